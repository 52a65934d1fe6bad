"""Files of rows, which are YAML. A title stands above the rows that it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Rows = dict[str, list[dict[str, Any]]]


def read_rows(path: Path) -> Rows:
    # yaml.safe_load takes twenty times as long.
    rows_by_title: Rows = yaml.load(path.read_text(), yaml.CSafeLoader)
    return rows_by_title


def write_rows(path: Path, rows_by_title: Rows) -> None:
    """Write a line for each row."""
    with path.open("w") as file:
        for title, rows in rows_by_title.items():
            file.write(f"{title}:\n")
            for row in rows:
                line = yaml.safe_dump(row, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)
                file.write(f"- {line}")
