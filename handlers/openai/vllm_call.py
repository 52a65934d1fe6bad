"""A call of OpenAI's routes that vLLM's front end answers, as an ASGI application in this process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

import msgspec

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import JSON, LONG_BODY, Call, Reply, ReplyWriter, media_type
from handlers.openai.constraints import (
    BATCH,
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    DETOKENIZE,
    FIELDS,
    MESSAGES,
    RENDER,
    RESPONSES,
    TOKENIZE,
    enforceable,
    uses_tools,
)
from handlers.openai.current_call import OpenAICall, current_call
from handlers.openai.error_forms import error_form
from handlers.openai.media_limits import MediaMemory
from handlers.openai.routes import error_reply, refuse
from handlers.openai.speech import SPEECH, check_form
from handlers.parsing.images import ImageLoader
from handlers.parsing.json_fields import json_fault
from handlers.parsing.json_limits import JsonDecoder, JsonTooCostly, NotUtf8, check_cost, groups_in, off_the_loop
from handlers.route_declarations import MOST_BYTES, check_body, check_text

logger = logging.getLogger(__name__)

_EVENTS = "text/event-stream"
_COMMENT = b":"  # Begins a comment, which keeps a connection open while an answer waits for the engine.
# Routes whose streams begin with the first token, because the engine may refuse a request before.
_GENERATED = frozenset({CHAT, COMPLETIONS, MESSAGES, RESPONSES, *SPEECH})
# Request headers that are replaced for the application, or answered here.
_OURS = frozenset(
    {b"content-length", b"content-type", b"transfer-encoding", b"x-request-id", b"endpoint-load-metrics-format"}
)
_FRAMING = frozenset({"content-type", "content-length"})

_CONVERSATIONS = frozenset({CHAT, BATCH, MESSAGES, COUNT_TOKENS, RESPONSES, RENDER})
# vLLM's front end reads bodies on the event loop. Pydantic tries all types that an item of `input` may have, which
# takes 0.1 ms. A message takes a tenth of that.
_MOST_GROUPS, _MOST_GROUPS_OF_RESPONSES = 10_000, 2_500  # Objects and arrays.
_MOST_ESCAPES = 2_000_000  # Backslashes. Python's `json` reads them slowly.
# Characters between the parts of a document. Texts have at most one of them for each token, with few exceptions.
_MARKS = (b"{", b"[", b",")
_MARKS_PER_TOKEN, _FURTHER_MARKS = 4, 10_000
_MARKS_OF_PROMPTS = 2_000_000  # Token ids of many prompts cost a tenth of messages.

_LARGE = 16 * 1024  # Bytes of a body, and of a field in it, whose parts are counted.
_MOST_MEMBERS = 4000  # Of an object. Pydantic describes each wrong one, which takes 0.05 ms.
_INPUTS = frozenset(
    ("input", "inputs", "texts", "images", "documents", "queries", "data_1", "data_2", "text_1", "text_2")
)
_TEXTS = _INPUTS | {"prompt", "query", "messages"}
_COUNTED = frozenset({TOKENIZE, DETOKENIZE, RENDER})  # The model's context does not bound their prompts.
_MEDIA = frozenset(("image_url", "audio_url", "video_url", "input_audio"))  # Fields of a part with its data.
_TRUNCATE = "truncate_prompt_tokens"
_OF_PROMPTS = frozenset(("tools", "documents", "chat_template_kwargs"))  # Fields that a template reads.
_ID = re.compile(r"[\x21-\x7e]{1,128}")  # Of a request, as in headers.

_decode_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_split = JsonDecoder(dict[str, msgspec.Raw]).decode
_decode_messages = JsonDecoder(list[dict[str, msgspec.Raw]]).decode


@dataclass(frozen=True, slots=True)
class VllmApp:
    """vLLM's front end of a model."""

    app: Any  # FastAPI's application.
    llm: Any  # vLLM's engine. It knows requests by the ids of their answers.
    parses_tools: bool = False  # The model has a parser of tool calls.
    media: MediaMemory | None = None  # The images, sounds and videos of its requests.
    images: ImageLoader | None = None
    most_sound_mib: int = 25  # Of a file to be transcribed.
    # Returns the reply to an exception of the application; None if the client did not cause it.
    refusal: Callable[[BaseException], Reply | None] = lambda _: None


