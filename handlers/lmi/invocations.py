"""The handler of `/invocations`. It finds the kind of each body, and passes the call to the handler for that kind."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import msgspec

from engines.errors import InvalidRequest, UnknownAdapter
from handlers.contract import JSON, Call, ContractError, Handler, ReplyWriter, Running, adapter_header, media_type
from handlers.custom.formatters import Formatters
from handlers.djl_errors import FAILED_DEPENDENCY, unknown_adapter
from handlers.explanation import Explained, explaining
from handlers.lmi.adapter_choice import adapter_query, adapters_in, adapters_of
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.chat_answers import AsyncForm, LmiChatForm
from handlers.lmi.errors import payload_refused
from handlers.lmi.formatters.async_formatters import FormattedReply, formatted_call
from handlers.lmi.sessions import SESSION_ID, Sessions
from handlers.model_config import ModelConfig
from handlers.openai.answer import VLLM_FORM, AnswerForm
from handlers.openai.body import Body, read_chat, read_completion
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.handler import OpenAIHandler
from handlers.parsing.json_limits import JsonDecoder, off_the_loop
from handlers.queue import EngineQueue

logger = logging.getLogger(__name__)

# These fields decide the kind of a body. If it has several of them, the first in this order counts. LMI's contract
# refuses a body without any of them.
_ROLLING_BATCH = ("messages", "prompt", "inputs", "requestType")
_ASYNCHRONOUS = ("prompt", "inputs", "messages", "requestType")  # LMI's asynchronous handler uses this order.
_PATHS = {"messages": CHAT, "prompt": COMPLETIONS}
# For each kind, the sentence that an explanation shows.
_WAYS = {
    "messages": "the body has `messages`: OpenAI's chat",
    "prompt": "the body has `prompt`: OpenAI's completion",
    "inputs": "no other field decides first: LMI's own contract reads `inputs`",
    "requestType": "the body has `requestType`: a session, which generates nothing",
}
# LMI also accepts JSON with these content types. curl sends the last one by default.
_JSON_TYPES = frozenset({"", "application/octet-stream", "application/x-www-form-urlencoded"})
_SESSION_HEADER = SESSION_ID.lower().encode()

_split = JsonDecoder(dict[str, msgspec.Raw]).decode


class InvocationsHandler:
    """Passes each call to the handler for the kind of its body."""

    def __init__(
        self,
        lmi: Handler,
        openai: OpenAIHandler | None,
        config: ModelConfig,
        queue: EngineQueue,
        sessions: Sessions,
        contract: LmiAsyncContract | None = None,
        formatters: Formatters | None = None,
    ) -> None:
        """Create the handler.

        Args:
            lmi: Answers bodies with `inputs`.
            openai: Answers chats and completions. None if the engine is not vLLM.
            config: The model's settings.
            queue: The queue of the model's engine.
            sessions: Answers bodies with `requestType`.
            contract: The contract of bodies with `inputs` in LMI's asynchronous mode.
            formatters: The formatters of the asynchronous mode. If there is an output formatter, vLLM's front end also
                answers bodies with `inputs`.
        """
        self._lmi, self._openai, self._config, self._queue, self._sessions = lmi, openai, config, queue, sessions
        self._contract, self._formatters = contract, formatters
        self._order = _ASYNCHRONOUS if config.lmi.async_mode else _ROLLING_BATCH
        self._forms = dict.fromkeys(_PATHS, VLLM_FORM)
        if config.lmi.async_mode:
            self._forms = dict.fromkeys(_PATHS, AsyncForm(queue.overload_status))
        elif config.lmi.chat_format != "openai":
            sse = config.lmi.output_formatter == "sse"
            self._forms["messages"] = LmiChatForm(sse=sse, overload_status=queue.overload_status)

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        formatters = self._formatters
        if formatters is not None and formatters.input is not None:
            if call.explanation is not None:
                call.explanation.once = True
            queue = self._queue if call.explanation is None else explaining(self._queue, call)
            call = await formatters.thread.read(call, partial(formatted_call, formatters.input, call), queue)
        data, field, body = call.body, "inputs", None
        if b'"messages"' in data or b'"prompt"' in data or b'"requestType"' in data:
            call, field, body = await off_the_loop(data, self._read, call)
        if call.explanation is not None:
            call.explanation.because.append(_WAYS[field])
            call.explanation.way = field
        if field == "requestType":
            if call.steering_fault is not None:
                raise payload_refused(call.steering_fault.message)
            if call.explanation is not None:
                raise Explained
            writer.reply(await self._sessions.answer(call))
            return None
        # A variant repeats an explained call with another body. The call's session was checked before, and a refusal
        # for too many waiting calls would say nothing about the variant's body.
        if _SESSION_HEADER in call.headers and (call.explanation is None or not call.explanation.variant):
            await self._sessions.check(call)
        if formatters is not None and formatters.output is not None:
            return await self._formatted(formatters, call, field, body, writer)
        if field == "inputs":
            return await self._lmi.handle(call, writer)
        if self._openai is None:
            if call.fields is not None and given(call.fields, "inputs"):
                return await self._lmi.handle(call, writer)
            raise payload_refused(
                f"`{field}` needs vLLM as the engine (option.rolling_batch=vllm); send `inputs` instead"
            )
        return await self._begin(self._openai, call, field, body, writer, self._forms[field])

    async def _formatted(
        self, formatters: Formatters, call: Call, field: str, body: Body | None, writer: ReplyWriter
    ) -> Running | None:
        """Answer a call with vLLM's front end and the model's output formatter."""
        assert self._openai is not None, "the model has not loaded without it"
        form = AsyncForm(self._queue.overload_status)
        if field == "inputs":
            assert self._contract is not None
            call, notes = await off_the_loop(call.body, self._contract.as_completion, call)
            if call.explanation is not None:
                call.explanation.ignored += notes
            for note in notes:
                logger.info("%s", note, extra={"request_id": call.request_id})
            call, field, body = await off_the_loop(call.body, self._read, call)
            form = AsyncForm(self._queue.overload_status, FAILED_DEPENDENCY)
        reply = FormattedReply(writer, formatters, form, _PATHS[field])
        reply.follow(await self._begin(self._openai, call, field, body, reply, VLLM_FORM))
        return reply

    async def _begin(
        self, openai: OpenAIHandler, call: Call, field: str, body: Body | None, writer: ReplyWriter, form: AnswerForm
    ) -> Running | None:
        adapter = self._adapter(call) if self._config.enable_lora else None
        if call.method != "POST" or call.content_type != JSON or call.query:
            call = replace(call, method="POST", content_type=JSON, query=())
        try:
            return await openai.begin(
                call, writer, _PATHS[field], any_model=True, adapter=adapter, form=form, body=body
            )
        except UnknownAdapter as error:
            raise ContractError(unknown_adapter(error), error.message) from None

    def _adapter(self, call: Call) -> str | None:
        """Return the adapter that the header, the body or the query names, or None."""
        named = adapters_in(call.body) if call.fields is not None and given(call.fields, "adapters") else None
        if (adapter_header(call), named, adapter_query(call)) == (None, None, None):
            return None
        try:
            return adapters_of(call, named, 1)[0] or ""
        except InvalidRequest as error:
            raise payload_refused(error.message) from None

    def _read(self, call: Call) -> tuple[Call, str, Body | None]:
        """Return the call, the field that decides its kind, and the parsed body if it is a common OpenAI body.

        A common body has only the usual fields. Any other body is split into its fields, and not parsed further.
        """
        kind = media_type(call.content_type)
        if not ("json" in kind or kind in _JSON_TYPES):
            return call, "inputs", None
        try:
            if b'"messages"' in call.body:
                return call, "messages", read_chat(call.body)
            if b'"prompt"' in call.body:
                return call, "prompt", read_completion(call.body)
        except msgspec.DecodeError:
            pass  # not a common body
        try:
            fields = _split(call.body)
        except msgspec.DecodeError:
            return call, "inputs", None  # LMI's contract reports the error.
        for field in self._order:
            if given(fields, field):
                return replace(call, fields=fields), field, None
        return call, "inputs", None


def given(fields: Mapping[str, msgspec.Raw], name: str) -> bool:
    """Return True if a body has a field. A field that is null counts as absent."""
    return bytes(fields.get(name, b"null")) != b"null"
