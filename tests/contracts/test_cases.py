"""Runs the case files `cases/<contract>/<behaviour>.yaml`. Each YAML document is a request and its reply, byte for
byte.

`-k NAME` runs one file. UPDATE_CASES=1 writes the replies, and keeps the text above each `reply:`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import httpx
import pytest
import yaml
from starlette.responses import Response

from container.app import create_app
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import Model, Models
from engines import errors
from engines.interface import Generation, Sink
from engines.loaded_model import ModelTexts
from engines.request import FinishReason, GenerationRequest, Token, TokenDelta
from handlers.deadline import Deadline
from handlers.djl_errors import overloaded
from handlers.engine_handler import EngineHandler
from handlers.entry_point import generation_handlers, lmi_contract, pooling_invocations
from handlers.lmi.invocations import InvocationsHandler
from handlers.lmi.sessions import Sessions
from handlers.loaded_service import Service
from handlers.openai.contract import OpenAIContract
from handlers.openai.embeddings import EmbeddingsContract
from handlers.openai.handler import OpenAIHandler
from handlers.openai.vllm_call import VllmApp
from handlers.queue import EngineQueue
from tests.contracts import pooling_exchange, tgi_exchange
from tests.contracts.openai_exchange import FRONT_END
from tests.rows import UniqueKeyLoader
from tests.settings import load_settings
from tests.stand_ins.scripted_engine import ScriptedGeneration

CASES = sorted((Path(__file__).parent / "cases").glob("*/*.yaml"))
assert CASES
HEADERS = ("content-type", "allow", "cache-control", "x-accel-buffering", "x-compute-type", "x-compute-characters")
HEADERS += ("x-compute-tokens", "x-prompt-tokens", "x-generated-tokens")
HEADERS += ("x-slipway-deadline", "x-amzn-sagemaker-custom-attributes")


class CaseEngine(pooling_exchange.PoolingEngine):
    """Answers with the deltas or the numbers of a case. The deltas wait for all requests of the call."""

    eos_token_ids = frozenset({tgi_exchange.END})

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__(case.get("model", "generating"), case.get("numbers", [[0.5, 0.5, 0.5, 0.5]]))
        if self.pooling is None:
            self.max_model_len = tgi_exchange.CONTEXT
        self.tokenizer: Any = SimpleNamespace(pad_token="")
        self._script: Sequence[dict[str, Any]] | None = case.get("deltas")
        error = case.get("error")  # The engine's error: name and arguments. Without deltas, it refuses the request.
        self.error: errors.RequestError | None = getattr(errors, error[0])(*error[1:]) if error else None
        self._tasks: list[asyncio.Task[None]] = []
        self._script_ended = asyncio.Event()

    @cached_property
    def texts(self) -> ModelTexts:
        return ModelTexts(tgi_exchange.FakeTokenizer()) if self.pooling is None else super().texts

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if self.error is not None and self._script is None:
            raise self.error
        if request.pooling is not None or self._script is None:
            return await super().submit(request, sink)
        self.sinks.append(sink)
        if len(self.sinks) == 1 + max([step.get("prompt", 0) for step in self._script], default=0):
            self._tasks.append(asyncio.create_task(self._play(self._script)))
        return ScriptedGeneration(request, sink, self)

    async def _play(self, script: Sequence[dict[str, Any]]) -> None:
        for step in script:
            fields = {"token_count": len(step.get("tokens", ()))} | step
            sink = self.sinks[fields.pop("prompt", 0)]
            for name in ("tokens", "prompt_tokens"):
                fields[name] = [token(*one) for one in fields[name]] if name in fields else []
            if reason := fields.get("finish_reason"):
                fields = {"last": True} | fields | {"finish_reason": FinishReason(reason)}
            sink.on_delta(TokenDelta(**fields))
        if self.error is not None:
            self.sinks[0].on_error(self.error)
        self._script_ended.set()

    def call_at_deadline(
        self, deadline: Deadline, function: Callable[[errors.DeadlineExceeded], object]
    ) -> asyncio.Task[None]:
        """Call the function when the script ends, so that the deadline does not depend on the machine's speed."""

        async def call() -> None:
            await self._script_ended.wait()
            function(errors.DeadlineExceeded(deadline.seconds))

        self._tasks.append(asyncio.create_task(call()))
        return self._tasks[-1]


def token(number: int, text: str, logprob: float | None = None, fields: dict[str, Any] | None = None) -> Token:
    """Return a token of a case: `[id, text, log probability, further fields]`."""
    fields = dict(fields or {})
    return Token(number, text, logprob, **fields | {"top": tuple(token(*one) for one in fields.get("top", ()))})


