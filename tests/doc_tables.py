"""Tables of the documentation that are made from code or from recorded files.

`UPDATE_TABLES=1` writes the tables of the tests that run.
"""

from __future__ import annotations

import os
from pathlib import Path


def assert_written(page: Path, made: str) -> None:
    """Assert that a page has the generated text. If the environment asks for that, write the page first."""
    if os.environ.get("UPDATE_TABLES"):
        page.write_text(made, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == made
