"""LMI's forms for chats and completions on `/invocations`.

With option.async_mode=true, LMI sends vLLM's objects as lines of JSON. Otherwise it sends chat objects of its own.
Sources: djl_python, `async_utils.py` for the lines; LMI, "Chat Completions API Schema" for the chat objects.

Common calls are answered from the engine's deltas. `handlers.lmi.converted_reply` converts the answers of vLLM's
serving classes.
"""

from __future__ import annotations

from collections.abc import Iterable
from json.encoder import encode_basestring as quote

import msgspec

from engines.errors import RequestError
from engines.request import DEADLINE, FinishReason, Token, TokenDelta
from handlers.contract import Answer, Call, Reply, ReplyWriter
from handlers.djl_errors import FAILED_DEPENDENCY
from handlers.lmi.converted_reply import LmiChatShape, ShapedReply, error_of, lmi_error, reason_of_stop
from handlers.openai.answer import (
    FINISH_REASONS,
    AnswerForm,
    AnswerOptions,
    DocumentAnswer,
    alternatives,
    failure,
    spelled,
)
from handlers.openai.answer import in_document as number_of
from handlers.parsing.json_limits import JsonDecoder


class _Fields(msgspec.Struct):
    stop_token_ids: list[int] | None = None


_decode_fields = JsonDecoder(_Fields).decode


class AsyncForm(AnswerForm):
    """The form of the asynchronous mode: each vLLM object is a line. A stream ends with an empty line."""

    stream_type = "application/jsonlines"
    before, after, done, document_end = "", "\n", "\n", "\n"

    def __init__(self, overload_status: int = 503, refusal_status: int | None = None) -> None:
        """Create the form.

        Args:
            overload_status: The status of a reply if the queue is full.
            refusal_status: The status of client errors. None keeps vLLM's status.
        """
        self._overload_status, self._refusal_status = overload_status, refusal_status

    def refusal(self, reply: Reply) -> Reply:
        status = self._refusal_status if self._refusal_status and reply.status < 500 else reply.status
        return lmi_error(reply, status, self._overload_status)

    def of_vllm(self, writer: ReplyWriter, call: Call) -> ReplyWriter:
        return ShapedReply(writer, self)

    def whole(self, reply: Reply) -> Reply:
        """Return a successful reply of vLLM in this form."""
        return Reply(reply.status, reply.content_type, reply.body + b"\n", reply.headers)

    def event(self, data: bytes) -> bytes:
        """Return the line for an event of vLLM. `data` is a chunk, an error object, or `[DONE]`."""
        return b"\n" if data == b"[DONE]" else data + b"\n"


class LmiChatForm(AnswerForm):
    """The form of chats in LMI's rolling batch: lines or server-sent events of LMI's own objects."""

    def __init__(self, *, sse: bool = False, overload_status: int = 503) -> None:
        """Create the form.

        Args:
            sse: True if a stream consists of server-sent events instead of lines.
            overload_status: The status of a reply if the queue is full.
        """
        self._overload_status = overload_status
        self.stream_type = "text/event-stream" if sse else "application/jsonlines"
        if not sse:
            self.before, self.after, self.done = "", "\n", ""

    def chat(self, options: AnswerOptions, *, stream: bool) -> Answer:
        return (LmiChatStream if stream else LmiChatDocument)(options, form=self)

    def refusal(self, reply: Reply) -> Reply:
        """Return vLLM's error in LMI's form. The status of every client error is 424, as in the rest of LMI."""
        status = FAILED_DEPENDENCY if reply.status < 500 else reply.status
        return lmi_error(reply, status, self._overload_status)

    def of_vllm(self, writer: ReplyWriter, call: Call) -> ReplyWriter:
        try:
            ids = (_decode_fields(call.body).stop_token_ids or ()) if b"stop_token_ids" in call.body else ()
        except msgspec.DecodeError:
            ids = ()  # vLLM reports the error
        return ShapedReply(writer, LmiChatShape(self, ids))


