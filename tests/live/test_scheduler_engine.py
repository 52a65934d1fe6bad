"""The scheduler engine with the real model, against `generate` of transformers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from handlers.engines.protocol import EngineOutOfMemory, EngineStartError
from handlers.engines.stream import generate
from handlers.errors import EngineDead, GenerationFailed, InvalidParameter, InvalidRequest
from handlers.model_settings import ModelSettings
from handlers.request import BeamSearch, FinishReason, GenerationRequest, SamplingParameters, Token, TokenDelta
from tests.freed import when_freed
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS
from tests.recorder import Recorder

if TYPE_CHECKING:
    from handlers.engines.transformers_scheduler import SchedulerEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

Generate = Callable[..., list[int]]


@dataclass
class Answer:
    deltas: list[TokenDelta]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[Token]:
        return [token for delta in self.deltas for token in delta.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


def settings_for(directory: Path, **arguments: Any) -> ModelSettings:
    engine_arguments = {"max_model_len": "512", "kv_cache_memory_bytes": str(128 << 20), **arguments}
    return ModelSettings(
        name="m",
        model_dir=directory,
        model_id=str(directory),
        dtype="float32",
        rolling_batch="scheduler",
        max_rolling_batch_size=8,
        engine_arguments={name: value for name, value in engine_arguments.items() if value is not None},
    )


def request_for(prompt: str | tuple[int, ...], **fields: Any) -> GenerationRequest:
    names = GenerationRequest.__struct_fields__
    request_fields = {name: fields.pop(name) for name in list(fields) if name in names}
    fields.setdefault("max_tokens", MAX_NEW_TOKENS)
    defaults = {"request_id": "r", "want_tokens": True, "stream": True}
    return GenerationRequest(prompt=prompt, sampling=SamplingParameters(**fields), **{**defaults, **request_fields})


async def answer(engine: SchedulerEngine, prompt: str | tuple[int, ...], **fields: Any) -> Answer:
    return Answer([delta async for delta in generate(engine, request_for(prompt, **fields))])


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come about in time"
        await asyncio.sleep(0.02)


def held_requests(engine: SchedulerEngine) -> set[str]:
    assert engine._batching is not None
    return engine._batching.held_requests()


async def started(settings: ModelSettings) -> SchedulerEngine:
    from handlers.engines.transformers_scheduler import SchedulerEngine

    engine = SchedulerEngine(settings)
    await engine.start()
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(sample_model: Path) -> AsyncIterator[SchedulerEngine]:
    running = await started(settings_for(sample_model))
    yield running
    await running.stop()


@pytest.fixture(scope="module")
def reference(sample_model: Path) -> Generate:
    """What `generate` of transformers gives, as token ids."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(sample_model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(sample_model)

    def run(prompt: str, **arguments: Any) -> list[int]:
        ids = tokenizer(prompt, return_tensors="pt")
        arguments = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, **arguments}
        output: list[int] = model.generate(**ids, **arguments)[0, ids["input_ids"].shape[1] :].tolist()
        return output

    return run


async def test_the_installed_transformers_is_one_that_the_seam_is_written_for() -> None:
    from handlers.engines.transformers_batching import check_seam

    minor = tuple(map(int, version("transformers").split(".")[:2]))
    assert (5, 19) <= minor <= (5, 23), "read transformers_batching.py against this transformers, then widen the range"
    check_seam()


async def test_a_transformers_whose_seam_has_moved_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from handlers.engines import transformers_batching

    moved = ((lambda request_id: None, ("request_id", "input_ids")),)
    monkeypatch.setattr(transformers_batching, "_WANTED_PARAMETERS", moved)
    with pytest.raises(EngineStartError, match="has no parameter input_ids"):
        transformers_batching.check_seam()


@pytest.mark.parametrize("prompt", PROMPTS)
async def test_greedy_tokens_are_those_of_generate(engine: SchedulerEngine, reference: Generate, prompt: str) -> None:
    given = await answer(engine, prompt)
    assert given.ids == reference(prompt)
    assert given.text == "".join(token.text for token in given.tokens)
    assert given.text == engine.tokenizer.decode(given.ids, skip_special_tokens=True)


async def test_a_repetition_penalty_is_that_of_generate(engine: SchedulerEngine, reference: Generate) -> None:
    given = await answer(engine, PROMPTS[1], repetition_penalty=1.3)
    assert given.ids == reference(PROMPTS[1], repetition_penalty=1.3)


