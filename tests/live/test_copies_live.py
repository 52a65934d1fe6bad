"""Copies of a model on one CPU, with the real vLLM. For clients, the copies are one engine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.live import failing_output_loop
from tests.live.continued_calls import (
    CASES,
    FEW,
    OPTIONS,
    Case,
    add_adapters,
    answer,
    answers,
    cases,
    kill,
    signal_engines,
    step_until_running,
)
from tests.live.deadly_prompts import IS_KILLED, RAISES
from tests.live.server import START_SECONDS, Server, serving, stopped
from tests.waiting import wait_until

DEAD = "the engine has died; the request was not completed"
TOKENS = "vllm:generation_tokens_total"
CALLS_OF_ALL = {name: CASES[name] for name in (*FEW, "LMI, adapter", "LMI, formatter")}
"""test_continuation_live.py has all calls."""
HITS, LOOKED_UP = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with two copies, which may die many times."""
    directory = tmp_path_factory.mktemp("copies")
    add_adapters(directory / "model", Path(str(small_options["model_id"])))
    environment = {"SERVING_ENGINE_RESTART": "1000", "SERVING_JOB_QUEUE_SIZE": "1000", "SERVING_MAX_WORKERS": "2"}
    with serving(directory, environment, **OPTIONS, **small_options) as server:
        yield server


def completion(prompt: str, tokens: int, **given: Any) -> Case:
    body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0} | given
    return Case("/v1/completions", body)


@pytest.fixture(scope="module")
def right(two: Server) -> dict[str, str]:
    """Run each call alone, and return its answer."""
    return {name: answer(two, case) for name, case in CALLS_OF_ALL.items()}


def test_calls_of_all_contracts_get_the_same_answers_from_each_copy(two: Server, right: dict[str, str]) -> None:
    for _ in range(2):
        assert answers(two, CALLS_OF_ALL) == right


def test_equal_streams_are_spread_evenly(two: Server) -> None:
    """All streams begin before one of them ends, because otherwise a faster copy would get more streams."""
    before, begun = two.by_engine(TOKENS), two.metric("slipway_generations_total")
    case = completion("Once upon a time there was", 64, stream=True)
    with ThreadPoolExecutor(64) as pool, contextlib.ExitStack() as stack:
        for process in two.engine_processes():
            stack.enter_context(stopped(process.pid))
        streams = [pool.submit(answer, two, case) for _ in range(64)]
        wait_until(lambda: two.metric("slipway_generations_total") == begun + 64)
        stack.close()
        assert len({stream.result() for stream in streams}) == 1
    tokens = two.by_engine(TOKENS) - before
    assert set(tokens) == {"0", "1"}
    assert sum(tokens.values()) == 64 * 64
    assert max(tokens.values()) <= 1.1 * 64 * 64 / 2


def test_calls_with_one_system_prompt_meet_in_one_cache(two: Server) -> None:
    """Eight prompts of more than 512 tokens are sent through four contracts, one call at a time."""
    before = two.by_engine(HITS)
    system = [" ".join(f"{number} {word}" for word in range(130)) for number in range(8)]
    for turn in range(4):
        for text in system:
            prompt = f"{text} {turn}"
            tgi = {"inputs": prompt, "parameters": {"max_new_tokens": 2}}
            for case in (completion(prompt, 2), Case("/generate", tgi), Case("/invocations", tgi)):
                answer(two, case)
    hits = two.by_engine(HITS) - before
    calls = 8 * 4 * 3
    assert set(hits) == {"0", "1"}
    assert sum(hits.values()) >= 512 * (calls - 8), "only the first call of each system prompt computes it"


@pytest.mark.slow
def test_a_copy_dies_and_no_call_notices(two: Server, right: dict[str, str]) -> None:
    restarts = two.metric("slipway_engine_restarts_total")
    long = {name: case for name, case in cases(tokens=200).items() if name in CALLS_OF_ALL}
    undisturbed = answers(two, long)
    assert answers(two, long, lambda: kill(two, 8)) == undisturbed
    assert two.ping() == 200
    wait_until(lambda: two.metric("slipway_engine_restarts_total") == restarts + 1)
    wait_until(lambda: len(two.engine_processes()) == 2)
    assert answers(two, CALLS_OF_ALL) == right


