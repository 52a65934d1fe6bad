from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = re.findall(r"\| \[(test_\w+)\]\((tests/[\w/]+\.py)\) \|", (ROOT / "README.md").read_text())


def test_every_test_that_the_readme_names_is_there() -> None:
    assert len(ROWS) > 50
    missing = [f"{path}: {name}" for name, path in ROWS if f"def {name}(" not in (ROOT / path).read_text()]
    assert not missing


def test_every_page_that_the_readme_and_the_docs_link_to_is_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([\w./]+\.\w+)(?:#[\w-]+)?\)", page.read_text())
        assert not [link for link in links if not (page.parent / link).exists()], page.name