class LmiChatStream(Answer):
    """A record for each step of a sequence. The first record also has the role, after the text."""

    def __init__(self, options: AnswerOptions, form: AnswerForm) -> None:
        self._options, self._form = options, form
        self.content_type = form.stream_type
        self._head = (
            f'{form.before}{{"id": {quote(options.id)}, "object": "chat.completion.chunk", '
            f'"created": {options.created}, "choices": ['
        )
        self._heads = [f'{self._head}{{"index": {index}, "delta": {{' for index in range(options.sequences)]
        self._plain_end = f'}}, "logprobs": null, "finish_reason": null}}]}}{form.after}'
        self._begun = [False] * options.sequences
        # For each sequence: whether its further records have only text. The last record also has the finish reason.
        self._plain = [False] * options.sequences
        self._tokens = 0  # The number of tokens of the sequences that have ended.

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the record of a step. This is the hot path: it runs for each token of each stream."""
        if self._plain[delta.sequence] and delta.finish_reason is None:
            text = delta.text
            return f'{self._heads[delta.sequence]}"content": {quote(text)}{self._plain_end}'.encode() if text else b""
        data = ""
        if delta.text or delta.token_count or delta.stop_reason:  # Otherwise the call was aborted.
            data = self._record(delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            if self._options.usage:
                usage = _usage(delta.prompt_token_count, self._tokens)
                data += f'{self._head}], "usage": {usage}}}{self._form.after}'
            data += self._form.done
        return data.encode()

    def fail(self, error: RequestError) -> Reply:
        return self._form.refusal(failure(error))

    def fail_midway(self, error: RequestError) -> bytes:
        message = error_of(failure(error).body).message
        return (
            f'{self._heads[0]}"content": ""}}, "logprobs": null, "finish_reason": "error"}}], '
            f'"error": {quote(message)}, "code": {FAILED_DEPENDENCY}}}{self._form.after}{self._form.done}'
        ).encode("utf-8", "replace")

    def _record(self, delta: TokenDelta) -> str:
        options, index, ended = self._options, delta.sequence, delta.finish_reason is not None
        if not (delta.text or ended or options.logprobs):
            return ""
        shown = [f'"content": {quote(delta.text)}'] if delta.text or ended else []
        if not self._begun[index]:
            self._begun[index] = True
            self._plain[index] = not options.logprobs
            shown.append(f'"role": {quote(options.role)}')
        ending = _ending(delta.tokens, options, delta.finish_reason, delta.stop_reason)
        return f"{self._heads[index]}{', '.join(shown)}}}, {ending}}}]}}{self._form.after}"


class LmiChatDocument(DocumentAnswer):
    """One JSON document, which is sent when all sequences have finished."""

    def _document(self) -> str:
        options, usage = self._options, _usage(self._prompt_tokens, self._tokens)
        choices = ", ".join(map(self._choice, range(len(self._sequences))))
        return (
            f'{{"id": {quote(options.id)}, "object": "chat.completion", "created": {options.created}, '
            f'"choices": [{choices}], "usage": {usage}}}'
        )

    def _choice(self, index: int) -> str:
        options, sequence = self._options, self._sequences[index]
        ending = _ending(sequence.tokens, options, sequence.finish_reason, sequence.stop_reason)
        return (
            f'{{"index": {index}, "message": {{"role": {quote(options.role or "assistant")}, '
            f'"content": {quote("".join(sequence.text))}}}, {ending}}}'
        )


def _usage(prompt_tokens: int, new_tokens: int) -> str:
    total = prompt_tokens + new_tokens
    return f'{{"prompt_tokens": {prompt_tokens}, "completion_tokens": {new_tokens}, "total_tokens": {total}}}'


def _ending(
    tokens: Iterable[Token], options: AnswerOptions, finish_reason: FinishReason | None, stop_reason: int | str | None
) -> str:
    """Return the members of a choice that follow its text."""
    logprobs = "null"
    if options.logprobs:
        logprobs = f'{{"content": [{", ".join([_logprob(token, options.top) for token in tokens])}]}}'
    reason = FINISH_REASONS[finish_reason]
    if reason == '"stop"':
        reason = f'"{reason_of_stop(stop_reason, options.stop_token_ids)}"'
    told = f', "stop_reason": "{DEADLINE}"' if stop_reason == DEADLINE and reason == '"length"' else ""
    return f'"logprobs": {logprobs}, "finish_reason": {reason}{told}'


def _logprob(token: Token, top: int) -> str:
    # The token itself counts as one of its alternatives.
    shown = ", ".join([_entry(other) + "}" for other in alternatives(token)[:top]]) if top else ""
    return f'{_entry(token)}, "top_logprobs": [{shown}]}}'


def _entry(token: Token) -> str:
    text, octets = spelled(token.text, ", ")
    return f'{{"token": {text}, "logprob": {number_of(token)}, "bytes": {octets}'
