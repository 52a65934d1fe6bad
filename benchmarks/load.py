"""The load client: repeats one request on keep-alive connections, with an asyncio protocol for each.

The client is fast enough not to be the bottleneck: it creates no task for a token, and does not parse the token's
record. Run it as a separate process, so that it does not share an event loop with the server:

    python -m benchmarks.load --url http://127.0.0.1:8080/invocations --concurrency 32 --seconds 5 \\
        --body '{"inputs": "Tell me", "parameters": {"max_new_tokens": 64}, "stream": true}' \\
        --marker '"token": {' --end-marker '"generated_text"' --tokens 64 --exact-records
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import math
import os
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop

from container.server import allow_open_files

CONNECT_TIMEOUT_S = 10.0
SHOWN_ERROR_BYTES = 200
TAIL_BYTES = 1024
_REFUSALS = (429, 503)

clock = time.perf_counter


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a load run, over HTTP or on the bare engine. Times are measured by the client."""

    requests: int  # Complete and correct answers.
    errors: int
    error_kinds: dict[str, int]  # The number of errors, by message.
    tokens: int  # The tokens of complete answers.
    records: int  # Streamed records. There are fewer than `tokens` if the server merged several tokens into one record.
    wall_s: float
    # The time from the start of the request to the first byte of the body. Without HTTP, it ends with the engine's
    # first output.
    first_p50_ms: float
    first_p99_ms: float
    total_p50_ms: float
    total_p99_ms: float
    # The time between two records of a stream, or between two outputs of the engine. Records that are read together
    # count as one.
    gap_p50_ms: float
    gap_p99_ms: float
    client_cpu_s: float  # The CPU time of the process that generates the load.
    # The number of replies with status 429 or 503 if clients retry (`LoadSpec.come_again`). They are not errors.
    refused: int = 0
    refused_p50_ms: float = math.nan
    refused_p99_ms: float = math.nan
    client_real_time: bool = False  # Whether the client had real-time priority. See `take_precedence`.


