"""vLLM's own metrics for a model, and the figures of its schedulers."""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats

from engines.loaded_model import EngineStatus
from engines.statistics import MOST_STEPS, MOST_WAITING, Step

# The attributes of `PrometheusStatLogger` whose values are further classes that create metrics.
_PARTS = ("_spec_decoding_cls", "_kv_connector_cls", "_ec_connector_cls", "_perf_metrics_cls")
_GAPS = "inter_token_latencies_iter"

# The histogram for each list of `IterationStats`.
_STEP_HISTOGRAMS = {
    _GAPS: "histogram_inter_token_latency",
    "max_num_generation_tokens_iter": "histogram_max_num_generation_tokens_request",
    "n_params_iter": "histogram_n_request",
    "time_to_first_tokens_iter": "histogram_time_to_first_token",
}
# The histograms of finished requests, each with the function that returns a request's value.
_REQUEST_HISTOGRAMS: dict[str, Callable[[Any], float]] = {
    "histogram_e2e_time_request": attrgetter("e2e_latency"),
    # `queued_time` is negative for a continued request, because vLLM keeps the time at which the request first ran.
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


class _ReportHistogram(Histogram):
    """A histogram that can observe many values at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        """Observe several values, without exemplars."""
        counts = np.bincount(np.searchsorted(self._upper_bounds, amounts))[: len(self._buckets)]  # NaN has no bucket.
        for place in counts.nonzero()[0]:
            self._buckets[place].inc(int(counts[place]))
        self._sum.inc(sum(amounts))


class _Waiting:
    """The statistics of one copy or data-parallel rank that have not been added to the metrics yet."""

    def __init__(self) -> None:
        self.scheduler: Any = None  # The last report. It includes the prefix-cache look-ups of earlier reports.
        self.generated = 0
        self.steps: list[int] = []  # The number of tokens of each step.
        self.prompts: list[Any] = []  # The `PromptTokenStats` of each step that has prompt tokens.
        self.values: dict[str, list[float]] = {name: [] for name in _STEP_HISTOGRAMS}
        self.finished: list[Any] = []  # Requests that have ended.


class EngineReports(PrometheusStatLogger, Collector):
    """Receives a report from vLLM's output loop for each message of the engine process.

    vLLM would create its metrics in the registry of the process, and each new engine would replace the metrics of the
    engine before it. Here, each engine has its own registry, which is freed together with the engine.
    """

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        kinds = {"_gauge_cls": Gauge, "_counter_cls": Counter, "_histogram_cls": _ReportHistogram}
        makers = {name: partial(self._metric, kind) for name, kind in kinds.items()}
        for name, make in makers.items():
            setattr(self, name, make)
        for name in _PARTS:
            part = getattr(self, name)
            setattr(self, name, type(part.__name__, (part,), {key: staticmethod(make) for key, make in makers.items()}))
        super().__init__(vllm_config, engine_indexes)
        self._latest: dict[int, Any] = {}  # The last report of each copy or data-parallel rank, by its number.
        self._waiting = {engine: _Waiting() for engine in self.engine_indexes}
        self.steps: dict[int, deque[Step]] = {engine: deque(maxlen=MOST_STEPS) for engine in self.engine_indexes}
        self._counts_watermarks = vllm_config.watermark_config is not None

    def _metric(self, kind: Callable[..., Any], name: str, documentation: str, **options: Any) -> Any:
        """Return a metric. It is created at the first call."""
        if name not in self._metrics:
            self._metrics[name] = kind(name, documentation, registry=self._registry, **options)
        return self._metrics[name]

    def add_engine(self, engine: int) -> None:
        """Accept reports of a further copy. vLLM's constructor adds a series for each engine to each metric."""
        if engine not in self.engine_indexes:
            super().__init__(self.vllm_config, [*self.engine_indexes, engine])
            self._waiting[engine], self.steps[engine] = _Waiting(), deque(maxlen=MOST_STEPS)
            self.log_engine_initialized()

    @property
    def status(self) -> EngineStatus:
        """The scheduler's figures after the last step, summed over all copies or data-parallel ranks."""
        latest = self._latest.values()
        return EngineStatus(
            running_requests=sum(stats.num_running_reqs for stats in latest),
            waiting_requests=sum(stats.num_waiting_reqs + stats.num_skipped_waiting_reqs for stats in latest),
            # All caches have the same size, so the mean is the used share of all caches together.
            kv_cache_usage=sum(stats.kv_cache_usage for stats in latest) / max(len(latest), 1),
        )

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Keep the statistics of a step until the metrics are read, or until many steps have been kept."""
        waiting, scheduler, step = self._waiting[engine_idx], scheduler_stats, iteration_stats
        if scheduler is not None:
            self._latest[engine_idx] = scheduler
            running, waits = scheduler.num_running_reqs, scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            if step is not None:
                tokens = step.prompt_token_stats.computed + step.num_generation_tokens
                done = step.iteration_timestamp, running, waits, tokens, scheduler.kv_cache_usage
                self.steps[engine_idx].append(done)
            elif running:  # A step with a part of a long prompt, which generates no token.
                self.steps[engine_idx].append((time.time(), running, waits, 0, scheduler.kv_cache_usage))
            if waiting.scheduler is not None:
                cache, before = scheduler.prefix_cache_stats, waiting.scheduler.prefix_cache_stats
                cache.queries += before.queries
                cache.hits += before.hits
            waiting.scheduler = scheduler
            if (
                scheduler.connector_prefix_cache_stats
                or scheduler.spec_decoding_stats
                or scheduler.kv_connector_stats
                or scheduler.ec_connector_stats
                or scheduler.perf_stats
                or scheduler.kv_cache_eviction_events
            ):
                self._record_scheduler(engine_idx)
        if step is not None:
            waiting.finished += step.finished_requests
            if step.num_preempted_reqs or step.num_corrupted_reqs or self._counts_watermarks:
                step.finished_requests = ()
                super().record(None, step, engine_idx=engine_idx)
            else:
                prompts, generated = step.prompt_token_stats, step.num_generation_tokens
                waiting.generated += generated
                waiting.steps.append(prompts.computed + generated)
                if prompts.total:
                    waiting.prompts.append(prompts)
                for name, values in waiting.values.items():
                    values += getattr(step, name)
            if len(waiting.steps) + len(waiting.finished) + len(waiting.values[_GAPS]) >= MOST_WAITING:
                self._count(engine_idx)
        if mm_cache_stats is not None and mm_cache_stats.requests:
            super().record(None, None, mm_cache_stats, engine_idx)

    def _record_scheduler(self, engine: int) -> None:
        """Pass the scheduler's last report to vLLM's `record`, which updates gauges and counters."""
        waiting = self._waiting[engine]
        stats, waiting.scheduler = waiting.scheduler, None
        if self.gauge_lora_info is not None:
            self.gauge_lora_info.clear()  # vLLM would keep a series for every set of adapters that has ever occurred.
            for adapters in (stats.waiting_lora_adapters, stats.running_lora_adapters):
                named = {public_name(name): count for name, count in adapters.items()}
                adapters.clear()
                adapters.update(named)
        super().record(stats, None, engine_idx=engine)

    def _count(self, engine: int) -> None:
        """Add the kept statistics of an engine to its metrics."""
        if self._waiting[engine].scheduler is not None:
            self._record_scheduler(engine)
        waiting, self._waiting[engine] = self._waiting[engine], _Waiting()
        self.counter_generation_tokens[engine].inc(waiting.generated)
        self.histogram_iteration_tokens[engine].observe_all(waiting.steps)
        self.counter_prompt_tokens[engine].inc(sum([prompts.total for prompts in waiting.prompts]))
        self.counter_prompt_tokens_cached[engine].inc(sum([prompts.cached_tokens for prompts in waiting.prompts]))
        for source, counters in self.counter_prompt_tokens_by_source.items():
            counters[engine].inc(sum([prompts.get_by_source(source) for prompts in waiting.prompts]))
        for name, values in waiting.values.items():
            getattr(self, _STEP_HISTOGRAMS[name])[engine].observe_all(values)
        finished = waiting.finished
        for histogram, value in _REQUEST_HISTOGRAMS.items():
            getattr(self, histogram)[engine].observe_all([value(each) for each in finished])
        limits = [each.max_tokens_param for each in finished if each.max_tokens_param]
        self.histogram_max_tokens_request[engine].observe_all(limits)
        for reason, count in Tally([each.finish_reason for each in finished]).items():
            self.counter_request_success[reason][engine].inc(count)

    def engine_died(self, engines: Iterable[int]) -> None:
        """Set the figures of a dead copy's schedulers to zero."""
        for engine in set(engines).intersection(self.engine_indexes):  # A copy may end before it is loaded.
            self.record(SchedulerStats(), None, engine_idx=engine)
            self._latest.pop(engine, None)

    def collect(self) -> Iterable[Metric]:
        for engine in self.engine_indexes:
            self._count(engine)
        return self._registry.collect()


def public_name(name: str) -> str:
    """Return the name that clients use for an adapter, without the number that makes it unique in vLLM."""
    return name.rpartition("#")[0] or name