class VllmCall:
    """A running call in vLLM's front end. A task runs the front end as an ASGI application."""

    def __init__(
        self, vllm: VllmApp, openai_call: OpenAICall, call: Call, writer: ReplyWriter, path: str, model: str | None
    ) -> None:
        self._vllm, self._openai_call, self._call, self._writer, self._path = vllm, openai_call, call, writer, path
        self._model = model
        self._errors = error_form(path)
        self._held_back = b""  # Events of a stream that the engine has not begun.
        self._gone = asyncio.Event()
        self._body_read = False
        self._status, self._content_type = 0, ""
        self._headers: tuple[tuple[str, str], ...] = ()
        self._id_header: tuple[tuple[str, str], ...] = ()  # If the body has the id of the request.
        self._started = self._complete = False
        if path in _GENERATED:
            openai_call.on_begin = self._release
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._run())  # None when it has ended.

    def cancel(self) -> None:
        """Tell the front end that the client has left. It ends its tasks, and its further output is dropped."""
        self._gone.set()
        if self._status and not self._complete and self._task is not None:
            self._task.cancel()  # A reply that has begun does not listen for a disconnect.

    async def _run(self) -> None:
        call, path = self._call, self._path
        current_call.set(self._openai_call)
        began = time.monotonic()
        try:
            self._call = await off_the_loop(call.body, self._read)
            if self._call.request_id != call.request_id:  # the body has one
                self._id_header = (("x-request-id", self._call.request_id),)
            call = self._call
            self._openai_call.request_id = call.request_id
            await self._vllm.app(scope(call, path), self._receive, self._send)
        except InvalidRequest as error:
            self._finish(refuse(error))
        except UnicodeEncodeError:
            self._finish(error_reply("The body holds text that is not valid Unicode.", "BadRequestError", 400))
        except Exception as error:
            # If the engine has failed, some of vLLM's streams raise other errors because of that.
            if not self._openai_call.failed:
                if (refused := self._vllm.refusal(error)) is not None:
                    self._finish(refused)
                else:
                    logger.exception("vLLM's front end failed", extra={"request_id": call.request_id})
        finally:
            self._openai_call.close()
            if not self._gone.is_set():
                reason = self._openai_call.failed or "Internal server error"
                self._finish(error_reply(reason, "InternalServerError", 500))
            # The server cancels a call as well when its reply is complete.
            if self._complete and self._openai_call.generates:
                self._openai_call.engine.statistics.calls.count(
                    time.monotonic() - began, failed=bool(self._openai_call.failed)
                )
            self._task = None  # A cancelled task holds its exception, whose traceback holds this object.

    def _read(self) -> Call:
        """Return the call for vLLM.

        Raises:
            InvalidRequest: The call is refused.
        """
        call, openai_call = self._call, self._openai_call
        if self._path in SPEECH:
            check_form(call, self._vllm.most_sound_mib)
            return call
        if len(call.body) < LONG_BODY:  # `OpenAIHandler` has checked longer ones
            check_readable(call.body, self._path, openai_call.engine.max_model_len)
        return for_vllm(call, self._path, openai_call, model=self._model, parses_tools=self._vllm.parses_tools)

    async def _receive(self) -> dict[str, Any]:
        if not self._body_read:
            self._body_read = True
            return {"type": "http.request", "body": self._call.body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        """Pass the application's messages on. A reply begins with its first bytes, which show if it is a stream."""
        if self._gone.is_set():
            raise asyncio.CancelledError  # It passes through the application, which would go on after any other error.
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in message["headers"]}
            self._content_type = headers.get("content-type", "")
            self._headers = tuple(pair for pair in headers.items() if pair[0] not in _FRAMING) + self._id_header
        elif message["type"] == "http.response.body":
            self._pass_on(message.get("body", b""), last=not message.get("more_body", False))
            await self._writer.drain()

    def _pass_on(self, data: bytes, *, last: bool) -> None:
        writer = self._writer
        if self._path in _GENERATED and not (last or self._openai_call.begun or data.startswith(_COMMENT)):
            self._held_back += data  # vLLM begins a stream before the engine can refuse it
            return
        if self._held_back:
            data, self._held_back = self._held_back + data, b""
        if last and not self._started:
            self._reply(self._whole(data))
        elif last:
            writer.end(data)
        elif data:
            if not self._started:
                self._started = True
                writer.start(self._status, self._content_type, self._reply_headers())
            writer.write(data)
            self._errors.sent(data)
        self._complete = self._complete or last

    def _release(self) -> None:
        """Send what was held back."""
        if self._held_back and not self._gone.is_set():
            self._pass_on(b"", last=False)

    def _whole(self, data: bytes) -> Reply:
        """Return a reply that is complete before it has begun. A stream of an error alone has the error's status."""
        place = data.find(b'data: {"error":')
        if place < 0 or self._openai_call.begun or media_type(self._content_type) != _EVENTS:
            return Reply(self._status, self._content_type, data, self._reply_headers())
        document = msgspec.json.decode(data[place:].removeprefix(b"data: ").partition(b"\n\n")[0])
        return Reply(document["error"]["code"], JSON, msgspec.json.encode(document), self._headers)

    def _reply_headers(self) -> tuple[tuple[str, str], ...]:
        return (*self._headers, *(self._openai_call.not_held if self._status < 400 else ()))

    def _reply(self, reply: Reply) -> None:
        self._writer.reply(self._errors.whole(reply) if reply.status >= 400 else reply)

    def _finish(self, reply: Reply) -> None:
        if self._complete or self._gone.is_set():
            return
        self._complete = True
        if not self._started:
            self._reply(reply)
        elif media_type(self._content_type) == _EVENTS:
            self._writer.end(self._errors.last_events(reply))
        else:
            self._writer.end(b"")


