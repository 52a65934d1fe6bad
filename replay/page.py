"""The report as one HTML page without scripts or files from other servers. All links stay within the page."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from replay.report import rows, summary

MOST_LINES = 500  # The maximum number of lines of an answer to show.
_TEMPLATE = "page.html"
_DOCS = Path(__file__).parents[1] / "docs"  # Exists only in a checkout. An installed package does not include it.
_HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
for _rule in ("link_open", "link_close"):
    _MARKDOWN.add_render_rule(_rule, lambda *_: "")  # The report does not contain the pages that a section links to.


def page(report: Mapping[str, Any], written: str) -> str:
    """Return the page.

    Args:
        report: The report as a JSON value.
        written: The time at which the report is written.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"seconds": _seconds, "statement": _statement, "lines": _lines}
    links = {found["explanation"]["page"] for found in report["differences"] if found["explanation"] is not None}
    return environment.get_template(_TEMPLATE).render(
        report=report,
        rows=rows(report["differences"]),
        sentences=summary(report),
        sections={link: text for link in sorted(links) if (text := _section(link))},
        written=written,
    )


def _seconds(points: Mapping[str, float] | None, at: str) -> str:
    return "-" if points is None else f"{points[at]:.3f}"


def _statement(markdown: str) -> Markup:
    """Return the statement of an explanation as HTML."""
    return Markup(_MARKDOWN.renderInline(markdown))


def section(page: str, anchor: str) -> str | None:
    """Return the Markdown under a page's heading and its subheadings. None if the page or the heading is missing."""
    path = _DOCS / page
    text = path.read_text() if path.is_file() else ""
    headings = list(_HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            level = len(heading[1])
            ends = (other.start() for other in headings[number + 1 :] if len(other[1]) <= level)
            return text[heading.end() : next(ends, len(text))]
    return None


def _section(link: str) -> Markup | None:
    found = section(*link.removeprefix("docs/").split("#"))
    return None if found is None else Markup(_MARKDOWN.render(_COMMENT.sub("", found)))


def _lines(answers: Mapping[str, str]) -> Iterator[tuple[str, str, bool]]:
    """Yield the lines of both answers side by side, and whether they differ. Long answers are cut, with a note."""
    old, new = (_pretty(answers[name]).splitlines() for name in ("old", "new"))
    # Frequent lines are not used to align the answers. Otherwise the time would grow with the cube of their number.
    matcher = difflib.SequenceMatcher(None, old[:MOST_LINES], new[:MOST_LINES], autojunk=True)
    for _, a, b, c, d in matcher.get_opcodes():
        for one, other in zip_longest(old[a:b], new[c:d]):
            yield one or "", other or "", one != other
    rest = old[MOST_LINES:], new[MOST_LINES:]
    if any(rest):
        one, other = (f"... ({len(lines)} more lines)" if lines else "" for lines in rest)
        yield one, other, rest[0] != rest[1]


def _pretty(body: str) -> str:
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return body
