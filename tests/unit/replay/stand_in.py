"""A small server in which each request names its answer, and functions that run `slipway replay`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from container.server import http_server, listen
from replay.request import Reply
from slipway.cli import app

CASE = "x-case"  # The header that names the answer.


@dataclass
class StandIn:
    """An ASGI application. The header `x-case` names the answer of a request."""

    answers: Mapping[str, Reply]
    asked: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    on_request: Callable[[int], None] = lambda _: None
    url: str = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        case = headers.get(CASE, "")
        self.asked.append(case)
        self.bodies.append(body)
        self.headers.append(headers)
        self.paths.append(scope["path"])
        self.on_request(len(self.asked))
        reply = self.answers.get(case) or self.answers[""]
        if not reply.status:  # Never answers.
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        lines = [(name.encode(), value.encode()) for name, value in reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": lines})
        middle = len(reply.body) // 2
        for part, more in ((reply.body[:middle], True), (reply.body[middle:], not reply.complete)):
            await send({"type": "http.response.body", "body": part, "more_body": more})


@contextlib.contextmanager
def serving(
    answers: Mapping[str, Reply] | Reply, on_request: Callable[[int], None] = lambda _: None
) -> Iterator[StandIn]:
    """Serve answers in a thread."""
    stand_in = StandIn({"": answers} if isinstance(answers, Reply) else answers, on_request=on_request)
    with listen("127.0.0.1", 0) as listener:
        server = http_server(stand_in)
        stand_in.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=asyncio.run, args=(server.serve([listener]),))
        thread.start()
        try:
            yield stand_in
        finally:
            server.should_exit = True
            thread.join()


NEVER = Reply(0, (), b"")


def reply(body: Any, status: int = 200, content_type: str = "application/json", **headers: str) -> Reply:
    """Return a reply. A body that is no text is encoded as JSON."""
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    more = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Reply(status, (("content-type", content_type), *more), data)


def record(number: int | str, **fields: Any) -> dict[str, Any]:
    """Return a request of a source."""
    found = {"id": str(number), "path": "/generate", "headers": {CASE: str(number)}, "body": {"inputs": "Hi"}}
    return found | fields


def write_source(file: Path, records: list[dict[str, Any]]) -> Path:
    """Write a source."""
    file.write_text("".join(json.dumps(one) + "\n" for one in records))
    return file


@dataclass
class Run:
    """A finished run of `slipway replay`."""

    code: int
    output: str
    directory: Path

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "report.json").read_text())
        return found

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        lines = (self.directory / "results.jsonl").read_text().splitlines()[1:]
        return {found["id"]: found for found in map(json.loads, lines)}

    @property
    def page(self) -> str:
        return (self.directory / "report.html").read_text()


def replay(source: Path | str, directory: Path, *arguments: str) -> Run:
    """Run `slipway replay`."""
    command = ["replay", str(source), "--output", str(directory), "--pass-header", CASE, *arguments]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200", "TERM": "dumb"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Run(done.exit_code, done.output, directory)


def replay_recorded(
    directory: Path, records: list[dict[str, Any]], answers: Mapping[str, Reply] | Reply, *arguments: str
) -> Run:
    """Run `slipway replay` with recorded answers, against a server with other answers."""
    source = write_source(directory / "a.jsonl", records)
    with serving(answers) as server:
        return replay(source, directory / "out", "--to", server.url, "--recorded", *arguments)