async def exchanged(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the application's reply to a case's request."""
    engine = CaseEngine(case)
    with patch.object(Deadline, "call", lambda *given: engine.call_at_deadline(*given)):
        return await reply_of(application(case, directory, engine), case["request"])


def application(case: dict[str, Any], directory: Path, engine: CaseEngine) -> Any:
    """Return the server's application with a case's settings, on this engine."""
    options = {"option.rolling_batch": "lmi-dist"} | case.get("options", {})
    (directory / "config.json").write_text("{}")
    (directory / "serving.properties").write_text("".join(f"{key}={value}\n" for key, value in options.items()))
    settings = load_settings(directory, case.get("environment", {}))
    overload_status = settings.server_config.throttle_error_http_code
    queue = EngineQueue(engine, case.get("places", 100), overload_status)
    vllm = case.get("vllm", {"status": 501, "body": ""})
    media_type = vllm.get("content-type", "application/json")
    front_end = VllmApp(Response(vllm["body"], vllm.get("status", 200), media_type=media_type), None)
    embeddings = EmbeddingsContract(FRONT_END.model, FRONT_END.accepts, FRONT_END.adapters)
    common = OpenAIContract(FRONT_END) if engine.pooling is None else embeddings
    openai = OpenAIHandler(front_end, queue, common, FRONT_END.model)
    if engine.pooling is None:
        lmi = EngineHandler(queue, lmi_contract(settings.config, engine), refuse_unread=overloaded)
        invocations: Any = InvocationsHandler(lmi, openai, settings.config, queue, Sessions(None, overload_status))
    else:
        invocations = pooling_invocations(settings.config, queue, engine.pooling, openai)
    handlers = generation_handlers(settings.config, queue)
    lifecycle = Lifecycle(settings)
    lifecycle.stage = State(case.get("state", "ready"))
    if lifecycle.stage is not State.STARTING:
        lifecycle.service = Service(
            settings.config, invocations, engine, handlers, openai=openai, queue=queue, engine=engine
        )
    models = Models([Model(lifecycle, "model")])
    return create_app(models, settings.server_config, Registrar(models, settings.server_config, Mock())).main


async def reply_of(app: Any, request: dict[str, Any]) -> dict[str, Any]:
    body = request.get("body")
    sent: dict[str, Any] = {"content": body.encode()} if isinstance(body, str) else {"json": body}
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")
    sent["headers"] = {"x-request-id": "r"} | request.get("headers", {})
    async with asyncio.timeout(60), client:  # A script without a last delta does not end.
        reply = await client.request(request.get("method", "POST"), request["path"], **sent)
    headers = {name: reply.headers[name] for name in HEADERS if name in reply.headers}
    body = re.sub(r'("created": ?)\d{10}', r"\g<1>1", reply.content.decode())  # the time of the call
    return {"status": int(reply.status_code), **headers, "body": body}


class ReplyDumper(yaml.SafeDumper):
    """Writes bodies as YAML blocks, whose lines are the bytes of the body."""


ReplyDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text or text[:1] in "{[" else None
    ),
)


def write_replies(path: Path, replies: list[dict[str, Any]]) -> None:
    heads = [document.partition("\nreply:\n")[0] for document in path.read_text().removesuffix("\n").split("\n---\n")]
    shown = [
        yaml.dump({"reply": reply}, Dumper=ReplyDumper, allow_unicode=True, sort_keys=False, width=10**6)
        for reply in replies
    ]
    path.write_text("---\n".join(f"{head}\n{reply}" for head, reply in zip(heads, shown, strict=True)))


def read_cases(path: Path) -> list[dict[str, Any]]:
    return list(yaml.load_all(path.read_text(), UniqueKeyLoader))


@pytest.mark.parametrize("path", CASES, ids=[f"{path.parent.name}-{path.stem}" for path in CASES])
def test_the_reply_has_the_bytes_of_the_case(path: Path, tmp_path: Path) -> None:
    (directory := tmp_path / "model").mkdir()
    replies = [asyncio.run(exchanged(case, directory)) for case in read_cases(path)]
    if os.environ.get("UPDATE_CASES"):
        write_replies(path, replies)
    assert replies == [case["reply"] for case in read_cases(path)]


@pytest.mark.parametrize("twice", ["reply: {}\nreply: {}", "request:\n  path: /\n  path: /"])
def test_a_key_that_is_there_twice_is_refused(twice: str, tmp_path: Path) -> None:
    (path := tmp_path / "case.yaml").write_text(f"request: {{}}\n---\n{twice}\n")
    with pytest.raises(yaml.MarkedYAMLError, match="is there twice"):
        read_cases(path)
