"""The containers' logs, read with boto3's client of CloudWatch Logs (`logs`)."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from deploy.sagemaker.aws import is_missing


class NoLog(Exception):
    """There is no such log group: nothing has logged to it yet."""


def group(endpoint: str, component: str | None = None) -> str:
    """Where the containers of an endpoint log, or the copies of an inference component."""
    return f"/aws/sagemaker/InferenceComponents/{component}" if component else f"/aws/sagemaker/Endpoints/{endpoint}"


def read(logs: Any, group: str, since: int) -> Iterator[tuple[int, str]]:
    """The records from `since` on, in milliseconds since 1970: when each was written, and its line.

    Raises NoLog where nothing has ever logged, and botocore's ClientError.
    """
    from botocore.exceptions import ClientError

    pages = logs.get_paginator("filter_log_events").paginate(logGroupName=group, startTime=max(since, 0))
    try:
        for event in (event for page in pages for event in page["events"]):
            when = datetime.fromtimestamp(event["timestamp"] / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
            yield event["timestamp"], f"{when} {event['message'].rstrip()}"
    except ClientError as error:
        if is_missing(error):
            raise NoLog(f"there is no log group {group}: nothing has logged there yet") from None
        raise
