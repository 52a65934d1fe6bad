"""Manages the sessions that clients create, use and close, and the copies of sessions in S3.

All state is on disk, because several worker processes share the directory.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from djl_python.lazy_import import require
from djl_python.session import EXPIRATION, PARTIAL, Session

NEW_SESSION = "NEW_SESSION"  # The session id that a client without a session sends.
_DEFAULT_EXPIRATION_S = 1200
_UNFINISHED = ".new-"
_ABANDONED_S = 3600  # An unfinished directory that is older than this belongs to a process that was killed.
_OTHERS_MAY_WRITE = 0o022
# A session id comes from the client and becomes the name of a directory.
_SESSION_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INTERVAL_S = 3.0
_Files = dict[str, tuple[int, int]]

__all__ = ["NEW_SESSION", "Session", "SessionManager"]


class SessionManager:
    """All sessions under one directory."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        """Create the directory of the sessions if it does not exist.

        Args:
            properties: `sessions_path`, `sessions_expiration` in seconds (default 1200), and `sessions_s3url`.

        Raises:
            ValueError: The expiration is not a number, `sessions_s3url` does not name a bucket, or another user can
                write to the directory.
            ImportError: `sessions_s3url` is set, and boto3 is not installed.
        """
        self.expiration = int(properties.get("sessions_expiration") or _DEFAULT_EXPIRATION_S)
        self.sessions_path = str(properties.get("sessions_path") or _default_path())
        self.sessions_s3url: str | None = properties.get("sessions_s3url") or None
        self.make_directory()
        self._backup = SessionBackup(self.sessions_s3url, self.sessions_path) if self.sessions_s3url else None

    def make_directory(self) -> None:
        """Create `sessions_path` if it does not exist. A server that stops removes this directory if it is empty.

        Raises:
            ValueError: Another user can write to the directory, whose files are unpickled.
        """
        path = self.sessions_path
        os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.stat(path)
        if status.st_uid != os.geteuid() or status.st_mode & _OTHERS_MAY_WRITE:
            raise ValueError(
                f"sessions_path {path} must belong to the user {os.geteuid()} and be writable for no other user: it "
                f"belongs to {status.st_uid} and has mode {stat.S_IMODE(status.st_mode):o}"
            )

    def create_session(self) -> Session:
        """Create a session. Remove expired sessions."""
        self.make_directory()
        self.remove_expired()
        session_id, ends = str(uuid.uuid4()), time.time() + self.expiration
        # The directory gets its final name when it is complete. So no other process sees a session without its
        # expiration.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        Session(os.path.basename(unfinished), self.sessions_path, ends).put(EXPIRATION, ends)
        os.rename(unfinished, os.path.join(self.sessions_path, session_id))
        if self._backup:
            self._backup.watch(session_id)
        return Session(session_id, self.sessions_path, ends)

    def get_session(self, session_id: str | None) -> Session | None:
        """Return a session. Return None if it has expired, or if there is no id yet (empty or `NEW_SESSION`).

        Raises:
            ValueError: The session does not exist.
        """
        if not session_id or session_id == NEW_SESSION:
            return None
        session = self._find(session_id)
        return None if session.expiration_ts is not None and time.time() > session.expiration_ts else session

    def close_session(self, session_id: str | None) -> None:
        """Delete a session and its copy in S3.

        Raises:
            ValueError: The session does not exist.
        """
        if not session_id:
            raise ValueError(f"invalid session_id: {session_id}")
        session = self._find(session_id)
        if self._backup:
            self._backup.delete(session_id)
        session.remove()

    def remove_expired(self) -> None:
        """Remove expired sessions, and the unfinished directories of killed processes."""
        with os.scandir(self.sessions_path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # Another worker has renamed or removed the directory.
                    if self._is_over(entry):
                        shutil.rmtree(entry, ignore_errors=True)

    def close(self) -> None:
        """Save changed sessions to S3, and end the background thread. This may take minutes."""
        if self._backup:
            self._backup.close()

    def _find(self, session_id: str) -> Session:
        if not _SESSION_ID.fullmatch(session_id):
            raise ValueError(f"session not found: {session_id}")
        known = os.path.isdir(os.path.join(self.sessions_path, session_id))
        if not known and not self._restore(session_id):
            raise ValueError(f"session not found: {session_id}")
        if self._backup:
            self._backup.watch(session_id)
        return Session(session_id, self.sessions_path)

    def _restore(self, session_id: str) -> bool:
        if not self._backup:
            return False
        target = os.path.join(self.sessions_path, session_id)
        # The directory gets its final name when it is complete. So no other process sees a partial session.
        unfinished = tempfile.mkdtemp(prefix=_UNFINISHED, dir=self.sessions_path)
        try:
            if not self._backup.restore(session_id, unfinished):
                return False
            os.rename(unfinished, target)
        except OSError:
            # Another worker may have restored the session first. In that case, its directory is used.
            if not os.path.isdir(target):
                raise
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return True

    def _is_over(self, entry: os.DirEntry[str]) -> bool:
        if entry.name.startswith(_UNFINISHED):
            return time.time() - entry.stat().st_mtime > _ABANDONED_S
        if not _SESSION_ID.fullmatch(entry.name):
            return False
        ends = Session(entry.name, self.sessions_path).expiration_ts
        return ends is None or time.time() > ends


def _default_path() -> str:
    root = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return os.path.join(root, "djl_sessions")


class SessionBackup:
    """A thread that copies the sessions of this process to S3 soon after they change.

    A process that is told to stop has only a few seconds. That is too short to copy many sessions. Because of the
    earlier copies, only the latest changes are left to save.
    """

    def __init__(self, url: str, sessions_path: str, interval_s: float = _INTERVAL_S) -> None:
        """Start the thread.

        Args:
            url: The bucket and the prefix for the copies, `s3://<bucket>/<prefix>`.
            sessions_path: The directory of all sessions.
            interval_s: The seconds between two checks for changes.

        Raises:
            ValueError: The URL does not name a bucket.
            ImportError: Boto3 is not installed.
        """
        self._bucket, _, prefix = url.removeprefix("s3://").strip("/").partition("/")
        if not self._bucket or not url.startswith("s3://"):
            raise ValueError(f"sessions_s3url must be s3://<bucket>/<prefix>, not {url!r}")
        self._prefix = f"{prefix}/" if prefix else ""
        # SageMaker sets AWS_REGION, which boto3 does not read.
        self._client = require("boto3", "sessions_s3url").client("s3", region_name=os.environ.get("AWS_REGION"))
        self._sessions_path, self._interval_s = sessions_path, interval_s
        self._saved: dict[str, _Files] = {}
        self._saving = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="session-saver", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def watch(self, session_id: str) -> None:
        """From now on, copy the session to S3 when it changes, until its directory is removed."""
        self._saved.setdefault(session_id, {})

    def restore(self, session_id: str, directory: str) -> bool:
        """Copy a session from S3 to a directory. Return True if the session is in S3. Failures are logged."""
        try:
            for key in self._keys(session_id):
                self._client.download_file(self._bucket, key, os.path.join(directory, os.path.basename(key)))
        except Exception as error:  # botocore raises many types of exceptions.
            logging.warning("Session %s cannot be restored from S3: %s", session_id, error)
            return False
        return bool(os.listdir(directory))

    def delete(self, session_id: str) -> None:
        """Delete the copy of a closed session, so that it cannot be restored. Failures are logged."""
        with self._saving:
            self._saved.pop(session_id, None)
            try:
                for key in self._keys(session_id):
                    self._client.delete_object(Bucket=self._bucket, Key=key)
            except Exception as error:
                logging.warning("Session %s cannot be deleted in S3: %s", session_id, error)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._ends.set()
        self._thread.join()

    def save(self, path: str) -> None:
        """Copy one file of a session to S3.

        Raises:
            OSError: The file cannot be read.
            Exception: The upload failed. botocore raises many types of exceptions.
        """
        with open(path, "rb") as file:
            # `upload_file` starts threads, but a process that is exiting cannot start threads.
            key = self._prefix + os.path.relpath(path, self._sessions_path)
            self._client.put_object(Bucket=self._bucket, Key=key, Body=file)

    def _keys(self, session_id: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}{session_id}/"
        )
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def _watch(self) -> None:
        ended = False
        while not ended:
            # The loop runs once more after `close` has set the event.
            ended = self._ends.wait(self._interval_s)
            for session_id in list(self._saved):
                self._save_changes(session_id)

    def _save_changes(self, session_id: str) -> None:
        directory = os.path.join(self._sessions_path, session_id)
        with self._saving:
            if not os.path.isdir(directory):
                self._saved.pop(session_id, None)
            saved = self._saved.get(session_id)
            if saved is None:  # The session has been closed or removed.
                return
            try:
                # The states of the files are read before copying. So changes that are made during the copy are copied
                # the next time.
                files = _files(directory)
                for name in files:
                    if files[name] != saved.get(name):
                        self.save(os.path.join(directory, name))
            except Exception as error:  # An OSError, or one of botocore's many types of exceptions.
                logging.warning("Session %s cannot be saved to S3: %s", session_id, error)
            else:
                self._saved[session_id] = files


def _files(directory: str) -> _Files:
    with os.scandir(directory) as entries:
        states = ((entry.name, entry.stat()) for entry in entries if not entry.name.startswith(PARTIAL))
        return {name: (state.st_size, state.st_mtime_ns) for name, state in states}
