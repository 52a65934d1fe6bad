"""The answers of `/v1/completions` and `/v1/chat/completions`.

The bytes are vLLM's (`serving.py` in `entrypoints/openai/completion/` and `chat_completion/`). vLLM writes a whole
answer with Python's `json`, and the records of a stream with pydantic. They write numbers differently: 0.00002 in a
stream is 2e-05 in a whole answer.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from json.encoder import encode_basestring as quote
from typing import ClassVar

import msgspec

from engines.errors import EngineFault, GenerationFailed, RequestError
from engines.request import GeneratedSequence, Token, TokenDelta
from handlers.contract import JSON, Answer, Call, Reply, ReplyWriter
from handlers.openai.routes import refuse
from handlers.parsing import vllm_parameters

EVENTS = "text/event-stream; charset=utf-8"
_LEAST = -9999.0  # Replaces minus infinity.
_FAULT = "Internal server error"  # vLLM's message if its engine fails to serve a request.

FINISH_REASONS = {None: "null"} | {reason: quote(name) for reason, name in vllm_parameters.FINISH_REASONS.items()}
_DETAILS = ',"completion_tokens_details":null'
_NO_TOKEN_IDS = ',"prompt_token_ids":null,"token_ids":null}]'
# The bytes that follow the text in a text-only record.
_PLAIN_CHAT = '},"logprobs":null,"finish_reason":null,"token_ids":null}]}'
_PLAIN_COMPLETION = f',"logprobs":null,"finish_reason":null,"stop_reason":null{_NO_TOKEN_IDS}}}'


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that decide what an answer contains."""

    id: str
    created: int
    model: str
    fingerprint: str | None
    role: str = ""  # The role of the message in a chat's answer.
    sequences: int = 1  # The number of sequences for each prompt.
    logprobs: bool = False
    top: int = 0  # The number of alternatives for each token of a chat.
    usage: bool = False  # Whether a stream ends with a record of the usage.
    running_usage: bool = False  # Whether each record of the stream has the usage so far.
    stop_token_ids: Sequence[int] = ()  # The body's stop tokens. A text may also end with the model's own stop tokens.


class AnswerForm:
    """The form of answers. This class is vLLM's form. `/invocations` has subclasses with other forms."""

    stream_type = EVENTS
    before, after = "data: ", "\n\n"  # The text around each record of a stream.
    done = "data: [DONE]\n\n"  # Ends a stream.
    document_end = ""

    def chat(self, options: AnswerOptions, *, stream: bool) -> Answer:
        return (ChatStream if stream else ChatDocument)(options, form=self)

    def completion(self, options: AnswerOptions, prompts: int, *, stream: bool) -> Answer:
        return (CompletionStream if stream else CompletionDocument)(options, prompts, form=self)

    def refusal(self, reply: Reply) -> Reply:
        """Convert a reply with vLLM's error object to this form."""
        return reply

    def of_vllm(self, writer: ReplyWriter, call: Call) -> ReplyWriter:
        """Return a writer that converts the replies of vLLM's serving classes to this form, and passes them on."""
        return writer


VLLM_FORM = AnswerForm()


class StreamAnswer(Answer):
    """A record for each step of a sequence. The sequences of all prompts are numbered consecutively."""

    kind: ClassVar[str]  # The value of `object` in a record.

    def __init__(self, options: AnswerOptions, form: AnswerForm) -> None:
        self._options, self._form = options, form
        self.content_type = form.stream_type
        self._head = f'{form.before}{{{_head(options, self.kind)},"choices":['
        # True if all records of a sequence except the last have only text.
        self._plain = not (options.logprobs or options.running_usage)
        self._tokens = 0  # The number of tokens of the sequences that have ended.

    def fail(self, error: RequestError) -> Reply:
        return self._form.refusal(failure(error))

    def fail_midway(self, error: RequestError) -> bytes:
        form = self._form
        return f"{form.before}{json.dumps(json.loads(failure(error).body))}{form.after}{form.done}".encode()

    def _end(self, prompt_tokens: int) -> str:
        form = self._form
        if not self._options.usage:
            return form.done
        fingerprint = self._options.fingerprint
        end = f',"system_fingerprint":{quote(fingerprint)}' if fingerprint is not None else ""
        return f'{self._head}],"usage":{usage_of(prompt_tokens, self._tokens)}}}{end}}}{form.after}{form.done}'


