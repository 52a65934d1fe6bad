"""`slipway blackbox`: prints the black box of a server on this machine, even if the server hangs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from container.observability.black_box import SIGNAL, ask_by_signal, box_directory, boxes_in
from container.observability.process_report import process_reports
from container.settings.server import DIRECTORY_OR_NONE

_ANSWER_SECONDS, _FILE_SECONDS = 15.0, 20.0
_POLL_SECONDS = 0.1


def blackbox(
    url: Annotated[
        str, typer.Option("--url", help="The server, or its listener for the management API.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[str | None, typer.Option("--api-key", help="A key, if the server has keys.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write it to this file.")] = None,
) -> None:
    """Print the black box of a running server: stacks, calls in flight, steps of the engine, memory, settings."""
    try:
        reply = httpx.get(
            f"{url.rstrip('/')}/server/blackbox",
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            timeout=_ANSWER_SECONDS,
            trust_env=False,  # no proxy between this machine and itself
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise typer.BadParameter(f"{url!r}: {error}; expected http://HOST:PORT", param_hint="--url") from None
    except httpx.TransportError as error:  # It hangs, or nothing listens.
        typer.echo(f"slipway: {url} does not answer ({error}); its process is asked by {SIGNAL.name}", err=True)
        data = _written_by(_listener(httpx.URL(url).port or 80))
    else:
        if reply.status_code != httpx.codes.OK:
            raise _failed(f"{url} answers {reply.status_code}: {reply.text[:500].strip()}")
        data = reply.content
    if output is None:
        sys.stdout.write(data.decode())
    else:
        output.write_bytes(data)


def _listener(port: int) -> psutil.Process:
    """Return the process that listens on a port."""
    for process in psutil.process_iter():
        try:
            found = process.net_connections("tcp")
        except psutil.Error:  # It has ended, or belongs to another user.
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found):
            return process
    raise _failed(f"no process of this user listens on port {port}")


def _written_by(process: psutil.Process) -> bytes:
    """Have a server write a box, and return it. If no thread of it runs, return the stacks alone."""
    environment = process.environ()
    given = environment.get("SERVING_BLACKBOX_DIR")
    directory = box_directory(DIRECTORY_OR_NONE.convert(given) if given else None, environment)
    before = boxes_in(directory) if directory is not None else []
    if not ask_by_signal(process.pid):
        raise _failed(f"process {process.pid} ({process.name()}) is no server of Slipway, or has just been started")
    deadline = time.monotonic() + _FILE_SECONDS
    while directory is not None and time.monotonic() < deadline:
        new = [box for box in boxes_in(directory) if box not in before and f"-{process.pid}-" in box.name]
        if new:
            typer.echo(f"slipway: the server has written {new[0]}", err=True)
            return new[0].read_bytes()
        time.sleep(_POLL_SECONDS)
    typer.echo("slipway: the server has written no black box; these are the stacks of its processes", err=True)
    return json.dumps({"processes": [report.shown() for report in process_reports(process, {})]}, indent=1).encode()


def _failed(why: str) -> typer.Exit:
    typer.echo(f"slipway: {why}", err=True)
    return typer.Exit(1)
