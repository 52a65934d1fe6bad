"""A call of OpenAI's routes that vLLM's front end answers, as an ASGI application in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import msgspec

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import LONG_BODY, Call, Reply, ReplyWriter
from handlers.json_cost import JsonDecoder, JsonTooCostly, check_cost, groups_in, off_the_loop
from handlers.json_fields import json_fault
from handlers.openai.constraints import BATCH, CHAT, FIELDS, MESSAGES, RESPONSES, enforceable, form_name
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.media_limits import MediaMemory
from handlers.openai.routes import error_reply, refuse

logger = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
# Request headers that are written anew for the application.
_OURS = frozenset({b"content-length", b"content-type", b"transfer-encoding", b"x-request-id"})
_FRAMING = frozenset({"content-type", "content-length"})

_CONVERSATIONS = frozenset({CHAT, BATCH, MESSAGES, f"{MESSAGES}/count_tokens", RESPONSES})
# vLLM's front end reads bodies on the event loop. Pydantic tries out each kind that an item of `input` may be, which
# takes 0.1 ms; a message takes a tenth of that.
_MOST_GROUPS, _MOST_GROUPS_OF_RESPONSES = 10_000, 2_500  # Objects and arrays.
_MOST_ESCAPES = 2_000_000  # Backslashes, with which Python's `json` takes its time.
# What is between the parts of a document. Texts have them too, one to a token at most, but for a few odd ones.
_MARKS = (b"{", b"[", b",")
_MARKS_PER_TOKEN, _FURTHER_MARKS = 4, 10_000
_MARKS_OF_PROMPTS = 2_000_000  # Token ids of many prompts; these cost a tenth of what messages do.

_decode = JsonDecoder(dict[str, msgspec.Raw]).decode
_decode_messages = JsonDecoder(list[dict[str, msgspec.Raw]]).decode


@dataclass(frozen=True, slots=True)
class VllmApp:
    """vLLM's front end of a model."""

    app: Any  # FastAPI's application.
    llm: Any  # vLLM's engine, which knows requests by the ids of their answers.
    parses_tools: bool = False  # The model has a parser of tool calls.
    media: MediaMemory | None = None  # The images, sounds and videos of its requests.
    # The answer to an exception of the application; None if it is none of the client's.
    refusal: Callable[[BaseException], Reply | None] = lambda _: None


class VllmCall:
    """One call in vLLM's front end, as a task of its own, which gets `_receive` and `_send` as any ASGI application.
    Implements `Running`."""

    def __init__(
        self, vllm: VllmApp, held: OpenAICall, call: Call, writer: ReplyWriter, path: str, model: str | None
    ) -> None:
        self._vllm, self._held, self._call, self._writer, self._path = vllm, held, call, writer, path
        self._model = model
        self._gone = asyncio.Event()
        self._body_read = False
        self._status, self._content_type = 0, ""
        self._headers: tuple[tuple[str, str], ...] = ()
        self._started = self._complete = False
        self._task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """Tell the front end, which ends its tasks; the engine aborts then. What it sends from now on is dropped."""
        self._gone.set()

    async def _run(self) -> None:
        call, path = self._call, self._path
        current_call.set(self._held)
        began = time.monotonic()
        try:
            self._call = call = await off_the_loop(call.body, self._read)
            await self._vllm.app(scope(call, path), self._receive, self._send)
        except InvalidRequest as error:
            self._finish(refuse(error))
        except UnicodeEncodeError:
            self._finish(error_reply("The body holds text that is not valid Unicode.", "BadRequestError", 400))
        except Exception as error:
            # Where the engine has failed, vLLM stumbles over that in some of its streams.
            if not self._held.failed:
                if (refused := self._vllm.refusal(error)) is not None:
                    self._finish(refused)
                else:
                    logger.exception("vLLM's front end failed", extra={"request_id": call.request_id})
        finally:
            self._held.close()
            if not self._gone.is_set():
                reason = self._held.failed or "Internal server error"
                self._finish(error_reply(reason, "InternalServerError", 500))
                if self._held.generates:
                    self._held.engine.meter.calls.count(time.monotonic() - began, failed=bool(self._held.failed))

    def _read(self) -> Call:
        """The call for vLLM. Raises InvalidRequest."""
        call, held = self._call, self._held
        check_body(call.body, self._path, held.engine.max_model_len)
        return for_vllm(call, self._path, held, model=self._model, parses_tools=self._vllm.parses_tools)

    async def _receive(self) -> dict[str, Any]:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        """Pass on what the application sends. A reply begins with its first bytes: they show whether it streams."""
        if self._gone.is_set():
            return
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._content_type = headers.get("content-type", "")
            self._headers = tuple(pair for pair in headers.items() if pair[0] not in _FRAMING)
        elif message["type"] == "http.response.body":
            self._pass_on(message.get("body", b""), last=not message.get("more_body", False))
            await self._writer.drain()

    def _pass_on(self, data: bytes, *, last: bool) -> None:
        writer = self._writer
        if self._held.failed and data.startswith(b"event: error\n"):  # vLLM's would say how it stumbled over that
            data = _last_events(self._path, error_reply(self._held.failed, "InternalServerError", 500))
        if last and not self._started:
            writer.reply(Reply(self._status, self._content_type, data, self._headers))
        elif last:
            writer.end(data)
        elif data:
            if not self._started:
                self._started = True
                writer.start(self._status, self._content_type, self._headers)
            writer.write(data)
        self._complete = last

    def _finish(self, reply: Reply) -> None:
        if self._complete or self._gone.is_set():
            return
        self._complete = True
        if not self._started:
            self._writer.reply(reply)
        elif self._content_type.partition(";")[0].strip() == _EVENTS:
            self._writer.end(_last_events(self._path, reply))
        else:
            self._writer.end(b"")


