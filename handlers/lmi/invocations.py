"""`/invocations`: finds out which kind of call a body is, and gives the call to the handler for that kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from engines.errors import InvalidRequest, UnknownAdapter
from engines.model_settings import ModelSettings
from handlers.contract import JSON, Call, ContractError, Handler, ReplyWriter, Running, adapter_header, media_type
from handlers.djl_errors import FAILED_DEPENDENCY, unknown_adapter
from handlers.json_cost import JsonDecoder, off_the_loop
from handlers.lmi.adapter_choice import adapter_query, adapters_of
from handlers.lmi.answer_forms import AsyncForm, LmiChatForm
from handlers.lmi.async_formatters import Formatting
from handlers.lmi.errors import payload_refused
from handlers.lmi.formatted_reply import FormattedReply
from handlers.lmi.sessions import SESSION_ID, Sessions
from handlers.openai.answer import VLLM_FORM, AnswerForm
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.handler import OpenAIHandler

Kind = Literal["chat", "completion", "lmi", "session"]
Table = tuple[tuple[str, Kind], ...]

# The first of these fields that a body has decides its kind. A body without any of them is LMI's, which refuses it.
ROLLING_BATCH: Table = (("messages", "chat"), ("prompt", "completion"), ("inputs", "lmi"), ("requestType", "session"))
# The same, in the order of LMI's asynchronous handler.
ASYNCHRONOUS: Table = (("prompt", "completion"), ("inputs", "lmi"), ("messages", "chat"), ("requestType", "session"))

# A body without any of these is LMI's. It is not decoded to find that out.
_MARKS = tuple(f'"{field}"'.encode() for field, kind in ROLLING_BATCH if kind != "lmi")
# LMI takes JSON with these content types too. curl sends the last one by default.
_JSON_TYPES = frozenset({"", "application/octet-stream", "application/x-www-form-urlencoded"})
_PATHS = {"chat": CHAT, "completion": COMPLETIONS}
_NULL = b"null"
_SESSION_HEADER = SESSION_ID.lower().encode()


_split = JsonDecoder(dict[str, msgspec.Raw]).decode
_decode_any = JsonDecoder[Any]().decode


@dataclass(frozen=True, slots=True)
class InvocationBody:
    """A body of `/invocations`, read as far as needed to choose its handler."""

    kind: Kind
    field: str = ""  # The field that decides the kind.
    fields: Mapping[str, msgspec.Raw] | None = None  # All fields; None if the body was not split.

    def given(self, name: str) -> msgspec.Raw | None:
        """Return a field, still encoded. A field that is null counts as absent."""
        value = (self.fields or {}).get(name)
        return None if value is None or bytes(value) == _NULL else value

    @property
    def adapters(self) -> Any:
        given = self.given("adapters")
        try:
            return _decode_any(bytes(given)) if given is not None else None
        except msgspec.DecodeError:
            return None  # vLLM reports the fault


_LMI = InvocationBody("lmi")


def read_body(body: bytes, table: Table) -> InvocationBody:
    """Find out the kind of a JSON body."""
    try:
        fields = _split(body)
    except msgspec.DecodeError:
        return _LMI  # LMI's contract reports the fault
    for field, kind in table:
        found = InvocationBody(kind, field, fields)
        if found.given(field) is not None:
            return found
    return _LMI


class InvocationsHandler:
    """Gives each call to the handler for the kind of its body."""

    def __init__(
        self,
        lmi: Handler,
        openai: OpenAIHandler | None,
        settings: ModelSettings,
        sessions: Sessions,
        overload_status: int = 503,
        formatting: Formatting | None = None,
    ) -> None:
        """Create the handler.

        Args:
            lmi: Answers bodies with `inputs`.
            openai: Answers chats and completions. None if the engine is not vLLM.
            settings: The model's settings.
            sessions: Answers `requestType`.
            overload_status: The status of a reply if the queue is full.
            formatting: The formatters of LMI's asynchronous mode. If there is an output formatter, vLLM's front end
                answers bodies with `inputs` too.
        """
        self._lmi, self._openai, self._settings, self._formatting = lmi, openai, settings, formatting
        self._sessions, self._overload_status = sessions, overload_status
        self._table = ASYNCHRONOUS if settings.async_mode else ROLLING_BATCH
        self._chat_form = self._completion_form = VLLM_FORM
        if settings.async_mode:
            self._chat_form = self._completion_form = AsyncForm(overload_status)
        elif settings.chat_format != "openai":
            self._chat_form = LmiChatForm(sse=settings.output_formatter == "sse", overload_status=overload_status)

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        formatting = self._formatting
        if formatting is not None:
            call = await formatting.of_call(formatting.formatters.read, call)
        body = await off_the_loop(call.body, self._read, call)
        if body.kind == "session":
            writer.reply(await self._sessions.answer(call))
            return None
        if _SESSION_HEADER in call.headers:
            await self._sessions.check(call)
        if formatting is not None and formatting.formatters.writes:
            return await self._formatted(formatting, body, call, writer)
        if body.kind == "lmi":
            return await self._lmi.handle(call, writer)
        if self._openai is None:
            if body.given("inputs") is not None:
                return await self._lmi.handle(call, writer)
            raise payload_refused(
                f"`{body.field}` needs vLLM as the engine (option.rolling_batch=vllm); send `inputs` instead"
            )
        form = self._chat_form if body.kind == "chat" else self._completion_form
        return await self._begin(self._openai, body, call, writer, form)

    async def _formatted(
        self, formatting: Formatting, body: InvocationBody, call: Call, writer: ReplyWriter
    ) -> Running | None:
        """Answer a call with vLLM's front end and the model's output formatter."""
        assert self._openai is not None, "the model has not loaded without it"
        shape = AsyncForm(self._overload_status)
        if body.kind == "lmi":
            call = await formatting.of_call(formatting.formatters.as_completion, call)
            body = InvocationBody("completion", fields=await off_the_loop(call.body, _split, call.body))
            shape = AsyncForm(self._overload_status, FAILED_DEPENDENCY)
        reply = FormattedReply(writer, formatting, shape, _PATHS[body.kind])
        reply.running = running = await self._begin(self._openai, body, call, reply)
        return running

    async def _begin(
        self,
        openai: OpenAIHandler,
        body: InvocationBody,
        call: Call,
        writer: ReplyWriter,
        form: AnswerForm = VLLM_FORM,
    ) -> Running | None:
        try:
            return await openai.begin(
                replace(call, method="POST", content_type=JSON, query=(), fields=body.fields),
                writer,
                _PATHS[body.kind],
                any_model=True,
                adapter=self._adapter(call, body),
                form=form,
            )
        except UnknownAdapter as error:
            raise ContractError(unknown_adapter(error), error.message) from None

    def _adapter(self, call: Call, body: InvocationBody) -> str | None:
        """Return the adapter that header, body or query names. None if none does, or the model has no adapters."""
        if not self._settings.enable_lora:
            return None
        given = body.adapters
        if (adapter_header(call), given, adapter_query(call)) == (None, None, None):
            return None
        try:
            return adapters_of(call, given, 1)[0] or ""
        except InvalidRequest as error:
            raise payload_refused(error.message) from None

    def _read(self, call: Call) -> InvocationBody:
        if not any(mark in call.body for mark in _MARKS):
            return _LMI
        kind = media_type(call.content_type)
        if not ("json" in kind or kind in _JSON_TYPES):
            return _LMI
        return read_body(call.body, self._table)
