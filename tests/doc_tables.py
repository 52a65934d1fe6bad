"""Tables in the documentation that are generated from code or from recorded files.

With `UPDATE_TABLES=1`, each test of a table also writes the table.
"""

from __future__ import annotations

import os
from pathlib import Path


def assert_written(page: Path, made: str) -> None:
    """Assert that a page contains the generated text. If `UPDATE_TABLES` is set, write the page first."""
    if os.environ.get("UPDATE_TABLES"):
        page.write_text(made, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == made
