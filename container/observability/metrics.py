"""`/metrics`: the counts of the hot path, as Prometheus text.

`engines.statistics` and `HttpCounts` count with plain numbers. Only a scrape turns these numbers into metrics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.samples import Sample

from container.http.route import HttpCounts
from container.models.life_cycle import State
from container.models.registry import Model, Models
from container.observability.logs import dropped_lines
from container.observability.prometheus_text import prometheus_text
from engines.interface import CopyState
from engines.loaded_model import EngineStatus
from engines.statistics import Distribution, EngineStatistics
from handlers.custom.metrics import HandlerMetrics
from handlers.custom.worker_pool import WorkerPool

_VERSION = "1"  # The version in Triton's series if a model has no version.
_MICROSECONDS = 1e6

Labels = Mapping[str, str]
_NONE: Labels = {}


class Metrics:
    """Everything that /metrics shows."""

    def __init__(self, models: Models, counts: HttpCounts, lag: Distribution | None = None) -> None:
        self._models, self._counts, self._lag = models, counts, lag

    def render(self) -> bytes:
        return prometheus_text(self.collect())

    def collect(self) -> Iterable[Metric]:
        yield from self._http()
        yield from self._container()
        if self._models.only is not None:
            yield from self._model(self._models.only)
        else:
            yield from labelled({model.title: self._model(model) for model in self._models})

    def _model(self, model: Model) -> Iterable[Metric]:
        if phases := model.lifecycle.startup_times.seconds:
            text = "What each phase of the model's start took."
            values = [([phase], seconds) for phase, seconds in phases.items()]
            yield _each(GaugeMetricFamily, "slipway_startup_seconds", text, ["phase"], values)
        text = "Restarts of the model's engine, or of copies of it."
        yield _counter("slipway_engine_restarts", text, len(model.restarts))
        engine = model.lifecycle.engine
        if engine is not None:
            text = "Requests that continued after the engine had died."
            yield _counter("slipway_continued_calls", text, engine.statistics.continued_requests)
            text = "Seconds in which requests waited for an engine that was started again."
            yield _counter("slipway_engine_down_seconds", text, engine.statistics.down_seconds)
            status, stalled = engine.status(), bool(model.lifecycle.stalled)
            yield from self._generation(engine.statistics)
            text = "1 while requests run and the engine makes nothing of them."
            yield _gauge("slipway_engine_stalled", text, float(stalled))
            states = Counter(copy.state for copy in engine.copies)
            copies = [([state.value], states[state]) for state in CopyState]
            yield _each(GaugeMetricFamily, "slipway_engine_copies", "Copies of the model.", ["state"], copies)
            yield _gauge("slipway_engine_running", "Sequences in the engine's batch.", status.running_requests)
            yield _gauge("slipway_engine_waiting", "Sequences that wait for the engine.", status.waiting_requests)
            yield _gauge("slipway_kv_cache_usage_ratio", "Share of the KV cache in use.", status.kv_cache_usage)
            served_as = model.lifecycle.config.public_names[0] if self._models.only is model else model.name
            yield from known_metrics(model.name, engine.statistics, status, model.version, served_as)
        if (pool := model.lifecycle.pool) is not None:
            yield from self._workers(pool)

    def _http(self) -> Iterable[Metric]:
        text, labels = "HTTP requests served, by route and status.", ["route", "status"]
        counts = [([route, str(status)], count) for (route, status), count in self._counts.requests.items()]
        yield _each(CounterMetricFamily, "slipway_requests", text, labels, counts)
        yield _histogram("slipway_request_seconds", "Duration of HTTP requests.", self._counts.duration)

    def _container(self) -> Iterable[Metric]:
        # As in /ping, a model that is added after the start does not count until it is loaded.
        counts = [m for m in self._models if m.at_startup or m.lifecycle.state is not State.STARTING]
        ready = all(m.lifecycle.state is State.READY and not m.lifecycle.unhealthy for m in counts)
        yield _gauge("slipway_ready", "1 when the model can serve.", float(ready and not self._models.draining))
        if remote := [found for model in self._models for found in model.lifecycle.settings.remote_models]:
            there, total = sum(model.bytes_here for model in remote), sum(model.total_bytes for model in remote)
            yield _gauge("slipway_download_bytes", "Bytes of remote weights that are on this machine.", there)
            yield _gauge("slipway_download_total_bytes", "Bytes of remote weights in all.", total)
        if self._lag is not None:
            yield _histogram("slipway_event_loop_lag_seconds", "How late the event loop is.", self._lag)
        text = "Lines of the log that were dropped because nobody read them."
        yield _counter("slipway_log_lines_dropped", text, dropped_lines())
        yield _gauge("slipway_open_requests", "HTTP requests that are not answered yet.", len(self._models.open_calls))

    def _generation(self, statistics: EngineStatistics) -> Iterable[Metric]:
        yield _counter("slipway_generations", "Prompts given to the engine.", statistics.started_requests)
        yield _counter(
            "slipway_generations_finished", "Sequences that came to their end.", statistics.finished_requests
        )
        yield _counter("slipway_generations_aborted", "Sequences whose client went away.", statistics.aborted_requests)
        yield _counter("slipway_generations_failed", "Sequences that ended with an error.", statistics.failed_requests)
        text = "Prompts whose JSON schema the engine enforces only in part."
        yield _counter("slipway_partial_generations", text, statistics.partial_requests)
        text = (
            "Finished answers whose JSON schema was enforced only in part, by the verdict of a check against all of it."
        )
        verdicts = [([verdict], count) for verdict, count in statistics.partial_answers.items()]
        yield _each(CounterMetricFamily, "slipway_partial_answers", text, ["verdict"], verdicts)
        text = "Calls that ended at their deadline, by what they had then."
        reached = [([answer], count) for answer, count in statistics.deadlines.items()]
        yield _each(CounterMetricFamily, "slipway_deadlines", text, ["answer"], reached)
        yield _counter("slipway_prompt_tokens", "Tokens of prompts.", statistics.prompt_tokens)
        yield _counter("slipway_generated_tokens", "Tokens generated.", statistics.tokens)
        yield _histogram(
            "slipway_time_to_first_token_seconds", "From submission to the first token.", statistics.time_to_first_token
        )
        yield _histogram("slipway_inter_token_seconds", "Between one token and the next.", statistics.inter_token)
        yield _histogram("slipway_queue_seconds", "From submission to its first step.", statistics.queue_time)

    def _workers(self, pool: WorkerPool) -> Iterable[Metric]:
        yield _gauge("slipway_workers", "Worker processes of the custom handler that can serve.", pool.ready)
        yield _gauge("slipway_workers_busy", "Worker processes that have a call.", pool.busy)
        yield _gauge("slipway_queue_length", "Calls that wait for a worker.", pool.queue_length)
        yield _counter("slipway_worker_failures", "Crashes and hangs of worker processes.", pool.failures)
        yield from handler_metrics(pool.metrics)


def handler_metrics(metrics: HandlerMetrics) -> Iterable[Metric]:
    """Yield the metrics that a customer's handler prints in DJL Serving's format."""
    for metric in metrics.snapshot():
        text, labels = f"Printed by the handler, unit: {metric.unit}", [metric.label]
        if metric.kind == "h":
            family = HistogramMetricFamily(metric.name, text, labels=labels)
            for series, distribution in metric.distributions.items():
                family.add_metric([series], distribution.cumulative(), distribution.total)
            yield family
        else:
            kind = CounterMetricFamily if metric.kind == "c" else GaugeMetricFamily
            yield _each(
                kind, metric.name, text, labels, [([series], value) for series, value in metric.numbers.items()]
            )


def known_metrics(
    model: str,
    statistics: EngineStatistics,
    status: EngineStatus,
    version: str | None = None,
    served_as: str | None = None,
) -> Iterable[Metric]:
    """Yield the series of a model that runs on an engine, under the names that vLLM, Triton and TGI use.

    Args:
        version: Distinguishes models with the same name.
        served_as: The model's name in vLLM's series, if that name differs from `model`.
    """
    own = {"version": version} if version else {}
    yield from _vllm({"model_name": served_as or model} | own, statistics, status)
    yield from _triton({"model": model, "version": _VERSION} | own, statistics, status)
    yield from _tgi(statistics, status)


def _vllm(own: Labels, statistics: EngineStatistics, status: EngineStatus) -> Iterable[Metric]:
    labels = {**own, "engine": "0"}
    if statistics.vllm is None:
        yield from _as_vllm(labels, statistics, status)
    else:
        for metric in statistics.vllm.collect():
            metric.samples = [_of_model(sample, own) for sample in metric.samples]
            yield metric
    # vLLM used these names until 0.10 and 0.11. Some routers still read them.
    yield _gauge("vllm:gpu_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", status.kv_cache_usage, labels)
    gaps = statistics.inter_token
    yield _histogram("vllm:time_per_output_token_seconds", "Between one token and the next.", gaps, labels)


def _of_model(sample: Sample, own: Labels) -> Sample:
    """Return a sample of vLLM with additional labels: Slipway's labels for the model."""
    if own.items() <= sample.labels.items() or "model_name" not in sample.labels:
        return sample
    return sample._replace(labels={**sample.labels, **own})


