"""vLLM's own metrics of one engine, and the figures of its schedulers."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Iterable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig

from engines.loaded_model import EngineStatus
from engines.vllm.internals import METRICS_PARTS, PrometheusStatLogger, SchedulerStats


class _ReportCounter(Counter):
    """A counter that passes over zeros, which a report has for most counters."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount:
            super().inc(amount, exemplar)


class _ReportHistogram(Histogram):
    """A histogram that finds its bucket by bisection. An answer of one token is observed by thirteen histograms."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)
        self._sum.inc(amount)


class EngineReports(PrometheusStatLogger, Collector):
    """The place to which vLLM's output loop reports each message of the engine's process.

    vLLM would make its metrics in the process's registry, in which each further engine replaces those of the last one.
    These are in a registry of the engine, and are gone with it.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._registry = CollectorRegistry()
        kinds = {"_gauge_cls": Gauge, "_counter_cls": _ReportCounter, "_histogram_cls": _ReportHistogram}
        makers = {name: partial(kind, registry=self._registry) for name, kind in kinds.items()}
        for name, make in makers.items():
            setattr(self, name, make)
        for name in METRICS_PARTS:
            part = getattr(self, name)
            setattr(self, name, type(part.__name__, (part,), {key: staticmethod(make) for key, make in makers.items()}))
        super().__init__(vllm_config, engine_indexes)
        self.count = 0  # Messages: steps with tokens and steps without, as of a long prompt.
        self._latest: dict[int, Any] = {}  # The last report of each data-parallel replica, by its number.
        self._unseen: dict[int, Any] = {}  # Those of them whose gauges are still to be set.

    @property
    def status(self) -> EngineStatus:
        """The figures after the last step: of the scheduler, or of those of all data-parallel replicas together."""
        latest = self._latest.values()
        return EngineStatus(
            running_requests=sum(stats.num_running_reqs for stats in latest),
            waiting_requests=sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in latest),
            # Their caches are equally large, so this is the share of all of them together.
            kv_cache_usage=sum(stats.kv_cache_usage for stats in latest) / max(len(latest), 1),
        )

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        self.count += 1
        if scheduler_stats is not None:
            self._latest[engine_idx] = self._unseen[engine_idx] = scheduler_stats
        if iteration_stats is not None:
            gaps, iteration_stats.inter_token_latencies_iter = iteration_stats.inter_token_latencies_iter, ()
            _observe_all(self.histogram_inter_token_latency[engine_idx], gaps)
            if _only_decodes(scheduler_stats, iteration_stats, mm_cache_stats):
                # All that is left for vLLM's function to count, which takes ten times as long.
                tokens = iteration_stats.num_generation_tokens
                self.counter_generation_tokens[engine_idx].inc(tokens)
                self.histogram_iteration_tokens[engine_idx].observe(tokens)
                return
        self._unseen.pop(engine_idx, None)
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def engine_died(self) -> None:
        """Set the figures of the schedulers to zero."""
        for engine in self.engine_indexes:
            self.record(SchedulerStats(), None, engine_idx=engine)

    def collect(self) -> Iterable[Metric]:
        for engine, stats in self._unseen.items():
            super().record(stats, None, engine_idx=engine)
        self._unseen.clear()
        return self._registry.collect()


def _only_decodes(scheduler: Any, iteration: Any, media: Any) -> bool:
    """Return True if a step has only added tokens to sequences that had some: nothing else is to be counted."""
    if iteration.time_to_first_tokens_iter or iteration.finished_requests or iteration.num_preempted_reqs:
        return False
    if media is not None and media.requests:
        return False
    return scheduler is None or not (
        scheduler.prefix_cache_stats.requests
        or scheduler.connector_prefix_cache_stats
        or scheduler.spec_decoding_stats
        or scheduler.kv_connector_stats
        or scheduler.ec_connector_stats
        or scheduler.perf_stats
        or scheduler.kv_cache_eviction_events
    )


def _observe_all(histogram: Histogram, values: Iterable[float]) -> None:
    """Observe many values, of which most are equal: a step's sequences had their last tokens in the same step.

    One by one, they would cost as much as the rest of a token's way through the server's process.
    """
    for value, count in Tally(values).items():
        histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(count)
        histogram._sum.inc(value * count)
