from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from djl_python.streaming_utils import StreamingUtils
from tests.unit.djl_python.tiny_models import save_model
from tests.waiting import wait_until

pytest.importorskip("torch", reason="torch is not installed")

PROMPTS = ["the quick brown fox", "a dog"]


def load(directory: Path, architecture: str) -> tuple[Any, Any]:
    import transformers

    path = save_model(directory, architecture)
    model = getattr(transformers, architecture).from_pretrained(path).eval()
    return model, transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    return load(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


def stream(loaded: tuple[Any, Any], prompts: Any, **parameters: Any) -> list[list[str]]:
    return list(StreamingUtils.get_stream_generator("Accelerate")(*loaded, prompts, None, **parameters))


def generated(loaded: tuple[Any, Any], prompts: list[str], **parameters: Any) -> list[list[str]]:
    """Return the texts of the tokens that transformers' `generate` returns."""
    model, tokenizer = loaded
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    encoded.pop("token_type_ids", None)
    tokens = model.generate(**encoded, do_sample=False, **parameters)
    skip = 1 if model.config.is_encoder_decoder else encoded["input_ids"].shape[1]
    return [tokenizer.batch_decode(column[:, None]) for column in tokens[:, skip:].T]


def test_greedy_tokens_are_those_of_generate_also_for_prompts_of_different_length(loaded: tuple[Any, Any]) -> None:
    assert stream(loaded, PROMPTS, max_new_tokens=6) == generated(loaded, PROMPTS, max_new_tokens=6)


def test_the_repetition_penalty_is_that_of_generate(llama: tuple[Any, Any]) -> None:
    expected = generated(llama, PROMPTS, max_new_tokens=6, repetition_penalty=5.0)
    assert stream(llama, PROMPTS, max_new_tokens=6, repetition_penalty=5.0) == expected
    assert expected != generated(llama, PROMPTS, max_new_tokens=6)


def test_a_string_is_one_prompt_and_there_are_fifty_steps_at_most(llama: tuple[Any, Any]) -> None:
    steps = stream(llama, "the fox")
    assert 0 < len(steps) <= 50
    assert all(len(step) == 1 for step in steps)


def test_a_seed_makes_sampling_repeatable(llama: tuple[Any, Any]) -> None:
    sampling = {"temperature": 2.0, "top_k": 9, "top_p": 0.99, "typical_p": 0.99, "max_new_tokens": 12}
    one, again, other = (stream(llama, "the fox", **sampling, manual_seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_a_temperature_of_zero_is_greedy(llama: tuple[Any, Any]) -> None:
    assert stream(llama, "the", temperature=0, max_new_tokens=5) == stream(llama, "the", max_new_tokens=5)


def test_a_finished_prompt_goes_on_with_padding_until_all_have_finished(llama: tuple[Any, Any]) -> None:
    model, tokenizer = llama
    first, second = (column for column in zip(*stream(llama, PROMPTS, max_new_tokens=8), strict=True))
    end = next(token for token in first if token not in second[: first.index(token) + 1])
    previous, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    try:
        model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(end)
        steps = stream(llama, PROMPTS, max_new_tokens=8)
    finally:
        model.generation_config.eos_token_id = previous
    column = [step[0] for step in steps]
    assert column[: first.index(end) + 1] == list(first[: first.index(end) + 1])
    assert set(column[first.index(end) + 1 :]) == {"<pad>"}


def test_only_one_engine_is_known_and_prompts_are_needed(llama: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="DeepSpeed engine is not supported"):
        StreamingUtils.get_stream_generator("DeepSpeed")
    with pytest.raises(ValueError, match="at least one prompt"):
        stream(llama, [])


def test_an_error_of_generate_comes_out_of_the_stream(llama: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match="no_such_parameter"):
        list(StreamingUtils.use_hf_default_streamer(*llama, PROMPTS, None, no_such_parameter=1))


def test_an_abandoned_stream_ends_its_thread(llama: tuple[Any, Any]) -> None:
    steps = StreamingUtils.use_hf_default_streamer(*llama, "the", None, max_new_tokens=10_000, eos_token_id=-1)
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    wait_until(lambda: all(thread.name != "generate" for thread in threading.enumerate()))
