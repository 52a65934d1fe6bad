"""The client of all copies, with stand-ins for the clients of their processes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from engines.daemon_thread import LastingThreads
from handlers.model_config import ModelConfig
from tests.live.test_vllm_internals import Processor, output
from tests.stand_ins.recorder import Recorder
from tests.stand_ins.vllm_clients import Started, engine_request, late_interaction
from tests.waiting import until

pytestmark = [pytest.mark.live, pytest.mark.asyncio]

PROMPT = [7] * 300
TOKENS = 10
WORK = len(PROMPT) + TOKENS + 1


def request(request_id: str, of: str = "", **given: Any) -> Any:
    """Return a sequence. `of` is the id of the request that the sequence belongs to."""
    from vllm.sampling_params import SamplingParams

    fields = {"prompt_token_ids": PROMPT, "sampling_params": SamplingParams(max_tokens=TOKENS)}
    return engine_request(request_id, external_req_id=of or request_id, **fields | given)


def works(started: Started) -> list[int]:
    return [copy.work for copy in started.copies]


def message(**given: Any) -> Any:
    return SimpleNamespace(**{"outputs": [], "engine_index": 0} | given)


async def test_the_sequences_of_a_request_go_to_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 3)
    await started.client.add_request_async(request("0"))
    started.siblings["n"] = [f"n{place}" for place in range(5)]
    for name in started.siblings["n"]:
        await started.client.add_request_async(request(name, of="n", prompt_token_ids=[1] * 9))
    assert [copy.client.added_ids for copy in started.copies] == [["0"], started.siblings["n"], []]


async def test_sequences_whose_copy_takes_no_more_go_to_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 2)
    started.siblings["n"] = ["n0", "n1"]
    await started.client.add_request_async(request("n0", of="n"))
    started.client.close(started.copies[0])
    await started.client.add_request_async(request("n1", of="n"))
    assert [copy.client.added_ids for copy in started.copies] == [["n0"], ["n1"]]


async def test_prompts_meet_the_cache_that_has_them_unless_adapter_or_salt_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.lora.request import LoRARequest

    started = Started(monkeypatch, 3)
    ways: list[dict[str, Any]] = [{}, {"lora_request": LoRARequest("x", 1, "/x")}, {"cache_salt": "s"}]
    for number, way in enumerate(ways):
        await started.client.add_request_async(request(f"first{number}", **way))
    for number, way in reversed(list(enumerate(ways))):
        await started.client.add_request_async(request(f"second{number}", **way))
    assert [copy.client.added_ids for copy in started.copies] == [[f"first{n}", f"second{n}"] for n in range(3)]


async def test_the_documents_of_a_query_go_where_its_vectors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 4)
    for query in range(8):
        for number, mode in enumerate(("cache_query", "score_doc", "score_doc")):
            await started.client.add_request_async(late_interaction(f"q{query}-{number}", mode, f"q{query}"))
    for copy in started.copies:
        queries = [name.partition("-")[0] for name in copy.client.added_ids]
        assert all(queries.count(query) == 3 for query in queries)
    assert sum(bool(copy.client.added) for copy in started.copies) > 1


@pytest.mark.parametrize("holds", [True, False])
async def test_without_a_copy_a_request_waits_or_gets_an_error(monkeypatch: pytest.MonkeyPatch, holds: bool) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    started = Started(monkeypatch, 1, holds=holds)
    (copy,) = started.copies
    copy.client.resources.engine_dead = True  # Nobody has noticed yet.
    dying = started.client.add_request_async(request("a"))
    later = started.client.add_request_async(request("b"))
    if holds:
        await dying
    else:
        with pytest.raises(EngineDeadError):
            await dying
    assert started.kill(copy) == ["a"], "it is known whose it was"
    if holds:
        await later
    else:
        with pytest.raises(EngineDeadError):
            await later
    assert not started.client.placed


async def test_an_abort_reaches_the_copy_that_has_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 3)
    for name in "abcdef":
        await started.client.add_request_async(request(name, prompt_token_ids=[1]))
    await started.client.abort_requests_async(["b", "f", "unknown", "c"])
    assert [copy.client.aborted for copy in started.copies] == [[], ["b"], ["f", "c"]]
    assert [copy.work // (TOKENS + 2) for copy in started.copies] == [2, 1, 0]
    await started.client.abort_requests_async(["b"])
    assert started.copies[1].client.aborted == ["b"], "once"


async def test_a_method_is_called_in_all_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 3)
    opening = started.start(4)
    copies = [*started.copies, opening]
    clients = [copy.client for copy in copies]
    assert await started.client.call_utility_all_async("profile", 1) == clients
    assert await started.client.add_lora_async("adapter") is clients[0]
    for client in clients:
        assert client.calls == [("profile", 1), ("add_lora", "adapter")]


async def test_a_copy_that_dies_meanwhile_does_not_hurt_a_call_and_the_last_one_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    started = Started(monkeypatch, 3)
    first, second, third = started.copies
    for copy in (first, second):
        copy.client.answers.clear()
    for ended in range(2):
        call = asyncio.create_task(started.client.call_utility_all_async("add_lora"))
        await until(lambda before=ended: len(third.client.calls) > before)
        assert not call.done()
        started.kill((first, second)[ended])
        if not ended:
            await asyncio.sleep(0)
            assert not call.done(), "the second copy has not answered"
            second.client.utility_results[1].set_result("result")
            assert await call == ["result", third.client]
    assert await call == [third.client]
    third.client.resources.engine_dead = True  # Nobody has noticed yet.
    with pytest.raises(EngineDeadError):
        await started.client.call_utility_async("add_lora")
    assert not started.client.resources.engine_dead
    started.kill(third)
    assert started.client.resources.engine_dead, "vLLM looks there"
    with pytest.raises(EngineDeadError):
        await started.client.call_utility_async("add_lora")
    started.start(3)
    assert not started.client.resources.engine_dead


async def test_the_error_of_one_copy_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 2)
    started.copies[1].client.error = RuntimeError("no room")
    with pytest.raises(RuntimeError, match="no room"):
        await started.client.call_utility_async("add_lora")


async def test_messages_have_the_number_of_their_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 3)
    for copy in reversed(started.copies):
        copy.client.queue.put_nowait(message())
    found = [await started.client.get_output_async() for _ in range(3)]
    assert [each.engine_index for each in found] == [2, 1, 0]
    assert [copy.messages for copy in started.copies] == [1, 1, 1]
    started.copies[0].client.queue.put_nowait(message(engine_index=1))
    assert (await started.client.get_output_async()).engine_index == 1, "of the second data-parallel rank"


async def test_work_goes_back_to_nothing_when_requests_end(monkeypatch: pytest.MonkeyPatch, sample_model: Path) -> None:
    """Requests end with their last output, with an abort, with the death of their copy, or because nobody refers to
    them any more.
    """
    from transformers import AutoTokenizer

    started = Started(monkeypatch, 2)
    client = started.client
    processor = Processor(AutoTokenizer.from_pretrained(sample_model), lean=True)
    processor.processor.client = client
    for name in ("length", "stop", "aborted", "gone", "dies"):
        processor.add(name, Recorder())
        await client.add_request_async(request(name, prompt_token_ids=[1]))
    assert sum(works(started)) == 5 * (TOKENS + 2)
    processor.step(output("length", [5]), output("stop", [5]))
    assert len(client.placed) == 5, "they go on"
    processor.step(output("length", [5], "LENGTH"), output("stop", [5], "STOP"))
    assert set(client.placed) == {"aborted", "gone", "dies"}
    await client.abort_requests_async(["aborted"])
    client.forget(["gone", "unknown"])
    assert sum(works(started)) == TOKENS + 2
    (copy,) = (placed.copy for placed in client.placed.values())
    assert started.kill(copy) == ["dies"]
    assert works(started) == [0, 0]
    assert not client.placed


async def test_the_part_of_an_answer_that_counts_as_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.pooling_params import PoolingParams
    from vllm.sampling_params import SamplingParams

    from engines.vllm.copies.choice import MOST_ANSWER_TOKENS

    started = Started(monkeypatch, 1)
    (copy,) = started.copies
    works_of = []
    for number, given in enumerate(
        (
            {"sampling_params": SamplingParams(max_tokens=100_000)},
            {"sampling_params": SamplingParams(max_tokens=None)},
            {"sampling_params": None, "pooling_params": PoolingParams(task="embed")},
        )
    ):
        before = copy.work
        await started.client.add_request_async(request(str(number), **given))
        works_of.append(copy.work - before)
    most = len(PROMPT) + MOST_ANSWER_TOKENS + 1
    assert works_of == [most, most, len(PROMPT) + 1]


async def test_a_document_whose_query_is_lost_gets_an_error_and_reaches_no_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.exceptions import GenerationError

    started = Started(monkeypatch, 2)
    await started.client.add_request_async(late_interaction("query", "cache_query"))
    (first,) = [copy for copy in started.copies if copy.client.added]
    (other,) = [copy for copy in started.copies if copy is not first]
    started.client.close(first)
    await started.client.add_request_async(late_interaction("document", "score_doc"))
    assert first.client.added_ids == ["query", "document"], "it drains, and still has the query"
    started.kill(first)
    with pytest.raises(GenerationError):
        await started.client.add_request_async(late_interaction("late", "score_doc"))
    assert not other.client.added


async def test_the_parts_of_a_prompt_reach_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch, 2)
    for resumable in (True, True, False):
        await started.client.add_request_async(request("a", resumable=resumable))
    await started.client.add_request_async(request("b"))
    await started.client.add_request_async(request("b"))
    (copy,) = [copy for copy in started.copies if "a" in copy.client.added_ids]
    assert copy.client.added_ids.count("a") == 3
    assert sum(copy.client.added_ids.count("b") for copy in started.copies) == 1, "it is one request"


async def test_a_load_that_is_cancelled_twice_still_waits_for_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cancellation is the end of the model, and the second one is the end of the server."""
    from engines.vllm import loading
    from engines.vllm.copies.places import Place

    begun, killed = Event(), Event()

    def start(*_: object) -> None:
        begun.set()
        killed.wait(60)
        raise RuntimeError("the processes have ended")

    parallel = SimpleNamespace(numa_bind=False, assigned_physical_gpu_ids=None)
    monkeypatch.setattr(loading, "start_processes", start)
    monkeypatch.setattr(loading, "config_of_copy", lambda *_: SimpleNamespace(parallel_config=parallel))
    config = ModelConfig(name="model", model_dir=Path(), model_id="model")
    threads, llm = LastingThreads("copy"), SimpleNamespace(vllm_config=None)
    load = asyncio.create_task(loading.VllmLoader(config, threads).load_copy(llm, Place()))  # type: ignore[arg-type]
    try:
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):
            load.cancel()
            done, _waiting = await asyncio.wait([load], timeout=0.05)
            assert not done, "the processes still run"
    finally:
        killed.set()
        threads.end()
    with pytest.raises(asyncio.CancelledError):
        await load
