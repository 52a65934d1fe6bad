"""Prometheus' text format: the same as prometheus_client's, except for counters that the package cannot write."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from container.observability.prometheus_text import prometheus_text

_TEXTS = st.text(st.characters(exclude_categories=["Cs"]))


@given(_TEXTS, st.dictionaries(st.sampled_from(["b", "a", "_c1"]), _TEXTS, max_size=3), st.floats(0))
def test_the_text_is_that_of_the_library(documentation: str, labels: dict[str, str], value: float) -> None:
    registry = CollectorRegistry()
    names = list(labels)
    metrics = [
        kind(f"m:{kind.__name__}", documentation, names, registry=registry) for kind in (Counter, Gauge, Histogram)
    ]
    assert prometheus_text(registry.collect()) == generate_latest(registry)
    counter, gauge, histogram = (metric.labels(**labels) if labels else metric for metric in metrics)
    counter.inc(value)
    gauge.set(-value)
    histogram.observe(value)
    text = prometheus_text(registry.collect())
    assert text == generate_latest(registry)
    found = [s for family in text_string_to_metric_families(text.decode()) for s in family.samples]
    assert all(labels.items() <= sample.labels.items() for sample in found)


def test_a_counter_has_the_name_of_its_sample() -> None:
    metric = Metric("nv_inference_count", "Prompts.", "counter")
    metric.add_sample("nv_inference_count", {"model": 'a "b"'}, 3)
    assert prometheus_text([metric]).decode() == (
        "# HELP nv_inference_count Prompts.\n"
        "# TYPE nv_inference_count counter\n"
        'nv_inference_count{model="a \\"b\\""} 3.0\n'
    )
