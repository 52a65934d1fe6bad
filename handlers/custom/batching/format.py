"""The format of a batch: the entries of all requests in one message, with keys such as `batch_000.data`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from handlers.custom.worker_process.socket_protocol import Contents, Message, Properties

MAX_BATCH = 999  # Entries are numbered with three digits, from 0.

_KEY = re.compile(r"batch_([0-9]{1,9})\.(.*)", re.DOTALL)


class BatchMismatch(Exception):
    """The handler's output does not have one answer for each request of the batch."""


def prefixed(index: int, properties: Properties, contents: Contents) -> Message:
    """Return the entries of one request with the prefix that they have in a batch."""
    prefix = f"batch_{index:03d}."
    return Message(
        properties=tuple((prefix + name, value) for name, value in properties),
        contents=tuple((prefix + (key or "data"), value) for key, value in contents),
    )


def joined(messages: Sequence[Message], *more: tuple[str, str]) -> Message:
    """Join messages into one.

    Args:
        messages: The entries of each request.
        more: Properties of the whole batch.
    """
    properties = [pair for message in messages for pair in message.properties]
    contents = [pair for message in messages for pair in message.contents]
    whole = (*more, ("batch_size", str(len(messages))), *properties)
    return Message(properties=whole, contents=tuple(contents))


def split_output(output: Message, size: int) -> list[Message]:
    """Return one output for each request.

    An error or a 204 is the answer to every request.

    Raises:
        BatchMismatch: The output does not have one answer for each request.
    """
    if output.streams:
        raise BatchMismatch("a batch of requests cannot be answered with a stream")
    if output.code >= 300 or output.code == 204:
        return [output] * size
    if len(output.contents) != size:
        raise BatchMismatch(f"Batch output size mismatch, expected: {size}, actual: {len(output.contents)}")
    answers: dict[int, Message] = {}
    for key, value in output.contents:
        match = _KEY.fullmatch(key or "")
        index = int(match[1]) if match else -1
        if match is None or index >= size or index in answers:
            raise BatchMismatch(f"Unexpected batch output key: {key}")
        answers[index] = replace(output, contents=((match[2], value),))
    return [answers[index] for index in range(size)]
