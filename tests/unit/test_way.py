"""A request's way in and a token's way out, counted: what a reader has to follow, and each token pays for."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from container.app import create_app
from container.models.registration import Registrar
from container.models.registry import Lifecycle, Model, Models, State
from container.server import http_server
from container.settings.settings import ServerSettings, Settings
from handlers.contracts.lmi.rolling_batch import LmiContract
from handlers.engine_handler import EngineHandler, EngineQueue
from handlers.entry_point import Service
from handlers.invocations import InvocationsHandler
from handlers.request import FinishReason, Token, TokenDelta
from handlers.sessions import Sessions
from tests.contracts.exchange import MODEL
from tests.unit.handlers.test_engine_handler import ScriptedEngine
from tests.waiting import until

ROOT = Path(__file__).parents[2]
MOST_IN, MOST_FILES_IN, MOST_OUT = 30, 12, 13

BODY = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 4}, "stream": True}).encode()
HEAD = (
    b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nUser-Agent: test\r\nAccept: */*\r\n"
    b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)
)


class Way:
    """The functions of container/ and handlers/ that have run, in the order of their first calls."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], None] = {}

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        if (
            event != "call"
            or not path.is_relative_to(ROOT)
            or code.co_name in ("<genexpr>", "<listcomp>", "<dictcomp>")
        ):
            return
        file = path.relative_to(ROOT)
        if file.parts[0] in ("container", "handlers"):
            self.functions[str(file), code.co_qualname] = None

    def __str__(self) -> str:
        lines = [f"{number:3} {file}: {name}" for number, (file, name) in enumerate(self.functions, start=1)]
        return "\n".join([*lines, f"{len(self.functions)} functions in {len(self.files)} files"])


@contextmanager
def traced() -> Iterator[Way]:
    way = Way()
    sys.setprofile(way)
    try:
        yield way
    finally:
        sys.setprofile(None)


class Engine(ScriptedEngine):
    """Stops the tracing of the way in."""

    async def submit(self, *given: Any) -> Any:
        sys.setprofile(None)
        return await super().submit(*given)


def token(text: str, *, last: bool = False) -> TokenDelta:
    reason = FinishReason.LENGTH if last else None
    return TokenDelta(text, [Token(7, text, -0.5)], finish_reason=reason, token_count=1, last=last)


async def until_in(reader: asyncio.StreamReader, text: bytes) -> None:
    async with asyncio.timeout(15):
        await reader.readuntil(text)


@pytest.mark.asyncio
async def test_the_ways_of_a_request_and_of_a_token_are_short() -> None:
    settings = ServerSettings()
    lifecycle = Lifecycle(Settings(server=settings, model=MODEL))
    engine = Engine()
    queue = EngineQueue(engine, 4)
    invocations = InvocationsHandler(EngineHandler(queue, LmiContract(MODEL)), None, MODEL, Sessions(None, 503))
    lifecycle.service, lifecycle.stage = Service(MODEL, invocations, engine, engine=engine, queue=queue), State.READY
    models = Models([Model(lifecycle, str(lifecycle.model.model_dir))])
    server = http_server(create_app(models, settings, Registrar(models, settings, {})).main)
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(server.serve([listener]))
    reader, writer = await asyncio.open_connection(*listener.getsockname())

    writer.write(HEAD + BODY)  # the connection is made, and the parameters are known
    await until(lambda: engine.sinks)
    engine.sinks[0].on_delta(token("a", last=True))
    await until_in(reader, b'"generated_text": "a"}\n')

    with traced() as way_in:
        writer.write(HEAD + BODY)
        await until(lambda: len(engine.sinks) == 2)
    engine.sinks[1].on_delta(token("first"))
    await until_in(reader, b'"first"')
    with traced() as way_out:
        engine.sinks[1].on_delta(token("second"))
        await until_in(reader, b'"second"')
    engine.sinks[1].on_delta(token("third", last=True))
    await until_in(reader, b"0\r\n\r\n")

    writer.close()
    server.should_exit = True
    await serving
    assert len(way_in.functions) <= MOST_IN, f"the way in has grown:\n{way_in}"
    assert len(way_in.files) <= MOST_FILES_IN, f"the way in has grown:\n{way_in}"
    assert len(way_out.functions) <= MOST_OUT, f"the way out has grown:\n{way_out}"
