"""Metrics that a handler prints: the lines, and the samples in /metrics."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from container.observability.metrics import handler_metrics
from handlers.custom.metrics import MAX_NAMES, MAX_SERIES, HandlerMetrics
from tests.unit.handlers.custom.harness import serving
from tests.waiting import until

HOST = socket.gethostname()
HANDLER = """
from djl_python import Output

def handle(inputs):
    if inputs.is_empty():
        return None
    print("[METRICS]Answers.Count:1|#Model:mine")
    return Output().add("done")
"""


class _Collector(Collector):
    def __init__(self, metrics: HandlerMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return list(handler_metrics(self._metrics))


def shown(*lines: str, metrics: HandlerMetrics | None = None) -> dict[tuple[str, str, str], float]:
    """Return the samples that Prometheus reads, by their name, label and label value."""
    metrics = metrics or HandlerMetrics()
    for line in lines:
        metrics.read(line)
    text = generate_latest(_Collector(metrics)).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(one.name, *next(iter(one.labels.items()))): one.value for one in samples if "le" not in one.labels}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[METRICS]Hits.Count:2", {("Hits_total", "Host", HOST): 2.0}),
        ("INFO model [METRICS] Disk.Gigabytes:311|#Disk:sda|1650953744320", {("Disk", "Disk", "sda"): 311.0}),
        ("[METRICS]Disk.Gigabytes:3e2|#Level:Host,Disk:sda|1650953744320|c", {("Disk_total", "Level", "Host"): 300.0}),
        ("[METRICS]Rate.Count/Second:0.5", {("Rate", "Host", HOST): 0.5}),
        ("[METRICS]Load.Count:7|g", {("Load", "Host", HOST): 7.0}),
        ("[METRICS]T.Milliseconds:7|h", {("T_count", "Host", HOST): 1.0, ("T_sum", "Host", HOST): 7.0}),
    ],
)
def test_a_line_is_a_metric_as_in_djl_serving(line: str, expected: dict[tuple[str, str, str], float]) -> None:
    assert shown(line) == expected


def test_counters_add_up_and_gauges_keep_the_last_value() -> None:
    lines = ["[METRICS]a.Count:1|#m:x", "[METRICS]a.Count:2|#m:x", "[METRICS]a.Count:5|#m:y"]
    lines += ["[METRICS]b.Bytes:9", "[METRICS]b.Bytes:-4.5"]
    assert shown(*lines) == {("a_total", "m", "x"): 3.0, ("a_total", "m", "y"): 5.0, ("b", "Host", HOST): -4.5}


@pytest.mark.parametrize(
    "line",
    [
        "[METRICS]",
        "[METRICS]no unit:1",
        "[METRICS]a.Count:one",
        "[METRICS]a.Count:1,5",
        "[METRICS]a.Count:-1",
        "[METRICS]a.Bytes:1e999",
        "[METRICS]1a.Count:1",
        "[METRICS]a b.Count:1",
        "[METRICS]a.Count:1|#__name__:x",
        "[METRICS]slipway_ready.Bytes:1",
        "[METRICS]" + "a" * 2000 + ".Count:1",
        "Requests.Count:1",
    ],
)
def test_other_lines_are_none(line: str) -> None:
    assert shown(line) == {}


def test_a_name_keeps_its_type_and_no_two_metrics_share_a_series(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        kept = shown(
            "[METRICS]a.Count:1",
            "[METRICS]a.Bytes:5",
            "[METRICS]a_total.Bytes:5",
            "[METRICS]b.X:1|h",
            "[METRICS]b_sum.X:1",
        )
    assert set(kept) == {("a_total", "Host", HOST), ("b_count", "Host", HOST), ("b_sum", "Host", HOST)}
    assert kept["a_total", "Host", HOST] == 1.0
    assert len(caplog.records) == 1
    assert "the metric a has another type already" in caplog.text


def test_a_handler_cannot_make_metrics_without_end() -> None:
    metrics = HandlerMetrics()
    names = shown(*(f"[METRICS]n{number}.Count:1" for number in range(MAX_NAMES + 50)), metrics=metrics)
    assert len(names) == MAX_NAMES
    series = shown(*(f"[METRICS]n1.Count:1|#m:{number}" for number in range(MAX_SERIES + 50)), metrics=metrics)
    assert len(series) == MAX_SERIES
    assert shown("[METRICS]n1.Count:1|#m:0", metrics=metrics)["n1_total", "Host", "0"] == 2.0


async def test_what_all_workers_print_is_counted_together(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(HANDLER)
    async with serving(tmp_path, min_workers=2, max_workers=2) as client:
        for _ in range(4):
            assert (await client.ask("x")).body == b"done"
        metrics = client.handler.pool.metrics
        await until(lambda: shown(metrics=metrics) == {("Answers_total", "Model", "mine"): 4.0})
