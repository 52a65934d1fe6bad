"""LMI's dynamic-batch answers: a JSON array with a text for each prompt, or a record for each step.

Source: LMI schema v0.31, Dynamic Batch/Static Batch Schema; contracts/lmi.md sections 1.6 (E3), 5.2, 5.4 and 5.5.
"""

from __future__ import annotations

from collections.abc import Sequence
from json.encoder import encode_basestring, encode_basestring_ascii

from handlers.contracts.lmi.errors import JSON, handler_failure, overloaded, status_of
from handlers.contracts.protocol import Reply
from handlers.errors import Overloaded, RequestError
from handlers.request import FinishReason, TokenDelta

JSON_LINES = "application/jsonlines"


def failure(error: RequestError, overload_status: int) -> Reply:
    """The answer to a call that failed before its first byte: E3, or the front end's own for a full queue."""
    if isinstance(error, Overloaded):
        return overloaded(error, overload_status)
    status = status_of(error)
    return Reply(status, JSON, handler_failure(error.message, status))


class ListAnswer:
    """One text for each prompt, in the prompts' order; sent when all have finished."""

    content_type = JSON
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, lead: Sequence[str], overload_status: int) -> None:
        """`lead`: what each text begins with, the prompt or nothing."""
        self._texts = [[text] for text in lead]
        self._open = len(lead)
        self._overload_status = overload_status

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`."""
        if delta.sequence == 0:  # further ones are less probable
            self._texts[prompt].append(delta.text)
        self._open -= delta.last
        return b"" if self._open else self._body().encode()

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`."""
        return failure(error, self._overload_status)

    def fail_midway(self, error: RequestError) -> bytes:
        """Never comes to it: the body is sent whole."""
        return b""

    def _body(self) -> str:
        objects = (f'  {{\n    "generated_text":{encode_basestring("".join(parts))}\n  }}' for parts in self._texts)
        return "[\n" + ",\n".join(objects) + "\n]"


class RecordListAnswer:
    """A record for each step, with an entry for each prompt.

    A record is complete when every unfinished prompt has its entry. A prompt that comes again before that is a step
    ahead of the others, which wait in another batch or hold their text back: then the record goes without them.
    """

    content_type = JSON_LINES
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, prompts: int, overload_status: int, pad_text: str, first_record: Sequence[str] = ()) -> None:
        """`first_record`: what is sent before anything was generated; nothing if empty."""
        self._entries: list[str | None] = [None] * prompts
        self._finished = [False] * prompts
        self._missing = prompts
        self._overload_status = overload_status
        self._pad_text = pad_text
        self._head = _record(first_record) if first_record else ""
        self._sent = bool(first_record)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`."""
        records, self._head = self._head, ""
        if self._entries[prompt] is not None:
            records += self._flush()
        shown_as_pad = not delta.text and delta.finish_reason is FinishReason.EOS
        self._entries[prompt] = self._pad_text if shown_as_pad else delta.text
        self._finished[prompt] = delta.last
        self._missing -= 1
        if self._missing == 0:
            records += self._flush()
        return records.encode()

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`."""
        return failure(error, self._overload_status)

    def fail_midway(self, error: RequestError) -> bytes:
        """The error as a record of its own, without `outputs`; what was generated before it is not lost."""
        pending = self._flush() if any(self._entries) else ""
        reason = encode_basestring_ascii(error.message)
        record = f'{{"code": {status_of(error)}, "message": "invoke handler failure", "error": {reason}}}\n'
        return f"{pending}{record}".encode()

    def _flush(self) -> str:
        entries = [
            entry if entry is not None else self._pad_text if finished else ""
            for entry, finished in zip(self._entries, self._finished, strict=True)
        ]
        at_end = all(self._finished) and not any(entry for entry in entries if entry != self._pad_text)
        self._entries = [None] * len(entries)
        self._missing = self._finished.count(False)
        if at_end and self._sent:  # nothing but ends: no record is needed to say so
            return ""
        self._sent = True
        return _record(entries)


def _record(entries: Sequence[str]) -> str:
    return f'{{"outputs": [{", ".join(map(encode_basestring_ascii, entries))}]}}\n'
