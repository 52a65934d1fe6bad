"""The benchmark that measures how copies of a model share the calls."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from benchmarks.copies_in_turn import in_turn
from benchmarks.shares import CALLS, END_TOKENS, SYSTEM_TOKENS, busiest, calls, counters
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


@dataclass
class Copy:
    number: int
    work: int
    chosen: int
    cached_tokens: int = 0
    stalled: bool = False


def test_the_comparison_chooses_copies_in_turn_whatever_their_work() -> None:
    copies = [Copy(1, 0, 0), Copy(2, 900, 0), Copy(3, 0, 0)]
    numbers = []
    for _ in range(7):
        copy = in_turn(CopyChoice(), copies, [5] * 512, None, 100)
        copy.chosen += 1
        numbers.append(copy.number)
    assert numbers == [1, 2, 3, 1, 2, 3, 1]
