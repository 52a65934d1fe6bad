"""`slipway blackbox`: prints the black box of a server on this machine, even if the server hangs."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import httpx
import psutil
import typer

from container.observability.black_box import SIGNAL, ask_by_signal, box_directory, boxes_in
from container.observability.process_report import process_reports
from container.settings.server import DIRECTORY_OR_NONE

_SECONDS, _FILE_SECONDS = 15.0, 20.0  # The time limits for the HTTP reply, and for the file after the signal.
_PORTS = {"http": 80, "https": 443}
_POLL_SECONDS = 0.1


def blackbox(
    url: Annotated[
        str, typer.Option("--url", help="URL of the server, or of its listener for the management API.")
    ] = "http://127.0.0.1:8080",
    api_key: Annotated[str | None, typer.Option("--api-key", help="API key, if the server requires one.")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to which the black box is written. Default: standard output."),
    ] = None,
) -> None:
    """Print the black box of a running server: stacks, calls in flight, steps of the engine, memory, settings."""
    address = _parsed(url)
    local = _is_here(address.host)
    try:
        headers = {} if api_key is None else {b"authorization": b"Bearer " + api_key.encode()}
        # A URL of this machine is called without a proxy.
        reply = httpx.get(f"{url.rstrip('/')}/server/blackbox", headers=headers, timeout=_SECONDS, trust_env=not local)
    except httpx.TransportError as error:  # The server hangs, or no server listens.
        if not local:
            raise _failed(f"{url} does not answer ({error}); run this command on its machine") from None
        typer.echo(f"slipway: {url} does not answer ({error}); its process is asked by {SIGNAL.name}", err=True)
        data = _written_by(_listener(address.port or _PORTS[address.scheme]))
    except httpx.HTTPError as error:
        raise _failed(f"{url}: {error}") from None
    else:
        if reply.status_code != httpx.codes.OK:
            raise _failed(f"{url} answers {reply.status_code}: {reply.text[:500].strip()}")
        data = reply.content
    if output is None:
        sys.stdout.write(data.decode())
        return
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        raise _failed(f"{output} cannot be written: {error.strerror}") from None


def _parsed(url: str) -> httpx.URL:
    try:
        address = httpx.URL(url)
        wrong = "" if address.scheme in _PORTS and address.host else "it names no server"
        wrong = wrong or ("" if (address.port or 1) in range(1, 1 << 16) else "its port is too large")
    except (httpx.InvalidURL, UnicodeError) as error:
        wrong = str(error)
    if wrong:
        raise typer.BadParameter(f"{url!r}: {wrong}; expected http://HOST:PORT", param_hint="--url")
    return address


def _is_here(host: str) -> bool:
    """Return True if all addresses of a host belong to this machine."""
    own = {address.address.partition("%")[0] for card in psutil.net_if_addrs().values() for address in card}
    try:
        found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return False
    return all(one in own or ip_address(one).is_loopback or ip_address(one).is_unspecified for one in found)


def _listener(port: int) -> psutil.Process:
    """Return the process that listens on a port."""
    for process in psutil.process_iter():
        try:
            found = process.net_connections("tcp")
        except psutil.Error:  # The process has ended, or belongs to another user.
            continue
        if any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in found):
            return process
    raise _failed(f"no process of this user listens on port {port}")


def _written_by(process: psutil.Process) -> bytes:
    """Make a server write a box, and return the box. If none appears in time, return only the stacks.

    No box appears if no thread of the server can run, or if boxes have no directory.
    """
    try:
        name, environment, place = process.name(), process.environ(), Path(process.cwd())
    except psutil.Error as error:
        raise _failed(f"process {process.pid} has ended, or belongs to another user: {error}") from None
    given = environment.get("SERVING_BLACKBOX_DIR")
    directory = box_directory(DIRECTORY_OR_NONE.convert(given) if given else None, environment)
    if directory is not None:
        directory = place / directory
    before = boxes_in(directory) if directory is not None else []
    if not ask_by_signal(process.pid):
        raise _failed(f"process {process.pid} ({name}) is no server of Slipway, or has just been started")
    deadline = time.monotonic() + _FILE_SECONDS
    while directory is not None and time.monotonic() < deadline:
        new = [box for box in boxes_in(directory) if box not in before and f"-{process.pid}-" in box.name]
        if new:
            typer.echo(f"slipway: the server has written {new[0]}", err=True)
            return new[0].read_bytes()
        time.sleep(_POLL_SECONDS)
    typer.echo(
        f"slipway: no black box has come to {directory or 'a file'}; these are the stacks of the server's processes",
        err=True,
    )
    try:
        reports = process_reports(process, {})
    except psutil.Error as error:
        raise _failed(f"process {process.pid} has ended: {error}") from None
    return json.dumps({"processes": [report.shown() for report in reports]}, indent=1).encode()


def _failed(why: str) -> typer.Exit:
    typer.echo(f"slipway: {why}", err=True)
    return typer.Exit(1)
