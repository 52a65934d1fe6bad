"""The benchmark's figures of the shares of copies."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from benchmarks.copies_in_turn import in_turn
from benchmarks.peers import Engine, module
from benchmarks.report import shares_table
from benchmarks.scripted_front_end import Script
from benchmarks.shares import CALLS, END_TOKENS, SYSTEM_TOKENS, Shares, busiest, calls, counters
from engines.vllm.copies.choice import CopyChoice

METRICS = """
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{engine="0",model_name="m"} 30
vllm:generation_tokens_total{engine="1",model_name="m"} 10
vllm:generation_tokens_created{engine="1",model_name="m"} 1.7e9
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 512
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 7
"""


def test_the_counters_of_each_engine_are_read_and_no_other_metric() -> None:
    assert counters(METRICS) == {
        "vllm:generation_tokens_total": {"0": 30, "1": 10},
        "vllm:prefix_cache_hits_total": {"0": 512},
    }


@pytest.mark.parametrize(("tokens", "ratio"), [((30, 10), 1.5), ((20, 20), 1.0), ((7,), 1.0), ((0, 5), 2.0)])
def test_the_busiest_copy_is_compared_with_the_mean(tokens: tuple[int, ...], ratio: float) -> None:
    assert busiest({str(number): count for number, count in enumerate(tokens)}) == ratio


@pytest.mark.parametrize("system_prompts", [4, 8])
def test_calls_share_only_their_system_prompts(system_prompts: int) -> None:
    prompts = calls(random.Random(0), system_prompts)
    beginnings = Counter(tuple(prompt[:SYSTEM_TOKENS]) for prompt in prompts)
    assert list(beginnings.values()) == [CALLS // system_prompts] * system_prompts
    assert len({tuple(prompt[SYSTEM_TOKENS:]) for prompt in prompts}) == CALLS
    assert {len(prompt) for prompt in prompts} == {SYSTEM_TOKENS + END_TOKENS}


def test_all_servers_get_the_same_calls() -> None:
    assert calls(random.Random(1), 8) == calls(random.Random(1), 8) != calls(random.Random(2), 8)


def test_the_table_has_a_row_for_each_server() -> None:
    one = Shares(
        server="slipway-2",
        busiest=1.0,
        busiest_of_one_prompt=1.25,
        busiest_of_calls=1.5,
        hits_of_many=0.864,
        hits_of_few=0.98,
    )
    assert "| slipway-2 | 1.00 | 1.25 | 1.50 | 86% | 98% |" in shares_table([one]).splitlines()


@dataclass
class Copy:
    number: int
    work: int
    chosen: int
    cached_tokens: int = 0


def test_the_comparison_chooses_copies_in_turn_whatever_their_work() -> None:
    copies = [Copy(1, 0, 0), Copy(2, 900, 0), Copy(3, 0, 0)]
    numbers = []
    for _ in range(7):
        copy = in_turn(CopyChoice(), copies, [5] * 512, None, 100)
        copy.chosen += 1
        numbers.append(copy.number)
    assert numbers == [1, 2, 3, 1, 2, 3, 1]


def test_a_scripted_server_gets_an_engine_for_each_copy() -> None:
    engine = Engine(model_dir=Path("/m"), arguments={}, step_ms=4.0, cache_blocks=160)
    directory, script, *command = module(engine, Path("/w"), "slipway", "serve", copies=2)[3:]
    assert msgspec.json.decode(script, type=Script) == Script(model="/m", step_ms=4.0, engines=2, cache_blocks=160)
    assert (directory, command) == ("/w", ["slipway", "serve"])