async def test_a_seeded_request_is_the_same_alone_and_in_a_batch(engine: SchedulerEngine) -> None:
    seeded: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 42}
    alone = await answer(engine, PROMPTS[1], **seeded)
    others = (answer(engine, prompt, temperature=1.0) for prompt in PROMPTS[:3])
    together, *rest = await asyncio.gather(answer(engine, PROMPTS[1], **seeded), *others)
    assert together.ids == alone.ids
    assert len(rest) == 3
    assert (await answer(engine, PROMPTS[1], **{**seeded, "seed": 43})).ids != alone.ids


async def test_mixed_requests_that_run_together_are_each_as_alone(engine: SchedulerEngine) -> None:
    requests: list[tuple[str, dict[str, Any]]] = [
        (PROMPTS[0], {}),
        (PROMPTS[1], {"repetition_penalty": 1.3, "stream": False}),
        (PROMPTS[2], {"stop": ("return",)}),
        (PROMPTS[3], {"temperature": 0.8, "seed": 3, "top_k": 20}),
        (PROMPTS[0], {"presence_penalty": 1.0, "frequency_penalty": 0.5, "max_tokens": 7}),
        (PROMPTS[4], {"min_tokens": 10, "ignore_eos": True}),
        (PROMPTS[1] * 60, {"max_tokens": 4}),
    ]
    alone = [await answer(engine, prompt, **fields) for prompt, fields in requests]
    together = await asyncio.gather(*(answer(engine, prompt, **fields) for prompt, fields in requests))
    assert [given.ids for given in together] == [given.ids for given in alone]
    assert [given.text for given in together] == [given.text for given in alone]
    assert together[2].deltas[-1].finish_reason is FinishReason.STOP


