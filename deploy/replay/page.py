"""The report as one HTML page without scripts, links and files of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from deploy.replay.report import rows, summary

_TEMPLATE = "page.html"


def page(report: Mapping[str, Any], written: str) -> str:
    """Return the page.

    Args:
        report: The report as a JSON value.
        written: The time at which it is written.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["seconds"] = _seconds
    return environment.get_template(_TEMPLATE).render(
        report=report, rows=rows(report["differences"]), sentences=summary(report), written=written
    )


def _seconds(points: Mapping[str, float] | None, at: str) -> str:
    return "-" if points is None else f"{points[at]:.3f}"
