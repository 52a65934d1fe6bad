"""A customer's formatters for the asynchronous mode of LMI.

Source: djl_python, `lmi_vllm/vllm_async_service.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from djl_python.encode_decode import decode as decode_as_lmi
from engines.errors import GenerationFailed, InvalidRequest, RequestError
from handlers.contract import JSON, Call, media_type
from handlers.custom.formatter_thread import FormatterThread
from handlers.custom.formatters import Formatter, Formatters
from handlers.djl_errors import failed_dependency
from handlers.forms import is_form
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.body import decode
from handlers.lmi.errors import payload_refused
from handlers.lmi.formatter_contract import FAILED, accepted_keywords, handler_input

logger = logging.getLogger(__name__)


def _answer_object(path: str, body: bytes) -> Any:
    from handlers.openai.vllm_app import answer_object  # imports vLLM

    return answer_object(path, body)


class AsyncFormatters:
    """The input formatter, which changes bodies before they are parsed, and the output formatter for answers."""

    def __init__(
        self,
        contract: LmiAsyncContract,
        given: Formatters,
        thread: FormatterThread,
        tokenizer: Any = None,
        answer_object: Callable[[str, bytes], Any] = _answer_object,
    ) -> None:
        """Create the formatters.

        Args:
            contract: The contract that parses bodies with `inputs`.
            given: The customer's functions.
            thread: The thread on which they run.
            tokenizer: The value of the input formatter's argument `tokenizer`.
            answer_object: Returns vLLM's object for an answer, from the path in its front end and the body.
        """
        self._contract, self._read, self._write = contract, given.input, given.output
        self._answer_object = answer_object
        self._keywords = accepted_keywords(self._read, {"tokenizer": tokenizer}) if self._read is not None else {}
        self.thread = thread
        self.writes = self._write is not None  # True if there is an output formatter.

    async def read(self, call: Call) -> Call:
        """Return the call with the body that the input formatter returns.

        As in LMI, `adapters` is taken out of the body before the formatter is called.

        Raises:
            ContractError: The body cannot be decoded, or the formatter failed.
        """
        if self._read is None:
            return call
        try:
            return await self.thread.run(partial(self._read_call, self._read, call))
        except RequestError as error:
            raise failed_dependency(error.message) from None

    def _read_call(self, read: Formatter, call: Call) -> Call:
        document = _decoded(call)
        adapters = document.pop("adapters", None) if isinstance(document, dict) else None
        try:
            document = read(document, **self._keywords)
            if not isinstance(document, dict):
                raise TypeError(f"the input formatter returned {type(document).__name__}; expected dict")
            if adapters is not None:
                document.setdefault("adapters", adapters)
            body = json.dumps(document).encode()
        except Exception as error:
            logger.exception("the input formatter failed", extra={"request_id": call.request_id})
            raise failed_dependency(f"{FAILED}: {error}") from None
        return replace(call, body=body, content_type=JSON)

    def as_completion(self, call: Call) -> Call:
        """Return a call with `inputs` as a call for a completion of vLLM, so that vLLM's front end answers it.

        Raises:
            ContractError: The call is refused.
        """
        completion, notes = self._contract.as_completion(call)
        for note in notes:
            logger.info("%s", note, extra={"request_id": call.request_id})
        return completion

    def written_answer(self, path: str, body: bytes) -> bytes:
        """Return the output formatter's line for a whole answer of vLLM. `path` is a path of its front end.

        Raises:
            GenerationFailed: See `written`.
        """
        return self.written(self._answer_object(path, body))

    def written(self, response: Any) -> bytes:
        """Return the output formatter's line for vLLM's response, or for one event of its stream.

        Raises:
            GenerationFailed: The formatter raised an error, or returned a value that cannot be sent.
        """
        assert self._write is not None
        try:
            return _line(self._write(response))
        except Exception as error:
            logger.exception("the output formatter failed")
            raise GenerationFailed(f"{FAILED}: {error}") from None


def _decoded(call: Call) -> Any:
    kind = media_type(call.content_type)
    try:
        if "json" in kind or is_form(kind) or kind in ("", "application/octet-stream"):
            return decode(call.body, "" if "json" in kind else call.content_type)
        return decode_as_lmi(handler_input(call), call.content_type)
    except InvalidRequest as error:
        raise payload_refused(error.message) from None
    except (ValueError, KeyError, ImportError) as error:
        raise payload_refused(f"the body is not valid {kind}: {error}") from None


def _line(value: Any) -> bytes:
    if hasattr(value, "model_dump_json"):
        value = value.model_dump_json()
    elif hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise TypeError(f"the output formatter returned {type(value).__name__}; expected dict, str or a response")
    return value.encode("utf-8", "replace") + b"\n"
