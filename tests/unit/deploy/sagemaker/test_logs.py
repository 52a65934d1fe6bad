from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from deploy.sagemaker import logs
from tests.unit.deploy.sagemaker.formation import SESSION


class Group:
    """A log group that grows with each look; None is a look at which it is not there, as after the last one."""

    def __init__(self, *looks: list[tuple[str, int]] | None) -> None:
        self.looks = list(looks)
        self.client: Any = SESSION.client("logs")
        self.client.meta.events.register("before-call.cloudwatch-logs", self._answer)

    def _answer(self, params: dict[str, Any], **more: Any) -> tuple[Any, dict[str, Any]]:
        events = self.looks.pop(0) if self.looks else None
        if events is None:
            return SimpleNamespace(status_code=400), {"Error": {"Code": "ResourceNotFoundException", "Message": "no"}}
        lines = [{"eventId": id, "timestamp": when, "message": f"line {id}\n"} for id, when in events]
        next_page = {"nextToken": "more"} if self.looks and self.looks[0] and self.looks[0][0][0] == "page" else {}
        return SimpleNamespace(status_code=200), {"events": lines, **next_page}


def test_a_log_is_read_page_after_page() -> None:
    group = Group([("1", 1000)], [("page", 2000)])
    assert [line for _, line in logs.read(group.client, "g", 0)] == [
        "1970-01-01 00:00:01 line 1",
        "1970-01-01 00:00:02 line page",
    ]


def test_of_a_group_that_is_not_there_it_is_said() -> None:
    with pytest.raises(logs.NoLog, match="there is no log group g: nothing has logged there yet"):
        list(logs.read(Group().client, "g", 0))