class Tally:
    """Collects the answers of one load run."""

    def __init__(self) -> None:
        self._tokens = 0
        self._records = 0
        self._errors: Counter[str] = Counter()
        self._first: list[float] = []
        self._total: list[float] = []
        self._gaps = array("d")
        self._refused: list[float] = []
        self._cpu_started = time.process_time()
        self._started = clock()

    def answered(self, *, tokens: int, records: int, first_s: float, total_s: float) -> None:
        self._tokens += tokens
        self._records += records
        self._first.append(first_s)
        self._total.append(total_s)

    def gap(self, seconds: float) -> None:
        self._gaps.append(seconds)

    def refused(self, total_s: float) -> None:
        self._refused.append(total_s)

    def failed(self, error: str) -> None:
        self._errors[error] += 1

    def figures(self) -> Figures:
        return Figures(
            requests=len(self._total),
            errors=self._errors.total(),
            error_kinds=dict(self._errors),
            tokens=self._tokens,
            records=self._records,
            wall_s=clock() - self._started,
            first_p50_ms=1000 * percentile(self._first, 0.5),
            first_p99_ms=1000 * percentile(self._first, 0.99),
            total_p50_ms=1000 * percentile(self._total, 0.5),
            total_p99_ms=1000 * percentile(self._total, 0.99),
            gap_p50_ms=1000 * percentile(self._gaps, 0.5),
            gap_p99_ms=1000 * percentile(self._gaps, 0.99),
            refused=len(self._refused),
            refused_p50_ms=1000 * percentile(self._refused, 0.5),
            refused_p99_ms=1000 * percentile(self._refused, 0.99),
            client_cpu_s=time.process_time() - self._cpu_started,
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile. Without values, return 0."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Waves:
    """Makes all clients send the same number of requests, as many as the time allows.

    In a wave, each client sends one request. If time is left, the first client that is ready for its next request opens
    the next wave, and all other clients join it. So the number of concurrent requests stays the same until nearly the
    end of the run.
    """

    def __init__(self, seconds: float, *, together: bool = True) -> None:
        """Start the clock.

        Args:
            seconds: The time in which waves may be opened.
            together: If False, each client sends as many requests as it can, without waves.
        """
        self.deadline = clock() + seconds
        self._opened = 1
        self._together = together

    def admits(self, made: int) -> bool:
        """Return True if a client may send another request after `made` requests."""
        if self._together and made < self._opened:
            return True
        if clock() >= self.deadline:
            return False
        self._opened = made + 1
        return True


class ResponseError(Exception):
    """The server's bytes are not one well-formed response."""


class ResponseReader:
    """Parses one HTTP/1.1 response: counts the marker in the body, and keeps the end of the body."""

    def __init__(self, marker: bytes = b"") -> None:
        self.status = 0
        self.keep_alive = True
        self.retry_after = 0  # The header's value, in seconds.
        self.body_bytes = 0
        self.markers = 0  # The number of markers in the body so far.
        self.tail = b""  # The last `TAIL_BYTES` of the body.
        self.complete = False
        self._marker = marker
        self._overlap = len(marker) - 1
        self._delimited = False
        self._pieces: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, data: bytes) -> None:
        """Parse the next bytes.

        Raises:
            ResponseError: The bytes are not part of this response.
        """
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ResponseError(str(error)) from error
        if not self._pieces:
            return
        body = b"".join(self._pieces)
        self._pieces.clear()
        self.body_bytes += len(body)
        if self._marker:
            # The overlap is shorter than a marker, so no marker is counted twice.
            before = self.tail[-self._overlap :] if self._overlap else b""
            self.markers += (before + body).count(self._marker)
        self.tail = (self.tail + body)[-TAIL_BYTES:]

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._delimited |= name in (b"content-length", b"transfer-encoding")
        if name == b"retry-after":
            self.retry_after = int(value)

    def on_headers_complete(self) -> None:
        if not self._delimited:
            raise ResponseError("neither Content-Length nor chunked")
        self.status = self._parser.get_status_code()
        self.keep_alive = self._parser.should_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class LoadSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of a load run, the duration of the run, and the criteria for a complete answer."""

    url: str
    body: str  # One or several bodies, one per line. Each request uses a random body.
    concurrency: int = 1
    seconds: float = 5.0  # No wave starts after this time. Running requests finish.
    timeout: float = 120.0  # The run ends after this time. Unfinished requests are errors.
    tokens: int = 1  # The number of tokens in a complete answer. If there are several bodies, this is the mean.
    marker: str = ""  # A text that occurs once in each streamed record.
    end_marker: str = ""  # A text that occurs at the end of the body.
    exact_records: bool = False  # A complete answer has exactly as many records as tokens.
    # Whether a client retries if a full queue refuses its request. Before the retry, it waits for the time in
    # Retry-After, and up to a quarter longer. Clients that retry do not send in waves. If this is False, a refusal is
    # an error.
    come_again: bool = False

    def requests(self) -> list[bytes]:
        """Return complete HTTP requests, one for each body."""
        url = urlsplit(self.url)
        head = f"POST {url.path or '/'} HTTP/1.1\r\nHost: {url.netloc}\r\nContent-Type: application/json\r\n"
        bodies = [line.encode() for line in self.body.split("\n")]
        return [f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body for body in bodies]


class Load:
    """One load run: opens the connections, and tells each client when to send its next request."""

    def __init__(self, spec: LoadSpec) -> None:
        self.spec = spec
        self.requests = spec.requests()
        self.marker = spec.marker.encode()
        self.tally = Tally()
        self._end_marker = spec.end_marker.encode()
        self._waves = Waves(spec.seconds, together=not spec.come_again)
        self._made: Counter[int] = Counter()
        self._clients: dict[int, Client] = {}
        self._idle = asyncio.Event()

    async def run(self) -> Figures:
        clients = await asyncio.gather(*(self._connect(number) for number in range(self.spec.concurrency)))
        self.tally = Tally()
        self._waves = Waves(self.spec.seconds, together=not self.spec.come_again)
        self._clients = {client.number: client for client in clients if client}
        for client in clients:
            if client:
                self._continue(client)
            else:
                self.tally.failed("connection refused or timed out")
        try:
            if self._clients:
                await asyncio.wait_for(self._idle.wait(), self.spec.timeout)
        except TimeoutError:
            for client in list(self._clients.values()):
                client.give_up(f"unfinished after {self.spec.timeout:g} s")
        return self.tally.figures()

    def answered(self, client: Client, answer: ResponseReader, first_s: float, total_s: float) -> None:
        """Count an answer that a client has read."""
        if self.spec.come_again and answer.status in _REFUSALS:
            self.tally.refused(total_s)
            pause = answer.retry_after * random.uniform(1.0, 1.25)
            if clock() + pause >= self._waves.deadline:  # The run would end before the retry.
                client.close()
                return
            asyncio.get_running_loop().call_later(pause, self._go_on, client, answer.keep_alive)
            return
        if error := self._error(answer):
            self.tally.failed(error)
        else:
            records = answer.markers
            self.tally.answered(tokens=self.spec.tokens, records=records, first_s=first_s, total_s=total_s)
        self._go_on(client, answer.keep_alive)

    def left(self, client: Client, *, reopen: bool) -> None:
        """Handle the end of a client's connection."""
        if reopen and self._waves.admits(self._made[client.number]):
            client.reopening = asyncio.get_running_loop().create_task(self._reopen(client.number))
            return
        self._clients.pop(client.number, None)
        if not self._clients:
            self._idle.set()

    def _go_on(self, client: Client, keep_alive: bool) -> None:
        if keep_alive:
            self._continue(client)
        else:
            client.close(reopen=True)

    def _continue(self, client: Client) -> None:
        """Send the client's next request, or close its connection."""
        if self._waves.admits(self._made[client.number]):
            self._made[client.number] += 1
            client.send()
        else:
            client.close()

    def _error(self, answer: ResponseReader) -> str | None:
        if answer.status != 200:
            return f"status {answer.status}: {answer.tail[:SHOWN_ERROR_BYTES].decode(errors='replace')}"
        if self._end_marker not in answer.tail:
            return f"incomplete answer, ending in: {answer.tail[-SHOWN_ERROR_BYTES:].decode(errors='replace')}"
        if self.spec.exact_records and answer.markers != self.spec.tokens:
            return f"{answer.markers} records instead of {self.spec.tokens}"
        return None

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
            self._continue(client)
        else:
            self.tally.failed("connection refused or timed out")
            self.left(self._clients[number], reopen=False)


