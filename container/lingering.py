"""Closing a connection whose client still sends: it gets its reply nevertheless.

Where bytes of a request are left unread, a close makes the kernel reset the connection, and what the client has not
read of its reply is lost: it sees a broken connection in the place of a 413. So our side is closed, what the client
sends is passed over for a while, and then all ends. Source: RFC 9112 section 9.6.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from container.cork import Cork, CorkedTransport


class LingeringTransport(CorkedTransport):
    """A corked transport that is closed after the client has sent its request, or `seconds` later.

    `still_sends` tells, when the connection is closed, whether a reply is out and its request is not yet in.
    `closing` is called then: what the client has not taken may keep the connection for as long as it likes.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        cork: Cork,
        still_sends: Callable[[], bool],
        seconds: float,
        closing: Callable[[], None],
    ) -> None:
        super().__init__(transport, cork)
        self._still_sends, self._seconds, self._closing = still_sends, seconds, closing
        self._end: asyncio.TimerHandle | None = None

    @property
    def lingering(self) -> bool:
        """What comes from the client now is for nobody."""
        return self._end is not None

    def is_closing(self) -> bool:
        """See `asyncio.BaseTransport`."""
        return self.lingering or self._transport.is_closing()

    def close(self) -> None:
        """Close once all is sent, and the client has had time to read it."""
        if self.is_closing():
            return
        if self._still_sends():
            self.flush()
            self._transport.write_eof()
            self._transport.resume_reading()
            self._end = asyncio.get_running_loop().call_later(self._seconds, self._transport.close)
        else:
            super().close()
        self._closing()

    def closed(self) -> None:
        """The connection is gone."""
        if self._end is not None:
            self._end.cancel()
