"""Creates the answers of handlers that run in async mode."""

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
    """Return a complete answer.

    Args:
        data: Text, or a mapping that is encoded as JSON. A line feed is appended.
        properties: The headers.
        error: The message of an error.
        code: The status of an error.
    """
    output = _part(data, True, error, code).add_property("Content-Type", "application/json")
    output.properties.update(properties or {})
    return output


def create_stream_chunk_output(
    data: str | Mapping[str, Any], last_chunk: bool, error: str | None = None, code: int | None = None
) -> Output:
    """Return one chunk of an answer.

    Args:
        data: Text, or a mapping that is encoded as JSON. A line feed is appended.
        last_chunk: True for the last chunk of the answer.
        error: The message of an error.
        code: The status of an error.
    """
    return _part(data, last_chunk, error, code).add_property("Content-Type", "application/jsonlines")


async def handle_streaming_response(
    response: AsyncIterator[Any],
    stream_output_formatter: Callable[..., Any],
    accumulate_chunks: bool = False,
    **kwargs: Any,
) -> AsyncGenerator[Output, None]:
    """Yield each chunk of a response as an Output, until the formatter marks a chunk as the last one.

    If the formatter raises an exception, the last chunk is an error with the status 424.

    Args:
        response: The chunks.
        stream_output_formatter: Called with a chunk and `kwargs`. It returns `(text, last)`. If `accumulate_chunks` is
            set, it also receives `history`, and returns `(text, last, history)`.
        accumulate_chunks: Whether to pass each result's `history` to the next call.
        kwargs: Further arguments of the formatter.
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