async def test_log_probabilities_are_the_models_own(engine: SchedulerEngine, sample_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    given = await answer(engine, PROMPTS[0], want_logprobs=True, want_prompt_tokens=True, top_tokens=2, max_tokens=6)
    prompt = given.deltas[0].prompt_tokens
    assert prompt is not None
    model = AutoModelForCausalLM.from_pretrained(sample_model, dtype=torch.float32).eval()
    ids = [token.id for token in prompt] + given.ids
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [logprobs[place, ids[place + 1]].item() for place in range(len(ids) - 1)]
    values = [token.logprob for token in [*prompt[1:], *given.tokens]]
    assert values == pytest.approx(expected, abs=1e-3)
    assert prompt[0].logprob is None
    assert "".join(token.text for token in prompt) == PROMPTS[0]
    assert all(token.top[0].logprob == pytest.approx(token.logprob, abs=1e-5) for token in given.tokens)
    assert given.deltas[-1].cumulative_logprob == pytest.approx(sum(token.logprob or 0.0 for token in given.tokens))


async def test_the_most_probable_of_several_candidates_is_returned(engine: SchedulerEngine) -> None:
    every = await answer(engine, PROMPTS[0], temperature=1.0, seed=5, sequences=3, candidates=3, stream=False)
    best = await answer(engine, PROMPTS[0], temperature=1.0, seed=5, sequences=1, candidates=3)
    assert [delta.sequence for delta in every.deltas] == [0, 1, 2]
    assert len({delta.text for delta in every.deltas}) > 1
    assert best.text == every.deltas[0].text


async def test_beam_search_finds_what_generate_finds(engine: SchedulerEngine, reference: Generate) -> None:
    given = await answer(engine, PROMPTS[0], beam_search=BeamSearch(width=3), max_tokens=8)
    assert [token.id for token in given.deltas[0].tokens] == reference(PROMPTS[0], num_beams=3, max_new_tokens=8)


async def test_a_cancelled_request_leaves_nothing_in_the_engine_and_its_peers_go_on(engine: SchedulerEngine) -> None:
    await until(lambda: not held_requests(engine))
    gone, stays = Recorder(), Recorder()
    generation = await engine.submit(request_for(PROMPTS[1], max_tokens=400, ignore_eos=True), gone)
    await engine.submit(request_for(PROMPTS[0], ignore_eos=True), stays)
    await until(lambda: len(gone.deltas) >= 2 and len(stays.deltas) >= 2)
    aborted = engine.meter.aborted_requests
    generation.cancel()
    generation.cancel()
    heard = len(gone.deltas)
    await until(lambda: bool(stays.deltas[-1].last))
    await until(lambda: engine.status().running_requests == 0)
    assert len(gone.deltas) == heard
    assert gone.errors == []
    assert engine.status().waiting_requests == 0
    assert held_requests(engine) == set()
    assert engine.meter.aborted_requests == aborted + 1
    assert "".join(delta.text for delta in stays.deltas) == (await answer(engine, PROMPTS[0], ignore_eos=True)).text


async def test_a_stop_string_frees_the_engine_before_max_tokens(engine: SchedulerEngine) -> None:
    given = await answer(engine, PROMPTS[0], stop=(".",), max_tokens=400)
    assert given.text == " Paris"
    await until(lambda: engine.status().running_requests == 0, seconds=1.0)


async def test_a_prompt_that_is_too_long_is_refused_and_one_that_just_fits_is_served(engine: SchedulerEngine) -> None:
    with pytest.raises(InvalidRequest, match="512 tokens"):
        await answer(engine, (100,) * 512)
    given = await answer(engine, (100,) * 510, max_tokens=None, ignore_eos=True)
    assert (len(given.ids), given.deltas[-1].finish_reason) == (2, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [({"adapter": "a"}, "adapter"), ({"top_tokens": 21}, "top_n_tokens"), ({"stop_token_ids": (10**6,)}, "stop_token")],
)
async def test_what_cannot_be_done_is_refused_before_anything_starts(
    engine: SchedulerEngine, fields: dict[str, Any], parameter: str
) -> None:
    before = engine.meter.started_requests
    with pytest.raises(InvalidParameter, match=parameter):
        await answer(engine, PROMPTS[0], **fields)
    assert engine.meter.started_requests == before
    assert engine.health().alive


async def test_a_request_that_fails_in_the_engine_fails_alone(engine: SchedulerEngine) -> None:
    impossible = answer(
        engine, PROMPTS[0], allowed_token_ids=tuple(engine.eos_token_ids), min_tokens=2, max_tokens=5, request_id="no"
    )
    sound = answer(engine, PROMPTS[1])
    failed, given = await asyncio.gather(impossible, sound, return_exceptions=True)
    assert isinstance(failed, GenerationFailed)
    assert "forbid every token" in failed.message
    assert isinstance(given, Answer)
    assert given.ids == (await answer(engine, PROMPTS[1])).ids
    await until(lambda: engine.status().running_requests == 0)


async def test_a_bug_in_one_requests_sink_ends_that_request_alone(engine: SchedulerEngine) -> None:
    class Failing(Recorder):
        def on_delta(self, delta: TokenDelta) -> None:
            raise RuntimeError("a bug in a contract")

    broken = Failing()
    await engine.submit(request_for(PROMPTS[0], max_tokens=400, ignore_eos=True), broken)
    assert (await answer(engine, PROMPTS[1])).text
    assert [type(error) for error in broken.errors] == [GenerationFailed]
    await until(lambda: engine.status().running_requests == 0, seconds=1.0)


async def test_more_requests_than_the_cache_holds_are_each_as_alone(sample_model: Path) -> None:
    small = await started(
        settings_for(sample_model, kv_cache_memory_bytes=str(46080 * 256), max_model_len="256", block_size="16")
    )
    try:
        prompts = [f"Chapter {number}. " + "The quick brown fox jumps. " * 12 for number in range(4)]
        fields = {"max_tokens": 32, "ignore_eos": True}
        alone = [await answer(small, prompt, **fields) for prompt in prompts]
        together = await asyncio.gather(*(answer(small, prompt, **fields) for prompt in prompts))
        assert [given.ids for given in together] == [given.ids for given in alone]
        assert small.health().alive
    finally:
        await small.stop()


async def test_a_cache_too_small_for_the_wanted_context_is_refused(sample_model: Path) -> None:
    with pytest.raises(EngineOutOfMemory, match=r"max_model_len.*holds \d+ tokens, fewer than 512"):
        await started(settings_for(sample_model, kv_cache_memory_bytes=str(46080 * 128)))


async def test_without_a_wanted_context_it_is_cut_to_what_the_cache_holds(
    sample_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = await started(settings_for(sample_model, max_model_len=None, kv_cache_memory_bytes=str(46080 * 128)))
    try:
        assert small.max_model_len == 128
        with pytest.raises(InvalidRequest, match="128 tokens"):
            await answer(small, (100,) * 128)
        assert "the context is cut to that from 8192" in caplog.text
    finally:
        await small.stop()


async def test_a_dead_engine_ends_pending_requests_within_a_second(sample_model: Path) -> None:
    dying = await started(settings_for(sample_model))
    sinks = [Recorder(), Recorder()]
    for sink in sinks:
        await dying.submit(request_for(PROMPTS[1], max_tokens=400, ignore_eos=True), sink)
    await until(lambda: all(sink.deltas for sink in sinks))

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the device has fallen off the bus")

    dying._model.model.register_forward_pre_hook(broken)
    await until(lambda: not dying.health().alive, seconds=2.0)
    await until(lambda: all(sink.errors for sink in sinks), seconds=1.0)
    assert [[type(error) for error in sink.errors] for sink in sinks] == [[EngineDead], [EngineDead]]
    with pytest.raises(EngineDead):
        await answer(dying, PROMPTS[0])
    await dying.stop()


async def test_stopping_ends_pending_requests(sample_model: Path) -> None:
    stopping = await started(settings_for(sample_model))
    sink = Recorder()
    await stopping.submit(request_for(PROMPTS[1], max_tokens=400, ignore_eos=True), sink)
    await until(lambda: bool(sink.deltas))
    await stopping.stop()
    await stopping.stop()
    assert [error.message for error in sink.errors] == ["the server is stopping; the request was not completed"]
    assert not stopping.health().alive
    with pytest.raises(EngineDead):
        await answer(stopping, PROMPTS[0])


@pytest.mark.usefixtures("no_collection_by_itself")
async def test_a_model_that_loads_for_too_long_is_freed_once_it_is_there(sample_model: Path) -> None:
    from handlers.engines.transformers_scheduler import SchedulerEngine

    engine = SchedulerEngine(replace(settings_for(sample_model), model_loading_timeout=0.05))
    freed = when_freed(engine)
    with pytest.raises(EngineStartError, match=r"longer than model_loading_timeout \(0\.05 s\)"):
        await engine.start()
    del engine
    assert not freed.is_set()
    await until(freed.is_set, seconds=60.0)


async def test_a_request_without_a_token_in_time_fails_and_is_freed(sample_model: Path) -> None:
    engine = await started(replace(settings_for(sample_model), predict_timeout=1.0))
    try:
        slow = engine._model.model.register_forward_pre_hook(lambda *_: time.sleep(2.0))
        with pytest.raises(GenerationFailed, match="no token within predict_timeout"):
            await answer(engine, PROMPTS[0])
        slow.remove()
        await until(lambda: engine.status().running_requests == 0)
        assert (await answer(engine, PROMPTS[0])).text
    finally:
        await engine.stop()


async def test_a_step_that_runs_out_of_memory_ends_its_own_requests_alone(sample_model: Path) -> None:
    engine = await started(settings_for(sample_model))
    try:
        expected = (await answer(engine, PROMPTS[0])).ids
        failing = engine._model.model.register_forward_pre_hook(lambda *_: no_memory())
        failed = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS[:3]), return_exceptions=True)
        failing.remove()
        assert [type(error) for error in failed] == [GenerationFailed] * 3
        assert "memory ran out" in str(failed[0])
        await until(lambda: engine.status().running_requests == 0)
        assert held_requests(engine) == set()
        assert engine.health().alive
        assert (await answer(engine, PROMPTS[0])).ids == expected
    finally:
        await engine.stop()


