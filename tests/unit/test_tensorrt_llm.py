"""The TensorRT-LLM engine against a stand-in of the package's API; no real TensorRT-LLM runs here."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from handlers.engines.protocol import EngineStartError
from handlers.engines.tensorrt_llm import TensorRtLlmEngine
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter, InvalidRequest
from handlers.model_settings import ModelSettings
from handlers.request import (
    BeamSearch,
    Constraint,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    Token,
    TokenDelta,
)
from tests.recorder import Recorder
from tests.unit import fake_tensorrt_llm as fake

EOS, OTHER_EOS = 0, 1
TEXT = "héllo 😀 world"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration and a tokenizer of single bytes, so that one character may take several tokens."""
    directory = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<eos>": EOS, "<eot>": OTHER_EOS} | {byte: i for i, byte in enumerate(alphabet, 2)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=["<eot>"], unk_token=None
    )
    whole.save_pretrained(directory)
    config = {"model_type": "llama", "vocab_size": len(vocabulary), "max_position_embeddings": 64, "hidden_size": 8}
    config |= {"num_attention_heads": 1, "num_hidden_layers": 1, "intermediate_size": 8}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, OTHER_EOS]}))
    return directory


@pytest.fixture
def settings(model_dir: Path) -> ModelSettings:
    return ModelSettings(name="m", model_dir=model_dir, model_id=str(model_dir), rolling_batch="trtllm")


def changed(settings: ModelSettings, **fields: Any) -> ModelSettings:
    from dataclasses import replace

    return replace(settings, **fields)


@asynccontextmanager
async def running(settings: ModelSettings) -> AsyncIterator[tuple[TensorRtLlmEngine, fake.LLM]]:
    engine = TensorRtLlmEngine(settings)
    await engine.start()
    try:
        yield engine, fake.LLM.instances[-1]
    finally:
        await engine.stop()


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch)


def one_by_one(token_ids: Sequence[int]) -> Callable[..., list[fake.Step]]:
    return lambda *_: [[token_id] for token_id in token_ids]


def request(stream: bool = True, **fields: Any) -> GenerationRequest:
    sampling = fields.pop("sampling", None) or SamplingParameters(max_tokens=50)
    return GenerationRequest(
        request_id="r", prompt=fields.pop("prompt", "ab"), sampling=sampling, stream=stream, **fields
    )


async def answer(engine: TensorRtLlmEngine, asked: GenerationRequest) -> Recorder:
    """The whole answer."""
    sink = Recorder()
    await engine.submit(asked, sink)
    await until(lambda: bool(sink.errors) or bool(sink.deltas and sink.deltas[-1].last))
    return sink


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not happened():
            await asyncio.sleep(0.001)


