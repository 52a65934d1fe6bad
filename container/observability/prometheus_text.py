"""Prometheus' text format, version 0.0.4.

`prometheus_client.generate_latest` takes three times as long as this module. It would block all streams during this
time, and routers may ask for metrics 20 times a second. It also cannot write counters whose names do not end in
`_total`, such as Triton's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CREATED = "_created"  # The format has a separate gauge for samples with this suffix.
_number: Callable[[float], str] = floatToGoString


def prometheus_text(metrics: Iterable[Metric]) -> bytes:
    """Return counters, gauges and histograms as text. Their names and label names must be valid."""
    lines: list[str] = []
    for metric in metrics:
        created: list[str] = []
        lines.append(_head(_name(metric), metric.documentation, metric.type))
        for sample in metric.samples:
            (created if sample.name == metric.name + _CREATED else lines).append(_line(sample))
        if created:
            lines += [_head(metric.name + _CREATED, metric.documentation, "gauge"), *created]
    return "".join(lines).encode()


def _name(metric: Metric) -> str:
    has_ending = metric.type == "counter" and not (metric.samples and metric.samples[0].name == metric.name)
    return f"{metric.name}_total" if has_ending else metric.name


def _head(name: str, documentation: str, kind: str) -> str:
    return f"# HELP {name} {_escaped(documentation)}\n# TYPE {name} {kind}\n"


def _line(sample: Sample) -> str:
    value = _number(sample.value)
    if not sample.labels:
        return f"{sample.name} {value}\n"
    labels = ",".join([f'{name}="{_quotable(text)}"' for name, text in sorted(sample.labels.items())])
    return f"{sample.name}{{{labels}}} {value}\n"


def _quotable(text: str) -> str:
    return text if text.isalnum() else _escaped(text).replace('"', r"\"")


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
