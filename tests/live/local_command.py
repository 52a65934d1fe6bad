"""`slipway local` as a process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.live.server import free_port


@contextlib.contextmanager
def local_command(
    directory: Path, *arguments: str, environment: dict[str, str] | None = None
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The URL and the process, once it answers at all; its log is `local.log` in the directory."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "deploy", "local", "--port", str(port), *arguments]
    log = directory / "local.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | (environment or {}))
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/ping")
                break
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)