def _last_events(path: str, reply: Reply) -> bytes:
    """What ends a stream with an error, as vLLM's own streams on this path do."""
    message = msgspec.json.decode(reply.body)["error"]["message"]
    if path == MESSAGES:
        error = {"type": "error", "error": {"type": "internal_error", "message": message}}
        return b"event: error\ndata: " + msgspec.json.encode(error) + b"\n\n"
    return b"data: " + reply.body + b"\n\ndata: [DONE]\n\n"


def scope(call: Call, path: str) -> dict[str, Any]:
    """The call as an ASGI scope. The application sees our id of the request, and so gives it to its answer."""
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in call.headers]
    headers = [(name, value) for name, value in headers if name not in _OURS]
    if call.content_type:
        headers.append((b"content-type", call.content_type.encode("latin-1", "replace")))
    headers += [
        (b"content-length", str(len(call.body)).encode()),
        (b"x-request-id", call.request_id.encode("latin-1", "replace")),
    ]
    return {
        "type": "http",
        # Before 2.4 an application listens for a disconnect while it streams; later ones wait for `send` to fail,
        # which ours never does.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(call.query).encode(),
        "headers": headers,
        "client": None,
        "server": None,
        "state": {},
    }


def check_body(body: bytes, path: str, max_model_len: int) -> None:
    """Raise InvalidRequest for a body that would hold up the event loop, or that has more parts than the model's
    context could hold."""
    most = _MOST_GROUPS_OF_RESPONSES if path == RESPONSES else _MOST_GROUPS
    # Brackets in texts do not count; they are left out where there are so many that it takes a closer look.
    if body.count(b"{") + body.count(b"[") > most and (groups := groups_in(body)) > most:
        raise InvalidRequest(f"the body has {groups} objects and arrays; this route takes at most {most}")
    try:
        check_cost(body)
    except JsonTooCostly as error:
        raise InvalidRequest(f"the body takes too long to read: {error}") from None
    if len(body) < LONG_BODY:
        return
    limit = _MARKS_PER_TOKEN * max_model_len + _FURTHER_MARKS
    if path not in _CONVERSATIONS:
        limit = max(limit, _MARKS_OF_PROMPTS)
    if sum(map(body.count, _MARKS)) > limit:
        raise InvalidRequest(f"the body has more parts than the model's context of {max_model_len} tokens can hold")
    if body.count(b"\\") > _MOST_ESCAPES:
        raise InvalidRequest(f"the body has more than {_MOST_ESCAPES} escaped characters")


def for_vllm(call: Call, path: str, held: OpenAICall, *, model: str | None = None, parses_tools: bool = False) -> Call:
    """The call as vLLM's serving classes are to read it; a body that is no JSON is left to them to refuse.

    `model` takes the place of the body's. Constraints get the form in which vLLM enforces them, and `held` the name of
    the one that the text is to have, for the engine's refusals. Null fields of a chat's messages are absent: TGI's
    Python client sends every field, and TGI takes null for absent, as our contracts do.

    Raises InvalidRequest: only vLLM can read the body, so that it cannot be translated. Raises InvalidParameter: vLLM
    would not enforce one of the constraints.
    """
    try:
        document = _decode(call.body)
        given = {name: msgspec.json.decode(document[name]) for name in FIELDS.intersection(document)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _is_read_by_python(call.body):
            raise InvalidRequest(f"the body is not JSON in UTF-8 (RFC 8259): {json_fault(call.body, error)}") from None
        return call
    if len(call.body) >= LONG_BODY and bytes(document.get("messages", b"")).startswith(b'"'):
        raise InvalidParameter("messages", "must be an array, got a string")  # vLLM would look at each character
    changes: dict[str, Any] = {} if model is None else {"model": model}
    if given := {name: value for name, value in given.items() if value is not None}:
        changes |= enforceable(given, path, parses_tools=parses_tools)
        held.form_name = form_name(given, path)
    if path == CHAT and b"null" in call.body:
        changes |= _without_nulls(document)
    if not changes:
        return call
    fields = {name: value for name, value in (document | changes).items() if value is not None}
    return replace(call, body=msgspec.json.encode(fields))


def _is_read_by_python(body: bytes) -> bool:
    """Tell whether vLLM, which reads bodies with Python's `json`, reads this one: that takes NaN, half surrogate pairs,
    a byte order mark, UTF-16 and UTF-32 as well."""
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _without_nulls(document: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """The field to replace; a null `content` stays, since a message with tool calls may have it."""
    try:
        messages = _decode_messages(document["messages"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return {}
    kept = [
        {name: value for name, value in message.items() if name == "content" or bytes(value) != b"null"}
        for message in messages
    ]
    return {} if kept == messages else {"messages": kept}
