"""vLLM's own metrics of a model, and the figures of its schedulers."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from vllm.config import VllmConfig

from engines.loaded_model import EngineStatus
from engines.vllm.internals import METRICS_PARTS, CacheHitSource, PrometheusStatLogger, SchedulerStats

_MOST_WAITING = 1000

# The histogram of each list of `IterationStats`.
_STEP_HISTOGRAMS = {
    "inter_token_latencies_iter": "histogram_inter_token_latency",
    "max_num_generation_tokens_iter": "histogram_max_num_generation_tokens_request",
    "n_params_iter": "histogram_n_request",
    "time_to_first_tokens_iter": "histogram_time_to_first_token",
}
# The value of an ended request in each histogram.
_REQUEST_HISTOGRAMS: dict[str, Callable[[Any], float]] = {
    "histogram_e2e_time_request": attrgetter("e2e_latency"),
    # Negative for a request that was continued: vLLM keeps the time at which it first ran.
    "histogram_queue_time_request": lambda each: max(each.queued_time, 0.0),
    "histogram_prefill_time_request": attrgetter("prefill_time"),
    "histogram_inference_time_request": attrgetter("inference_time"),
    "histogram_decode_time_request": attrgetter("decode_time"),
    "histogram_request_num_preemptions": attrgetter("num_preemptions"),
    "histogram_prefill_kv_computed_request": lambda each: each.num_prompt_tokens - max(each.num_cached_tokens, 0),
    "histogram_num_prompt_tokens_request": attrgetter("num_prompt_tokens"),
    "histogram_num_generation_tokens_request": attrgetter("num_generation_tokens"),
    "histogram_request_time_per_output_token": attrgetter("mean_time_per_output_token"),
}


class _ReportCounter(Counter):
    """A counter that passes over zeros, which a report has for most counters."""

    def inc(self, amount: float = 1, exemplar: dict[str, str] | None = None) -> None:
        if amount:
            super().inc(amount, exemplar)


class _ReportHistogram(Histogram):
    """A histogram that counts many values together: when it is read, or when `_MOST_WAITING` wait.

    A step has a value for each sequence. Values have no exemplars.
    """

    def _metric_init(self) -> None:
        super()._metric_init()
        self._waiting: list[float] = []

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        self.observe_all((amount,))

    def observe_all(self, amounts: Iterable[float]) -> None:
        """Observe several values."""
        self._waiting.extend(amounts)
        if len(self._waiting) >= _MOST_WAITING:
            self._count()

    def _child_samples(self) -> Iterable[Sample]:
        self._count()
        return super()._child_samples()

    def _count(self) -> None:
        amounts, self._waiting = self._waiting, []
        counts = np.bincount(np.searchsorted(self._upper_bounds, amounts))[: len(self._buckets)]  # NaN is in no bucket
        for place in counts.nonzero()[0]:
            self._buckets[place].inc(int(counts[place]))
        self._sum.inc(sum(amounts))


class EngineReports(PrometheusStatLogger, Collector):
    """The place to which vLLM's output loop reports each message of the engine's process.

    vLLM would make its metrics in the process's registry, in which each further engine replaces those of the last one.
    These are in a registry of the engine, and are gone with it.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        kinds = {"_gauge_cls": Gauge, "_counter_cls": _ReportCounter, "_histogram_cls": _ReportHistogram}
        makers = {name: partial(self._metric, kind) for name, kind in kinds.items()}
        for name, make in makers.items():
            setattr(self, name, make)
        for name in METRICS_PARTS:
            part = getattr(self, name)
            setattr(self, name, type(part.__name__, (part,), {key: staticmethod(make) for key, make in makers.items()}))
        super().__init__(vllm_config, engine_indexes)
        self._latest: dict[int, Any] = {}  # The last report of each copy or data-parallel replica, by its number.
        self._unseen: dict[int, Any] = {}  # Those of them whose gauges are still to be set.
        # Requests that have ended and are still to be counted, by the number of their replica.
        self._finished: dict[int, list[Any]] = {engine: [] for engine in self.engine_indexes}

    def _metric(self, kind: Callable[..., Any], name: str, documentation: str, **options: Any) -> Any:
        """Return a metric. It is made once."""
        if name not in self._metrics:
            self._metrics[name] = kind(name, documentation, registry=self._registry, **options)
        return self._metrics[name]

    def add_engine(self, engine: int) -> None:
        """Begin to take reports of a copy. vLLM's constructor gives each metric a series for each engine."""
        if engine not in self.engine_indexes:
            super().__init__(self.vllm_config, [*self.engine_indexes, engine])
            self._finished[engine] = []
            self.log_engine_initialized()

    @property
    def status(self) -> EngineStatus:
        """The figures after the last step: of the scheduler, or of those of all copies or replicas together."""
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
        if scheduler_stats is not None:
            self._latest[engine_idx] = scheduler_stats
            self._unseen.pop(engine_idx, None)
            if _has_only_figures(scheduler_stats):
                self._count_prefix_cache(scheduler_stats.prefix_cache_stats, engine_idx)
                self._unseen[engine_idx] = scheduler_stats
                scheduler_stats = None  # The gauges are set when they are read.
        if iteration_stats is not None:
            self._take_requests(iteration_stats, engine_idx)
            if scheduler_stats is None and self._has_only_tokens(iteration_stats, mm_cache_stats):
                # For the rest, vLLM's function would take ten times as long.
                self._count_tokens(iteration_stats, engine_idx)
                return
        if scheduler_stats is not None:
            self._name_adapters(scheduler_stats)
        super().record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)

    def _name_adapters(self, stats: Any) -> None:
        """Give the adapters of a report the names that clients know. The gauge of adapters gets one series."""
        if self.gauge_lora_info is None:
            return
        self.gauge_lora_info.clear()  # vLLM would keep a series for each set of adapters that was ever seen.
        for adapters in (stats.waiting_lora_adapters, stats.running_lora_adapters):
            named = {_public_name(name): count for name, count in adapters.items()}
            adapters.clear()
            adapters.update(named)

    def _take_requests(self, iteration: Any, engine: int) -> None:
        """Take the values of a step's requests, so that vLLM's function counts none of them."""
        for name, histogram in _STEP_HISTOGRAMS.items():
            if values := getattr(iteration, name):
                getattr(self, histogram)[engine].observe_all(values)
                setattr(iteration, name, ())
        if iteration.finished_requests:
            finished = self._finished[engine]
            finished += iteration.finished_requests
            iteration.finished_requests = ()
            if len(finished) >= _MOST_WAITING:
                self._count_finished(engine)

    def _count_finished(self, engine: int) -> None:
        """Count the requests that have ended."""
        finished, self._finished[engine] = self._finished[engine], []
        for histogram, value in _REQUEST_HISTOGRAMS.items():
            getattr(self, histogram)[engine].observe_all(map(value, finished))
        limits = (each.max_tokens_param for each in finished if each.max_tokens_param)
        self.histogram_max_tokens_request[engine].observe_all(limits)
        for reason, count in Tally(each.finish_reason for each in finished).items():
            self.counter_request_success[reason][engine].inc(count)

    def _has_only_tokens(self, iteration: Any, media: Any) -> bool:
        """Return True if only tokens are left to count. Call it after `_take_requests`."""
        if (
            iteration.num_preempted_reqs
            or iteration.num_corrupted_reqs
            or self.vllm_config.watermark_config is not None
        ):
            return False
        return media is None or not media.requests

    def _count_tokens(self, iteration: Any, engine: int) -> None:
        """Count the tokens of a step."""
        generated, prompts = iteration.num_generation_tokens, iteration.prompt_token_stats
        self.counter_generation_tokens[engine].inc(generated)
        self.histogram_iteration_tokens[engine].observe(prompts.computed + generated)
        if prompts.total:
            self.counter_prompt_tokens[engine].inc(prompts.total)
            self.counter_prompt_tokens_cached[engine].inc(prompts.cached_tokens)
            for source, counters in self.counter_prompt_tokens_by_source.items():
                counters[engine].inc(prompts.get_by_source(source))

    def _count_prefix_cache(self, stats: Any, engine: int) -> None:
        """Count the tokens that were looked for in the prefix cache, and those that were there."""
        queries, hits = stats.queries, stats.hits
        stats.queries = stats.hits = 0
        self.counter_prefix_cache_queries[engine].inc(queries)
        if hits:
            self.counter_prefix_cache_hits[engine].inc(hits)
            labels = (*self.per_engine_labelvalues[engine], CacheHitSource.DEVICE.value)
            self.counter_prompt_tokens_cached_by_source.labels(*labels).inc(hits)

    def engine_died(self, engines: Iterable[int]) -> None:
        """Set the figures of the schedulers of a copy to zero."""
        for engine in set(engines).intersection(self.engine_indexes):  # A copy may end before it is loaded.
            self.record(SchedulerStats(), None, engine_idx=engine)
            self._latest.pop(engine, None)

    def collect(self) -> Iterable[Metric]:
        for engine, stats in self._unseen.items():
            self._name_adapters(stats)
            super().record(stats, None, engine_idx=engine)
        self._unseen.clear()
        for engine in self.engine_indexes:
            self._count_finished(engine)
        return self._registry.collect()


def _public_name(name: str) -> str:
    """Return the name that clients use for an adapter, without the number that tells it from former ones."""
    return name.rpartition("#")[0] or name


def _has_only_figures(scheduler: Any) -> bool:
    """Return True if a scheduler's report has nothing to count except look-ups in the prefix cache."""
    return not (
        scheduler.connector_prefix_cache_stats
        or scheduler.spec_decoding_stats
        or scheduler.kv_connector_stats
        or scheduler.ec_connector_stats
        or scheduler.perf_stats
        or scheduler.kv_cache_eviction_events
    )