class Client(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, load: Load, number: int) -> None:
        self.number = number
        self.reopening: asyncio.Task[None] | None = None
        self._load = load
        self._transport: asyncio.WriteTransport | None = None
        self._answer: ResponseReader | None = None
        self._reopen = False
        self._sent = 0.0
        self._first = 0.0
        self._last = 0.0  # The time of the last record.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def send(self) -> None:
        assert self._transport
        self._answer = ResponseReader(self._load.marker)
        self._first = 0.0
        self._sent = clock()
        self._transport.write(random.choice(self._load.requests))

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            self.give_up("bytes that no request asked for")
            return
        records = answer.markers
        try:
            answer.feed(data)
        except ResponseError as error:
            self.give_up(str(error))
            return
        now = clock()
        if not self._first and answer.body_bytes:
            self._first = now
        if answer.markers > records:
            if records:
                self._load.tally.gap(now - self._last)
            self._last = now
        if answer.complete:
            self._answer = None
            self._load.answered(self, answer, (self._first or now) - self._sent, now - self._sent)

    def close(self, *, reopen: bool = False) -> None:
        self._reopen = reopen
        if self._transport:
            self._transport.close()

    def give_up(self, error: str) -> None:
        self._answer = None
        self._load.tally.failed(error)
        if self._transport:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer = None
            self._load.tally.failed("connection closed before the answer was complete")
        self._load.left(self, reopen=self._reopen)


def take_precedence() -> bool:
    """Give this process real-time priority, as if it ran on a separate machine.

    Otherwise, on few cores, a polling engine can make the client wait for a whole answer. The measured time to the
    first byte would then include the client's wait for a core.

    Returns:
        False if the system does not allow this.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except (AttributeError, OSError):  # The system is not Linux, or does not allow this.
        return False
    return True


def command(spec: LoadSpec) -> list[str]:
    """Return the command line that generates this load in a separate process."""
    argv = [sys.executable, "-m", "benchmarks.load"]
    for name, value in msgspec.structs.asdict(spec).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            argv += [option] if value else []
        else:
            argv += [f"{option}={value}"]
    return argv


def parse(argv: Sequence[str] | None) -> LoadSpec:
    """Parse the load from a command line. None: the command line of this process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for field in msgspec.structs.fields(LoadSpec):
        option = "--" + field.name.replace("_", "-")
        if field.type is bool:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, required=field.required, default=field.default)
    return msgspec.convert(vars(parser.parse_args(argv)), LoadSpec, strict=False)


def main() -> None:
    """Generate the load, and print its figures as one line of JSON."""
    spec = parse(None)
    allow_open_files()
    real_time = take_precedence()
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(Load(spec).run())
    print(msgspec.json.encode(msgspec.structs.replace(figures, client_real_time=real_time)).decode())


if __name__ == "__main__":
    main()