def scope(call: Call, path: str) -> dict[str, Any]:
    """Return the call as an ASGI scope. The application uses the request's id in its answer."""
    headers = [(name, value) for name, value in call.headers.items() if name not in _OURS]
    if call.content_type:
        headers.append((b"content-type", call.content_type.encode("latin-1", "replace")))
    headers += [
        (b"content-length", str(len(call.body)).encode()),
        (b"x-request-id", call.request_id.encode("latin-1", "replace")),
    ]
    return {
        "type": "http",
        # From version 2.4 on, an application does not listen for a disconnect while it streams. `VllmCall` cancels it.
        # Starlette's listener leaves a reference cycle with the request when the client leaves.
        "asgi": {"version": "3.0", "spec_version": "2.4"},
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


def check_readable(body: bytes, path: str, max_model_len: int) -> None:
    """Check that vLLM's front end can read a body without holding up the event loop for long.

    Raises:
        InvalidRequest: Reading it would take too long, or it has more parts than the model's context can hold.
    """
    most = _MOST_GROUPS_OF_RESPONSES if path == RESPONSES else _MOST_GROUPS
    # Brackets in texts do not count. They are left out only if the total is too large.
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


def for_vllm(
    call: Call, path: str, openai_call: OpenAICall, *, model: str | None = None, parses_tools: bool = False
) -> Call:
    """Translate a call for vLLM's serving classes.

    They refuse a body that is no JSON.

    Constraints get the form in which vLLM enforces them. Null fields of a chat's messages are removed: TGI's Python
    client sends every field, and TGI and Slipway's contracts take null for absent. Null fields of a response are
    removed, since vLLM copies some of them into its answer, which cannot hold null. So are fields that vLLM refuses
    although they ask for nothing. The body's `request_id` becomes that of the call if no header has one.

    Args:
        call: The call.
        path: The path of OpenAI's API that the call is for.
        openai_call: Gets the name of the body's constraint, for the engine's refusals, and learns of the body's tools.
        model: Replaces the `model` of the body.
        parses_tools: The model has a parser of tool calls.

    Raises:
        InvalidRequest: Only vLLM can read the body, so that it cannot be translated.
        InvalidParameter: vLLM would not enforce one of the constraints.
    """
    try:
        document = _split(call.body) if call.fields is None else call.fields
        given = {name: msgspec.json.decode(document[name]) for name in FIELDS.intersection(document)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if isinstance(error, NotUtf8) or _is_read_by_python(call.body):
            reason = error.reason if isinstance(error, NotUtf8) else json_fault(call.body, error)
            raise InvalidRequest(f"the body is not JSON in UTF-8 (RFC 8259): {reason}") from None
        return call
    if len(call.body) > _LARGE:
        try:
            _check_sizes(document, path, call, openai_call)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return call  # vLLM refuses it.
    if len(call.body) >= LONG_BODY and bytes(document.get("messages", b"")).startswith(b'"'):
        raise InvalidParameter("messages", "must be an array, got a string")  # vLLM would take each character
    changes: dict[str, Any] = {}
    if path == RESPONSES:
        changes = {name: None for name, value in document.items() if bytes(value) == b"null"}
        if b'"assistant"' in call.body:
            changes |= _with_read_messages(document)
    if model is not None:
        changes["model"] = model
    openai_call.uses_tools = uses_tools(given)
    if given := {name: value for name, value in given.items() if value is not None}:
        enforced, openai_call.form = enforceable(given, path, parses_tools=parses_tools)
        changes |= enforced
    if path in (CHAT, TOKENIZE, RENDER) and b"null" in call.body:
        changes |= _without_nulls(document)
    changes |= _without_idle(document, path)
    if path not in (MESSAGES, COUNT_TOKENS) and call.request_id.encode() not in call.headers.values():
        call = replace(call, request_id=_id_in(document) or call.request_id)
    if not changes:
        return call
    fields = {name: value for name, value in {**document, **changes}.items() if value is not None}
    return replace(call, body=msgspec.json.encode(fields), fields=None)


def _id_in(document: Mapping[str, msgspec.Raw]) -> str:
    """Return the `request_id` of a body. Empty if there is none, or if vLLM refuses it.

    Raises:
        InvalidParameter: It would not be safe in headers and logs.
    """
    if _first(document.get("request_id", b"")) != b'"':
        return ""
    request_id = msgspec.json.decode(document["request_id"], type=str)
    if request_id and not _ID.fullmatch(request_id):
        raise InvalidParameter("request_id", "must have 1 to 128 characters of visible ASCII")
    return request_id


def _without_idle(document: Mapping[str, msgspec.Raw], path: str) -> dict[str, None]:
    """Return the fields to remove because they ask for nothing. Some clients send them with every request."""
    if path not in (CHAT, BATCH, COMPLETIONS, TOKENIZE, RENDER):
        return {}
    idle = [
        name for name, value in (("suffix", b'""'), ("request_id", b"null")) if bytes(document.get(name, b"")) == value
    ]
    if bytes(document.get("stream", b"null")) in (b"null", b"false"):
        idle.append("stream_options")
    tools = document.get("tools", b"null")
    if bytes(tools) == b"null" or (_first(tools) == b"[" and not _decode_items(tools)):
        idle.append("tools")
        if bytes(document.get("tool_choice", b"")) in (b'"auto"', b'"none"'):
            idle.append("tool_choice")
    return {name: None for name in idle if name in document}


def _with_read_messages(document: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return `input` with the assistant's messages as vLLM reads them.

    OpenAI's API does not ask for their `type`, but vLLM does. vLLM reads the first part alone, and no refusals.
    """
    if _first(document.get("input", b"")) != b"[":
        return {}
    items = [
        msgspec.json.decode(item) if b'"assistant"' in bytes(item) else item
        for item in _decode_items(document["input"])
    ]
    for item in items:
        if isinstance(item, dict) and item.get("role") == "assistant" and item.get("type") in (None, "message"):
            item["type"], parts = "message", item.get("content")
            if isinstance(parts, list):
                given = [part.get("text", part.get("refusal")) for part in parts if isinstance(part, dict)]
                texts = [text for text in given if isinstance(text, str)]
                if len(texts) == len(parts):
                    item["content"] = [{"type": "output_text", "text": "\n".join(texts), "annotations": []}]
    return {"input": items}


def _check_sizes(document: Mapping[str, msgspec.Raw], path: str, call: Call, openai_call: OpenAICall) -> None:
    """Check the fields of a large body whose cost for vLLM does not depend on the model's context.

    Raises:
        InvalidRequest: The body is too long for this route.
        InvalidParameter: The field is named.
    """
    inputs = () if path in _CONVERSATIONS else _INPUTS.intersection(document)
    for name, value in document.items():
        if name in inputs and (count := _count_inputs(value)) > openai_call.most_sequences:
            raise InvalidParameter(name, f"has {count} inputs; at most {openai_call.most_sequences} can be served")
        is_large = len(memoryview(value)) > _LARGE
        if is_large and _first(value) == b"{" and len(_decode_members(value)) > _MOST_MEMBERS:
            raise InvalidParameter(name, f"may have {_MOST_MEMBERS} members at most")
    if path in _COUNTED and "messages" in document:
        size = sum(_size(document[name]) for name in _OF_PROMPTS.intersection(document))
        size += _size_of_messages(document["messages"])
        if size > MOST_BYTES:
            raise InvalidParameter("messages", f"may have at most {MOST_BYTES} bytes of text, got {size}")
    elif path in _COUNTED:
        check_body(call)
        if _first(document.get("prompt", b"")) == b'"':
            check_text("prompt", msgspec.json.decode(document["prompt"], type=str))
    truncates = bytes(document.get(_TRUNCATE, b"null")) != b"null"
    if truncates and bytes(document.get("truncation_side", b"null")) == b"null":
        longest = max((_longest_text(document[name]) for name in _TEXTS.intersection(document)), default=0)
        if longest > MOST_BYTES:
            raise InvalidParameter(_TRUNCATE, f"needs `truncation_side` for a text of more than {MOST_BYTES} bytes")


def _size_of_messages(value: msgspec.Raw) -> int:
    """Return the bytes of messages, without images and other media."""
    size = 0
    for message in _decode_items(value) if _first(value) == b"[" else ():
        members = _decode_members(message) if _first(message) == b"{" else {"": message}
        content = members.pop("content", b"")
        size += sum(map(_size, members.values()))
        for part in _decode_items(content) if _first(content) == b"[" else [content]:
            within = _decode_members(part) if _first(part) == b"{" else {"": part}
            size += sum(_size(member) for name, member in within.items() if name not in _MEDIA)
    return size


def _size(value: msgspec.Raw | bytes) -> int:
    """Return the bytes of a JSON value: of a text, without escapes."""
    text = _first(value) == b'"'
    return len(msgspec.json.decode(value, type=str).encode()) if text else len(memoryview(value))


def _longest_text(value: msgspec.Raw) -> int:
    """Return the length of the longest text in a field: in bytes of a string, of an item, or of a message's text."""
    if _first(value) == b'"':
        return len(memoryview(value))
    if _first(value) == b"{":
        members = _decode_members(value)
        return max((_longest_text(members[name]) for name in ("content", "text") if name in members), default=0)
    return max(map(_longest_text, _decode_items(value)), default=0) if _first(value) == b"[" else 0


def _count_inputs(value: msgspec.Raw) -> int:
    """Return the number of texts, or of other prompts, in a field. An array of numbers is one prompt."""
    if _first(value) == b"{":
        content = _decode_members(value).get("content")
        return 1 if content is None else _count_inputs(content)
    if _first(value) != b"[":
        return 1
    items = _decode_items(value)
    return len(items) if items and _first(items[0]) in (b'"', b"[", b"{") else 1


def _first(value: msgspec.Raw | bytes) -> bytes:
    """Return the first character of a JSON value."""
    return bytes(memoryview(value)[:1])


def _is_read_by_python(body: bytes) -> bool:
    """Return True if vLLM can read a body that is no strict JSON in UTF-8.

    vLLM uses Python's `json`, which takes NaN, half surrogate pairs, a byte order mark, UTF-16 and UTF-32 as well.
    """
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _without_nulls(document: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """Return `messages` without null fields. A null `content` stays: a message with tool calls may have it."""
    try:
        messages = _decode_messages(bytes(document["messages"]))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return {}
    kept = [
        {name: value for name, value in message.items() if name == "content" or bytes(value) != b"null"}
        for message in messages
    ]
    return {} if kept == messages else {"messages": kept}
