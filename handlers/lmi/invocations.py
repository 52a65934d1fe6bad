"""`/invocations`: what kind of call a body is, and which handler answers it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from engines.errors import InvalidRequest, UnknownAdapter
from engines.model_settings import ModelSettings
from handlers.contract import Call, ContractError, Handler, ReplyWriter, Running, adapter_header
from handlers.djl_errors import FAILED_DEPENDENCY, JSON, unknown_adapter
from handlers.forms import media_type
from handlers.json_cost import JsonDecoder, off_the_loop
from handlers.lmi.adapters import adapter_query, adapters_in, adapters_of
from handlers.lmi.chat import AsyncShape, LmiChatShape, Shape
from handlers.lmi.errors import payload_refused
from handlers.lmi.formatted_reply import FormattedReply, Formatting, ShapedReply
from handlers.lmi.sessions import SESSION_ID, Sessions
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.handler import OpenAIHandler

Kind = Literal["chat", "completion", "lmi", "session"]
Table = tuple[tuple[str, Kind], ...]

# The first of these fields that a body has says what it is; a body with none of them is LMI's, which says so.
ROLLING_BATCH: Table = (("messages", "chat"), ("prompt", "completion"), ("inputs", "lmi"), ("requestType", "session"))
# The same, in the order of LMI's asynchronous handler.
ASYNCHRONOUS: Table = (("prompt", "completion"), ("inputs", "lmi"), ("messages", "chat"), ("requestType", "session"))

# A body without any of them is LMI's for certain; nothing is decoded to find that out.
_MARKS = tuple(f'"{field}"'.encode() for field, kind in ROLLING_BATCH if kind != "lmi")
# Content types beside those that say JSON with which LMI takes JSON; the last is what curl sets by default.
_JSON_TYPES = frozenset({"", "application/octet-stream", "application/x-www-form-urlencoded"})
_PATHS = {"chat": CHAT, "completion": COMPLETIONS}
_NULL = b"null"


_decode = JsonDecoder(dict[str, msgspec.Raw]).decode
_decode_ids = JsonDecoder(list[int]).decode


@dataclass(frozen=True, slots=True)
class Body:
    """What a body was found to be."""

    kind: Kind
    field: str = ""  # The field that says so.
    has_inputs: bool = True
    stop_token_ids: frozenset[int] = frozenset()


_LMI = Body("lmi")


def read_body(body: bytes, table: Table) -> Body:
    """What a JSON body is. A field that is null is absent; what is no JSON object is LMI's, which refuses it."""
    try:
        fields = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _LMI
    given = {name for name, value in fields.items() if bytes(value) != _NULL}
    for field, kind in table:
        if field in given:
            return Body(kind, field, "inputs" in given, _stop_token_ids(fields.get("stop_token_ids")))
    return _LMI


def _stop_token_ids(given: msgspec.Raw | None) -> frozenset[int]:
    try:
        return frozenset(_decode_ids(given)) if given is not None else frozenset()
    except msgspec.DecodeError:
        return frozenset()  # vLLM says what is wrong with it


class InvocationsHandler:
    """Implements `Handler`: hands a call to the handler that its body asks for."""

    def __init__(
        self,
        lmi: Handler,
        openai: OpenAIHandler | None,
        settings: ModelSettings,
        sessions: Sessions,
        overload_status: int = 503,
        formatting: Formatting | None = None,
    ) -> None:
        """`lmi`: answers bodies with `inputs`. `openai`: None where the engine has no chat. `formatting`: where it has
        an output formatter, vLLM's front end answers bodies with `inputs`, too."""
        self._lmi, self._openai, self._settings, self._formatting = lmi, openai, settings, formatting
        self._sessions, self._overload_status = sessions, overload_status
        self._table = ASYNCHRONOUS if settings.async_mode else ROLLING_BATCH

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        formatting = self._formatting
        if formatting is not None:
            call = await formatting.of_call(formatting.formatters.read, call)
        body = await off_the_loop(call.body, self._read, call)
        if body.kind == "session":
            writer.reply(await self._sessions.answer(call))
            return None
        if SESSION_ID in dict(call.headers):
            await self._sessions.check(call)
        if formatting is not None and formatting.formatters.writes:
            return await self._formatted(formatting, body, call, writer)
        if body.kind == "lmi":
            return await self._lmi.handle(call, writer)
        if self._openai is None:
            if body.has_inputs:
                return await self._lmi.handle(call, writer)
            raise payload_refused(
                f"`{body.field}` needs vLLM as the engine (option.rolling_batch=vllm); send `inputs` instead"
            )
        shape = self._shape(body)
        return await self._begin(self._openai, body, call, writer if shape is None else ShapedReply(writer, shape))

    async def _formatted(self, formatting: Formatting, body: Body, call: Call, writer: ReplyWriter) -> Running:
        """Answer a call by vLLM's front end and the model's output formatter."""
        assert self._openai is not None, "the model has not loaded without it"
        shape = AsyncShape(self._overload_status)
        if body.kind == "lmi":
            call = await formatting.of_call(formatting.formatters.as_completion, call)
            body = Body("completion")
            shape = AsyncShape(self._overload_status, FAILED_DEPENDENCY)
        reply = FormattedReply(writer, formatting, shape, _PATHS[body.kind])
        reply.running = running = await self._begin(self._openai, body, call, reply)
        return running

    async def _begin(self, openai: OpenAIHandler, body: Body, call: Call, writer: ReplyWriter) -> Running:
        try:
            return await openai.begin(
                replace(call, method="POST", content_type=JSON, query=()),
                writer,
                _PATHS[body.kind],
                any_model=True,
                adapter=await off_the_loop(call.body, self._adapter, call),
            )
        except UnknownAdapter as error:
            raise ContractError(unknown_adapter(error), error.message) from None

    def _adapter(self, call: Call) -> str | None:
        """The adapter that header, body or query names; None if none does, or the model has no adapters."""
        if not self._settings.enable_lora:
            return None
        given = adapters_in(call.body)
        if (adapter_header(call), given, adapter_query(call)) == (None, None, None):
            return None
        try:
            return adapters_of(call, given, 1)[0] or ""
        except InvalidRequest as error:
            raise payload_refused(error.message) from None

    def _read(self, call: Call) -> Body:
        if not any(mark in call.body for mark in _MARKS):
            return _LMI
        kind = media_type(call.content_type)
        if not ("json" in kind or kind in _JSON_TYPES):
            return _LMI
        return read_body(call.body, self._table)

    def _shape(self, body: Body) -> Shape | None:
        """None: vLLM's bytes as they are."""
        if self._settings.async_mode:
            return AsyncShape(self._overload_status)
        if body.kind == "completion" or self._settings.chat_format == "openai":
            return None
        return LmiChatShape(
            sse=self._settings.output_formatter == "sse",
            stop_token_ids=body.stop_token_ids,
            overload_status=self._overload_status,
        )
