"""Metrics that a customer's handler prints: lines `[METRICS]Name.Unit:value|#Dimension:value|timestamp|type`.

Source: DJL, `ai.djl.metric.Metric.parse`, and DJL Serving, `ai.djl.prometheus.PrometheusAppender`.
"""

from __future__ import annotations

import logging
import math
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from engines.statistics import Distribution

logger = logging.getLogger("handlers.custom")

MARK = "[METRICS]"
MAX_NAMES, MAX_SERIES = 100, 1000
"""Of one model: what a handler prints may hold anything, and each series takes memory for good."""
_LONGEST = 1000  # Characters of a line, and so of a name and a value.
_LINE = re.compile(r"([a-zA-Z_]\w*)\.([\w /]+):([0-9.e-]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_]\w*", re.ASCII)
# The bounds that DJL Serving's histograms have.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_OUR_OWN = ("slipway_", "nv_inference_", "tgi_")
# What is added to the name of each kind of metric.
_ENDINGS = {"c": ("_total",), "g": ("",), "h": ("_bucket", "_count", "_sum")}


@dataclass(slots=True)
class HandlerMetric:
    """One metric, and its series by the value of its label. The first line with its name says what it is."""

    name: str
    kind: str  # c: a counter, g: a gauge, h: a histogram.
    unit: str
    label: str
    numbers: dict[str, float] = field(default_factory=dict)
    distributions: dict[str, Distribution] = field(default_factory=dict)

    def count(self, series: str, value: float) -> None:
        if self.kind == "h":
            self.distributions.setdefault(series, Distribution(_BOUNDS)).observe(value)
        elif self.kind == "c":
            self.numbers[series] = self.numbers.get(series, 0.0) + value
        else:
            self.numbers[series] = value


class HandlerMetrics:
    """The metrics of one model's workers. Threads read their output, so that each access is locked."""

    def __init__(self) -> None:
        self._metrics: dict[str, HandlerMetric] = {}
        self._samples: set[str] = set()  # Names that /metrics shows.
        self._series = 0
        self._host = socket.gethostname()
        self._lock = threading.Lock()
        self._warned = False

    def read(self, line: str) -> None:
        """Take the metric of a line, if it has one. A line that is none of DJL's, or one too many, has no effect but
        one warning in the log."""
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        with self._lock:
            problem = self._count(text.strip())
        if problem and not self._warned:
            self._warned = True
            logger.warning(
                "a line of the handler is no metric: %s; further ones are not reported: %.200s", problem, text
            )

    def snapshot(self) -> Iterator[HandlerMetric]:
        """The metrics, in the order in which they came; they stay as they are while they are read."""
        with self._lock:
            yield from self._metrics.values()

    def _count(self, text: str) -> str:
        """Count a line. Returns why that was not done."""
        parts = _LINE.fullmatch(text) if len(text) <= _LONGEST else None
        value = _number(parts[3]) if parts is not None else None
        if parts is None or value is None:
            return "expected Name.Unit:value, with |#Dimension:value, |timestamp and |c, |g or |h if need be"
        unit = parts[2].strip()
        kind = parts[6] or ("c" if unit.lower() == "count" else "g")
        name = parts[1].removesuffix("_total") if kind == "c" else parts[1]
        label, series = self._dimension(parts[4])
        if not _LABEL.fullmatch(label):
            return "its dimension is not the name of a label"
        if kind == "c" and value < 0:
            return "a counter cannot count down"
        metric = self._metrics.get(name)
        if metric is None:
            metric = HandlerMetric(name, kind, unit, label)
            samples = {name + ending for ending in _ENDINGS[kind]}
            if samples & self._samples or name.startswith(_OUR_OWN):
                return "another metric has this name"
            if len(self._metrics) == MAX_NAMES:
                return f"there are {MAX_NAMES} metrics already"
        elif metric.kind != kind:
            return f"the metric {name} is of another type"
        if series not in metric.numbers and series not in metric.distributions:
            if self._series == MAX_SERIES:
                return f"there are {MAX_SERIES} series already"
            self._series += 1
        if name not in self._metrics:
            self._metrics[name] = metric
            self._samples |= samples
        metric.count(series, value)
        return ""

    def _dimension(self, text: str | None) -> tuple[str, str]:
        """The name and the value of the first dimension, the only one that DJL Serving shows."""
        for pair in (text or "").split(","):
            name, colon, value = pair.partition(":")
            if colon and ":" not in value:
                return name.strip(), value.strip()
        return "Host", self._host


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
