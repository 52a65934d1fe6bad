"""The dynamic-batch engine with a tiny model of random weights. Its forward passes fail and hang on demand."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from hypothesis import HealthCheck, given
from hypothesis import settings as example_settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    PreTrainedTokenizerFast,
)

from engines.errors import ContextExceeded, EngineDead, GenerationFailed, InvalidParameter, InvalidRequest, RequestError
from engines.interface import EngineStartError, Generation, Progress
from engines.memory.garbage_collection import release_memory
from engines.request import DEADLINE, BeamSearch, FinishReason, GenerationRequest, SamplingParameters, TokenDelta
from engines.transformers import engine as transformers_batch
from engines.transformers import generate as transformers_generate
from engines.transformers.engine import BatchEngine
from engines.transformers.model import TransformersModel, load_model
from handlers.model_config import ModelConfig
from tests.freed import when_freed
from tests.generation import generate
from tests.stand_ins.recorder import Recorder
from tests.waiting import until

CONTEXT = 96
MARK = "\x07"
"""A mark in prompts. In some tests, a request with this mark fails."""
TWELVE = SamplingParameters(max_tokens=12, ignore_eos=True)
PROMPTS = ["a", "some words", "a prompt that is a good deal longer than the others", "0123", "x y z"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    characters = ByteLevel(add_prefix_space=False)
    # Only ASCII: `generate` would decode half a character at the end of a text differently.
    ascii_text = "".join(map(chr, range(32, 127))) + MARK
    alphabet = sorted({character for word, _ in characters.pre_tokenize_str(ascii_text) for character in word})
    vocabulary = {token: place for place, token in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = characters
    tokenizer.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(path)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tiny(directory: Path) -> TransformersModel:
    return load_model(settings(directory))


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, tiny: TransformersModel) -> None:
    """Make engines use the model on which the tests have hooks."""
    monkeypatch.setattr(transformers_batch, "load_model", lambda _: tiny)


def settings(directory: Path, **fields: Any) -> ModelConfig:
    fields = {"batch_size": 8, "max_batch_delay": 0.05, "dtype": "float32", "rolling_batch": "disable", **fields}
    return ModelConfig(name="tiny", model_dir=directory, model_id=str(directory), **fields)


@asynccontextmanager
async def engine_with(directory: Path, **fields: Any) -> AsyncIterator[BatchEngine]:
    engine = BatchEngine(settings(directory, **fields))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def on_thread_of_batches() -> bool:
    return threading.current_thread().name == "batches"


class Forward:
    """Records the token ids of each forward pass of the engine's batches."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.before: Callable[[Any], None] = lambda ids: None
        """A function that runs in the engine's thread before each pass."""

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if not on_thread_of_batches():  # an engine that starts, or the test itself
            return
        self.inputs.append(kwargs["input_ids"])
        self.before(kwargs["input_ids"])

    @property
    def batch_sizes(self) -> list[int]:
        """Return the batch sizes of the passes that take whole prompts."""
        return [len(ids) for ids in self.inputs if ids.shape[1] > 1]


@pytest.fixture
def forward(tiny: TransformersModel) -> Iterator[Forward]:
    hook = Forward()
    handle = tiny.model.register_forward_pre_hook(hook, with_kwargs=True)
    yield hook
    handle.remove()


def request_for(prompt: str, sampling: SamplingParameters = TWELVE, **fields: Any) -> GenerationRequest:
    return GenerationRequest(request_id=prompt[:8], prompt=prompt, sampling=sampling, **fields)


async def answer(engine: BatchEngine, request: GenerationRequest) -> list[TokenDelta]:
    return [delta async for delta in generate(engine, request)]


async def text(engine: BatchEngine, request: GenerationRequest) -> str:
    return "".join(delta.text for delta in await answer(engine, request))


async def texts(engine: BatchEngine, *requests: GenerationRequest) -> list[Any]:
    """Return the text or error of each request. All are sent at once."""
    return await asyncio.gather(*(text(engine, request) for request in requests), return_exceptions=True)


async def texts_alone(directory: Path, *requests: GenerationRequest) -> list[str]:
    async with engine_with(directory, batch_size=1) as engine:
        return [await text(engine, request) for request in requests]


# Batches


