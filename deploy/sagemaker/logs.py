"""The containers' logs, read with boto3's client of CloudWatch Logs (`logs`)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deploy.sagemaker.aws import error_in_words, is_missing

FOLLOW_INTERVAL = 2.0
"""Seconds."""
_MOST_PAGES = 100
_OVERLAP = 60_000
"""Milliseconds that are read again: CloudWatch's records may come late."""


class NoLog(Exception):
    """There is no such log group: nothing has logged to it yet."""

    def __init__(self, group: str) -> None:
        super().__init__(f"there is no log group {group}: nothing has logged there yet")


@dataclass(frozen=True, slots=True)
class Line:
    """One record of the log."""

    id: str
    milliseconds: int
    """Since 1970."""
    stream: str
    text: str

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.milliseconds / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
        return f"{when} {self.text}"


def group_of_endpoint(name: str) -> str:
    """Where containers of an endpoint without components log."""
    return f"/aws/sagemaker/Endpoints/{name}"


def group_of_component(name: str) -> str:
    """Where the copies of an inference component log."""
    return f"/aws/sagemaker/InferenceComponents/{name}"


def read(logs: Any, group: str, since: int) -> Iterator[Line]:
    """The records from `since` on, in milliseconds since 1970.

    Raises:
        NoLog: nothing has ever logged.
        botocore.exceptions.ClientError: the log could not be read.
    """
    from botocore.exceptions import ClientError

    token: dict[str, Any] = {}
    for _ in range(_MOST_PAGES):
        parameters = {"logGroupName": group, "startTime": max(since, 0), "interleaved": True, **token}
        try:
            answer = logs.filter_log_events(**parameters)
        except ClientError as error:
            if is_missing(error):
                raise NoLog(group) from None
            raise
        for event in answer.get("events", ()):
            text = str(event["message"]).rstrip()
            yield Line(str(event["eventId"]), int(event["timestamp"]), str(event["logStreamName"]), text)
        if not answer.get("nextToken"):
            return
        token = {"nextToken": answer["nextToken"]}


def follow(logs: Any, group: str, since: int, sleep: Callable[[float], None] = time.sleep) -> Iterator[Line]:
    """The records from `since` on, and each further one as it comes; without end, also where there are none yet."""
    seen: dict[str, int] = {}
    newest = since
    while True:
        with contextlib.suppress(NoLog):
            for line in read(logs, group, newest - _OVERLAP if seen else newest):
                if line.id not in seen:
                    seen[line.id] = line.milliseconds
                    newest = max(newest, line.milliseconds)
                    yield line
        seen = {id: when for id, when in seen.items() if when >= newest - _OVERLAP}
        sleep(FOLLOW_INTERVAL)


def last_lines(logs: Any, group: str, count: int, since: float) -> list[str]:
    """The last records from `since` on, in seconds since 1970; or why they cannot be read."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        lines = sorted(read(logs, group, int(since * 1000)), key=lambda line: line.milliseconds)
    except NoLog as error:
        return [f"({error})"]
    except (BotoCoreError, ClientError) as error:
        return [f"(the log cannot be read: {error_in_words(error)})"]
    return [str(line) for line in lines[-count:]]
