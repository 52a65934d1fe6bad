"""Triton's notes and paths, and bodies of every kind. `requests/triton.yaml` has the requests that bodies become."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engines.errors import UnknownAdapter
from handlers.contract import Exchange, Reply
from handlers.triton.errors import message_of
from tests.contracts.exchange import JSON
from tests.contracts.triton_exchange import PROMPT, attempt, parse, refused


def test_names_that_triton_keeps_for_itself_have_no_effect_and_are_noted() -> None:
    exchange = parse(PROMPT | {"priority": 1, "timeout": 5, "parameters": {"sequence_id": 7, "id": "x"}})
    assert exchange.notes == ("parameters without effect: id, priority, sequence_id, timeout",)


def test_adapters_that_cannot_be_used_have_the_backends_words() -> None:
    assert refused(PROMPT | {"lora_name": "x"}).body == b'{"error":"LoRA feature is not enabled."}'
    message = message_of(UnknownAdapter("x", ["sheep", "doll"]))
    assert message == "LoRA x is not supported, we currently support ['doll', 'sheep']"


def test_a_version_beyond_all_integers_is_refused() -> None:
    reply = refused(PROMPT, "generate_stream", names={"model": "model", "version": "9" * 5000})
    assert (reply.status, reply.content_type) == (400, "application/json")
    assert reply.body == b'{"error":"failed to get model version from specified version string"}'


NAMES = st.text(max_size=5) | st.sampled_from(
    [
        *("text_input", "id", "parameters", "stream", "exclude_input_in_output", "sampling_parameters", "image", "n"),
        *(
            "return_logprobs",
            "logprobs",
            "max_tokens",
            "temperature",
            "stop",
            "seed",
            "structured_outputs",
            "lora_name",
        ),
        *("bad_words", "stop_words", "end_id", "beam_width", "num_return_sequences", "top_k", "top_p", "streaming"),
        *("length_penalty", "early_stopping", "guided_decoding_guide", "guided_decoding_guide_type", "triton_x"),
        *("sampling_param_max_tokens", "sampling_param_stop", "return_log_probs", "logit_bias", "best_of"),
    ]
)
DOCUMENTS = st.dictionaries(NAMES, JSON, max_size=5)


def check(outcome: Exchange | Reply) -> None:
    if isinstance(outcome, Reply):
        assert (outcome.status, outcome.content_type) == (400, "application/json")
        (message,) = json.loads(outcome.body).values()
        assert isinstance(message, str)
    else:
        assert isinstance(outcome.requests[0].prompt, str)


@given(DOCUMENTS, DOCUMENTS, st.sampled_from(["generate", "generate_stream"]))
def test_any_document_is_understood_or_refused_with_400(
    document: dict[str, Any], parameters: dict[str, Any], route: str
) -> None:
    check(attempt({"text_input": "x", **document}, route))
    check(attempt({"text_input": "x", "parameters": parameters} | document, route))


@given(DOCUMENTS)
def test_any_sampling_parameters_are_understood_or_refused_with_400(parameters: dict[str, Any]) -> None:
    check(attempt(PROMPT | {"sampling_parameters": json.dumps(parameters)}))
    check(attempt(PROMPT | {"stop_words": "", "sampling_parameters": json.dumps(parameters)}))


@given(st.binary(max_size=60))
def test_any_bytes_are_understood_or_refused_with_400(body: bytes) -> None:
    check(attempt(body))


def test_a_body_nested_without_end_is_refused() -> None:
    check(attempt(b'{"text_input":' * 5000))
    check(attempt(b'{"text_input":"x","x":' + b"[" * 5000 + b"]" * 5000 + b"}"))
