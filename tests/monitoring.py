"""The Grafana dashboard and the alerts in `deploy/monitoring`, and the metrics that their expressions name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).parents[1] / "deploy" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((_FOLDER / "grafana_dashboard.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((_FOLDER / "prometheus_alerts.yaml").read_text())

_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_GROUPED = re.compile(r"\bby \(([^)]*)\)")
_SELECTION = re.compile(r"(?<![\w:$.])([a-zA-Z_:][\w:]*)(\{[^}]*\})?(?!\s*\(|[\w:])")
_OPERATORS = {"and", "or", "unless", "bool", "offset"}
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


def panels() -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def alerts() -> list[dict[str, Any]]:
    """Return the alerts in all groups."""
    return [alert for group in ALERTS["groups"] for alert in group["rules"]]


def expressions() -> list[str]:
    """Return all PromQL expressions in both files."""
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    queries = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if variable["type"] == "query"]
    # `label_values` is a Grafana function, and its last argument is a label.
    chosen = [query.removeprefix("label_values(").rsplit(",", 1)[0] for query in queries]
    return [*shown, *chosen, *(alert["expr"] for alert in alerts())]


def selections(expression: str) -> list[tuple[str, str]]:
    """Return the metrics in an expression, each with its label matchers, or with ""."""
    bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub("", expression))
    return [(name, chosen) for name, chosen in _SELECTION.findall(bare) if name not in _OPERATORS]


def labels(selection: str) -> set[str]:
    """Return the labels in label matchers."""
    return set(_LABEL.findall(re.sub(r'"[^"]*"', "", selection)))


def grouped(expression: str) -> set[str]:
    """Return the labels by which an expression groups its series."""
    return {name.strip() for names in _GROUPED.findall(expression) for name in names.split(",")}
