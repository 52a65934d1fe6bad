"""Several requests in one `Input`, and one `Output` for several requests. Source: contracts/lmi.md section 5.1."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from handlers.workers.runtime.messages import InputMessage, OutputMessage

MAX_BATCH = 999
"""Entries are numbered with three digits, from 0."""

_KEY = re.compile(r"batch_([0-9]{1,9})\.(.*)", re.DOTALL)


class BatchMismatch(Exception):
    """The handler did not answer each request of a batch once."""


def prefixed(index: int, message: InputMessage) -> InputMessage:
    """One request's entries as they appear in a batch."""
    prefix = f"batch_{index:03d}."
    return InputMessage(
        tuple((prefix + name, value) for name, value in message.properties),
        tuple((prefix + (key or "data"), value) for key, value in message.contents),
    )


def joined(messages: Iterable[InputMessage], size: int, *more: tuple[str, str]) -> InputMessage:
    """One message of several, with properties of the whole batch."""
    parts = list(messages)
    properties = [pair for part in parts for pair in part.properties]
    contents = [pair for part in parts for pair in part.contents]
    return InputMessage((*more, ("batch_size", str(size)), *properties), tuple(contents))


def batch_input(messages: Sequence[InputMessage]) -> InputMessage:
    """The input of a batch; a single request is no batch."""
    if len(messages) == 1:
        return messages[0]
    return joined((prefixed(index, message) for index, message in enumerate(messages)), len(messages))


def split_output(output: OutputMessage, size: int) -> list[OutputMessage]:
    """One output for each request. An error, and an output without content, is the answer to all of them.

    Raises:
        BatchMismatch: it does not answer each request once.
    """
    if size == 1 or output.code >= 300 or output.code == 204:
        return [output] * size
    if len(output.contents) != size:
        raise BatchMismatch(f"Batch output size mismatch, expected: {size}, actual: {len(output.contents)}")
    answers: dict[int, OutputMessage] = {}
    for key, value in output.contents:
        match = _KEY.fullmatch(key or "")
        index = int(match[1]) if match else -1
        if match is None or index >= size or index in answers:
            raise BatchMismatch(f"Unexpected batch output key: {key}")
        answers[index] = OutputMessage(
            code=output.code, message=output.message, properties=output.properties, contents=((match[2], value),)
        )
    return [answers[index] for index in range(size)]
