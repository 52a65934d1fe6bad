"""JSON schemas that the engine holds only in part, and the server's verdicts on the answers."""

from __future__ import annotations

import re
from typing import Any

from tests.live.server import Server
from tests.waiting import wait_until

NOT_HELD, ATTRIBUTES = "x-slipway-not-held", "x-amzn-sagemaker-custom-attributes"
PLACE = "#/properties/tags/uniqueItems"
VERDICTS = ("valid", "invalid", "incomplete", "unchecked")
A, B = {"type": "string", "pattern": "^a$"}, {"type": "string", "pattern": "^b$"}


def tags(**array: Any) -> dict[str, Any]:
    """Return a schema of an object with unique tags. The engine cannot enforce that the tags are unique."""
    return {
        "type": "object",
        "properties": {"tags": {"type": "array", "uniqueItems": True, **array}},
        "required": ["tags"],
        "additionalProperties": False,
    }


SAME = tags(items=A, minItems=2, maxItems=2)  # Every answer of the engine breaks this schema.
DIFFERENT = tags(prefixItems=[A, B], items=False, minItems=2, maxItems=2)  # Every answer obeys this schema.
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SAME}}


def verdicts(server: Server) -> dict[str, int]:
    text = server.client.get("/metrics").text
    labels = rf'\{{(?:model="{server.name}",)?verdict="(\w+)"\}}'
    found = re.findall(rf"^slipway_partial_answers_total{labels} (\d+)", text, re.MULTILINE)
    return {verdict: int(count) for verdict, count in found}


def assert_judged(server: Server, before: dict[str, int], **more: int) -> None:
    """Wait until the server has counted these verdicts in addition to the verdicts in `before`."""
    expected = {verdict: before[verdict] + more.get(verdict, 0) for verdict in VERDICTS}
    wait_until(lambda: sum(verdicts(server).values()) >= sum(expected.values()), about=lambda: verdicts(server))
    assert verdicts(server) == expected
