"""Sessions that clients create, use and close (contracts/lmi.md section 10).

What counts is what is on disk: several worker processes share the directory.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from djl_python.session import EXPIRATION, Session
from djl_python.session_backup import SessionBackup, SessionSaver

NEW_SESSION = "NEW_SESSION"
"""What a client that has no session yet sends for a session id."""
_DEFAULT_EXPIRATION_S = 1200
_UNFINISHED = ".new-"
_ABANDONED_S = 3600
"""Age at which a directory that has not been finished belongs to a process that has been killed."""
_OTHERS_MAY_WRITE = 0o022
# A session id comes from the client and becomes the name of a directory.
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

__all__ = ["NEW_SESSION", "Session", "SessionManager"]


class SessionManager:
    """All sessions under one directory."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """Takes `sessions_path`, `sessions_expiration` (seconds, 1200) and `sessions_s3url`.

        Raises:
            ValueError: the expiration is no number, there is no tool for S3, or others than this user can write to
                the directory.
        """
        self.expiration = int(properties.get("sessions_expiration") or _DEFAULT_EXPIRATION_S)
        self.sessions_path = str(properties.get("sessions_path") or _default_path())
        self.sessions_s3url: str | None = properties.get("sessions_s3url") or None
        self._backup = SessionBackup(self.sessions_s3url) if self.sessions_s3url else None
        _make_own_directory(self.sessions_path)
        self._saver = SessionSaver(self._backup, self.sessions_path) if self._backup else None

    def create_session(self) -> Session:
        """A new session; those that have expired are removed."""
        self.remove_expired()
        session_id, ends = str(uuid.uuid4()), time.time() + self.expiration
        # Renamed once complete, so that no other process takes it for one without an end.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        Session(os.path.basename(unfinished), self.sessions_path, ends).put(EXPIRATION, ends)
        os.rename(unfinished, os.path.join(self.sessions_path, session_id))
        if self._saver:
            self._saver.watch(session_id)
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
        session = self._find(session_id)
        if self._saver:
            self._saver.delete(session_id)
        session.remove()

    def remove_expired(self) -> None:
        """Removes the sessions that have ended, and what processes that were killed have left behind."""
        self._remove_abandoned()
        for session in self._sessions():
            if session.expiration_ts is None or time.time() > session.expiration_ts:
                _try_to_remove(session)

    def close(self) -> None:
        """Ends what goes on in the background: what has changed is saved to S3. Sessions stay. May take minutes."""
        if self._saver:
            self._saver.close()

    def _find(self, session_id: str) -> Session:
        if not _SESSION_ID.fullmatch(session_id):
            raise ValueError(f"session not found: {session_id}")
        known = os.path.isdir(os.path.join(self.sessions_path, session_id))
        if not known and not self._restore(session_id):
            raise ValueError(f"session not found: {session_id}")
        if self._saver:
            self._saver.watch(session_id)
        return Session(session_id, self.sessions_path)

    def _restore(self, session_id: str) -> bool:
        if not self._backup:
            return False
        target = os.path.join(self.sessions_path, session_id)
        # Renamed once complete: until then no other process may use it, or take it for one without an end.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        try:
            if not self._backup.restore(session_id, unfinished):
                return False
            os.rename(unfinished, target)
        except OSError:
            # Another worker may have been faster; its directory is the one that is used.
            if not os.path.isdir(target):
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return True

    def _sessions(self) -> Iterator[Session]:
        for name in os.listdir(self.sessions_path):
            if _SESSION_ID.fullmatch(name):
                yield Session(name, self.sessions_path)

    def _remove_abandoned(self) -> None:
        for name in os.listdir(self.sessions_path):
            path = os.path.join(self.sessions_path, name)
            if name.startswith(_UNFINISHED) and time.time() - _changed(path) > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _try_to_remove(session: Session) -> None:
    try:
        session.remove()
    except ValueError:
        logging.debug("Another worker has removed session %s", session.session_id)
    except OSError as error:
        logging.warning("The expired session %s cannot be removed: %s", session.session_id, error)


def _changed(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except FileNotFoundError:  # finished just now
        return time.time()


def _make_own_directory(path: str) -> None:
    """Who can write to the directory can have this process unpickle what they like."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    status = os.stat(path)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_MAY_WRITE:
        raise ValueError(
            f"sessions_path {path} must belong to the user {os.geteuid()} and be writable for no other user: it "
            f"belongs to {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}"
        )


def _default_path() -> str:
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, "djl_sessions")