class DocumentAnswer(Answer):
    """One JSON document, which is sent when all sequences have finished."""

    content_type = JSON
    kind: ClassVar[str]  # The value of `object` in the document.
    further: ClassVar[str]  # Members after the usage.

    def __init__(self, options: AnswerOptions, prompts: int = 1, *, form: AnswerForm) -> None:
        self._options, self._form = options, form
        self._sequences = [GeneratedSequence() for _ in range(prompts * options.sequences)]
        self._open = prompts
        self._prompt_tokens = self._tokens = 0  # The numbers of tokens of finished prompts, and of finished sequences.

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        index = prompt * self._options.sequences + delta.sequence
        self._sequences[index].add(delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            self._open -= 1
            self._prompt_tokens += delta.prompt_token_count
        return b"" if self._open else self._document().encode()

    def fail(self, error: RequestError) -> Reply:
        return self._form.refusal(failure(error))

    @abstractmethod
    def _choice(self, index: int) -> str: ...

    def _document(self) -> str:
        options, usage = self._options, usage_of(self._prompt_tokens, self._tokens)
        choices = ",".join(map(self._choice, range(len(self._sequences))))
        fingerprint = "null" if options.fingerprint is None else quote(options.fingerprint)
        return (
            f'{{{_head(options, self.kind)},"choices":[{choices}],"service_tier":null,'
            f'"system_fingerprint":{fingerprint},"usage":{usage},'
            f'"prompt_tokens_details":null,"completion_tokens_details":null}},{self.further}}}{self._form.document_end}'
        )


class ChatStream(StreamAnswer):
    """A stream for a chat. Its first records have the role."""

    kind = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions, form: AnswerForm) -> None:
        super().__init__(options, form)
        self._heads = [f'{self._head}{{"index":{index},"delta":{{"content":' for index in range(options.sequences)]
        self._plain_end = _PLAIN_CHAT + form.after
        self._begun = False

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the records of a step. This is the hot path: it runs for each token of each stream."""
        if self._begun and self._plain and delta.finish_reason is None:
            return f"{self._heads[delta.sequence]}{quote(delta.text)}{self._plain_end}".encode()
        data = ""
        if not self._begun:
            self._begun = True
            data = self._roles(delta.prompt_token_count)
        if delta.text or delta.token_count or delta.stop_reason:  # Otherwise the call was aborted.
            data += self._record(delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            data += self._end(delta.prompt_token_count)
        return data.encode()

    def _roles(self, prompt_tokens: int) -> str:
        options = self._options
        usage = f',"usage":{usage_of(prompt_tokens, 0)}{_DETAILS}}}' if options.running_usage else ""
        end = f'}}]{usage},"prompt_token_ids":null,"prompt_text":null}}{self._form.after}'
        delta = f'"delta":{{"role":{quote(options.role)},"content":""}},"logprobs":null,"finish_reason":null'
        return "".join([f'{self._head}{{"index":{i},{delta}{end}' for i in range(options.sequences)])

    def _record(self, delta: TokenDelta) -> str:
        options, ended = self._options, delta.finish_reason is not None
        logprobs = _chat_logprobs(delta.tokens, options.top, in_stream) if options.logprobs else "null"
        stop = f',"stop_reason":{stop_reason(delta.stop_reason)}' if ended else ""
        reason = f'"finish_reason":{FINISH_REASONS[delta.finish_reason]}{stop}'
        end = "]"
        if options.running_usage:
            end += f',"usage":{usage_of(delta.prompt_token_count, delta.token_count)}{_DETAILS}}}'
        if ended and not options.usage and options.fingerprint is not None:
            end += f',"system_fingerprint":{quote(options.fingerprint)}'
        return (
            f'{self._heads[delta.sequence]}{quote(delta.text)}}},"logprobs":{logprobs},{reason},"token_ids":null}}'
            f"{end}}}{self._form.after}"
        )


class ChatDocument(DocumentAnswer):
    """A document for a chat. Each choice has a message."""

    kind = "chat.completion"
    further = (
        '"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
        '"ec_transfer_params":null,"metrics":null'
    )

    def _choice(self, index: int) -> str:
        options, sequence = self._options, self._sequences[index]
        logprobs = _chat_logprobs(sequence.tokens, options.top, in_document) if options.logprobs else "null"
        return (
            f'{{"index":{index},"message":{{"role":{quote(options.role)},"content":{quote("".join(sequence.text))},'
            '"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},'
            f'"logprobs":{logprobs},"finish_reason":{FINISH_REASONS[sequence.finish_reason]},'
            f'"stop_reason":{stop_reason(sequence.stop_reason)},"token_ids":null,"routed_experts":null}}'
        )


class CompletionStream(StreamAnswer):
    """A stream for completions. Each record has a piece of text."""

    kind = "text_completion"

    def __init__(self, options: AnswerOptions, prompts: int, form: AnswerForm) -> None:
        super().__init__(options, form)
        self._plain_end = _PLAIN_COMPLETION + form.after
        choices = prompts * options.sequences
        self._heads = [f'{self._head}{{"index":{index},"text":' for index in range(choices)]
        self._offsets = [0] * choices
        self._open = prompts
        self._prompt_tokens = 0

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """Return the records of a step. This is the hot path: it runs for each token of each stream."""
        index = prompt * self._options.sequences + delta.sequence
        if self._plain and delta.finish_reason is None:
            return f"{self._heads[index]}{quote(delta.text)}{self._plain_end}".encode()
        data = ""
        if delta.text or delta.token_count or delta.stop_reason:  # Otherwise the call was aborted.
            data = self._record(index, delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            self._open -= 1
            self._prompt_tokens += delta.prompt_token_count
            if self._open == 0:
                data += self._end(self._prompt_tokens)
        return data.encode()

    def _record(self, index: int, delta: TokenDelta) -> str:
        options, ended = self._options, delta.finish_reason is not None
        logprobs = "null"
        if options.logprobs:
            logprobs, self._offsets[index] = _completion_logprobs(delta.tokens, in_stream, self._offsets[index])
        end = ""
        if options.running_usage:
            end = f',"usage":{usage_of(delta.prompt_token_count, delta.token_count)}}}'
        if ended and not options.usage and options.fingerprint is not None:
            end += f',"system_fingerprint":{quote(options.fingerprint)}'
        return (
            f'{self._heads[index]}{quote(delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":{FINISH_REASONS[delta.finish_reason]},"stop_reason":{stop_reason(delta.stop_reason)}'
            f"{_NO_TOKEN_IDS}{end}}}{self._form.after}"
        )


class CompletionDocument(DocumentAnswer):
    """A document for completions. Each choice has a text."""

    kind = "text_completion"
    further = '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null'

    def _choice(self, index: int) -> str:
        sequence = self._sequences[index]
        logprobs = _completion_logprobs(sequence.tokens, in_document, 0)[0] if self._options.logprobs else "null"
        return (
            f'{{"index":{index},"text":{quote("".join(sequence.text))},"logprobs":{logprobs},'
            f'"finish_reason":{FINISH_REASONS[sequence.finish_reason]},"stop_reason":{stop_reason(sequence.stop_reason)},'
            '"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}'
        )


def _head(options: AnswerOptions, kind: str) -> str:
    """Return the first fields of every document and record of an answer."""
    return f'"id":{quote(options.id)},"object":"{kind}","created":{options.created},"model":{quote(options.model)}'


def usage_of(prompt_tokens: int, new_tokens: int) -> str:
    """Return the token counts as a JSON object without its closing brace."""
    total = prompt_tokens + new_tokens
    return f'{{"prompt_tokens":{prompt_tokens},"total_tokens":{total},"completion_tokens":{new_tokens}'


def stop_reason(reason: int | str | None) -> str:
    """Return the stop string or the stop token that ended a sequence, as JSON."""
    return "null" if reason is None else quote(reason) if isinstance(reason, str) else str(reason)


def in_stream(token: Token) -> str:
    """Return a token's log probability, as pydantic writes it."""
    return msgspec.json.encode(_logprob(token)).decode()


