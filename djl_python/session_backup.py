"""Sessions in S3, by the command line tool that is installed: `s5cmd` or `aws`."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess

_TIMEOUT_S = 600


class SessionBackup:
    """Copies session directories to a place in S3 and back."""

    def __init__(self, url: str) -> None:
        """Raises ValueError if neither tool is installed."""
        self._url = url.rstrip("/")
        s5cmd, aws = shutil.which("s5cmd"), shutil.which("aws")
        if not s5cmd and not aws:
            raise ValueError("sessions_s3url needs s5cmd or aws on the PATH")
        self._command = [s5cmd, "--retry-count", "1", "sync"] if s5cmd else [aws, "s3", "sync", "--only-show-errors"]
        # s5cmd takes a pattern for what is in a directory, aws the directory.
        self._everything = "/*" if s5cmd else ""

    def save(self, sessions_path: str) -> bool:
        """Copies all sessions there. A failure is logged: this runs when the process ends."""
        return self._sync(sessions_path + self._everything, f"{self._url}/")

    def restore(self, sessions_path: str, session_id: str) -> bool:
        """Copies one session back. Whether it was there."""
        target = os.path.join(sessions_path, session_id)
        os.makedirs(target, mode=0o700)
        fetched = self._sync(f"{self._url}/{session_id}{self._everything}", target + "/") and bool(os.listdir(target))
        if not fetched:
            shutil.rmtree(target)
        return fetched

    def _sync(self, source: str, target: str) -> bool:
        command = [part for part in self._command if part]
        try:
            done = subprocess.run([*command, source, target], capture_output=True, text=True, timeout=_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            logging.warning("Copying sessions from %s to %s failed: %s", source, target, error)
            return False
        if done.returncode:
            logging.warning("Copying sessions from %s to %s failed: %s", source, target, done.stderr.strip())
        return done.returncode == 0
