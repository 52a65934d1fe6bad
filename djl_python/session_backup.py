"""Sessions in S3, by the command line tool that is installed: `s5cmd` or `aws`."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import subprocess
import threading

from djl_python.session import PARTIAL

_TIMEOUT_S = 600
_INTERVAL_S = 3.0
_NOTHING_THERE = "no object found"
"""What s5cmd says of a pattern that fits nothing."""
_Stamp = frozenset[tuple[str, int, int]]


class SessionBackup:
    """Copies session directories to a place in S3 and back."""

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
        # s5cmd takes a pattern for what is in a directory, aws the directory.
        self._everything = "/*" if s5cmd else "/"

    def save(self, sessions_path: str, session_id: str) -> bool:
        """Copies one session there. A failure is logged."""
        source = os.path.join(sessions_path, session_id) + self._everything
        return self._run(self._sync, source, f"{self._url}/{session_id}/")

    def restore(self, session_id: str, directory: str) -> bool:
        """Copies one session into a directory. Whether it was there; a failure is logged."""
        copied = self._run(self._sync, f"{self._url}/{session_id}{self._everything}", directory + "/")
        return copied and bool(os.listdir(directory))

    def delete(self, session_id: str) -> bool:
        """Deletes one session there, if it is there. A failure is logged."""
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
    """Saves the sessions that this process uses, in the background, soon after they have changed.

    The server gives a worker a few seconds to end, in which many sessions could not be copied. What has changed since
    the last look is saved when the process ends.
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
        """Saves the session from now on, until its directory is gone."""
        self._saved.setdefault(session_id, frozenset())

    def delete(self, session_id: str) -> None:
        """Deletes what has been saved of a session, so that it cannot be restored once it is closed."""
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
            # The last look comes after the end has been announced.
            ended = self._ends.wait(self._interval_s)
            for session_id in list(self._saved):
                self._save(session_id)

    def _save(self, session_id: str) -> None:
        with self._saving:
            if session_id not in self._saved:  # closed meanwhile
                return
            try:
                # Taken before the copy: what changes during it is copied again.
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
