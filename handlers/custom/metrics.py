"""Metrics that a customer's handler prints as lines `[METRICS]Name.Unit:value|#Dimension:value|timestamp|type`.

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
# Limits for one model, because a handler may print anything. The memory of a series is never freed.
MAX_NAMES, MAX_SERIES = 100, 1000
_LONGEST = 1000  # The maximum number of characters of a line, and so of a name and a value.
_LINE = re.compile(r"([a-zA-Z_]\w*)\.([\w /]+):([0-9.e-]+)(?:\|#([^|]*))?(?:\|(\d+))?(?:\|([cgh]))?", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_]\w*", re.ASCII)
# The bounds of DJL Serving's histograms.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_RESERVED_PREFIXES = ("slipway_", "nv_inference_", "tgi_")
# The suffixes of sample names at /metrics, keyed by the kind of metric.
_ENDINGS = {"c": ("_total",), "g": ("",), "h": ("_bucket", "_count", "_sum")}


@dataclass(slots=True)
class HandlerMetric:
    """A metric. Its series are keyed by the value of the label.

    The first line with the metric's name decides the kind, the unit and the label.
    """

    name: str
    kind: str  # `c` for a counter, `g` for a gauge, `h` for a histogram.
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
    """The metrics of one model's workers. Several threads read the workers' output, so each access takes a lock."""

    def __init__(self) -> None:
        self._metrics: dict[str, HandlerMetric] = {}
        self._samples: set[str] = set()  # Names of the samples that /metrics shows.
        self._series = 0
        self._host = socket.gethostname()
        self._lock = threading.Lock()
        self._warned = False

    def read(self, line: str) -> None:
        """Count the metric that a line holds.

        A line that is not valid or exceeds a limit is ignored. The first such line is logged.
        """
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        with self._lock:
            problem = self._count(text.strip())
        if problem and not self._warned:
            self._warned = True
            logger.warning(
                "the handler printed a metric that is ignored: %s; later ones are not logged: %.200s", problem, text
            )

    def snapshot(self) -> Iterator[HandlerMetric]:
        """Return the metrics in the order of their first lines. They do not change during the iteration."""
        with self._lock:
            yield from self._metrics.values()

    def _count(self, text: str) -> str:
        """Count a line. If the line is ignored, return the reason, otherwise an empty string."""
        parts = _LINE.fullmatch(text) if len(text) <= _LONGEST else None
        value = _number(parts[3]) if parts is not None else None
        if parts is None or value is None:
            return "expected Name.Unit:value, optionally with |#Dimension:value, |timestamp and |c, |g or |h"
        unit = parts[2].strip()
        kind = parts[6] or ("c" if unit.lower() == "count" else "g")
        name = parts[1].removesuffix("_total") if kind == "c" else parts[1]
        label, series = self._dimension(parts[4])
        if not _LABEL.fullmatch(label):
            return "the dimension's name is not valid as the name of a label"
        if kind == "c" and value < 0:
            return "the value of a counter must not be negative"
        metric = self._metrics.get(name)
        if metric is None:
            metric = HandlerMetric(name, kind, unit, label)
            samples = {name + ending for ending in _ENDINGS[kind]}
            if samples & self._samples or name.startswith(_RESERVED_PREFIXES):
                return "another metric has this name"
            if len(self._metrics) == MAX_NAMES:
                return f"the model has {MAX_NAMES} metrics already, the maximum"
        elif metric.kind != kind:
            return f"the metric {name} has another type already"
        if series not in metric.numbers and series not in metric.distributions:
            if self._series == MAX_SERIES:
                return f"the model has {MAX_SERIES} series already, the maximum"
            self._series += 1
        if name not in self._metrics:
            self._metrics[name] = metric
            self._samples |= samples
        metric.count(series, value)
        return ""

    def _dimension(self, text: str | None) -> tuple[str, str]:
        """Return the name and the value of the first dimension. DJL Serving shows only this one."""
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