def no_memory() -> None:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")


async def test_an_engine_whose_step_never_ends_is_dead(sample_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from handlers.engines import transformers_scheduler

    monkeypatch.setattr(transformers_scheduler, "_STUCK_SECONDS", 0.5)
    engine = await started(replace(settings_for(sample_model), predict_timeout=0.5))
    released = threading.Event()
    hanging = engine._model.model.register_forward_pre_hook(lambda *_: released.wait(30) and None)
    try:
        with pytest.raises(GenerationFailed, match="no token within predict_timeout"):
            await answer(engine, PROMPTS[0])
        await until(lambda: not engine.health().alive)
        assert engine.health().reason == "the engine has died: a step does not end"
        with pytest.raises(EngineDead):
            await answer(engine, PROMPTS[0])
    finally:
        released.set()
        hanging.remove()
        await engine.stop()


async def test_a_step_that_stands_still_shows_in_the_engines_health_until_it_goes_on(sample_model: Path) -> None:
    engine = await started(settings_for(sample_model))
    released = threading.Event()
    hanging = engine._model.model.register_forward_pre_hook(lambda *_: released.wait(30) and None)
    try:
        answered = asyncio.create_task(answer(engine, PROMPTS[0]))
        await until(lambda: engine.health().quiet_seconds > 0.4)
        assert engine.health().alive
        mark = engine.health().mark
        released.set()
        await answered
        await until(lambda: engine.health().quiet_seconds == 0)
        assert engine.health().mark > mark
    finally:
        released.set()
        hanging.remove()
        await engine.stop()


async def test_an_engine_without_work_is_not_taken_for_dead(
    sample_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handlers.engines import transformers_scheduler

    monkeypatch.setattr(transformers_scheduler, "_STUCK_SECONDS", 0.0)
    engine = await started(replace(settings_for(sample_model), predict_timeout=2.0))
    try:
        await asyncio.sleep(2.6)
        assert (await answer(engine, PROMPTS[0])).text
        assert engine.health().alive
    finally:
        await engine.stop()


async def test_a_text_with_a_token_that_the_model_does_not_have_is_refused(engine: SchedulerEngine) -> None:
    with pytest.raises(InvalidRequest, match="token id 49152"):
        await answer(engine, (1, 49152, 2))
    assert engine.health().alive
    assert (await answer(engine, PROMPTS[0])).text


async def test_log_probabilities_of_a_prompt_are_the_same_beside_others_which_go_on(engine: SchedulerEngine) -> None:
    prompt = tuple(range(1000, 1400))
    fields: dict[str, Any] = {"want_prompt_tokens": True, "want_logprobs": True, "max_tokens": 2, "ignore_eos": True}
    alone = (await answer(engine, prompt, **fields)).deltas[0].prompt_tokens
    other = Recorder()
    generation = await engine.submit(request_for(PROMPTS[1], max_tokens=400, ignore_eos=True), other)
    await until(lambda: bool(other.deltas))
    submitted = asyncio.create_task(answer(engine, prompt, **fields))
    heard = len(other.deltas)
    beside = (await submitted).deltas[0].prompt_tokens
    assert len(other.deltas) - heard >= 4, "a step between the chunks"
    generation.cancel()
    assert alone is not None
    assert beside is not None
    assert [token.logprob for token in beside[1:]] == pytest.approx([token.logprob for token in alone[1:]], abs=1e-3)


async def test_with_eager_attention_tokens_and_prompt_log_probabilities_are_the_same(
    engine: SchedulerEngine, sample_model: Path
) -> None:
    fields: dict[str, Any] = {"want_prompt_tokens": True, "want_logprobs": True, "max_tokens": 6}
    expected = await answer(engine, PROMPTS[1], **fields)
    eager = await started(settings_for(sample_model, attn_implementation="eager"))
    try:
        given = await answer(eager, PROMPTS[1], **fields)
        again = await answer(eager, PROMPTS[1], **fields)
    finally:
        await eager.stop()
    assert given.ids == again.ids == expected.ids
    assert [t.logprob for t in prompt_of(given)[1:]] == pytest.approx(
        [t.logprob for t in prompt_of(expected)[1:]], abs=1e-3
    )


def prompt_of(given: Answer) -> list[Token]:
    tokens = given.deltas[0].prompt_tokens
    assert tokens is not None
    return tokens


async def test_a_request_that_is_cancelled_while_its_prompt_is_read_leaves_nothing(engine: SchedulerEngine) -> None:
    gone = Recorder()
    aborted = engine.meter.aborted_requests
    request = request_for(tuple(range(1000, 1400)), want_prompt_tokens=True)
    (await engine.submit(request, gone)).cancel()
    reader = engine._reader
    assert reader is not None
    await until(lambda: not reader._tasks)
    assert (gone.deltas, gone.errors, engine._running) == ([], [], {})
    assert engine.meter.aborted_requests == aborted + 1


async def test_the_meter_counts_a_beam_search_as_one_prompt_and_its_beams_as_sequences(engine: SchedulerEngine) -> None:
    meter = engine.meter
    before = (meter.started_requests, meter.finished_requests, meter.prompt_tokens, meter.tokens)
    given = await answer(engine, PROMPTS[0], beam_search=BeamSearch(width=3), max_tokens=4)
    counts = [delta.token_count for delta in given.deltas]
    prompt = given.deltas[0].prompt_token_count
    after = (meter.started_requests, meter.finished_requests, meter.prompt_tokens, meter.tokens)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 3, prompt, sum(counts)]


async def test_a_beam_that_a_stop_token_ends_does_not_show_it_unless_asked(engine: SchedulerEngine) -> None:
    search: dict[str, Any] = {"beam_search": BeamSearch(width=3), "max_tokens": 6}
    free = (await answer(engine, PROMPTS[0], **search)).deltas[0]
    stop = free.tokens[2]
    search["stop_token_ids"] = (stop.id,)
    hidden = stopped_with(stop.id, await answer(engine, PROMPTS[0], **search))
    shown = stopped_with(stop.id, await answer(engine, PROMPTS[0], include_stop_str_in_output=True, **search))
    assert hidden.text == "".join(token.text for token in hidden.tokens[:-1])
    assert shown.text == hidden.text + stop.text
    late = await answer(engine, PROMPTS[0], min_tokens=4, **search)
    assert all(delta.token_count > 4 for delta in late.deltas)


def stopped_with(token_id: int, given: Answer) -> TokenDelta:
    return next(delta for delta in given.deltas if delta.tokens[-1].id == token_id)


@pytest.mark.parametrize(
    ("fields", "parameter"), [({"adapter": "a"}, "adapter"), ({"stop_token_ids": (10**6,)}, "stop_token_ids")]
)
async def test_a_beam_search_with_what_cannot_be_done_is_refused(
    engine: SchedulerEngine, fields: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(InvalidParameter, match=parameter):
        await answer(engine, PROMPTS[0], beam_search=BeamSearch(width=2), **fields)


async def test_a_model_with_attention_of_its_own_is_refused_and_what_runs_it_is_named(
    tmp_path: Path, sample_model: Path
) -> None:
    import torch
    from transformers import AutoTokenizer, BloomConfig, BloomForCausalLM

    torch.manual_seed(0)
    BloomForCausalLM(BloomConfig(vocab_size=49152, hidden_size=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(sample_model).save_pretrained(tmp_path)
    with pytest.raises(EngineStartError, match=r"BloomForCausalLM.*option\.rolling_batch=disable runs it"):
        await started(settings_for(tmp_path))


async def test_an_engine_that_gives_other_tokens_than_the_model_is_refused(
    sample_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handlers.engines import transformers_tryout

    def of_another_model(model: Any) -> Any:
        true = transformers_tryout.Reference(tuple(range(100, 112)), ())
        shifted = model.model(input_ids=torch.tensor([true.prompt_ids])).logits[0, -1].detach().flip(0)
        return replace(true, logits=(shifted,) * 4)

    import torch

    monkeypatch.setattr(transformers_tryout, "reference", of_another_model)
    with pytest.raises(EngineStartError, match="gives other tokens"):
        await started(settings_for(sample_model))


async def test_a_model_whose_first_pass_fails_is_refused_with_the_cause(
    sample_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from handlers.engines import transformers_scheduler
    from handlers.engines.transformers_cache import batching_config

    def failing(settings: ModelSettings, model: Any) -> Any:
        model.model.register_forward_pre_hook(lambda *_: no_kernel())
        return batching_config(settings, model)

    monkeypatch.setattr(transformers_scheduler, "batching_config", failing)
    with pytest.raises(EngineStartError, match="no kernel for this device"):
        await started(settings_for(sample_model))


def no_kernel() -> None:
    raise RuntimeError("no kernel for this device")


async def test_an_engine_that_is_stopped_while_it_loads_says_so(sample_model: Path) -> None:
    from handlers.engines.transformers_scheduler import SchedulerEngine

    engine = SchedulerEngine(settings_for(sample_model))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    await engine.stop()
    with pytest.raises(EngineStartError, match="stopped while it was loading"):
        await starting
    assert not engine.health().alive


async def test_a_model_that_cannot_be_loaded_is_refused_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(EngineStartError, match="transformers cannot load"):
        await started(settings_for(tmp_path))


async def test_arguments_without_effect_are_named_in_one_warning(
    sample_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await started(settings_for(sample_model, swap_space="4", low_cpu_mem_usage="true"))
    await engine.stop()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "no effect" in r.message]
    assert "option.swap_space, option.low_cpu_mem_usage" in warning