def in_document(token: Token) -> str:
    """Return a token's log probability, as Python's `json` writes it."""
    return repr(_logprob(token))


def _logprob(token: Token) -> float:
    assert token.logprob is not None, "the engine gave no log probabilities"
    return max(token.logprob, _LEAST)


def alternatives(token: Token) -> list[Token]:
    """Return a token and the most probable tokens at its position, without duplicates."""
    return [token, *(other for other in token.top if other.id != token.id)]


def failure(error: RequestError) -> Reply:
    """Return the reply to a call that failed before its answer began, in the words of vLLM's front end."""
    return refuse(GenerationFailed(_FAULT) if isinstance(error, EngineFault) else error)


def _chat_logprobs(tokens: Iterable[Token], top: int, number: Callable[[Token], str]) -> str:
    shown = []
    for token in tokens:  # The token itself counts as one of its alternatives.
        tops = ",".join([_entry(other, number) + "}" for other in alternatives(token)[:top]]) if top else ""
        shown.append(f'{_entry(token, number)},"top_logprobs":[{tops}]}}')
    return f'{{"content":[{",".join(shown)}]}}'


def _entry(token: Token, number: Callable[[Token], str]) -> str:
    text, octets = spelled(token.text)
    return f'{{"token":{text},"logprob":{number(token)},"bytes":{octets}'


@lru_cache(maxsize=65536)
def spelled(text: str, comma: str = ",") -> tuple[str, str]:
    """Return a token's text as JSON, and its bytes as a list of numbers with `comma` between them."""
    return quote(text), f"[{comma.join(map(str, text.encode('utf-8', 'replace')))}]"


def _completion_logprobs(tokens: Sequence[Token], number: Callable[[Token], str], offset: int) -> tuple[str, int]:
    """Return the log probabilities of tokens whose text begins at `offset`, and the offset of the next token."""
    offsets, numbers, texts, tops = [], [], [], []
    for token in tokens:
        value, text = number(token), quote(token.text)
        offsets.append(str(offset))
        offset += len(token.text)
        numbers.append(value)
        texts.append(text)
        tops.append(_completion_top(token, number) if token.top else f"{{{text}:{value}}}")
    return (
        f'{{"text_offset":[{",".join(offsets)}],"token_logprobs":[{",".join(numbers)}],'
        f'"tokens":[{",".join(texts)}],"top_logprobs":[{",".join(tops)}]}}',
        offset,
    )


def _completion_top(token: Token, number: Callable[[Token], str]) -> str:
    """Return a token's alternatives.

    Tokens with the same text share one member. The member has the log probability of the last such token.
    """
    top = {other.text: other for other in alternatives(token)}
    return "{" + ",".join([f"{quote(text)}:{number(other)}" for text, other in top.items()]) + "}"
