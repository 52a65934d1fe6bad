"""The ratios in the benchmarks' tables."""

from __future__ import annotations

import msgspec

from benchmarks.load import Figures
from benchmarks.report import markdown
from benchmarks.rounds import Sample

TIMES = {name: 1.0 for name in Figures.__struct_fields__ if name.endswith("_ms")}
FIGURES = msgspec.convert(
    {"requests": 10, "errors": 0, "error_kinds": {}, "tokens": 0, "records": 0, "wall_s": 2.0, "client_cpu_s": 0.1}
    | {"client_real_time": True, **TIMES},
    Figures,
)


def sample(variant: str, concurrency: int, tokens: int, *, cpu: float = 1.0, number: int = 0) -> Sample:
    return Sample(
        workload="front-end",
        load="streams",
        stream=True,
        concurrency=concurrency,
        round=number,
        variant=variant,
        figures=msgspec.structs.replace(FIGURES, tokens=tokens),
        front_end_cpu_s=cpu,
        engine_cpu_s=0.0,
        idle_cpu_s=0.0,
    )


SAMPLES = [
    sample(variant, clients, tokens, cpu=cpu)
    for clients in (1, 8)
    for variant, tokens, cpu in (
        ("slipway", 40_000, 1.0),
        ("slipway:chat", 30_000, 1.0),
        ("slipway+logprobs", 20_000, 1.0),
        ("vllm", 20_000, 2.0),
        ("vllm:chat", 20_000, 1.0),
    )
]


def test_chats_are_compared_with_chats_and_log_probabilities_with_log_probabilities() -> None:
    ratios = [row for row in markdown(SAMPLES).splitlines() if " / " in row]
    assert ratios == [
        "| slipway / vllm | 1 | 2.00 | 0.25 | 1.00 | 1.00 |",
        "| slipway / vllm | 8 | 2.00 | 0.25 | 1.00 | 1.00 |",
        "| slipway:chat / vllm:chat | 1 | 1.50 | 0.67 | 1.00 | 1.00 |",
        "| slipway:chat / vllm:chat | 8 | 1.50 | 0.67 | 1.00 | 1.00 |",
    ]


def test_an_interruption_can_leave_out_the_last_loads_of_a_peer() -> None:
    samples = [sample("slipway", 1, 40_000), sample("vllm", 1, 20_000), sample("slipway", 8, 40_000)]
    second_round = sample("slipway", 1, 80_000, number=1)
    for measured in (samples, [*samples, second_round]):
        ratios = [row for row in markdown(measured).splitlines() if " / " in row]
        assert ratios == ["| slipway / vllm | 1 | 2.00 | 0.50 | 1.00 | 1.00 |"]


def test_a_ratio_is_the_median_of_those_of_the_rounds_and_has_the_least_and_the_largest() -> None:
    pairs = [(100, 100), (300, 100), (1000, 500)]
    rounds = [
        sample(variant, 1, tokens, number=number)
        for number, pair in enumerate(pairs)
        for variant, tokens in zip(("slipway", "vllm"), pair, strict=True)
    ]
    assert "| slipway / vllm | 1 | 2.00 (1.00 to 3.00) |" in markdown(rounds)
