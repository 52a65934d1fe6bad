"""The answers of `/v1/completions`. Source: vLLM, `entrypoints/openai/completion/serving.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring as quote

from handlers.contracts.openai.answer import (
    DONE,
    EVENTS,
    FINISH_REASONS,
    AnswerOptions,
    alternatives,
    failure,
    failure_in_stream,
    head,
    in_document,
    in_stream,
    nullable,
    stop_reason,
    usage_of,
)
from handlers.contracts.protocol import Reply
from handlers.errors import RequestError
from handlers.request import GeneratedSequence, Token, TokenDelta

_NO_TOKEN_IDS = ',"prompt_token_ids":null,"token_ids":null}]'
_PLAIN = f',"logprobs":null,"finish_reason":null,"stop_reason":null{_NO_TOKEN_IDS}}}\n\n'
"""What follows the text in a record that has nothing but text."""


class CompletionStream:
    """A record for each step of a sequence. The sequences of all prompts are numbered through."""

    content_type = EVENTS
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, options: AnswerOptions, prompts: int) -> None:
        self._options = options
        self._head = "data: {" + head(options, "text_completion") + ',"choices":['
        choices = prompts * options.sequences
        self._heads = [f'{self._head}{{"index":{index},"text":' for index in range(choices)]
        self._plain = not (options.logprobs or options.running_usage)
        self._offsets = [0] * choices
        self._open = prompts
        self._prompt_tokens = self._tokens = 0

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """The records of a step. The hot path: called for each token of each stream."""
        index = prompt * self._options.sequences + delta.sequence
        if self._plain and delta.finish_reason is None:
            return f"{self._heads[index]}{quote(delta.text)}{_PLAIN}".encode()
        data = ""
        if delta.text or delta.token_count:  # otherwise it was aborted before its first token
            data = self._record(index, delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            self._open -= 1
            self._prompt_tokens += delta.prompt_token_count
            if self._open == 0:
                data += self._end()
        return data.encode()

    def fail(self, error: RequestError) -> Reply:
        return Reply(200, EVENTS, failure_in_stream(error))

    def fail_midway(self, error: RequestError) -> bytes:
        return failure_in_stream(error)

    def _record(self, index: int, delta: TokenDelta) -> str:
        options, ended = self._options, delta.finish_reason is not None
        logprobs = "null"
        if options.logprobs:
            logprobs, self._offsets[index] = _logprobs(delta.tokens, in_stream, self._offsets[index])
        end = ""
        if options.running_usage:
            end = f',"usage":{usage_of(delta.prompt_token_count, delta.token_count)}}}'
        if ended and not options.usage and options.fingerprint is not None:
            end += f',"system_fingerprint":{quote(options.fingerprint)}'
        return (
            f'{self._heads[index]}{quote(delta.text)},"logprobs":{logprobs},'
            f'"finish_reason":{FINISH_REASONS[delta.finish_reason]},"stop_reason":{stop_reason(delta)}'
            f"{_NO_TOKEN_IDS}{end}}}\n\n"
        )

    def _end(self) -> str:
        if not self._options.usage:
            return DONE
        fingerprint = self._options.fingerprint
        end = f',"system_fingerprint":{quote(fingerprint)}' if fingerprint is not None else ""
        return f'{self._head}],"usage":{usage_of(self._prompt_tokens, self._tokens)}}}{end}}}\n\n{DONE}'


class CompletionDocument:
    """One JSON document when everything has finished."""

    content_type = "application/json"
    headers: tuple[tuple[str, str], ...] = ()

    def __init__(self, options: AnswerOptions, prompts: int) -> None:
        self._options = options
        choices = prompts * options.sequences
        self._sequences = [GeneratedSequence() for _ in range(choices)]
        self._stops = ["null"] * choices
        self._open = prompts

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        index = prompt * self._options.sequences + delta.sequence
        self._sequences[index].add(delta)
        if delta.finish_reason is not None:
            self._stops[index] = stop_reason(delta)
        self._open -= delta.last
        return b"" if self._open else self._document().encode()

    def fail(self, error: RequestError) -> Reply:
        return failure(error)

    def fail_midway(self, error: RequestError) -> bytes:
        return b""  # the body is sent whole

    def _document(self) -> str:
        options, sequences = self._options, self._sequences
        prompt_tokens = sum([sequence.prompt_token_count for sequence in sequences[:: options.sequences]])
        usage = usage_of(prompt_tokens, sum([sequence.count for sequence in sequences]))
        choices = ",".join([self._choice(index) for index in range(len(sequences))])
        return (
            f'{{{head(options, "text_completion")},"choices":[{choices}],"service_tier":null,'
            f'"system_fingerprint":{nullable(options.fingerprint)},'
            f'"usage":{usage},"prompt_tokens_details":null,"completion_tokens_details":null}},'
            '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
        )

    def _choice(self, index: int) -> str:
        sequence = self._sequences[index]
        logprobs = _logprobs(sequence.tokens, in_document, 0)[0] if self._options.logprobs else "null"
        return (
            f'{{"index":{index},"text":{quote("".join(sequence.text))},"logprobs":{logprobs},'
            f'"finish_reason":{FINISH_REASONS[sequence.finish_reason]},"stop_reason":{self._stops[index]},'
            '"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,"routed_experts":null}'
        )


def _logprobs(tokens: Sequence[Token], number: Callable[[Token], str], offset: int) -> tuple[str, int]:
    """The log probabilities of tokens whose text begins at `offset`, and where the next one's does."""
    offsets, numbers, texts, tops = [], [], [], []
    for token in tokens:
        offsets.append(str(offset))
        offset += len(token.text)
        numbers.append(number(token))
        texts.append(quote(token.text))
        # Alternatives with the same text are one member, with the number of the last.
        top = {other.text: other for other in alternatives(token)}
        tops.append("{" + ",".join([f"{quote(text)}:{number(other)}" for text, other in top.items()]) + "}")
    return (
        f'{{"text_offset":[{",".join(offsets)}],"token_logprobs":[{",".join(numbers)}],'
        f'"tokens":[{",".join(texts)}],"top_logprobs":[{",".join(tops)}]}}',
        offset,
    )
