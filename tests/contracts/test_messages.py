"""Wrong requests by route in `messages.yaml`, and the reply to each. UPDATE_CASES=1 writes the replies."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import yaml

from tests.contracts.test_cases import ReplyDumper, exchanged

MESSAGES = Path(__file__).parent / "messages.yaml"


def test_each_wrong_request_has_its_message(tmp_path: Path) -> None:
    (directory := tmp_path / "model").mkdir()
    replies = {}
    for path, exchanges in yaml.safe_load(MESSAGES.read_text()).items():
        replies[path] = []
        for exchange in exchanges:
            head = {"path": path, "headers": {"content-type": "application/json"}, "body": exchange["request"]}
            reply = asyncio.run(exchanged({"request": head}, directory))
            replies[path].append({"request": exchange["request"], "status": reply["status"], "reply": reply["body"]})
    if os.environ.get("UPDATE_CASES"):
        MESSAGES.write_text(yaml.dump(replies, Dumper=ReplyDumper, allow_unicode=True, sort_keys=False, width=10**6))
    assert replies == yaml.safe_load(MESSAGES.read_text())
