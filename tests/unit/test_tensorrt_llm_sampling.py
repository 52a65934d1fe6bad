"""Our sampling parameters as TensorRT-LLM's, and those that it cannot do."""

from __future__ import annotations

import math
from typing import Any

import pytest

from handlers.engines.tensorrt_llm_sampling import Abilities, SamplingTranslator, abilities
from handlers.errors import InvalidRequest
from handlers.request import GenerationRequest, SamplingParameters
from tests.unit.fake_tensorrt_llm import SamplingParams

FULL = Abilities(history=True, max_top_tokens=20)
PLAIN = Abilities(history=False, max_top_tokens=20)


def translate(can: Abilities = FULL, sequence: int = 0, **fields: Any) -> SamplingParams:
    sampling = {name: fields.pop(name) for name in list(fields) if name in SamplingParameters.__struct_fields__}
    asked = GenerationRequest(
        request_id="r", prompt=fields.pop("prompt", "x"), sampling=SamplingParameters(**sampling), **fields
    )
    translator = SamplingTranslator(
        make=SamplingParams, max_model_len=100, vocabulary_size=50, abilities=can, further_eos_token_ids=(49,)
    )
    params: SamplingParams = translator.sampling_params(asked, 10, sequence)
    return params


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "top_k", 1),
        ({}, "temperature", None),
        ({}, "seed", None),
        ({}, "max_tokens", 90),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_tokens": 700}, "max_tokens", 90),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"min_tokens": 300}, "min_tokens", 90),
        ({}, "min_tokens", None),
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 0.5}, "top_k", 0),
        ({"temperature": 0.5}, "top_p", 1.0),
        ({"temperature": 0.5, "top_k": 4}, "top_k", 4),
        ({"temperature": 0.5, "top_k": 400}, "top_k", 50),
        ({"temperature": 0.5, "top_p": 0.25}, "top_p", 0.25),
        ({"temperature": 0.5, "min_p": 0.25}, "min_p", 0.25),
        ({"min_p": 0.25}, "min_p", None),
        ({"temperature": 0.5, "seed": 4}, "seed", 4),
        ({"temperature": 0.5, "seed": -1}, "seed", 2**63 - 1),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({}, "repetition_penalty", None),
        ({"presence_penalty": -0.5}, "presence_penalty", -0.5),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"bad_words": ("a", " b")}, "bad", ["a", " a", " b"]),
        ({}, "bad", None),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": (3,)}, "stop_token_ids", [3, 49]),
        ({"stop_token_ids": (3,), "ignore_eos": True}, "stop_token_ids", [3]),
        ({"stop": ("end",)}, "stop", None),
        ({"stop": ("end",)}, "detokenize", False),
        ({}, "logprobs", None),
        ({"want_logprobs": True}, "logprobs", 1),
        ({"top_tokens": 5}, "logprobs", 5),
        ({"candidates": 2, "temperature": 1.0}, "logprobs", 1),
        ({"candidates": 2, "sequences": 2, "stream": True, "temperature": 1.0}, "logprobs", None),
        ({}, "embedding_bias", None),
    ],
)
def test_parameters_are_translated(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(translate(**fields), name) == value


def test_sampling_without_a_seed_is_different_each_time() -> None:
    assert len({translate(temperature=1.0).seed for _ in range(5)}) == 5


def test_the_sequences_of_a_seeded_request_have_seeds_of_their_own() -> None:
    assert [translate(temperature=1.0, seed=2**63 - 1, sequence=i).seed for i in (0, 1)] == [2**63 - 1, 0]


def test_biases_and_allowed_tokens_are_added_to_the_logits() -> None:
    bias = translate(logit_bias={3: 1.5}).embedding_bias
    assert (bias.shape[0], bias[3].item(), bias.abs().sum().item()) == (50, 1.5, 1.5)
    bias = translate(logit_bias={3: 1.5, 4: 2.0}, allowed_token_ids=(3, 5)).embedding_bias
    assert [bias[i].item() for i in (3, 4, 5, 6)] == [1.5, -math.inf, 0.0, -math.inf]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repetition_penalty": 1.5}, "`repetition_penalty` is ignored by this version of TensorRT-LLM"),
        ({"presence_penalty": 1.5}, "`presence_penalty` is ignored"),
        ({"frequency_penalty": 1.5}, "`frequency_penalty` is ignored"),
        ({"bad_words": ("a",)}, "`bad_words` is ignored"),
        ({"temperature": 1.0, "seed": 4}, "`seed` is ignored"),
    ],
)
def test_what_the_sampler_would_ignore_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        translate(PLAIN, **fields)
    translate(FULL, **fields)


def test_a_seed_without_sampling_is_harmless_anywhere() -> None:
    assert translate(PLAIN, seed=4).seed is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"typical_p": 0.5}, "`typical_p` needs option.rolling_batch=lmi-dist or scheduler"),
        ({"adapter": "a"}, "adapters are not served"),
        ({"priority": 1}, "`priority` must be 0"),
        ({"top_tokens": 21}, "`top_n_tokens` must be at most 20"),
        ({"min_tokens": 2, "stop_token_ids": (3,)}, "`min_tokens` cannot be had together with `stop_token_ids`"),
        ({"stop_token_ids": (50,)}, "`stop_token_ids` must hold token ids below the vocabulary's size"),
        ({"stop_token_ids": (1,) * 101}, "`stop_token_ids` must hold at most 100 token ids"),
        ({"allowed_token_ids": (50,)}, "`allowed_token_ids` must hold token ids below"),
        ({"logit_bias": {50: 1.0}}, "`logit_bias` must hold token ids below"),
        ({"prompt": (50,)}, "`prompt` must hold token ids below"),
    ],
)
def test_what_tensorrt_llm_cannot_do_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        translate(**fields)


@pytest.mark.parametrize(
    ("version", "sampler", "expected"),
    [
        ((1, 2), "auto", Abilities(history=False, max_top_tokens=20)),
        ((1, 3), "TorchSampler", Abilities(history=False, max_top_tokens=20)),
        ((1, 3), "TRTLLMSampler", Abilities(history=True, max_top_tokens=0)),
        ((1, 4), "auto", Abilities(history=True, max_top_tokens=20)),
    ],
)
def test_what_can_be_done_depends_on_the_sampler(version: tuple[int, int], sampler: str, expected: Abilities) -> None:
    assert abilities(version, sampler, None) == expected


def test_the_number_of_alternatives_can_be_set() -> None:
    assert abilities((1, 4), "auto", 40).max_top_tokens == 40
