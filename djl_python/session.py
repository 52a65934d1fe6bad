"""A client's session. Its values are on disk, and persist between requests."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from djl_python.lazy_import import require

if TYPE_CHECKING:
    import numpy as np

EXPIRATION = ".expiration_ts"  # The key whose value is the time at which the session ends, in seconds since the epoch.
PARTIAL = ".put-"  # The prefix of files whose value is still incomplete.
# Array files have their own suffix, so that they are never unpickled. An array may contain a client's bytes.
_VALUE, _ARRAY = ".value", ".array"


class Session:
    """A directory with one file for each key: `<key>.value`, or `<key>.array` for an array.

    Values are pickled, so only the handler may write to the directory. A value and an array may have the same key.
    """

    def __init__(self, session_id: str, session_root: str, expiration_ts: float | None = None) -> None:
        """Open a session.

        Args:
            session_id: The name of the session's directory.
            session_root: The directory of all sessions.
            expiration_ts: The time at which the session ends, in seconds since the epoch. By default, this time is read
                from the session's directory.
        """
        self.session_id = session_id
        self.files_path = os.path.join(session_root, session_id)
        self.expiration_ts: float | None = self._kept_expiration() if expiration_ts is None else expiration_ts

    def put(self, key: str, value: Any) -> None:
        """Store a value. Other processes see either the old value or the complete new value."""
        path = self._path(key, _VALUE)
        with tempfile.NamedTemporaryFile(dir=self.files_path, prefix=PARTIAL, delete=False) as file:
            try:
                pickle.dump(value, file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise

    def get(self, key: str, d: Any = None) -> Any:
        """Return the value of a key, or `d` if the session does not have this key."""
        try:
            with open(self._path(key, _VALUE), "rb") as file:
                return pickle.load(file)
        except FileNotFoundError:
            return d

    def get_as_numpy(
        self, key: str, shape: int | Sequence[int], dtype: Any = "float32", create: bool = False
    ) -> np.memmap[Any, Any]:
        """Return the key's array, memory-mapped from its file. Changes to the array are stored in the file.

        Raises:
            FileNotFoundError: The session does not have this array, and `create` is False.
        """
        numpy = require("numpy", "Session.get_as_numpy")
        size = tuple(shape) if isinstance(shape, Sequence) else shape
        array: np.memmap[Any, Any] = numpy.memmap(
            self._path(key, _ARRAY), dtype=dtype, mode="w+" if create else "r+", shape=size
        )
        return array

    def remove(self) -> bool:
        """Delete the session's directory.

        Raises:
            ValueError: The directory does not exist.
        """
        try:
            shutil.rmtree(self.files_path)
        except FileNotFoundError:
            raise ValueError(f"session directory does not exist: {self.session_id}") from None
        logging.info("Closed session %s", self.session_id)
        return True

    def _kept_expiration(self) -> float | None:
        try:
            expiration_ts = self.get(EXPIRATION)
            return None if expiration_ts is None else float(expiration_ts)
        except Exception as error:  # Loading a malformed pickle can raise any exception.
            logging.warning("The session %s counts as expired: cannot read its end: %r", self.session_id, error)
            return 0.0

    def _path(self, key: str, kind: str) -> str:
        name = key.replace("/", "-")
        if name in {"", ".", ".."}:
            raise ValueError(f"{key!r} cannot be the key of a session's value")
        return os.path.join(self.files_path, name + kind)