def generated(tiny: TransformersModel, prompt: str, **arguments: Any) -> list[str]:
    """Return the texts that transformers' `generate` makes, with twelve tokens each."""
    inputs = tiny.tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    ids = tiny.model.generate(**inputs, max_new_tokens=12, eos_token_id=None, **arguments)
    found: list[str] = tiny.tokenizer.batch_decode(ids[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    return found


async def test_prompts_of_different_lengths_run_as_one_batch_and_get_the_texts_of_generate_itself(
    directory: Path, tiny: TransformersModel, forward: Forward
) -> None:
    async with engine_with(directory, batch_size=5, max_batch_delay=60.0) as engine:
        got = await texts(engine, *map(request_for, PROMPTS))
    assert forward.batch_sizes == [5]
    assert got == [text for prompt in PROMPTS for text in generated(tiny, prompt, do_sample=False)]
    assert len(set(got)) == len(PROMPTS)


async def test_a_list_longer_than_the_batch_size_runs_in_several_batches(directory: Path, forward: Forward) -> None:
    async with engine_with(directory, batch_size=3, max_batch_delay=60.0) as engine:
        await texts(engine, *(request_for(f"{place} of a list") for place in range(6)))
    assert forward.batch_sizes == [3, 3]


async def test_requests_with_different_parameters_are_batched_apart(directory: Path, forward: Forward) -> None:
    others = [
        SamplingParameters(max_tokens=12, ignore_eos=True, logit_bias={5: 1.0}),
        SamplingParameters(max_tokens=12, ignore_eos=True, temperature=0.5),
        TWELVE,
    ]
    # Equal requests have prompts of the same length, and do not arrive next to each other.
    asked = [request_for("x" * length, sampling) for _ in range(2) for length, sampling in enumerate(others, 2)]
    async with engine_with(directory, batch_size=2, max_batch_delay=60.0) as engine:
        await texts(engine, *asked, request_for("searched", beam_search=BeamSearch(width=2)))
    prompts = [tuple(ids.shape) for ids in forward.inputs if ids.shape[1] > 1]
    assert prompts == [(2, 2), (2, 3), (2, 4), (2, 8)]


async def test_requests_that_differ_in_seed_limit_trace_salt_priority_and_cut_alone_run_as_one_batch(
    directory: Path, forward: Forward
) -> None:
    differences: list[tuple[int, int | None, dict[str, Any]]] = [
        (3, 1, {"trace_context": {"traceparent": "00-1"}}),
        (9, 2, {"trace_context": {"traceparent": "00-2"}}),
        (9, None, {"cache_salt": "salt", "priority": 1}),
        (1, 1, {"truncate_prompt_tokens": 3, "room": 2}),
    ]
    requests = [
        request_for(
            prompt, SamplingParameters(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=seed), **fields
        )
        for prompt, (tokens, seed, fields) in zip(PROMPTS, differences, strict=False)
    ]
    alone = await texts_alone(directory, requests[0], requests[1], requests[3])
    forward.inputs.clear()
    async with engine_with(directory, batch_size=4, max_batch_delay=60.0) as engine:
        got = await texts(engine, *requests)
    assert [got[0], got[1], got[3]] == alone
    assert forward.batch_sizes == [4]


async def test_streamed_prompts_run_together_whatever_the_batch_size(directory: Path, forward: Forward) -> None:
    async with engine_with(directory, batch_size=1, enable_streaming="true") as engine:
        sinks = [Recorder() for _ in range(4)]
        for place, sink in enumerate(sinks):
            await engine.submit(request_for(f"prompt {place}", stream=True), sink)
        await until(lambda: all(sink.deltas and sink.deltas[-1].last for sink in sinks))
    assert forward.batch_sizes == [4]


async def test_a_stream_has_a_delta_for_each_token_in_order_and_then_ends(directory: Path) -> None:
    async with engine_with(directory) as engine:
        requests = [request_for(prompt, stream=True, want_tokens=True) for prompt in PROMPTS]
        streams = await asyncio.gather(*(answer(engine, request) for request in requests))
        whole = await texts(engine, *map(request_for, PROMPTS))
    for deltas, expected in zip(streams, whole, strict=True):
        assert [delta.token_count for delta in deltas] == list(range(1, 13))
        assert "".join(delta.text for delta in deltas) == expected
        assert [delta.finish_reason for delta in deltas] == [None] * 11 + [FinishReason.LENGTH]


async def test_of_several_candidates_the_most_probable_come_best_first(directory: Path, forward: Forward) -> None:
    sampling = SamplingParameters(max_tokens=6, temperature=1.0, seed=5)
    async with engine_with(directory) as engine:
        four = await answer(engine, request_for("several", sampling, sequences=4, candidates=4))
        best = await answer(engine, request_for("several", sampling, sequences=1, candidates=4))
    assert forward.batch_sizes == [4, 4]
    assert [delta.sequence for delta in four] == [0, 1, 2, 3]
    logprobs = [delta.cumulative_logprob or 0.0 for delta in four]
    assert logprobs == sorted(logprobs, reverse=True)
    assert len({delta.text for delta in four}) > 1
    assert [delta.text for delta in best] == [four[0].text]


async def test_beams_are_those_of_generate_itself(directory: Path, tiny: TransformersModel, forward: Forward) -> None:
    search = BeamSearch(width=3, length_penalty=0.5)
    async with engine_with(directory, batch_size=15, max_batch_delay=60.0) as engine:
        found = await asyncio.gather(*(answer(engine, request_for(p, beam_search=search)) for p in PROMPTS))
    assert forward.batch_sizes == [15]
    for prompt, deltas in zip(PROMPTS, found, strict=True):
        beams = generated(tiny, prompt, num_beams=3, num_return_sequences=3, length_penalty=0.5)
        assert [delta.text for delta in deltas] == beams
        assert [(delta.sequence, delta.last) for delta in deltas] == [(0, False), (1, False), (2, True)]


async def test_a_beam_ends_before_a_stop_string(directory: Path) -> None:
    search = BeamSearch(width=2, length_penalty=-5.0)  # this penalty prefers beams that end early
    async with engine_with(directory) as engine:
        free = await answer(engine, request_for("stop", beam_search=search))
        stop = free[0].text[3:5]
        sampling = SamplingParameters(max_tokens=12, ignore_eos=True, stop=(stop,))
        stopped = await answer(engine, request_for("stop", sampling, beam_search=search))
    ended = [delta for delta in stopped if delta.finish_reason is FinishReason.STOP]
    assert ended
    assert all(stop not in delta.text for delta in stopped)
    assert all(delta.token_count < 12 for delta in ended)


async def test_a_prompt_near_the_end_of_the_context_gets_the_tokens_that_fit(directory: Path) -> None:
    long = "l" * (CONTEXT - 5)
    endless = SamplingParameters(max_tokens=None, ignore_eos=True)
    for fields in ({}, {"beam_search": BeamSearch(width=2)}):
        async with engine_with(directory) as engine:
            near, far = await asyncio.gather(
                answer(engine, request_for(long, endless, **fields)),
                answer(engine, request_for("s" * 20, endless, **fields)),
            )
        assert (near[0].token_count, far[0].token_count) == (5, CONTEXT - 20)
        assert near[0].finish_reason is far[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
async def test_a_sequence_that_has_filled_the_context_does_not_break_those_that_go_on(
    directory: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(load_learned_positions(directory, kind), max_model_len=32)
    failures: list[Any] = []
    monkeypatch.setattr(transformers_batch, "load_model", lambda _: model)
    monkeypatch.setattr(transformers_generate.logger, "exception", lambda *message: failures.append(message))
    requests = [request_for(p, SamplingParameters(max_tokens=20, ignore_eos=True)) for p in ("s", "mid" * 6, "l" * 29)]
    alone = await texts_alone(directory, *requests)
    async with engine_with(directory) as engine:
        answers = await asyncio.gather(*(answer(engine, request) for request in requests))
    assert [deltas[0].token_count for deltas in answers] == [20, 14, 3]
    assert ["".join(delta.text for delta in deltas) for deltas in answers] == alone
    assert not failures


def load_learned_positions(directory: Path, kind: str) -> TransformersModel:
    """Return a model that has no position beyond 32."""
    loaded = load_model(settings(directory))
    common: dict[str, Any] = {"vocab_size": loaded.vocabulary_size, "eos_token_id": 1, "pad_token_id": 0}
    common |= {"bos_token_id": None, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    configs = {
        "gpt2": GPT2Config(**common, n_positions=32, initializer_range=0.4),
        "opt": OPTConfig(**common, ffn_dim=32, max_position_embeddings=32, word_embed_proj_dim=32, init_std=0.4),
    }
    torch.manual_seed(3)
    return replace(loaded, model=AutoModelForCausalLM.from_config(configs[kind]).eval())


async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(settings(directory))
    model.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    monkeypatch.setattr(transformers_batch, "load_model", lambda _: model)
    async with engine_with(directory) as engine:
        good, refused = await texts(engine, request_for("good"), request_for("say [PAD]"))
    assert isinstance(good, str)
    assert isinstance(refused, InvalidRequest)
    assert f"token id {model.vocabulary_size}" in refused.message


async def test_neither_a_stop_string_nor_a_stop_token_before_min_tokens_ends_a_beam(
    directory: Path, tiny: TransformersModel
) -> None:
    search = BeamSearch(width=2)
    least = SamplingParameters(max_tokens=12, min_tokens=6, ignore_eos=True)
    async with engine_with(directory) as engine:
        free = await answer(engine, request_for("beam", beam_search=search))
        begin = free[0].text[:3]
        assert all(delta.text.rfind(begin) + len(begin) <= 6 for delta in free), "the test needs another prompt"
        found = await answer(engine, request_for("beam", structs.replace(least, stop=(begin,)), beam_search=search))
        assert [(d.text, d.finish_reason) for d in found] == [(d.text, FinishReason.LENGTH) for d in free]
        sampling = structs.replace(least, stop_token_ids=tuple(tiny.tokenizer.encode(begin[0])))
        short = BeamSearch(width=2, length_penalty=-5.0)  # this penalty prefers beams that end early
        found = await answer(engine, request_for("beam", sampling, beam_search=short))
        assert all(delta.token_count > 6 for delta in found)


def test_a_checkpoint_that_lacks_weights_is_refused(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    with pytest.raises(EngineStartError, match=r"lacks weights: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(settings(tmp_path / "broken"))


async def test_prompt_tokens_carry_log_probabilities_and_come_with_the_first_delta(directory: Path) -> None:
    sampling = SamplingParameters(max_tokens=3, ignore_eos=True)
    fields: dict[str, Any] = {"want_tokens": True, "want_logprobs": True, "want_prompt_tokens": True, "top_tokens": 2}
    async with engine_with(directory) as engine:
        first, *rest = await answer(engine, request_for("abc", sampling, stream=True, **fields))
    assert first.prompt_tokens is not None
    assert [token.text for token in first.prompt_tokens] == ["a", "b", "c"]
    assert [token.logprob is None for token in first.prompt_tokens] == [True, False, False]
    assert [delta.prompt_tokens for delta in rest] == [None, None]
    assert all(len(token.top) == 2 and token.logprob == token.top[0].logprob for token in first.tokens)


async def test_a_model_without_attention_mask_gets_prompts_of_one_length_at_a_time(
    directory: Path, tiny: TransformersModel, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward_without_mask(input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:
        return type(tiny.model).forward(tiny.model, input_ids=input_ids, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(tiny.model, "forward", forward_without_mask)
    async with engine_with(directory) as engine:
        await texts(engine, *map(request_for, ["one", "two", "three"]))
    assert sorted(forward.batch_sizes) == [1, 2]


async def test_a_model_that_cannot_generate_is_found_at_the_start(directory: Path, tiny: TransformersModel) -> None:
    def fail(module: Any, args: Any) -> None:
        raise RuntimeError("no kernel for this device")

    handle = tiny.model.register_forward_pre_hook(fail)
    try:
        with pytest.raises(EngineStartError, match="no kernel"):
            await BatchEngine(settings(directory)).start()
    finally:
        handle.remove()


# Refusals


async def test_wrong_requests_are_refused_and_their_neighbours_are_served(directory: Path) -> None:
    good = [request_for(prompt) for prompt in PROMPTS]
    wrong = SamplingParameters(stop_token_ids=(100_000,))
    async with engine_with(directory) as engine:
        *got, too_long, refused = await texts(engine, *good, request_for("x" * CONTEXT), request_for("x", wrong))
        assert engine.statistics.started_requests == len(good)
    assert (type(too_long), type(refused)) == (ContextExceeded, InvalidParameter)
    assert got == await texts_alone(directory, *good)


# Failures


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (torch.OutOfMemoryError("no memory"), {}),
        (RuntimeError("a kernel has failed"), {}),
        (RuntimeError("a kernel has failed"), {"beam_search": BeamSearch(width=2)}),
    ],
)
async def test_a_request_that_breaks_its_batch_fails_alone(
    directory: Path, tiny: TransformersModel, forward: Forward, error: Exception, fields: dict[str, Any]
) -> None:
    mark = tiny.tokenizer.encode(MARK)[0]

    def fail_on_mark(ids: Any) -> None:
        if ids.shape[1] > 1 and (ids == mark).any():  # a beam of another prompt may write the mark
            raise error

    good = [request_for(prompt, **fields) for prompt in PROMPTS]
    alone = await texts_alone(directory, *good)
    forward.before = fail_on_mark
    async with engine_with(directory) as engine:
        *got, failed = await texts(engine, *good, request_for(f"the guilty {MARK}", **fields))
        assert engine.health().alive
        sequences = 2 if fields else 1
        assert (engine.statistics.finished_requests, engine.statistics.failed_requests) == (5 * sequences, sequences)
    assert got == alone
    assert isinstance(failed, GenerationFailed)


async def test_a_batch_for_which_memory_runs_out_is_split_until_it_fits(directory: Path, forward: Forward) -> None:
    requests = [request_for(f"{prompt}{place}") for place in range(2) for prompt in PROMPTS[:4]]
    alone = await texts_alone(directory, *requests)
    forward.inputs.clear()

    def two_fit(ids: Any) -> None:
        if len(ids) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")

    forward.before = two_fit
    async with engine_with(directory, batch_size=8, max_batch_delay=60.0) as engine:
        assert await texts(engine, *requests) == alone
    assert forward.batch_sizes == [8, 4, 2, 2, 4, 2, 2]


async def test_a_stream_goes_on_where_it_was_when_memory_runs_out_in_the_middle(
    directory: Path, forward: Forward
) -> None:
    requests = [request_for(prompt, stream=True, want_tokens=True) for prompt in PROMPTS]
    alone = await texts_alone(directory, *requests)
    forward.inputs.clear()

    def sixth_pass_fails(ids: Any) -> None:
        if len(forward.inputs) == 6:
            raise torch.OutOfMemoryError("no memory")

    forward.before = sixth_pass_fails
    async with engine_with(directory, batch_size=5, max_batch_delay=60.0) as engine:
        streams = await asyncio.gather(*(answer(engine, request) for request in requests))
    assert ["".join(delta.text for delta in deltas) for deltas in streams] == alone
    assert [[delta.token_count for delta in deltas] for deltas in streams] == [list(range(1, 13))] * 5
    assert forward.batch_sizes == [5, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_sequence_whose_logits_are_no_numbers_fails_alone(
    directory: Path, tiny: TransformersModel, forward: Forward, temperature: float
) -> None:
    mark = tiny.tokenizer.encode(MARK)[0]

    def spoil(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids = kwargs["input_ids"]
        if ids.shape[1] > 1:  # another sequence may write the mark
            output.logits[(ids == mark).any(dim=1)] = torch.nan

    sampling = structs.replace(TWELVE, temperature=temperature, seed=1)
    good = [request_for(prompt, sampling) for prompt in PROMPTS]
    alone = await texts_alone(directory, *good)
    forward.inputs.clear()
    handle = tiny.model.register_forward_hook(spoil, with_kwargs=True)
    try:
        async with engine_with(directory, batch_size=6, max_batch_delay=60.0) as engine:
            *got, failed = await texts(engine, *good, request_for(f"the guilty {MARK}", sampling))
    finally:
        handle.remove()
    assert got == alone
    assert isinstance(failed, GenerationFailed)
    assert "not numbers" in failed.message
    assert forward.batch_sizes == [6]


@pytest.mark.parametrize("takes_its_error", [True, False])
async def test_a_sink_that_raises_ends_its_own_request_only(directory: Path, takes_its_error: bool) -> None:
    class Failing(Recorder):
        def on_delta(self, delta: TokenDelta) -> None:
            raise RuntimeError("a bug in a contract")

        def on_error(self, error: RequestError) -> None:
            super().on_error(error)
            if not takes_its_error:
                raise RuntimeError("another")

    async with engine_with(directory) as engine:
        failing, good = Failing(), Recorder()
        await engine.submit(request_for("a", stream=True), failing)
        await engine.submit(request_for("b", stream=True), good)
        await until(lambda: bool(good.deltas) and good.deltas[-1].last)
        assert engine.health().alive
    assert [type(error) for error in failing.errors] == [GenerationFailed]
    assert not good.errors


# Cancellation


class Gate:
    """A gate that holds the forward pass until it is opened."""

    def __init__(self) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()

    def __call__(self, ids: Any) -> None:
        self.entered.set()
        assert self._opened.wait(120)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(forward: Forward) -> Iterator[Gate]:
    gate = Gate()
    forward.before = gate
    yield gate
    gate.open()


async def test_a_waiting_request_that_is_cancelled_never_runs(directory: Path, forward: Forward, gate: Gate) -> None:
    async with engine_with(directory, batch_size=1) as engine:
        first, waiting = Recorder(), Recorder()
        await engine.submit(request_for("first"), first)
        await until(gate.entered.is_set)
        generation = await engine.submit(request_for("waiting"), waiting)
        assert (engine.status().running_requests, engine.status().waiting_requests) == (1, 1)
        generation.cancel()
        generation.cancel()
        assert engine.status().waiting_requests == 0
        gate.open()
        await until(lambda: bool(first.deltas))
        assert await text(engine, request_for("next"))
        assert engine.statistics.aborted_requests == 1
    assert forward.batch_sizes == [1, 1]
    assert not waiting.deltas
    assert not waiting.errors


async def test_a_running_request_that_is_cancelled_leaves_the_others_alone(directory: Path, gate: Gate) -> None:
    async with engine_with(directory) as engine:
        kept, gone = Recorder(), Recorder()
        generations = [await engine.submit(request_for(p, stream=True), s) for p, s in (("kept", kept), ("gone", gone))]
        await until(gate.entered.is_set)
        generations[1].cancel()
        gate.open()
        await until(lambda: bool(kept.deltas) and kept.deltas[-1].last)
    gate_free = await texts_alone(directory, request_for("kept"))
    assert ["".join(delta.text for delta in kept.deltas)] == gate_free
    assert not gone.deltas
    assert not gone.errors


@pytest.mark.parametrize(("fields", "sequences"), [({}, 1), ({"beam_search": BeamSearch(width=2)}, 2)])
async def test_a_batch_stops_when_all_its_requests_are_gone(
    directory: Path, forward: Forward, fields: dict[str, Any], sequences: int
) -> None:
    running: list[Generation] = []
    loop = asyncio.get_running_loop()

    def cancel_all_in_the_third_pass(ids: Any) -> None:
        if len(forward.inputs) != 3:
            return
        cancelled = threading.Event()
        for generation in running:
            loop.call_soon_threadsafe(generation.cancel)
        loop.call_soon_threadsafe(cancelled.set)
        assert cancelled.wait(60)

    forward.before = cancel_all_in_the_third_pass
    async with engine_with(directory) as engine:
        running += [await engine.submit(request_for(prompt, **fields), Recorder()) for prompt in PROMPTS]
        await until(lambda: len(forward.inputs) >= 3)
        assert await text(engine, request_for("next", SamplingParameters(max_tokens=1)))
        assert engine.statistics.aborted_requests == 5 * sequences
    assert len(forward.inputs) == 4


# Hanging and dying


async def test_a_batch_without_a_token_in_time_fails_and_the_engine_goes_on(
    directory: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine_with(directory, predict_timeout=60.0, batch_size=5, max_batch_delay=60.0) as engine:
        failing = asyncio.create_task(texts(engine, *map(request_for, PROMPTS)))
        await until(gate.entered.is_set)
        with monkeypatch.context() as later:
            later.setattr(transformers_batch, "time", Mock(monotonic=lambda: time.monotonic() + 61))
            failed = await failing
        assert [type(error) for error in failed] == [GenerationFailed] * len(PROMPTS)
        assert str(failed[0]) == "no token within predict_timeout (60 s)"
        gate.open()
        assert all(await texts(engine, *map(request_for, PROMPTS)))
        assert engine.health().alive


async def test_a_batch_that_stands_still_shows_in_the_engines_health_until_it_goes_on(
    directory: Path, gate: Gate
) -> None:
    async with engine_with(directory, predict_timeout=30) as engine:
        answered = asyncio.create_task(text(engine, request_for("stuck")))
        await until(lambda: engine.health().quiet_seconds > 0.4)
        assert engine.health().alive
        gate.open()
        assert await answered
        await until(lambda: engine.health().quiet_seconds == 0)


async def test_an_engine_whose_batch_never_ends_is_dead(directory: Path, gate: Gate) -> None:
    async with engine_with(directory, batch_size=1, predict_timeout=0.3) as engine:
        stuck, waiting = await texts(engine, request_for("stuck"), request_for("waiting"))
        assert isinstance(stuck, GenerationFailed)
        assert isinstance(waiting, EngineDead)
        assert not engine.health().alive
        with pytest.raises(EngineDead):
            await engine.submit(request_for("too late"), Recorder())


async def test_an_engine_whose_thread_has_ended_is_dead_at_once(directory: Path, forward: Forward) -> None:
    def end(ids: Any) -> None:
        raise SystemExit("a library has called exit")

    forward.before = end
    async with engine_with(directory, batch_size=1) as engine:
        got = await asyncio.wait_for(texts(engine, request_for("first"), request_for("second")), 60)
        assert [type(error) for error in got] == [EngineDead, EngineDead]
        assert engine.health().reason == "the engine has died: a library has called exit"


async def test_stopping_ends_what_runs_and_what_waits(directory: Path, gate: Gate) -> None:
    async with engine_with(directory, batch_size=1) as engine:
        sinks = [Recorder(), Recorder()]
        for sink in sinks:
            await engine.submit(request_for("x"), sink)
        await until(gate.entered.is_set)
        gate.open()
        await engine.stop()
        await engine.stop()
        assert [[type(error) for error in sink.errors] for sink in sinks] == [[EngineDead], [EngineDead]]
        assert not engine.health().alive
        with pytest.raises(EngineDead):
            await engine.submit(request_for("too late"), Recorder())


async def test_the_meter_counts_prompts_that_start_and_sequences_that_finish(directory: Path) -> None:
    async with engine_with(directory) as engine:
        await texts(engine, *map(request_for, PROMPTS))
        statistics = engine.statistics
        assert (statistics.started_requests, statistics.finished_requests, statistics.failed_requests) == (5, 5, 0)
        assert (statistics.tokens, statistics.prompt_tokens) == (60, sum(map(len, PROMPTS)))
        assert sum(statistics.time_to_first_token.counts) == 5
        assert sum(statistics.inter_token.counts) == 55
        assert sum(statistics.queue_time.counts) == 5
        await answer(engine, request_for("several", TWELVE, sequences=4, candidates=4))
        await answer(engine, request_for("beams", TWELVE, beam_search=BeamSearch(width=3)))
        assert (engine.statistics.started_requests, engine.statistics.finished_requests) == (7, 12)


# Any mix

SAMPLINGS = [
    TWELVE,
    SamplingParameters(max_tokens=5),
    SamplingParameters(max_tokens=9, ignore_eos=True, repetition_penalty=1.5),
    SamplingParameters(max_tokens=9, temperature=1.2, seed=3),
    SamplingParameters(max_tokens=9, ignore_eos=True, logit_bias={40: 8.0}, stop=("a", "b", "c")),
]
REQUESTS = st.builds(
    request_for,
    st.text("abc XYZ.", min_size=1, max_size=40),
    st.sampled_from(SAMPLINGS),
    stream=st.booleans(),
    truncate_prompt_tokens=st.sampled_from([None, None, 6]),
)


@example_settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUESTS, min_size=1, max_size=12), st.integers(1, 5), st.sampled_from([0.0, 0.01]))
def test_in_any_mix_of_requests_each_gets_what_it_gets_alone(
    directory: Path, requests: list[GenerationRequest], batch_size: int, delay: float
) -> None:
    async def run() -> None:
        alone = await texts_alone(directory, *requests)
        async with engine_with(directory, batch_size=batch_size, max_batch_delay=delay) as engine:
            assert await texts(engine, *requests) == alone

    asyncio.run(run())


@pytest.mark.parametrize("at_deadline", [False, True])
@pytest.mark.parametrize("fields", [{}, {"beam_search": BeamSearch(width=2), "sequences": 2}])
async def test_an_aborted_request_ends_with_what_there_is_whether_it_waits_or_runs(
    directory: Path, gate: Gate, fields: dict[str, Any], at_deadline: bool
) -> None:
    reason, stop = (FinishReason.LENGTH, DEADLINE) if at_deadline else (FinishReason.ABORT, None)
    long = SamplingParameters(max_tokens=40, ignore_eos=True)
    sequences = fields.get("sequences", 1)
    async with engine_with(directory, batch_size=1) as engine:
        first, waiting = Recorder(), Recorder()
        running = await engine.submit(request_for("first", long, **fields), first)
        await until(gate.entered.is_set)
        queued = await engine.submit(request_for("waiting", long, **fields), waiting)
        assert not queued.begun
        queued.abort(at_deadline=at_deadline)
        assert [(d.text, d.token_count, d.finish_reason, d.stop_reason) for d in waiting.deltas] == [
            ("", 0, reason, stop)
        ] * sequences
        assert waiting.deltas[-1].last
        assert waiting.deltas[-1].prompt_token_count > 0
        running.abort(at_deadline=at_deadline)
        gate.open()
        await until(lambda: bool(first.deltas) and first.deltas[-1].last)
        assert len(first.deltas) == sequences
        assert {d.finish_reason for d in first.deltas} <= {reason, FinishReason.EOS}
        assert all(d.token_count < 40 for d in first.deltas)
        assert (engine.statistics.aborted_requests >= sequences + 1) is not at_deadline


class Cycle:
    """An object in a reference cycle, like a model. Only the garbage collector frees it."""

    def __init__(self) -> None:
        self.layers = [self]


@pytest.mark.usefixtures("no_collection_by_itself")
async def test_a_model_that_loads_for_too_long_is_freed_once_it_is_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, freed = threading.Event(), []

    def load(_: ModelConfig) -> Cycle:
        model = Cycle()
        freed.append(when_freed(model))
        assert may_end.wait(60)
        return model

    monkeypatch.setattr(transformers_batch, "load_model", load)
    with pytest.raises(EngineStartError, match=r"model_loading_timeout \(0\.05 s\)"):
        await BatchEngine(settings(directory, model_loading_timeout=0.05)).start()
    assert not freed[0].is_set()
    may_end.set()
    await until(freed[0].is_set)


@pytest.mark.usefixtures("no_collection_by_itself")
async def test_a_model_that_is_stopped_during_a_long_step_is_freed_when_the_step_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, freed = Gate(), []

    def load(config: ModelConfig) -> TransformersModel:
        model = load_model(config)
        model.model.register_forward_pre_hook(lambda module, args: gate(args) if on_thread_of_batches() else None)
        freed.append(when_freed(model.model))
        return model

    monkeypatch.setattr(transformers_batch, "load_model", load)
    monkeypatch.setattr(transformers_batch, "_STOP_SECONDS", 0.01)
    engine = BatchEngine(settings(directory))
    await engine.start()
    await engine.submit(request_for("x"), Recorder())
    await until(gate.entered.is_set)
    await engine.stop()
    del engine
    release_memory()
    assert not freed[0].is_set(), "the step still uses it"
    gate.open()
    await until(freed[0].is_set)


async def test_a_bug_in_the_watchdog_makes_the_engine_unhealthy(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine_with(directory) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Progress, "look", lambda *_: 1 / 0)
            await until(lambda: not engine.health().alive)
        assert engine.health().reason == "watching the engine has failed: ZeroDivisionError('division by zero')"
        assert "ZeroDivisionError" in caplog.text
        with pytest.raises(EngineDead):
            await engine.submit(GenerationRequest(request_id="r", prompt="a", sampling=TWELVE), Recorder())
