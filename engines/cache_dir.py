"""The directory for files that can be made or downloaded again."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return SLIPWAY_CACHE_DIR, else `slipway` in the user's cache directory, else a temporary directory.

    The temporary directory is for containers without a writable home directory.
    """
    environ = os.environ if environ is None else environ
    if configured := environ.get("SLIPWAY_CACHE_DIR"):
        return Path(configured)
    base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".cache")
    directory = Path(base) / "slipway"
    if directory.is_absolute() and is_writable(directory):
        return directory
    directory = Path(tempfile.gettempdir()) / f"slipway-{os.getuid()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        # The directory may belong to another user, who could change files before they are loaded.
        if directory.lstat().st_uid == os.getuid() and directory.is_dir() and not directory.is_symlink():
            return directory
    return Path(tempfile.mkdtemp(prefix="slipway-"))


def is_writable(directory: Path) -> bool:
    """Return whether files can be created in `directory`. The directory is created if it does not exist."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            return True
    except OSError:
        return False
