"""A customer's formatters in LMI's asynchronous mode. They change request bodies and vLLM's answers.

Source: djl_python, `lmi_vllm/vllm_async_service.py`. The formatters of the other modes are in
`handlers.lmi.formatters.formatter_contract`.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

from djl_python.encode_decode import decode as decode_as_lmi
from engines.errors import GenerationFailed, InvalidRequest
from handlers.contract import JSON, Call, Reply, ReplyWriter, Running, media_type
from handlers.custom.formatters import Formatter, Formatters
from handlers.custom.handler_input import sdk_input
from handlers.djl_errors import FAILED_DEPENDENCY, failed_dependency, payload_error
from handlers.formatter_thread import FAILED, FormatterQueue
from handlers.lmi.body import decode
from handlers.lmi.chat_answers import AsyncForm
from handlers.lmi.converted_reply import ShapedReply, error_of, is_error
from handlers.lmi.errors import payload_refused
from handlers.parsing.forms import is_form

logger = logging.getLogger(__name__)

_END = b""  # The item that marks the end of a stream.


def formatted_call(read: Formatter, call: Call) -> Call:
    """Return the call with the body that the input formatter returns.

    As in LMI, `adapters` is removed from the body before the formatter is called.

    Raises:
        ContractError: The body cannot be decoded, or the formatter failed.
    """
    document = _decoded(call)
    adapters = document.pop("adapters", None) if isinstance(document, dict) else None
    try:
        document = read(document)
        if not isinstance(document, dict):
            raise TypeError(f"the input formatter returned {type(document).__name__}; expected dict")
        if adapters is not None:
            document.setdefault("adapters", adapters)
        body = json.dumps(document).encode()
    except Exception as error:
        logger.exception("the input formatter failed", extra={"request_id": call.request_id})
        raise failed_dependency(f"{FAILED}: {error}") from None
    return replace(call, body=body, content_type=JSON, fields=None)


def _decoded(call: Call) -> Any:
    kind = media_type(call.content_type)
    try:
        if "json" in kind or is_form(kind) or kind in ("", "application/octet-stream"):
            return decode(call.body, "" if "json" in kind else call.content_type)
        return decode_as_lmi(sdk_input(call), call.content_type)
    except InvalidRequest as error:
        raise payload_refused(error.message) from None
    except (ValueError, KeyError, ImportError) as error:
        raise payload_refused(f"the body is not valid {kind}: {error}") from None


class FormattedReply(ShapedReply):
    """Passes vLLM's replies to another writer after a customer's output formatter has changed them.

    The formatter gets vLLM's object for a whole answer, or each event of a stream as vLLM sends it. It does not get
    errors.
    """

    def __init__(self, writer: ReplyWriter, formatters: Formatters, form: AsyncForm, path: str) -> None:
        """Create the writer.

        Args:
            writer: Sends the changed reply.
            formatters: The formatters, including an output formatter.
            form: The form of errors.
            path: The path in vLLM's front end.
        """
        super().__init__(writer, form)
        self._formatters, self._path = formatters, path
        self._formatting: FormatterQueue[Reply | bytes] | None = None
        self._running: Running | None = None

    def follow(self, running: Running | None) -> None:
        """Set the call that makes the reply. The call is cancelled if the reply ends early."""
        self._running = running
        if self._ended:
            self.cancel()

    @property
    def request_id(self) -> str:
        return self._running.request_id if self._running is not None else ""

    def cancel(self) -> None:
        """Stop the call, because the client has disconnected or the formatter has failed."""
        if (running := self._close()) is not None:
            running.cancel()

    def reply(self, reply: Reply) -> None:
        super().reply(reply)
        if self._ended:
            self._close()

    def end(self, data: bytes) -> None:
        self.write(data)
        self._put(_END)

    async def drain(self) -> None:
        if self._formatting is not None:
            await self._formatting.drain()
        await super().drain()

    def _whole(self, reply: Reply) -> None:
        self._put(reply)

    def _event(self, event: bytes) -> None:
        self._put(event)

    def _put(self, item: Reply | bytes) -> None:
        if self._ended:
            return
        if self._formatting is None:
            self._formatting = FormatterQueue(self._formatters.thread, self._format, self._take)
        self._formatting.put(item)

    def _format(self, item: Reply | bytes) -> bytes:
        """Return the bytes for a whole answer or for an event. Runs on the formatters' thread."""
        if isinstance(item, Reply):
            from handlers.openai.vllm.request_models import answer_object  # imports vLLM

            return self._line(answer_object(self._path, item.body))
        if item == _END:
            return b"\n"
        return self._shape.event(item) if is_error(item) else self._line(f"data: {item.decode()}\n\n")

    def _line(self, response: Any) -> bytes:
        """Return the output formatter's line for an object or an event of vLLM.

        Raises:
            GenerationFailed: The formatter raised an error, or returned a value that cannot be sent.
        """
        assert self._formatters.output is not None
        try:
            return _encoded(self._formatters.output(response))
        except Exception as error:
            logger.exception("the output formatter failed")
            raise GenerationFailed(f"{FAILED}: {error}") from None

    def _take(self, done: list[tuple[Reply | bytes, bytes]], error: GenerationFailed | None) -> None:
        for item, line in done:
            if self._ended:
                return
            if isinstance(item, Reply):
                self._close()
                self._writer.reply(Reply(item.status, JSON, line, item.headers))
            elif is_error(item):
                self._fail(line, self._shape.refusal(Reply(error_of(item).code, JSON, item)))
            else:
                if not self._started:
                    self._begin()
                if item == _END:
                    self._close()
                    self._writer.end(line)
                else:
                    self._writer.write(line)
        if error is not None and not self._ended:
            last = payload_error(error.message)
            self._fail(last, Reply(FAILED_DEPENDENCY, JSON, last))

    def _fail(self, last: bytes, refusal: Reply) -> None:
        self.cancel()
        if self._started:
            self._writer.end(last)
        else:
            self._writer.reply(refusal)

    def _close(self) -> Running | None:
        """Close the writer, and return the call.

        The queue and the call refer to the writer. So the writer drops them, which leaves no reference cycle.
        """
        self._ended = True
        if self._formatting is not None:
            self._formatting.close()
        running, self._formatting, self._running = self._running, None, None
        return running


def _encoded(value: Any) -> bytes:
    if hasattr(value, "model_dump_json"):
        value = value.model_dump_json()
    elif hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise TypeError(f"the output formatter returned {type(value).__name__}; expected dict, str or a response")
    return value.encode("utf-8", "replace") + b"\n"
