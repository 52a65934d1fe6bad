from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_page_that_the_readme_and_the_docs_link_to_is_there() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        links = re.findall(r"\]\(([\w./]+\.\w+)(?:#[\w-]+)?\)", page.read_text())
        assert links or page.name != "README.md"
        assert not [link for link in links if not (page.parent / link).exists()], page.name
