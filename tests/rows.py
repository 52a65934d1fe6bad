"""YAML files of cases. In a file of rows, a title stands above the rows that it describes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

Rows = dict[str, list[dict[str, Any]]]


class UniqueKeyLoader(yaml.CSafeLoader):  # yaml.SafeLoader takes twenty times as long.
    """Refuses a second key of the same name. YAML's loaders drop the first one, with its value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        if len(mapping) < len(node.value):
            names = [key.value for key, _ in node.value]
            twice = next(key for place, (key, _) in enumerate(node.value) if key.value in names[:place])
            raise yaml.MarkedYAMLError(problem=f"{twice.value!r} is there twice", problem_mark=twice.start_mark)
        return mapping


def read_rows(path: Path) -> Rows:
    rows_by_title: Rows = yaml.load(path.read_text(), UniqueKeyLoader)
    return rows_by_title


def write_rows(path: Path, rows_by_title: Rows) -> None:
    """Write a line for each row."""
    with path.open("w") as file:
        for title, rows in rows_by_title.items():
            file.write(f"{title}:\n")
            for row in rows:
                line = yaml.safe_dump(row, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)
                file.write(f"- {line}")
