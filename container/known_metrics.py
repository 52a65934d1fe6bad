"""The series that dashboards made for vLLM, Triton and TGI read, from the same numbers as our own.

Only what is measured: a series that would need a guess is not there. Each counts the calls of all routes, whatever the
client; whoever needs them apart has `slipway_requests_total`.

Source: vLLM's `v1/metrics/loggers.py`; Triton's metrics documentation; contracts/tgi.md section 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    UntypedMetricFamily,
)

from handlers.engines.protocol import EngineStatus
from handlers.meter import CallCounts, Distribution, Meter

_VERSION = "1"
"""What Triton's series say of a model that has no version."""
_MICROSECONDS = 1e6

Labels = Mapping[str, str]


def known_metrics(model: str, meter: Meter, status: EngineStatus, version: str | None = None) -> Iterable[Metric]:
    """The series of one model that runs on an engine. `version`: tells it from others of its name."""
    own = {"version": version} if version else {}
    yield from _vllm({"model_name": model, "engine": "0"} | own, meter, status)
    yield from _triton({"model": model, "version": _VERSION} | own, meter, status)
    yield from _tgi(meter, status)


def _vllm(labels: Labels, meter: Meter, status: EngineStatus) -> Iterable[Metric]:
    yield _gauge("vllm:num_requests_running", "Sequences in the engine's batch.", labels, status.running_requests)
    yield _gauge("vllm:num_requests_waiting", "Sequences that wait for the engine.", labels, status.waiting_requests)
    for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):  # the latter until vLLM 0.10
        yield _gauge(name, "Share of the KV cache in use, 0 to 1.", labels, status.kv_cache_usage)
    yield _counter("vllm:prompt_tokens", "Tokens of prompts.", labels, meter.prompt_tokens)
    yield _counter("vllm:generation_tokens", "Tokens generated.", labels, meter.tokens)
    yield _counter("vllm:request_success", "Sequences that came to their end.", labels, meter.finished_requests)
    yield _histogram(
        "vllm:time_to_first_token_seconds", "From submission to the first token.", labels, meter.time_to_first_token
    )
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):  # the latter until 0.11
        yield _histogram(name, "Between one token and the next.", labels, meter.inter_token)
    yield _histogram(
        "vllm:request_queue_time_seconds", "From submission until the engine runs it.", labels, meter.queue_time
    )


def _triton(labels: Labels, meter: Meter, status: EngineStatus) -> Iterable[Metric]:
    calls = meter.calls
    yield _plain_counter("nv_inference_request_success", "Calls that were answered.", labels, calls.succeeded)
    yield _plain_counter("nv_inference_request_failure", "Calls that failed.", labels, calls.failed)
    yield _plain_counter("nv_inference_count", "Prompts given to the engine.", labels, meter.started_requests)
    yield _plain_counter(
        "nv_inference_request_duration_us",
        "Duration of all answered calls together, in microseconds.",
        labels,
        calls.succeeded_seconds * _MICROSECONDS,
    )
    yield _plain_counter(
        "nv_inference_queue_duration_us",
        "Time of all sequences in the queue together, in microseconds.",
        labels,
        meter.queue_time.total * _MICROSECONDS,
    )
    yield _gauge(
        "nv_inference_pending_request_count",
        "Sequences that wait for the engine.",
        labels,
        status.waiting_requests,
    )


def _tgi(meter: Meter, status: EngineStatus) -> Iterable[Metric]:
    calls = meter.calls
    yield _plain_counter("tgi_request_count", "Calls that were answered or failed.", {}, calls.succeeded + calls.failed)
    yield _plain_counter("tgi_request_success", "Calls that were answered.", {}, calls.succeeded)
    yield _plain_counter("tgi_request_failure", "Calls that failed.", {}, calls.failed)
    yield _durations("tgi_request_duration", "Duration of answered calls.", calls)
    yield _histogram("tgi_request_queue_duration", "From submission until the engine runs it.", {}, meter.queue_time)
    yield _gauge("tgi_batch_current_size", "Sequences in the engine's batch.", {}, status.running_requests)
    yield _gauge("tgi_queue_size", "Sequences that wait for the engine.", {}, status.waiting_requests)


def _counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    """A counter whose sample ends in `_total`."""
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _plain_counter(name: str, text: str, labels: Labels, value: float) -> Metric:
    """A counter without that ending, as Triton and TGI name theirs; the library has such samples only untyped."""
    family = UntypedMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _gauge(name: str, text: str, labels: Labels, value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, text: str, labels: Labels, distribution: Distribution) -> Metric:
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), distribution.cumulative(), distribution.total)
    return family


def _durations(name: str, text: str, calls: CallCounts) -> Metric:
    """Number and sum, for averages; the distribution is not known."""
    return HistogramMetricFamily(
        name, text, buckets=[("+Inf", float(calls.succeeded))], sum_value=calls.succeeded_seconds
    )
