"""Internal parts of vLLM's statistics: Slipway's shorter code gives the same results as vLLM's functions."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from engines.statistics import EngineStatistics
from tests.live.small_model import prepare_small_model

STEPS = 6


@pytest.fixture(scope="module")
def config() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(model=str(prepare_small_model()), max_model_len=1024).create_engine_config()


def event(kind: str, at: float) -> Any:
    from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType

    return EngineCoreEvent(type=EngineCoreEventType[kind], timestamp=at)


def steps() -> list[tuple[float, list[Any]]]:
    """Return the times and outputs of an engine's steps. One of two sequences is preempted once, and ends early."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.metrics.stats import PrefillStats

    made = []
    for number in range(STEPS):
        at = 10.0 + number * 0.125
        outputs = [EngineCoreOutput(name, [number + 1] * (1 + number % 2)) for name in ("a", "b")]
        if number == 0:
            for each in outputs:
                each.events = [event("QUEUED", 9.0), event("SCHEDULED", 9.5)]
                each.prefill_stats = PrefillStats(num_prompt_tokens=3, num_computed_tokens=2, num_cached_tokens=1)
        elif number == 2:
            outputs[1].events = [event("PREEMPTED", at), event("SCHEDULED", at)]
        elif number == 3:
            outputs.pop()  # The next gap of `b` is longer.
        elif number == 4:
            outputs[1].finish_reason = FinishReason.STOP
        elif number == 5:
            outputs.pop()
            outputs[0].finish_reason = FinishReason.LENGTH
        made.append((at, outputs))
    return made


def state(name: str) -> Any:
    from vllm.v1.metrics.stats import RequestStateStats

    return SimpleNamespace(
        stats=RequestStateStats(arrival_time=1.0),
        is_prefilling=True,
        lora_name=None,
        external_req_id=name,
        prompt_len=3,
        max_tokens_param=16,
        num_cached_tokens=1,
        parent_req=None,
        request_id=name,
        detokenizer=object(),
    )


def iterations(processor: Any) -> list[Any]:
    """Return the statistics of each step."""
    from vllm.v1.metrics.stats import IterationStats

    states = {name: state(name) for name in ("a", "b")}
    found = []
    for at, outputs in steps():
        iteration = IterationStats()
        iteration.iteration_timestamp = at + 100.0
        for each in outputs:
            processor._update_stats_from_output(states[each.request_id], each, at, iteration)
            states[each.request_id].is_prefilling = False
            if each.finish_reason is not None:
                processor._update_stats_from_finished(states[each.request_id], each.finish_reason, iteration)
        found.append(iteration)
    return found


def processors() -> tuple[Any, Any]:
    """Return vLLM's processor and Slipway's."""
    from vllm.v1.engine.output_processor import OutputProcessor

    from engines.vllm.output_processor import LeanOutputProcessor

    ours = LeanOutputProcessor(None, log_stats=True)
    ours.statistics = EngineStatistics()
    return OutputProcessor(None, log_stats=True), ours


def test_the_lean_processor_counts_what_vllms_does_and_slipways_series_tell_the_same() -> None:
    vllms, lean = processors()
    theirs, ours = iterations(vllms), iterations(lean)
    assert [vars(one) for one in ours] == [vars(one) for one in theirs]
    assert sum(len(one.inter_token_latencies_iter) for one in ours) == 8
    statistics = lean.statistics
    assert statistics.tokens == sum(one.num_generation_tokens for one in theirs) == 14
    assert statistics.time_to_first_token.total == sum(sum(one.time_to_first_tokens_iter) for one in theirs)
    assert (sum(statistics.queue_time.counts), statistics.queue_time.total) == (2, 1.0)
    # The time since the previous step is divided among the tokens of a step.
    assert sum(statistics.inter_token.counts) == 8
    assert statistics.inter_token.total == 4 * 0.125 / 2 + 3 * 0.125 + 0.25


def scheduler_reports() -> list[Any]:
    """Return a report for each step: the second has a prompt that was looked up in the cache, and the fifth is None."""
    from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats

    reports: list[Any] = [
        SchedulerStats(num_running_reqs=2, num_waiting_reqs=n, num_skipped_waiting_reqs=1, kv_cache_usage=n / 8)
        for n in range(STEPS)
    ]
    reports[1].prefix_cache_stats = PrefixCacheStats(requests=1, queries=5, hits=3)
    reports[4] = None
    return reports


