from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError

from deploy.sagemaker import logs


def error(operation: str, message: str, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, operation)


class Group:
    """A log group that grows with each look."""

    def __init__(self, *looks: list[tuple[str, int]]) -> None:
        self.looks = list(looks)
        self.starts: list[int] = []

    def filter_log_events(self, startTime: int, **more: Any) -> dict[str, Any]:  # noqa: N803
        self.starts.append(startTime)
        if not self.looks:
            raise error("filter_log_events", "The specified log group does not exist.", "ResourceNotFoundException")
        events = self.looks.pop(0)
        return {
            "events": [
                {"eventId": id, "timestamp": when, "logStreamName": "s", "message": f"line {id}\n"}
                for id, when in events
            ],
            **({"nextToken": "more"} if self.looks and self.looks[0] and self.looks[0][0][0] == "page" else {}),
        }


def test_a_log_is_read_page_after_page() -> None:
    group = Group([("1", 1000)], [("page", 2000)])
    assert [str(line) for line in logs.read(group, "g", 0)] == [
        "1970-01-01 00:00:01 line 1",
        "1970-01-01 00:00:02 line page",
    ]


def test_of_a_group_that_is_not_there_it_is_said() -> None:
    with pytest.raises(logs.NoLog, match="there is no log group g: nothing has logged there yet"):
        list(logs.read(Group(), "g", 0))
    assert logs.last_lines(Group(), "g", 5, 0.0) == ["(there is no log group g: nothing has logged there yet)"]


def test_following_waits_for_a_group_that_is_not_there_yet() -> None:
    class Late(Group):
        def filter_log_events(self, startTime: int, **more: Any) -> dict[str, Any]:  # noqa: N803
            if len(self.starts) < 2:
                self.starts.append(0)
                raise error("filter_log_events", "does not exist", "ResourceNotFoundException")
            return super().filter_log_events(startTime, **more)

    assert next(logs.follow(Late([("1", 1000)]), "g", 0, lambda seconds: None)).id == "1"


def test_following_gives_each_line_once_and_late_ones_too() -> None:
    group = Group([("1", 100_000)], [("1", 100_000), ("2", 90_000)], [("3", 101_000)])
    slept: list[float] = []
    lines = logs.follow(group, "g", 50_000, slept.append)
    assert [next(lines).id for _ in range(3)] == ["1", "2", "3"]
    assert group.starts == [50_000, 40_000, 40_000]
    assert slept == [logs.FOLLOW_INTERVAL] * 2


def test_a_log_that_cannot_be_read_says_why() -> None:
    class Denied:
        def filter_log_events(self, **parameters: Any) -> dict[str, Any]:
            raise error("filter_log_events", "no", "AccessDeniedException")

    (line,) = logs.last_lines(Denied(), "g", 5, 0.0)
    assert line.startswith("(the log cannot be read: filter_log_events: AccessDeniedException: no (`slipway policy`")