def _as_vllm(labels: Labels, statistics: EngineStatistics, status: EngineStatus) -> Iterable[Metric]:
    """Yield vLLM's main series, by the same names, for an engine other than vLLM."""
    running, waiting = status.running_requests, status.waiting_requests
    yield _gauge("vllm:num_requests_running", "Sequences in the engine's batch.", running, labels)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait for the engine.", waiting, labels)
    yield _gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", status.kv_cache_usage, labels)
    yield _counter("vllm:prompt_tokens", "Tokens of prompts.", statistics.prompt_tokens, labels)
    yield _counter("vllm:generation_tokens", "Tokens generated.", statistics.tokens, labels)
    yield _counter("vllm:request_success", "Sequences that came to their end.", statistics.finished_requests, labels)
    first, gaps, queued = statistics.time_to_first_token, statistics.inter_token, statistics.queue_time
    yield _histogram("vllm:time_to_first_token_seconds", "From submission to the first token.", first, labels)
    yield _histogram("vllm:inter_token_latency_seconds", "Between one token and the next.", gaps, labels)
    yield _histogram("vllm:request_queue_time_seconds", "From submission to its first step.", queued, labels)


def _triton(labels: Labels, statistics: EngineStatistics, status: EngineStatus) -> Iterable[Metric]:
    calls = statistics.calls
    yield _plain_counter("nv_inference_request_success", "Calls that were answered.", calls.succeeded, labels)
    yield _plain_counter("nv_inference_request_failure", "Calls that failed.", calls.failed, labels)
    yield _plain_counter("nv_inference_count", "Prompts given to the engine.", statistics.started_requests, labels)
    yield _plain_counter(
        "nv_inference_request_duration_us",
        "Duration of all answered calls together, in microseconds.",
        calls.succeeded_seconds * _MICROSECONDS,
        labels,
    )
    yield _plain_counter(
        "nv_inference_queue_duration_us",
        "Time of all sequences in the queue together, in microseconds.",
        statistics.queue_time.total * _MICROSECONDS,
        labels,
    )
    waiting = status.waiting_requests
    yield _gauge("nv_inference_pending_request_count", "Sequences that wait for the engine.", waiting, labels)


