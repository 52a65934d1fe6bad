"""Wrong requests by route in `messages.yaml`, and the reply to each. UPDATE_CASES=1 writes the replies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import yaml

from tests.contracts.test_cases import exchanged

MESSAGES = Path(__file__).parent / "messages.yaml"


def write_lines(path: Path, rows_by_title: dict[str, list[dict[str, Any]]]) -> None:
    """Write a line for each row."""
    with path.open("w") as file:
        for title, rows in rows_by_title.items():
            file.write(f"{title}:\n")
            for row in rows:
                line = yaml.safe_dump(row, default_flow_style=True, allow_unicode=True, sort_keys=False, width=10**6)
                file.write(f"- {line}")


def test_each_wrong_request_has_its_message(tmp_path: Path) -> None:
    (directory := tmp_path / "model").mkdir()
    replies: dict[str, list[dict[str, Any]]] = {}
    for path, exchanges in yaml.safe_load(MESSAGES.read_text()).items():
        replies[path] = []
        for exchange in exchanges:
            sent = {"path": path, "headers": {"content-type": "application/json"}, "body": exchange["request"]}
            reply = asyncio.run(exchanged({"request": sent}, directory))
            replies[path].append({"request": exchange["request"], "status": reply["status"], "reply": reply["body"]})
    if os.environ.get("UPDATE_CASES"):
        write_lines(MESSAGES, replies)
    assert replies == yaml.safe_load(MESSAGES.read_text())
