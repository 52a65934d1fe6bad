"""The explanations are in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.replay.explanations import BY_NAME, EXPLANATIONS, Explanation

DOCS = Path(__file__).parents[4] / "docs"
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)


def words(text: str) -> str:
    """Return a text with single spaces, so that line ends do not matter."""
    return " ".join(text.split())


def section(page: str, anchor: str) -> str:
    """Return the text below a heading, up to the next heading of the same level or a higher one."""
    text = (DOCS / page).read_text()
    headings = list(HEADING.finditer(text))
    for number, heading in enumerate(headings):
        if re.sub(r"[^\w\- ]", "", heading[2].lower()).replace(" ", "-") == anchor:
            level = len(heading[1])
            after = (other.start() for other in headings[number + 1 :] if len(other[1]) <= level)
            return text[heading.end() : next(after, len(text))]
    raise AssertionError(f"{page} has no heading {anchor}")


@pytest.mark.parametrize("explanation", EXPLANATIONS, ids=lambda explanation: explanation.name)
def test_the_page_says_what_the_explanation_says(explanation: Explanation) -> None:
    found = words(section(explanation.page, explanation.anchor))
    assert words(explanation.statement) in found
    if explanation.setting is not None:
        assert explanation.setting.partition("=")[0] in words((DOCS / explanation.page).read_text())


def test_each_explanation_has_its_own_name() -> None:
    assert len(BY_NAME) == len(EXPLANATIONS)


def test_nothing_explains_a_failure_of_the_server() -> None:
    pages = [one for one in EXPLANATIONS if re.search(one.new, "503") and re.search(one.old, "200")]
    assert not [one.name for one in pages if "status" in one.kinds]
