"""Sessions that clients create, use and close (contracts/lmi.md section 10).

What counts is what is on disk: several worker processes share the directory.
"""

from __future__ import annotations

import atexit
import os
import re
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from djl_python.session import EXPIRATION, Session
from djl_python.session_backup import SessionBackup

NEW_SESSION = "NEW_SESSION"
"""What a client that has no session yet sends for a session id."""
_DEFAULT_EXPIRATION_S = 1200
# A session id comes from the client and becomes the name of a directory.
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

__all__ = ["NEW_SESSION", "Session", "SessionManager"]


class SessionManager:
    """All sessions under one directory."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """Takes `sessions_path`, `sessions_expiration` (seconds, 1200) and `sessions_s3url`.

        Raises:
            ValueError: the expiration is no number, or there is no tool for S3.
        """
        self.expiration = int(properties.get("sessions_expiration") or _DEFAULT_EXPIRATION_S)
        self.sessions_path = str(properties.get("sessions_path") or _default_path())
        self.sessions_s3url: str | None = properties.get("sessions_s3url") or None
        self._backup = SessionBackup(self.sessions_s3url) if self.sessions_s3url else None
        os.makedirs(self.sessions_path, mode=0o700, exist_ok=True)
        if self._backup:
            atexit.register(self._backup.save, self.sessions_path)

    def create_session(self) -> Session:
        """A new session; those that have expired are removed."""
        self._remove_expired()
        session_id, ends = str(uuid.uuid4()), time.time() + self.expiration
        # Renamed once complete, so that no other process takes it for one without an end.
        unfinished = tempfile.mkdtemp(prefix=".new-", dir=self.sessions_path)
        Session(os.path.basename(unfinished), self.sessions_path, ends).put(EXPIRATION, ends)
        os.rename(unfinished, os.path.join(self.sessions_path, session_id))
        return Session(session_id, self.sessions_path, ends)

    def get_session(self, session_id: str | None) -> Session | None:
        """A session that goes on; None for no id, for `NEW_SESSION`, and for a session that has expired.

        Raises:
            ValueError: there is no such session.
        """
        if not session_id or session_id == NEW_SESSION:
            return None
        session = self._find(session_id)
        return None if session.expiration_ts is not None and time.time() > session.expiration_ts else session

    def close_session(self, session_id: str | None) -> None:
        """Removes a session. Raises ValueError if there is no such session."""
        if not session_id:
            raise ValueError(f"invalid session_id: {session_id}")
        self._find(session_id).remove()

    def _find(self, session_id: str) -> Session:
        if not _SESSION_ID.fullmatch(session_id):
            raise ValueError(f"session not found: {session_id}")
        known = os.path.isdir(os.path.join(self.sessions_path, session_id))
        if not known and not (self._backup and self._backup.restore(self.sessions_path, session_id)):
            raise ValueError(f"session not found: {session_id}")
        return Session(session_id, self.sessions_path)

    def _sessions(self) -> Iterator[Session]:
        for name in os.listdir(self.sessions_path):
            if _SESSION_ID.fullmatch(name):
                yield Session(name, self.sessions_path)

    def _remove_expired(self) -> None:
        for session in self._sessions():
            if session.expiration_ts is None or time.time() > session.expiration_ts:
                # Another worker may have been faster.
                with suppress(ValueError):
                    session.remove()


def _default_path() -> str:
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, "djl_sessions")
