"""The metrics of all replicas in one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        merged: dict[str, Metric] = {}
        for replica, text in self._texts.items():
            for metric in text_string_to_metric_families(text):
                whole = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                whole.samples += [
                    sample._replace(labels={"replica": replica, **sample.labels}) for sample in metric.samples
                ]
        return merged.values()


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Merge the metrics of replicas. Each series gets the label `replica`.

    Args:
        texts: The text of each replica's /metrics, by the name of the replica.

    Returns:
        A text in the format of Prometheus.
    """
    return generate_latest(_Merged(texts))
