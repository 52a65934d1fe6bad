"""The image's HEALTHCHECK: exits with 0 if /ping answers 200, else with 1 and the reason.

It runs every few seconds beside the model, so it imports little, and takes the port from the environment or the
container's command instead of reading the settings.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_TIMEOUT_SECONDS = 2.5
_PORT_FLAGS = ("--port", "-p")


def port_of(environ: Mapping[str, str], command: Sequence[str]) -> int:
    """The server's port: SAGEMAKER_BIND_TO_PORT, else SERVING_PORT, else that of its command line, else 8080.

    Raises:
        ValueError: it is not a number, which also keeps the server from starting.
    """
    for variable in ("SAGEMAKER_BIND_TO_PORT", "SERVING_PORT"):
        if text := environ.get(variable, "").strip():
            return int(text)
    for index, word in enumerate(command):
        if word in _PORT_FLAGS and index + 1 < len(command):
            return int(command[index + 1])
        if word.startswith("--port="):
            return int(word.removeprefix("--port="))
    return 8080


def check(port: int) -> str:
    """The empty string if /ping answers 200, else what is wrong."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)
    try:
        connection.request("GET", "/ping")
        answer = connection.getresponse()
        body = answer.read(1000).decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        return f"port {port}: {error or type(error).__name__}"
    finally:
        connection.close()
    return "" if answer.status == 200 else f"/ping on port {port} answers {answer.status}: {body}"


def _command() -> list[str]:
    """The command line of the container's first process."""
    try:
        return Path("/proc/1/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def main() -> int:
    """Check this container's server; returns the exit code."""
    try:
        problem = check(port_of(os.environ, _command()))
    except ValueError as error:
        problem = f"the port is not a number: {error}"
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
