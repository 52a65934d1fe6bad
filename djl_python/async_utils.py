"""Answers of handlers in async mode."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from djl_python import wire
from djl_python.outputs import Output


def create_non_stream_output(
    data: str | Mapping[str, Any],
    properties: Mapping[str, Any] | None = None,
    error: str | None = None,
    code: int | None = None,
) -> Output:
    """The whole answer. A mapping is written as JSON, and a line feed added; properties become headers."""
    output = _part(data, True, error, code).add_property("Content-Type", "application/json")
    output.properties.update(properties or {})
    return output


def create_stream_chunk_output(
    data: str | Mapping[str, Any], last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    """One chunk of an answer. A mapping is written as JSON, and a line feed added."""
    return _part(data, last_chunk, error, code).add_property("Content-Type", "application/jsonlines")


async def handle_streaming_response(
    response: AsyncIterator[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **kwargs: Any,
) -> AsyncGenerator[Output, None]:
    """Each chunk of `response` as an Output, up to the one that the formatter marks as the last.

    The formatter is called with a chunk and `kwargs` and returns `(text, last)`; with `accumulate_chunks` it also gets
    `history` and returns `(text, last, history)`. When it fails, the last chunk is an error with status 424.
    """
    history: Any = []
    async for chunk in response:
        try:
            if accumulate_chunks:
                data, last, history = stream_output_formatter(chunk, history=history, **kwargs)
            else:
                data, last = stream_output_formatter(chunk, **kwargs)
        except Exception as error:
            logging.exception("The formatter of the streamed answer failed")
            yield create_stream_chunk_output("", True, error=wire.sendable(str(error)), code=424)
            return
        yield create_stream_chunk_output(data, last)
        if last:
            return


def _part(data: str | Mapping[str, Any], last: bool, error: str | None, code: int | None) -> Output:
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    part: dict[str, Any] = {"data": text + "\n", "last": last}
    if error:
        part["error"] = error
    if code:
        part["code"] = code
    return Output().add(Output.binary_encode(part))
