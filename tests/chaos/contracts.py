"""One request for every contract and format, with the form of its complete answer and the form of its errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Json = dict[str, Any]
Verdict = Literal["complete", "error"]


class Malformed(Exception):
    """The reply is neither a complete answer nor an error of its contract."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete HTTP reply."""

    status: int
    content_type: str
    body: bytes
    retry_after: float | None = None
    """The number of seconds in `Retry-After`. None: the reply does not have this header."""


@dataclass(frozen=True, slots=True)
class ErrorForm:
    """The form of errors for a family of clients."""

    statuses: frozenset[int]
    """The statuses that the contract's page in docs/ lists for requests that generate tokens."""
    is_error: Callable[[Json], bool]
    """Returns True if an object is an error of the contract. The object is a body, or one record of a stream."""
    text: frozenset[int] = frozenset()
    """Statuses whose body is plain text."""
    empty: frozenset[int] = frozenset()
    """Statuses without a body."""


def _openai_error(record: Json) -> bool:
    error = record.get("error")
    return isinstance(error, dict) and isinstance(error.get("message"), str) and {"type", "param", "code"} <= set(error)


def _lmi_error(record: Json) -> bool:
    if _openai_error(record):  # Completions have vLLM's errors.
        return True
    if "error" in record:
        return isinstance(record["error"], str) and isinstance(record.get("code"), int)
    return set(record) == {"code", "type", "message"}


def _happy_vllm_error(record: Json) -> bool:
    return "detail" in record or isinstance(record.get("error"), str)


ERRORS = {
    "lmi": ErrorForm(frozenset({400, 404, 408, 413, 424, 500, 503}), _lmi_error, empty=frozenset({413})),
    "tgi": ErrorForm(
        frozenset({400, 404, 405, 408, 413, 415, 422, 424, 429, 500, 503}),
        lambda record: isinstance(record.get("error"), str) and isinstance(record.get("error_type"), str),
        text=frozenset({400, 408, 413, 415, 422}),
        empty=frozenset({405}),
    ),
    "triton": ErrorForm(
        frozenset({400, 404, 405, 408, 500, 501, 503}), lambda record: isinstance(record.get("error"), str)
    ),
    "happy_vllm": ErrorForm(frozenset({404, 405, 408, 413, 422, 500, 503}), _happy_vllm_error),
    "openai": ErrorForm(frozenset({400, 404, 405, 408, 413, 422, 500, 501, 503}), _openai_error),
}


@dataclass(frozen=True, slots=True)
class Contract:
    """One route and answer format."""

    name: str
    family: str
    path: str
    body: Callable[[int], Json]
    """Returns the body of a request for exactly this many tokens."""
    complete: Callable[[list[Json], int], bool]
    """Returns True if an answer's records contain everything that was requested. A plain answer is one record."""
    done: bool = False
    """True if the last event is `[DONE]`."""

    @property
    def errors(self) -> ErrorForm:
        return ERRORS[self.family]

    def judge(self, answer: Answer, tokens: int | None = None) -> Verdict:
        """Return the verdict on an answer.

        Args:
            answer: The answer.
            tokens: The number of requested tokens. None: the number is unknown, and any complete answer is accepted.

        Raises:
            Malformed: The answer is neither complete nor an error of its contract.
        """
        if b"Traceback (most recent" in answer.body:
            raise Malformed(f"{self.name}: a traceback: {_shown(answer)}")
        if answer.status != 200:
            self._judge_error(answer)
            return "error"
        records = self._records(answer)
        if records and self.errors.is_error(records[-1]):
            return "error"
        if not records or (tokens is not None and not self.complete(records, tokens)):
            raise Malformed(f"{self.name}: incomplete: {_shown(answer)}")
        return "complete"

    def _judge_error(self, answer: Answer) -> None:
        form = self.errors
        if answer.status not in form.statuses:
            raise Malformed(f"{self.name}: undocumented status: {_shown(answer)}")
        if answer.status in form.empty and not answer.body:
            return
        if answer.status in form.text and answer.content_type.startswith("text/plain"):
            return
        try:
            record = json.loads(answer.body)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not form.is_error(record):
            raise Malformed(f"{self.name}: not the form of its errors: {_shown(answer)}")

    def _records(self, answer: Answer) -> list[Json]:
        """Return the records of a plain answer, of JSON lines, or of an event stream."""
        try:
            if answer.content_type.startswith("text/event-stream"):
                events = [event for event in answer.body.decode().split("\n\n") if event and not event.startswith(":")]
                data = [event.removeprefix("data:").removeprefix(" ") for event in events]
                if self.done:
                    if data[-1:] != ["[DONE]"] and not (data and self.errors.is_error(json.loads(data[-1]))):
                        raise Malformed(f"{self.name}: the stream ends without [DONE]: {_shown(answer)}")
                    data = [text for text in data if text != "[DONE]"]
                return [json.loads(text) for text in data]
            if self.name.endswith("stream"):
                # Not `splitlines`: JSON text may contain line ends outside ASCII, such as U+2028.
                return [json.loads(line) for line in answer.body.decode().removesuffix("\n").split("\n")]
            return [json.loads(answer.body)]
        except ValueError as error:
            raise Malformed(f"{self.name}: {error}: {_shown(answer)}") from error


