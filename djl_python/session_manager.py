"""Sessions that clients create, use and close, and their copies in S3.

The disk has the only state: several worker processes share the directory.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from djl_python.session import EXPIRATION, PARTIAL, Session

NEW_SESSION = "NEW_SESSION"
"""The session id that a client without a session sends."""
_DEFAULT_EXPIRATION_S = 1200
_UNFINISHED = ".new-"
_ABANDONED_S = 3600
"""Age at which an unfinished directory is taken to belong to a process that was killed."""
_OTHERS_MAY_WRITE = 0o022
# A session id comes from the client and becomes the name of a directory.
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TIMEOUT_S = 600
_INTERVAL_S = 3.0
_NOTHING_THERE = "no object found"
"""s5cmd's message for a pattern that matches nothing."""
_Stamp = frozenset[tuple[str, int, int]]

__all__ = ["NEW_SESSION", "Session", "SessionManager"]


class SessionManager:
    """All sessions under one directory."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """Takes `sessions_path`, `sessions_expiration` (seconds, 1200) and `sessions_s3url`.

        Raises:
            ValueError: the expiration is no number, there is no tool for S3, or another user can write to the
                directory.
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
        # Renamed once complete, so that no other process sees it without its expiration.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        Session(os.path.basename(unfinished), self.sessions_path, ends).put(EXPIRATION, ends)
        os.rename(unfinished, os.path.join(self.sessions_path, session_id))
        if self._saver:
            self._saver.watch(session_id)
        return Session(session_id, self.sessions_path, ends)

    def get_session(self, session_id: str | None) -> Session | None:
        """A session; None for no id, for `NEW_SESSION`, and for a session that has expired.

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
        """Removes expired sessions, and what killed processes have left behind."""
        self._remove_abandoned()
        for session in self._sessions():
            if session.expiration_ts is None or time.time() > session.expiration_ts:
                _try_to_remove(session)

    def close(self) -> None:
        """Saves changed sessions to S3, and ends the background thread. May take minutes."""
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
        # Renamed once complete, so that no other process sees a part of it.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        try:
            if not self._backup.restore(session_id, unfinished):
                return False
            os.rename(unfinished, target)
        except OSError:
            # Another worker may have been faster; then its directory is used.
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
    """Make the directory, and check that nobody else can write to it: what is written there is unpickled."""
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


class SessionBackup:
    """Copies session directories to S3 and back, with the command line tool that is installed: `s5cmd` or `aws`."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if neither tool is installed."""
        self._url = url.rstrip("/")
        s5cmd, aws = shutil.which("s5cmd"), shutil.which("aws")
        if not s5cmd and not aws:
            raise ValueError("sessions_s3url needs s5cmd or aws on the PATH")
        tool = [s5cmd, "--retry-count", "1"] if s5cmd else [aws, "s3"]
        quiet = [] if s5cmd else ["--only-show-errors"]
        self._sync = [part for part in (*tool, "sync", *quiet) if part]
        self._rm = [part for part in (*tool, "rm", *quiet, *([] if s5cmd else ["--recursive"])) if part]
        # For the contents of a directory s5cmd takes a pattern, aws the directory.
        self._everything = "/*" if s5cmd else "/"

    def save(self, sessions_path: str, session_id: str) -> bool:
        """Copies one session to S3. A failure is logged."""
        source = os.path.join(sessions_path, session_id) + self._everything
        return self._run(self._sync, source, f"{self._url}/{session_id}/")

    def restore(self, session_id: str, directory: str) -> bool:
        """Copies one session from S3 into a directory; whether it was there. A failure is logged."""
        copied = self._run(self._sync, f"{self._url}/{session_id}{self._everything}", directory + "/")
        return copied and bool(os.listdir(directory))

    def delete(self, session_id: str) -> bool:
        """Deletes one session in S3, if it is there. A failure is logged."""
        return self._run(self._rm, f"{self._url}/{session_id}{self._everything}")

    def _run(self, command: list[str], *paths: str) -> bool:
        what = f"{os.path.basename(command[0])} {' '.join(paths)}"
        try:
            done = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            logging.warning("Sessions in S3: %s failed: %s", what, error)
            return False
        if done.returncode and _NOTHING_THERE not in done.stderr:
            logging.warning("Sessions in S3: %s failed: %s", what, done.stderr.strip())
        return done.returncode == 0


class SessionSaver:
    """Saves the sessions that this process uses, in a thread, soon after they have changed.

    At its end a process has only a few seconds, too few to copy many sessions; so only the last changes are saved then.
    """

    def __init__(self, backup: SessionBackup, sessions_path: str, interval_s: float = _INTERVAL_S) -> None:
        self._backup, self._sessions_path, self._interval_s = backup, sessions_path, interval_s
        self._saved: dict[str, _Stamp] = {}
        self._saving = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="session-saver", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def watch(self, session_id: str) -> None:
        """Saves the session from now on, until its directory is removed."""
        self._saved.setdefault(session_id, frozenset())

    def delete(self, session_id: str) -> None:
        """Deletes the copy of a session, so that it cannot be restored once it is closed."""
        with self._saving:
            self._saved.pop(session_id, None)
            self._backup.delete(session_id)

    def close(self) -> None:
        """Saves what has changed, and ends."""
        atexit.unregister(self.close)
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        ended = False
        while not ended:
            # One more round after `close` has set the event.
            ended = self._ends.wait(self._interval_s)
            for session_id in list(self._saved):
                self._save(session_id)

    def _save(self, session_id: str) -> None:
        with self._saving:
            if session_id not in self._saved:  # closed meanwhile
                return
            try:
                # Taken before the copy, so that changes during the copy are copied next time.
                stamp = _stamp(os.path.join(self._sessions_path, session_id))
            except FileNotFoundError:
                del self._saved[session_id]
                return
            except OSError as error:
                logging.warning("Session %s cannot be saved: %s", session_id, error)
                return
            if stamp != self._saved[session_id] and self._backup.save(self._sessions_path, session_id):
                self._saved[session_id] = stamp


def _stamp(directory: str) -> _Stamp:
    """Names, sizes and times of change of the files of a session."""
    with os.scandir(directory) as entries:
        states = ((entry.name, entry.stat()) for entry in entries if not entry.name.startswith(PARTIAL))
        return frozenset((name, state.st_size, state.st_mtime_ns) for name, state in states)