@pytest.mark.slow
# test_continuation_live.py tries both ways in which an engine dies.
@pytest.mark.parametrize(
    "prompt", [pytest.param(RAISES, id="raises", marks=pytest.mark.long), pytest.param(IS_KILLED, id="is killed")]
)
def test_a_call_that_kills_its_copy_gets_the_error_alone_and_one_of_three_copies_never_dies(
    tmp_path: Path, small_options: dict[str, object], prompt: list[int]
) -> None:
    environment = {"SERVING_ENGINE_RESTART": "3", "SERVING_MAX_WORKERS": "3"}
    worker = "tests.live.deadly_worker.DeadlyWorker"
    with serving(tmp_path, environment, worker_cls=worker, **small_options) as server, ThreadPoolExecutor(1) as pool:
        calls = {name: case for name, case in cases(tokens=300).items() if name in FEW}
        right = answers(server, calls)
        first = {process.pid for process in server.engine_processes()}

        def disturb() -> None:
            step_until_running(server, 6)
            body = {"model": "model", "prompt": prompt, "max_tokens": 5}
            call = pool.submit(server.client.post, "/v1/completions", json=body, timeout=START_SECONDS)
            signal_engines(server, signal.SIGCONT)
            killer = call.result()
            assert (killer.status_code, killer.json()["error"]["message"]) == (500, DEAD)

        assert answers(server, calls, disturb) == right
        assert len(first & {process.pid for process in server.engine_processes()}) == 1
        assert server.ping() == 200
        assert answers(server, {"chat": calls["chat"]}) == {"chat": right["chat"]}


@pytest.mark.slow
def test_a_server_that_stops_while_a_copy_loads_ends_without_an_error(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    environment = {"SERVING_MIN_WORKERS": "1", "SERVING_MAX_WORKERS": "2"}
    with serving(tmp_path, environment, gives_way=False, **small_options) as server:
        assert server.stop() == 0
        errors = [line for line in server.log_text().splitlines() if " ERROR " in line]
        # A worker that still loads may miss the server's sockets before it ends, and vLLM logs that.
        assert [line for line in errors if " vllm." not in line] == []


@pytest.mark.slow
def test_calls_go_on_after_a_failure_of_the_loop_that_handles_messages(small_options: dict[str, object]) -> None:
    """No token is missing, even though the messages after the failure are not handled."""
    found, calls = failing_output_loop.outcome(Path(str(small_options["model_id"]))), failing_output_loop.CALLS
    assert found == {"equal": calls, "copies": ["ready", "ready"], "continued": calls}


def test_an_explanation_shows_the_copy_that_has_the_prompt(two: Server) -> None:
    body = {"prompt": "An explanation of this prompt. " * 100, "max_tokens": 1}

    def explained() -> tuple[int, int]:
        (prompt,) = two.client.post("/v1/completions", json=body, headers={"x-slipway-explain": "1"}).json()["prompts"]
        assert prompt["cached_tokens"] <= prompt["tokens"]
        return prompt["copy"], prompt["cached_tokens"]

    assert explained() == explained()
    assert explained()[1] == 0
    assert two.client.post("/v1/completions", json=body).status_code == 200
    copy, cached = explained()
    assert (copy, cached) == explained()
    assert cached >= 256


@pytest.mark.slow
def test_a_stalled_copy_gets_no_new_calls_while_the_other_works(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    prompts = [f"{name} prompt that a cache has. " * 50 for name in ("A", "Another")]
    bodies = [{"prompt": prompt, "max_tokens": 1, "temperature": 0} for prompt in prompts]
    environment = {"SERVING_STALL_TIMEOUT": "6", "SERVING_MAX_WORKERS": "2"}
    with serving(tmp_path, environment, **small_options) as server, ThreadPoolExecutor(2) as pool:

        def call(body: dict[str, Any], **headers: str) -> Any:
            return server.client.post("/v1/completions", json=body, headers=headers).json()

        def copies() -> set[int]:
            return {call(body, **{"x-slipway-explain": "1"})["prompts"][0]["copy"] for body in bodies}

        before = [call(body)["choices"] for body in bodies]
        assert copies() == {1, 2}
        with stopped(server.engine_process()):
            waiting = [pool.submit(call, body) for body in bodies]  # One of these calls stalls its copy.
            wait_until(lambda: server.ping() == 500)
            assert len(copies()) == 1
            assert [call(body)["choices"] for body in bodies] == before
        assert [answered.result()["choices"] for answered in waiting] == before
        wait_until(lambda: server.ping() == 200)
        assert copies() == {1, 2}