def _tgi(statistics: EngineStatistics, status: EngineStatus) -> Iterable[Metric]:
    calls = statistics.calls
    yield _plain_counter("tgi_request_count", "Calls that were answered or failed.", calls.succeeded + calls.failed)
    yield _plain_counter("tgi_request_success", "Calls that were answered.", calls.succeeded)
    yield _plain_counter("tgi_request_failure", "Calls that failed.", calls.failed)
    yield _histogram("tgi_request_duration", "Duration of answered calls.", calls.durations)
    yield _histogram("tgi_request_input_length", "Tokens of each prompt.", statistics.prompt_lengths)
    yield _histogram("tgi_request_generated_tokens", "Tokens of each sequence.", statistics.lengths)
    yield _histogram("tgi_request_inference_duration", "From a sequence's first step to its end.", statistics.inference)
    yield _histogram("tgi_request_mean_time_per_token_duration", "The same, for each token.", statistics.mean_times)
    yield _histogram("tgi_request_queue_duration", "From submission to its first step.", statistics.queue_time)
    yield _gauge("tgi_batch_current_size", "Sequences in the engine's batch.", status.running_requests)
    yield _gauge("tgi_queue_size", "Sequences that wait for the engine.", status.waiting_requests)


def labelled(families: Mapping[str, Iterable[Metric]]) -> Iterable[Metric]:
    """Merge the series of several models. A series gets the label `model`, unless its labels already name the model."""
    merged: dict[str, Metric] = {}
    for model, metrics in families.items():
        for metric in metrics:
            whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            whole.samples += [_with_model(sample, model) for sample in metric.samples]
    return merged.values()


def _with_model(sample: Sample, model: str) -> Sample:
    if "model" in sample.labels or "model_name" in sample.labels:
        return sample
    return sample._replace(labels={"model": model, **sample.labels})


_Family = type[CounterMetricFamily | GaugeMetricFamily]


def _each(
    family: _Family, name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float]]
) -> Metric:
    """Return a metric with a value for each combination of labels."""
    metric = family(name, text, labels=labels)
    for key, value in values:
        metric.add_metric(key, value)
    return metric


def _one(family: _Family, name: str, text: str, value: float, labels: Labels = _NONE) -> Metric:
    return _each(family, name, text, list(labels), [(list(labels.values()), value)])


_gauge = partial(_one, GaugeMetricFamily)
_counter = partial(_one, CounterMetricFamily)  # The name of the sample gets the suffix `_total`.


def _plain_counter(name: str, text: str, value: float, labels: Labels = _NONE) -> Metric:
    """Return a counter whose sample's name does not end in `_total`, as in Triton and TGI."""
    metric = Metric(name, text, "counter")
    metric.add_sample(name, dict(labels), value)
    return metric


def _histogram(name: str, text: str, distribution: Distribution, labels: Labels = _NONE) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), distribution.cumulative(), distribution.total)
    return family
