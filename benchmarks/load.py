"""A load client that is not the bottleneck: one asyncio protocol per connection, no task and no parsing per token.

It makes the same request over and over on keep-alive connections. Run it as a process of its own, so that it does not
share an event loop with what it measures:

    python -m benchmarks.load --url http://127.0.0.1:8080/invocations --concurrency 32 --seconds 5 \\
        --body '{"inputs": "Tell me", "parameters": {"max_new_tokens": 64}, "stream": true}' \\
        --marker '"token": {' --end-marker '"generated_text"' --tokens 64 --exact-records
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
from typing import cast
from urllib.parse import urlsplit

import msgspec
import uvloop

from benchmarks.figures import Figures, Tally, Waves, clock
from benchmarks.response import ResponseError, ResponseReader
from container.server import allow_open_files

CONNECT_TIMEOUT_S = 10.0
SHOWN_ERROR_BYTES = 200


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What to send, for how long, and how to tell a complete answer."""

    url: str
    body: str
    concurrency: int = 1
    seconds: float = 5.0
    """No new wave of requests starts after this; those under way finish."""
    timeout: float = 120.0
    """After this the run ends, and what is unfinished is an error."""
    tokens: int = 1
    """How many tokens a complete answer has."""
    marker: str = ""
    """Occurs once in each streamed record."""
    end_marker: str = ""
    """Must occur in the end of the body."""
    exact_records: bool = False
    """A complete answer has exactly as many records as tokens."""

    def request_bytes(self) -> bytes:
        url = urlsplit(self.url)
        body = self.body.encode()
        head = (
            f"POST {url.path or '/'} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


class Load:
    """One run: its connections, and when each may send."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.request = spec.request_bytes()
        self.marker = spec.marker.encode()
        self.tally = Tally()
        self._end_marker = spec.end_marker.encode()
        self._waves = Waves(spec.seconds)
        self._made: dict[int, int] = {}
        self._clients: dict[int, Client] = {}
        self._idle = asyncio.Event()

    async def run(self) -> Figures:
        clients = await asyncio.gather(*(self._connect(number) for number in range(self.spec.concurrency)))
        self.tally = Tally()
        self._waves = Waves(self.spec.seconds)
        self._clients = {client.number: client for client in clients if client}
        for client in clients:
            if client:
                self.go_on(client)
            else:
                self.tally.failed("connection refused or timed out")
        try:
            await asyncio.wait_for(self._all_left(), self.spec.timeout)
        except TimeoutError:
            for client in list(self._clients.values()):
                client.give_up(f"unfinished after {self.spec.timeout:g} s")
        return self.tally.figures()

    def go_on(self, client: Client) -> None:
        """Send the client's next request, or let it go."""
        made = self._made.get(client.number, 0)
        if self._waves.admits(made):
            self._made[client.number] = made + 1
            client.send()
        else:
            client.close()

    def answered(self, client: Client, answer: ResponseReader, first_s: float, total_s: float) -> None:
        if wrong := self._what_is_wrong(answer):
            self.tally.failed(wrong)
        else:
            records = answer.markers
            self.tally.answered(tokens=self.spec.tokens, records=records, first_s=first_s, total_s=total_s)
        if answer.keep_alive:
            self.go_on(client)
        else:
            client.close(reopen=True)

    def left(self, client: Client, *, reopen: bool) -> None:
        """The client's connection is closed."""
        if reopen and self._waves.admits(self._made.get(client.number, 0)):
            client.reopening = asyncio.get_running_loop().create_task(self._reopen(client.number))
            return
        self._clients.pop(client.number, None)
        if not self._clients:
            self._idle.set()

    def _what_is_wrong(self, answer: ResponseReader) -> str | None:
        if answer.status != 200:
            return f"status {answer.status}: {answer.tail[:SHOWN_ERROR_BYTES].decode(errors='replace')}"
        if self._end_marker not in answer.tail:
            return f"incomplete answer, ending in: {answer.tail[-SHOWN_ERROR_BYTES:].decode(errors='replace')}"
        if self.spec.exact_records and answer.markers != self.spec.tokens:
            return f"{answer.markers} records instead of {self.spec.tokens}"
        return None

    async def _all_left(self) -> None:
        if self._clients:
            await self._idle.wait()

    async def _connect(self, number: int) -> Client | None:
        url = urlsplit(self.spec.url)
        loop = asyncio.get_running_loop()
        connecting = loop.create_connection(lambda: Client(self, number), url.hostname or "", url.port or 80)
        try:
            return (await asyncio.wait_for(connecting, CONNECT_TIMEOUT_S))[1]
        except (OSError, TimeoutError):
            return None

    async def _reopen(self, number: int) -> None:
        if client := await self._connect(number):
            self._clients[number] = client
            self.go_on(client)
        else:
            self.tally.failed("connection refused or timed out")
            self.left(self._clients[number], reopen=False)


class Client(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, load: Load, number: int) -> None:
        self.number = number
        self.reopening: asyncio.Task[None] | None = None
        self._load = load
        self._transport: asyncio.WriteTransport | None = None
        self._answer: ResponseReader | None = None
        self._reopen = False
        self._sent = 0.0
        self._first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self) -> None:
        assert self._transport
        self._answer = ResponseReader(self._load.marker)
        self._first = 0.0
        self._sent = clock()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.give_up("bytes that no request asked for")
            return
        try:
            answer.feed(data)
        except ResponseError as error:
            self.give_up(str(error))
            return
        if not self._first and answer.body_bytes:
            self._first = clock()
        if answer.complete:
            now = clock()
            self._answer = None
            self._load.answered(self, answer, (self._first or now) - self._sent, now - self._sent)

    def close(self, *, reopen: bool = False) -> None:
        self._reopen = reopen
        if self._transport:
            self._transport.close()

    def give_up(self, reason: str) -> None:
        self._answer = None
        self._load.tally.failed(reason)
        if self._transport:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer = None
            self._load.tally.failed("connection closed before the answer was complete")
        self._load.left(self, reopen=self._reopen)


def run(spec: LoadSpec) -> Figures:
    """Make the load from this process."""
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Load(spec).run())


def take_precedence() -> bool:
    """Run this process as soon as it has anything to do, as a client on a machine of its own would; needs privileges.

    Otherwise, on few cores, an engine that polls can keep the client waiting for a whole answer, and times to the
    first byte say nothing.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):  # not Linux, or not allowed
        return False
    return True


def command(spec: LoadSpec) -> list[str]:
    """The command line that makes this load from a process of its own."""
    argv = [sys.executable, "-m", "benchmarks.load"]
    for name, value in msgspec.structs.asdict(spec).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv += [option] if value else []
        else:
            argv += [f"{option}={value}"]
    return argv


def _parse(argv: list[str] | None) -> LoadSpec:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for spec_field in msgspec.structs.fields(LoadSpec):
        option = "--" + spec_field.name.replace("_", "-")
        if spec_field.type is bool:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, required=spec_field.required, default=spec_field.default)
    return msgspec.convert(vars(parser.parse_args(argv)), LoadSpec, strict=False)


def main(argv: list[str] | None = None) -> None:
    """Print the run's figures as one line of JSON."""
    spec = _parse(argv)
    allow_open_files()
    real_time = take_precedence()
    figures = msgspec.structs.replace(run(spec), client_real_time=real_time)
    print(msgspec.json.encode(figures).decode())


if __name__ == "__main__":
    main()