def text_of(deltas: Sequence[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@pytest.mark.asyncio
async def test_a_stream_gives_each_character_when_it_is_whole_and_its_texts_join_to_the_text(
    settings: ModelSettings,
) -> None:
    async with running(settings) as (engine, llm):
        ids = list(engine.texts.encode(TEXT))
        llm.answer = one_by_one([*ids, EOS])
        sink = await answer(engine, request(want_tokens=True))
    assert text_of(sink.deltas) == TEXT
    assert "".join(token.text for delta in sink.deltas for token in delta.tokens) == TEXT
    assert [token.id for delta in sink.deltas for token in delta.tokens] == [*ids, EOS]
    assert sink.deltas[0].text == "h"
    last = sink.deltas[-1]
    assert (last.finish_reason, last.token_count, last.prompt_token_count) == (FinishReason.EOS, len(ids) + 1, 2)
    assert last.tokens == [Token(EOS, "", None, True)]


@pytest.mark.asyncio
@pytest.mark.parametrize("end", ["\ufffd", "😀"])
async def test_a_prompt_that_ends_within_a_character_is_not_shown_in_the_answer(
    settings: ModelSettings, end: str
) -> None:
    async with running(settings) as (engine, llm):
        prompt = (*engine.texts.encode("secret "), *engine.texts.encode(end))
        prompt = prompt if end == "\ufffd" else prompt[:-1]
        llm.answer = one_by_one([*engine.texts.encode("open"), EOS])
        sink = await answer(engine, request(prompt=prompt))
    assert text_of(sink.deltas) == "open"


@pytest.mark.asyncio
async def test_a_long_prompt_does_not_change_the_answers_text(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one([*engine.texts.encode(TEXT), EOS])
        sink = await answer(engine, request(prompt="a 😀 " * 4))
    assert text_of(sink.deltas) == TEXT


@pytest.mark.asyncio
async def test_what_is_not_streamed_comes_as_one_delta(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one([*engine.texts.encode(TEXT), EOS])
        sink = await answer(engine, request(stream=False))
        assert engine.meter.finished_requests == engine.meter.started_requests == 1
        assert engine.meter.tokens == len(engine.texts.encode(TEXT)) + 1
    assert [(delta.text, delta.last) for delta in sink.deltas] == [(TEXT, True)]


@pytest.mark.asyncio
async def test_several_tokens_of_one_response_come_in_one_delta(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        ids = list(engine.texts.encode("abcd"))
        llm.answer = lambda *_: [ids[:3], ids[3:], [EOS]]
        sink = await answer(engine, request(want_tokens=True))
    assert [(delta.text, len(delta.tokens)) for delta in sink.deltas] == [("abc", 3), ("d", 1), ("", 1)]


@pytest.mark.asyncio
@pytest.mark.parametrize("include", [False, True])
async def test_no_part_of_a_stop_string_is_streamed_and_the_engine_is_told_to_stop(
    settings: ModelSettings, include: bool
) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one(engine.texts.encode("one ENTER two END three"))
        sampling = SamplingParameters(max_tokens=50, stop=("END",), include_stop_str_in_output=include)
        sink = await answer(engine, request(sampling=sampling, want_tokens=True))
        await until(lambda: llm.results[0].aborted)
    shown = "one ENTER two END" if include else "one ENTER two "
    assert text_of(sink.deltas) == shown
    assert "".join(token.text for delta in sink.deltas for token in delta.tokens) == shown
    assert sink.deltas[-1].finish_reason == FinishReason.STOP
    assert sum(len(delta.tokens) for delta in sink.deltas) == len("one ENTER two END")


@pytest.mark.asyncio
async def test_a_stop_string_does_not_count_before_the_least_number_of_tokens(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one(engine.texts.encode("abcab!"))
        sampling = SamplingParameters(max_tokens=50, stop=("ab",), min_tokens=2)
        sink = await answer(engine, request(sampling=sampling))
    assert text_of(sink.deltas) == "abc"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("ids", "sampling", "text", "reason"),
    [
        ([5, 6, EOS, 7], {}, 2, FinishReason.EOS),
        ([5, 6, OTHER_EOS, 7], {}, 2, FinishReason.EOS),
        ([5, 6, 7, 8], {"stop_token_ids": (7,)}, 2, FinishReason.STOP),
        ([5, 6, 7, 8], {"stop_token_ids": (7,), "include_stop_str_in_output": True}, 3, FinishReason.STOP),
        ([5, 6, 7, 8], {"max_tokens": 3}, 3, FinishReason.LENGTH),
        ([5, EOS, OTHER_EOS, 6], {"ignore_eos": True, "max_tokens": 4}, 2, FinishReason.LENGTH),
    ],
)
async def test_a_sequence_ends_for_the_reason_that_vllm_would_give(
    settings: ModelSettings, ids: list[int], sampling: dict[str, Any], text: int, reason: FinishReason
) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one(ids)
        sink = await answer(engine, request(sampling=SamplingParameters(**{"max_tokens": 50, **sampling})))
    assert (len(text_of(sink.deltas)), sink.deltas[-1].finish_reason) == (text, reason)


@pytest.mark.asyncio
async def test_an_end_token_that_the_engine_keeps_for_itself_ends_the_sequence_too(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [[5], fake.End("stop")]
        sink = await answer(engine, request())
    assert sink.deltas[-1].finish_reason == FinishReason.EOS


ASKED = {"stream": False, "want_tokens": True, "want_logprobs": True, "want_ranks": True, "top_tokens": 2}


@pytest.mark.asyncio
async def test_every_delta_has_the_counts_and_the_log_probability_so_far(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one([5, 6, EOS])
        sink = await answer(engine, request(stream=True, want_logprobs=True))
    prompt = sink.deltas[0].prompt_token_count
    assert prompt > 0
    assert [(d.prompt_token_count, d.token_count, d.cumulative_logprob) for d in sink.deltas] == [
        (prompt, count, -0.5 * count) for count in (1, 2, 3)
    ]


@pytest.mark.asyncio
async def test_a_constraint_is_refused_before_anything_is_generated(settings: ModelSettings) -> None:
    async with running(settings) as (engine, _):
        constraint = Constraint(parameter="grammar", regex="a+")
        with pytest.raises(InvalidParameter, match="`grammar` needs the vLLM engine"):
            await engine.submit(request(sampling=SamplingParameters(constraint=constraint)), Recorder())


@pytest.mark.asyncio
async def test_tokens_carry_log_probabilities_and_alternatives(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one([5, 6, EOS])
        sink = await answer(engine, request(**ASKED))
    delta = sink.deltas[0]
    assert [token.logprob for token in delta.tokens] == [-0.5, -0.5, -0.5]
    assert [(top.id, top.logprob) for top in delta.tokens[0].top] == [(5, -0.5), (0, -1.0)]
    assert delta.cumulative_logprob == -1.5
    assert [(token.rank, [top.rank for top in token.top]) for token in delta.tokens] == [(1, [1, 2])] * 3


@pytest.mark.asyncio
async def test_prompt_tokens_come_with_texts_and_without_log_probabilities(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = one_by_one([5, EOS])
        sink = await answer(engine, request(prompt="xy", want_prompt_tokens=True))
    prompt = sink.deltas[0].prompt_tokens
    assert prompt is not None
    assert [(token.text, token.logprob) for token in prompt] == [("x", None), ("y", None)]
    assert all(delta.prompt_tokens is None for delta in sink.deltas[1:])


@pytest.mark.asyncio
async def test_several_sequences_have_seeds_of_their_own_and_come_best_first(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda _, params: [[5]] * (3 - (params.seed or 0) % 3) + [[EOS]]
        sampling = SamplingParameters(max_tokens=9, temperature=1.0, seed=9)
        sink = await answer(engine, request(stream=False, sampling=sampling, sequences=2, candidates=3))
        assert [result.sampling_params.seed for result in llm.results] == [9, 10, 11]
    assert [(delta.token_count, delta.sequence, delta.last) for delta in sink.deltas] == [(2, 0, False), (3, 1, True)]


@pytest.mark.asyncio
async def test_a_beam_search_runs_over_log_probabilities(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda prompt, _: [[(prompt[-1] + 1) % 200]]
        asked = request(stream=False, sampling=SamplingParameters(max_tokens=3), beam_search=BeamSearch(width=2))
        sink = await answer(engine, asked)
        assert {result.sampling_params.logprobs for result in llm.results} == {4}
        first = engine.texts.encode("ab")[-1]
    assert [delta.sequence for delta in sink.deltas] == [0, 1]
    expected = engine.detokenize([first + 1, first + 2, first + 3], True)
    assert sink.deltas[0].text == "".join(token.text for token in expected)


@pytest.mark.asyncio
async def test_a_cancelled_request_is_aborted_and_its_neighbour_goes_on(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [[5]]
        left, stays = Recorder(), Recorder()
        generation = await engine.submit(request(), left)
        await engine.submit(request(), stays)
        await until(lambda: bool(left.deltas and stays.deltas))
        assert engine.status().running_requests == 2
        generation.cancel()
        generation.cancel()
        assert [result.aborted for result in llm.results] == [True, False]
        assert engine.status().running_requests == 1
        assert engine.meter.aborted_requests == 1
        assert len(left.deltas) == 1
        assert not left.errors
        assert not stays.errors


@pytest.mark.asyncio
async def test_a_request_without_a_token_within_predict_timeout_fails_and_is_aborted(settings: ModelSettings) -> None:
    async with running(changed(settings, predict_timeout=0.05)) as (engine, llm):
        llm.answer = lambda *_: [[5]]
        sink = await answer(engine, request())
        assert llm.results[0].aborted
        assert engine.health().alive
    assert [type(error) for error in sink.errors] == [GenerationFailed]
    assert sink.errors[0].message == "no token within predict_timeout (0.05 s)"


@pytest.mark.asyncio
async def test_requests_without_a_token_show_in_the_engines_health_until_they_are_gone(settings: ModelSettings) -> None:
    async with running(changed(settings, predict_timeout=3.0)) as (engine, llm):
        llm.answer = lambda *_: [[5]]
        answered = asyncio.create_task(answer(engine, request()))
        async with asyncio.timeout(2.9):
            while engine.health().quiet_seconds < 0.4:
                await asyncio.sleep(0.05)
        mark = engine.health().mark
        await answered
        async with asyncio.timeout(10):
            while engine.health().quiet_seconds:
                await asyncio.sleep(0.05)
        assert engine.health().mark > mark


@pytest.mark.asyncio
async def test_an_error_of_one_request_is_its_own(settings: ModelSettings) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda prompt, _: [fake.RequestError("no room\nin /a/file")] if len(prompt) == 1 else [[5], [EOS]]
        failed = await answer(engine, request(prompt="a"))
        assert (await answer(engine, request(prompt="ab"))).deltas[-1].finish_reason == FinishReason.EOS
        assert engine.health().alive
        assert engine.meter.failed_requests == 1
    assert isinstance(failed.errors[0], GenerationFailed)
    assert failed.errors[0].message == "TensorRT-LLM refused to go on: no room"


@pytest.mark.asyncio
@pytest.mark.parametrize("reason", ["timeout", "cancelled", "other"])
async def test_a_sequence_that_the_engine_gives_up_fails(settings: ModelSettings, reason: str) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [[5], fake.End(reason)]
        sink = await answer(engine, request())
    assert isinstance(sink.errors[0], GenerationFailed)


@pytest.mark.asyncio
@pytest.mark.parametrize(("quietly", "checks_health"), [(False, True), (True, True), (True, False)])
async def test_all_requests_of_a_dead_engine_end_within_a_second(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch, quietly: bool, checks_health: bool
) -> None:
    if not checks_health:
        monkeypatch.delattr(fake.LLM, "_check_health")
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [[5]]
        sinks = [Recorder() for _ in range(3)]
        for sink in sinks:
            await engine.submit(request(), sink)
        await until(lambda: all(sink.deltas for sink in sinks))
        died = time.monotonic()
        llm.die(quietly)
        await until(lambda: all(sink.errors for sink in sinks))
        assert time.monotonic() - died < 1.0
        assert [type(error) for sink in sinks for error in sink.errors] == [EngineDead] * 3
        assert not engine.health().alive
        with pytest.raises(EngineDead):
            await engine.submit(request(), Recorder())


@pytest.mark.asyncio
async def test_stopping_ends_what_runs_and_shuts_the_engine_down(settings: ModelSettings) -> None:
    sink = Recorder()
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [fake.HANG]
        await engine.submit(request(), sink)
    assert isinstance(sink.errors[0], EngineDead)
    assert llm.is_shutdown()
    assert not engine.health().alive
    await engine.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "prompt", "message"),
    [
        ({}, "a" * 64, "the prompt has 64 tokens; the model's context of 64 tokens"),
        ({"max_model_len": "32"}, "a" * 40, "the prompt has 40 tokens; the model's context of 32 tokens"),
        ({"max_input_len": "8"}, "a" * 9, "the prompt has 9 tokens; option.max_input_len allows 8"),
        ({"max_num_tokens": "8"}, "a" * 9, "should not exceed max_num_tokens"),
    ],
)
async def test_a_prompt_that_is_too_long_is_refused(
    settings: ModelSettings, arguments: dict[str, str], prompt: str, message: str
) -> None:
    async with running(changed(settings, engine_arguments=arguments)) as (engine, llm):
        llm.answer = one_by_one([EOS])
        with pytest.raises(InvalidRequest, match=message):
            await engine.submit(request(prompt=prompt), Recorder())
        assert not llm.results


@pytest.mark.asyncio
async def test_beam_search_is_refused_where_there_are_no_log_probabilities(settings: ModelSettings) -> None:
    async with running(changed(settings, engine_arguments={"sampler_type": "TRTLLMSampler"})) as (engine, _):
        with pytest.raises(InvalidRequest, match="`num_beams` above 1 needs log probabilities"):
            await engine.submit(request(stream=False, beam_search=BeamSearch(width=2)), Recorder())


@pytest.mark.asyncio
async def test_a_machine_without_the_package_is_told_so(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tensorrt_llm")
    with pytest.raises(EngineStartError, match=r"needs the package tensorrt_llm, .* or set option.rolling_batch=auto"):
        await TensorRtLlmEngine(settings).start()


@pytest.mark.asyncio
async def test_a_machine_without_a_gpu_is_told_so(settings: ModelSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.install(monkeypatch, gpus=0)
    with pytest.raises(EngineStartError, match=r"needs an NVIDIA GPU, .* or set option.rolling_batch=auto"):
        await TensorRtLlmEngine(settings).start()


@pytest.mark.asyncio
async def test_a_package_that_cannot_be_imported_is_told_so(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_llm.llmapi", None)
    with pytest.raises(EngineStartError, match="is installed but cannot be imported"):
        await TensorRtLlmEngine(settings).start()


@pytest.mark.asyncio
@pytest.mark.parametrize("version", ["0.20.0", "1.1.0rc5", "1.5.0", "2.0.0"])
async def test_a_version_that_is_not_known_is_refused(
    settings: ModelSettings, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake.install(monkeypatch, version)
    with pytest.raises(EngineStartError, match=r"is not served: versions 1.2 to 1.4 are"):
        await TensorRtLlmEngine(settings).start()


@pytest.mark.asyncio
async def test_what_the_package_refuses_stops_the_start(settings: ModelSettings) -> None:
    with pytest.raises(EngineStartError, match="TensorRT-LLM cannot load"):
        await TensorRtLlmEngine(changed(settings, engine_arguments={"stream_interval": "0"})).start()


@pytest.mark.asyncio
@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_request_ends_with_what_there_is(settings: ModelSettings, stream: bool) -> None:
    async with running(settings) as (engine, llm):
        llm.answer = lambda *_: [[5], [6]]
        sink = Recorder()
        generation = await engine.submit(request(stream=stream), sink)
        await until(lambda: bool(llm.results) and len(llm.results[0].outputs[0].token_ids) == 2)
        await asyncio.sleep(0.01)
        generation.abort()
        generation.abort()
        expected = "".join(token.text for token in engine.detokenize([5, 6], True))
        assert llm.results[0].aborted
        assert engine.meter.aborted_requests == 1
    assert "".join(delta.text for delta in sink.deltas).strip() == expected.strip()
    last = sink.deltas[-1]
    assert (last.finish_reason, last.token_count, last.last) == (FinishReason.ABORT, 2, True)
    assert last.prompt_token_count > 0