def _shown(answer: Answer) -> str:
    body = answer.body if len(answer.body) < 600 else answer.body[:300] + b" ... " + answer.body[-300:]
    return f"{answer.status} {answer.content_type} {body!r}"


PROMPT = "Once upon a time"
_CHAT: Json = {"messages": [{"role": "user", "content": PROMPT}], "ignore_eos": True}


def _asked(limit: str, **fields: Any) -> Callable[[int], Json]:
    """Return a function that makes a body with these fields, and with the number of tokens in the field `limit`."""
    return lambda tokens: {**fields, limit: tokens}


def _asked_inside(limit: str, parameters: Json, **fields: Any) -> Callable[[int], Json]:
    """Like `_asked`, but the limit is one of the `parameters`."""
    return lambda tokens: {**fields, "parameters": {limit: tokens, **parameters}}


def _text(field: str) -> Callable[[list[Json], int], bool]:
    return lambda records, _: len(records) == 1 and isinstance(records[0].get(field), str)


def _lmi_stream(records: list[Json], tokens: int) -> bool:
    whole = "".join(record["token"]["text"] for record in records)
    return len(records) == tokens and records[-1].get("generated_text") == whole


def _tgi_stream(records: list[Json], tokens: int) -> bool:
    # A model may end a text before the limit, because TGI has no parameter such as `ignore_eos`.
    indexes = [record["index"] for record in records]
    last = records[-1].get("generated_text")
    return indexes == list(range(1, len(records) + 1)) and len(records) <= tokens and isinstance(last, str)


def _usage(records: list[Json], tokens: int) -> bool:
    return len(records) == 1 and records[0]["usage"]["completion_tokens"] == tokens


def _finished(records: list[Json], _: int) -> bool:
    return any(choice.get("finish_reason") for record in records for choice in record["choices"])


def _happy_vllm(records: list[Json], tokens: int) -> bool:
    last = records[-1]
    return last["finish_reasons"] == ["length"] and last["usages"][0]["completion_tokens"] == tokens


def _triton_stream(records: list[Json], tokens: int) -> bool:
    return sum(record["num_output_tokens"] for record in records) == tokens


_ENDLESS = {"ignore_eos": True}
_TRITON_STREAM = {**_ENDLESS, "stream": True, "return_num_output_tokens": True}
_LMI = partial(_asked_inside, "max_new_tokens", inputs=PROMPT)
_TRITON = partial(_asked_inside, "max_tokens", text_input=PROMPT)
_LMI_CHAT = partial(_asked, "max_tokens", **_CHAT)
_TGI = _asked_inside("max_new_tokens", {}, inputs=PROMPT)
_HAPPY_VLLM = _asked("max_tokens", prompt=PROMPT, ignore_eos=True)
_CHATS = partial(_LMI_CHAT, model="model")
_COMPLETIONS = partial(_asked, "max_tokens", model="model", prompt=PROMPT, ignore_eos=True)
_TO_THE_END = {"ignore_eos_token": True}
CONTRACTS = (
    Contract("lmi", "lmi", "/invocations", _LMI(_TO_THE_END, stream=False), _text("generated_text")),
    Contract("lmi jsonlines stream", "lmi", "/invocations", _LMI(_TO_THE_END, stream=True), _lmi_stream),
    Contract(
        "lmi sse stream",
        "lmi",
        "/invocations",
        _LMI({**_TO_THE_END, "output_formatter": "sse"}, stream=True),
        _lmi_stream,
    ),
    Contract("lmi chat", "lmi", "/invocations", _LMI_CHAT(), _usage),
    Contract("lmi chat stream", "lmi", "/invocations", _LMI_CHAT(stream=True), _finished),
    Contract("tgi", "tgi", "/generate", _TGI, _text("generated_text")),
    Contract("tgi stream", "tgi", "/generate_stream", _TGI, _tgi_stream),
    Contract("triton", "triton", "/v2/models/model/generate", _TRITON(_ENDLESS), _text("text_output")),
    Contract("triton stream", "triton", "/v2/models/model/generate_stream", _TRITON(_TRITON_STREAM), _triton_stream),
    Contract("happy_vllm", "happy_vllm", "/v1/generate", _HAPPY_VLLM, _happy_vllm),
    Contract("happy_vllm stream", "happy_vllm", "/v1/generate_stream", _HAPPY_VLLM, _happy_vllm),
    Contract("openai chat", "openai", "/v1/chat/completions", _CHATS(), _usage),
    Contract("openai chat stream", "openai", "/v1/chat/completions", _CHATS(stream=True), _finished, done=True),
    Contract("openai completions", "openai", "/v1/completions", _COMPLETIONS(), _usage),
    Contract("openai completions stream", "openai", "/v1/completions", _COMPLETIONS(stream=True), _finished, done=True),
)
