"""Bodies for LMI that cannot be a row of `requests/lmi.yaml`, and bodies of every kind. Source: LMI schema v0.31."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.request import SamplingParameters
from handlers.contract import Reply
from tests.contracts.exchange import JSON, call, outcome, parse, refusal_of, rolling


def test_the_same_parameters_are_read_once_and_mean_the_same() -> None:
    contract = rolling()
    documents = [{"inputs": "x", "parameters": {"max_new_tokens": n, "stop": ["a"]}} for n in (3, 4, 3)]
    limits = [contract.parse(call(document)).requests[0].sampling.max_tokens for document in documents]
    assert limits == [3, 4, 3]


def test_unknown_parameters_and_fields_are_ignored_and_noted() -> None:
    exchange = parse({"inputs": "x", "watermark": 1, "parameters": {"foo": 1, "typical_p": 0.5, "max_new_tokens": 2}})
    assert exchange.requests[0].sampling == SamplingParameters(max_tokens=2)
    assert exchange.notes == ("parameters without effect: foo, typical_p", "fields without effect: watermark")


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"seed": "9" * 5000}, "seed"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1001]}, "stop_sequences"),
    ],
)
def test_a_bad_parameter_is_refused_with_the_schemas_object_naming_it(parameters: dict[str, Any], field: str) -> None:
    reply = refusal_of(rolling(), call({"inputs": "x", "parameters": parameters}))
    assert (reply.status, reply.content_type) == (424, "application/json")
    document = json.loads(reply.body)
    assert document["generated_text"] == ""
    assert document["details"] == {"finish_reason": "error", "generated_tokens": None, "inputs": None, "tokens": None}
    assert document["error"].startswith(f"`{field}` ")
    assert document["code"] == 424


def test_a_body_that_is_no_utf_8_is_refused_with_error_and_code_alone() -> None:
    reply = refusal_of(rolling(), call(b'{"inputs": "\xff"}'))
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert list(json.loads(reply.body)) == ["error", "code"]


NAMES = st.sampled_from(
    [
        "do_sample",
        "seed",
        "temperature",
        "repetition_penalty",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "max_new_tokens",
        "details",
        "stop_sequences",
        "return_full_text",
        "decoder_input_details",
        "truncate",
        "ignore_eos_token",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "best_of",
        "num_beams",
        "length_penalty",
        "early_stopping",
        "stop_token_ids",
        "logprobs",
        "top_n_tokens",
        "logit_bias",
        "output_formatter",
    ]
)


@given(
    st.fixed_dictionaries(
        {"inputs": st.text(min_size=1, max_size=5)},
        optional={"parameters": st.dictionaries(NAMES, JSON, max_size=4), "stream": JSON},
    )
)
def test_any_document_is_understood_or_refused_with_424(document: dict[str, Any]) -> None:
    found = outcome(rolling(), call(json.dumps(document).encode()))
    if isinstance(found, Reply):
        assert found.status == 424
        assert json.loads(found.body)["code"] == 424
    else:
        assert len(found.requests) == 1


@given(
    st.binary(max_size=60), st.sampled_from(["", "application/json", "text/plain", "application/x-www-form-urlencoded"])
)
def test_any_bytes_are_understood_or_refused_with_424(body: bytes, content_type: str) -> None:
    found = outcome(rolling(), call(body, content_type))
    if isinstance(found, Reply):
        assert found.status == 424
        json.loads(found.body)
    else:
        assert all(isinstance(request.prompt, str) and request.prompt for request in found.requests)


def test_a_csv_with_many_columns_takes_no_memory_for_missing_cells() -> None:
    columns = ",".join(map(str, range(100_000)))
    assert refusal_of(rolling(), call(f"inputs,{columns}\n".encode() + b"a\n" * 10_001, "text/csv")).status == 424
