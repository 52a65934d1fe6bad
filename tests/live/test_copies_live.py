"""Copies of a model on one CPU, with the real vLLM. For clients, the copies are one engine."""

from __future__ import annotations

import contextlib
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
    kill,
    resume,
    step_until_running,
)
from tests.live.deadly_prompts import IS_KILLED
from tests.live.server import START_SECONDS, Server, serving, stopped
from tests.waiting import wait_until

DEAD = "the engine has died; the request was not completed"
TOKENS = "vllm:generation_tokens_total"
CALLS_OF_ALL = {name: CASES[name] for name in (*FEW, "LMI, adapter", "LMI, formatter")}
"""test_continuation_live.py has all calls."""
HITS = "vllm:prefix_cache_hits_total"


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
    before = two.by_engine(TOKENS)
    assert answers(two, CALLS_OF_ALL) == right
    assert set(two.by_engine(TOKENS) - before) == {"0", "1"}


def test_equal_streams_are_spread_evenly(two: Server) -> None:
    """All streams begin before one of them ends, because otherwise a faster copy would get more streams."""
    before, begun = two.by_engine(TOKENS), two.metric("slipway_generations_total")
    case = completion("Once upon a time there was", 8, stream=True)
    with ThreadPoolExecutor(16) as pool, contextlib.ExitStack() as stack:
        for process in two.engine_processes():
            stack.enter_context(stopped(process.pid))
        streams = [pool.submit(answer, two, case) for _ in range(16)]
        wait_until(lambda: two.metric("slipway_generations_total") == begun + 16)
        stack.close()
        assert len({stream.result() for stream in streams}) == 1
    assert two.by_engine(TOKENS) - before == {"0": 8 * 8, "1": 8 * 8}


def test_calls_with_one_system_prompt_meet_in_one_cache(two: Server) -> None:
    """Two prompts of more than 512 tokens are sent through three contracts, one call at a time."""
    before = two.by_engine(HITS)
    system = [" ".join(f"{number} {word}" for word in range(130)) for number in range(2)]
    for turn in range(2):
        for text in system:
            prompt = f"{text} {turn}"
            tgi = {"inputs": prompt, "parameters": {"max_new_tokens": 2}}
            for case in (completion(prompt, 2), Case("/generate", tgi), Case("/invocations", tgi)):
                answer(two, case)
    hits = two.by_engine(HITS) - before
    calls_of_prompt = 2 * 3
    assert set(hits) == {"0", "1"}
    assert min(hits.values()) >= 512 * (calls_of_prompt - 1), "only the first call of each system prompt computes it"


@pytest.mark.slow
def test_a_copy_dies_and_no_call_notices(two: Server, right: dict[str, str]) -> None:
    restarts = two.metric("slipway_engine_restarts_total")
    assert answers(two, CALLS_OF_ALL, lambda: kill(two, 8)) == right
    assert two.ping() == 200
    wait_until(lambda: two.metric("slipway_engine_restarts_total") == restarts + 1)
    wait_until(lambda: len(two.engine_processes()) == 2)
    assert answers(two, CALLS_OF_ALL) == right


@pytest.mark.slow
def test_a_call_that_kills_its_copy_gets_the_error_alone_and_one_of_three_copies_never_dies(
    tmp_path: Path, small_options: dict[str, object]
) -> None:
    """In test_continuation_live.py, a call makes vLLM's worker raise an error."""
    environment = {"SERVING_ENGINE_RESTART": "3", "SERVING_MAX_WORKERS": "3"}
    worker = "tests.live.engine_workers.DeadlyWorker"
    with serving(tmp_path, environment, worker_cls=worker, **small_options) as server, ThreadPoolExecutor(1) as pool:
        calls = {name: CASES[name] for name in FEW}
        right = answers(server, calls)
        first = {process.pid for process in server.engine_processes()}

        def disturb() -> None:
            step_until_running(server, 6)
            body = {"model": "model", "prompt": IS_KILLED, "max_tokens": 5}
            before = server.metric("slipway_generations_total")
            call = pool.submit(server.client.post, "/v1/completions", json=body, timeout=START_SECONDS)
            wait_until(lambda: server.metric("slipway_generations_total") > before)
            resume(server)
            killer = call.result()
            assert (killer.status_code, killer.json()["error"]["message"]) == (500, DEAD)

        assert answers(server, calls, disturb) == right
        assert len(first & {process.pid for process in server.engine_processes()}) == 1
        assert server.ping() == 200
        assert answers(server, {"chat": calls["chat"]}) == {"chat": right["chat"]}


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
