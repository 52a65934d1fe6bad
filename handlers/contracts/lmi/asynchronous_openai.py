"""LMI's asynchronous schema for chat and completions: vLLM's own objects, in frames of LMI's.

Source: contracts/lmi.md section 4.7.
"""

from __future__ import annotations

from handlers.contracts.lmi.openai_shape import DONE, error_of, lmi_error
from handlers.contracts.protocol import Reply


class AsyncShape:
    """See `openai_shape.Shape`. Every document is a line; what ends a stream is an empty one."""

    stream_type = "application/jsonlines"

    def __init__(self, overload_status: int = 503) -> None:
        self._overload_status = overload_status

    def reply(self, reply: Reply) -> Reply:
        """See `Shape.reply`. An error has vLLM's own status."""
        if reply.status >= 400:
            return lmi_error(error_of(reply.body), reply.status, self._overload_status)
        return Reply(reply.status, reply.content_type, reply.body + b"\n", reply.headers)

    def event(self, data: bytes) -> bytes:
        """See `Shape.event`."""
        return b"\n" if data == DONE else data + b"\n"