def samples(collector: Any) -> dict[tuple[str, ...], float]:
    """Return the values of vLLM's metrics. A NaN, which equals no number, is -1."""
    return {
        (sample.name, *map(str, sorted(sample.labels.items()))): -1.0 if math.isnan(sample.value) else sample.value
        for metric in collector.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:") and not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("media", [False, True])
@pytest.mark.parametrize("scraped", ["after each step", "at the end", "at the end, with few values waiting"])
def test_the_reports_make_the_metrics_that_vllms_logger_makes(
    config: Any, media: bool, scraped: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import MultiModalCacheStats

    from engines.loaded_model import EngineStatus
    from engines.vllm.metrics import EngineReports

    if scraped.endswith("waiting"):
        monkeypatch.setattr("engines.statistics.MOST_WAITING", 2)
        monkeypatch.setattr("engines.vllm.metrics.MOST_WAITING", 2)
    ours = EngineReports(config, [0, 1])
    theirs = PrometheusStatLogger(config, [0, 1])  # The logger that is created last has the registry of the process.
    try:
        for engine in (0, 1):
            for report, iteration in zip(scheduler_reports(), iterations(processors()[0]), strict=True):
                if engine == 1:
                    iteration.time_to_first_tokens_iter += [math.nan, 1e6]
                looked_up = MultiModalCacheStats(requests=1, queries=2, hits=1) if media else None
                for logger in (theirs, ours):
                    logger.record(report, copy.copy(iteration), looked_up, engine_idx=engine)
                if scraped == "after each step":
                    assert samples(ours) == samples(REGISTRY)
        counted = samples(ours)
        assert counted == samples(REGISTRY)
    finally:
        unregister_vllm_metrics()
    assert sum(value for (name, *_), value in counted.items() if name == "vllm:inter_token_latency_seconds_count") == 16
    last = STEPS - 1
    assert ours.status == EngineStatus(4, 2 * (last + 1), last / 8)
    ours.engine_died([0, 1])
    assert ours.status == EngineStatus(0, 0, 0.0)
    gauges = {key for key, value in samples(ours).items() if value != counted[key]}
    assert {name for name, *_ in gauges} == {
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_requests_waiting_by_reason",
        "vllm:kv_cache_usage_perc",
    }


def test_a_copy_that_is_added_has_its_own_series_and_leaves_those_of_the_others(config: Any) -> None:
    from engines.loaded_model import EngineStatus
    from engines.vllm.metrics import EngineReports

    def fill(reports: Any, engine: int) -> None:
        for report, iteration in zip(scheduler_reports(), iterations(processors()[0]), strict=True):
            reports.record(report, copy.copy(iteration), engine_idx=engine)

    whole, grown = EngineReports(config, [0, 1]), EngineReports(config, [0])
    fill(whole, 0)
    fill(grown, 0)
    grown.add_engine(1)
    grown.add_engine(1)
    whole.log_engine_initialized()
    assert samples(grown) == samples(whole)
    fill(whole, 1)
    fill(grown, 1)
    assert samples(grown) == samples(whole)
    grown.engine_died([1])
    assert grown.status == EngineStatus(2, STEPS, (STEPS - 1) / 8), "the figures of the other copy alone"
    before = samples(grown)
    fill(grown, 1)
    counted = [key for key, value in samples(grown).items() if key[0].endswith("_total") and value > before[key]]
    assert counted, "the copy that replaces it goes on with its counts"
    assert all("('engine', '1')" in key for key in counted)


def test_adapters_have_the_names_of_clients_and_one_series(sample_model: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.metrics.stats import SchedulerStats

    from engines.vllm.metrics import EngineReports

    arguments = AsyncEngineArgs(model=str(sample_model), max_model_len=1024, enable_lora=True)
    reports = EngineReports(arguments.create_engine_config(), [0])

    def seen(*names: str) -> list[dict[str, str]]:
        reports.record(SchedulerStats(running_lora_adapters=dict.fromkeys(names, 1)), None)
        (found,) = [family for family in reports.collect() if family.name == "vllm:lora_requests_info"]
        return [sample.labels for sample in found.samples]

    assert [labels["running_lora_adapters"] for labels in seen("red#1", "a#b#2")] == ["red,a#b"]
    assert [labels["running_lora_adapters"] for labels in seen("red#3")] == ["red"]


def test_a_continued_request_has_waited_no_negative_time(config: Any) -> None:
    from vllm.v1.engine import FinishReason
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

    from engines.vllm.metrics import EngineReports

    reports, iteration = EngineReports(config, [0]), IterationStats()
    iteration.finished_requests = [FinishedRequestStats(finish_reason=FinishReason.STOP, queued_time=-60.0)]
    reports.record(None, iteration)
    (found,) = [family for family in reports.collect() if family.name == "vllm:request_queue_time_seconds"]
    assert [sample.value for sample in found.samples if sample.name.endswith("_sum")] == [0.0]
