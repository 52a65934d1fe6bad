"""A home directory for the libraries below, which keep caches and settings in it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from handlers.cache_dir import cache_dir, is_writable

logger = logging.getLogger(__name__)


def ensure_home() -> None:
    """Point HOME at a directory that can be written, where it is missing, or a read-only file system."""
    home = os.environ.get("HOME") or os.path.expanduser("~")
    if os.path.isabs(home) and is_writable(Path(home)):
        return
    instead = cache_dir() / "home"
    instead.mkdir(parents=True, exist_ok=True)
    logger.warning("HOME is %s, which cannot be written; using %s", home, instead)
    os.environ["HOME"] = str(instead)
