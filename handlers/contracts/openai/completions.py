"""The answers of `/v1/completions`. Source: vLLM, `entrypoints/openai/completion/serving.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring as quote

from handlers.contracts.openai.answer import (
    FINISH_REASONS,
    AnswerOptions,
    DocumentAnswer,
    StreamAnswer,
    alternatives,
    in_document,
    in_stream,
    stop_reason,
    usage_of,
)
from handlers.request import Token, TokenDelta

_NO_TOKEN_IDS = ',"prompt_token_ids":null,"token_ids":null}]'
_PLAIN = f',"logprobs":null,"finish_reason":null,"stop_reason":null{_NO_TOKEN_IDS}}}\n\n'
"""What follows the text in a record that has nothing but text."""


class CompletionStream(StreamAnswer):
    """Each record has a piece of text."""

    kind = "text_completion"

    def __init__(self, options: AnswerOptions, prompts: int) -> None:
        super().__init__(options)
        choices = prompts * options.sequences
        self._heads = [f'{self._head}{{"index":{index},"text":' for index in range(choices)]
        self._offsets = [0] * choices
        self._open = prompts
        self._prompt_tokens = 0

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
                data += self._end(self._prompt_tokens)
        return data.encode()

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


class CompletionDocument(DocumentAnswer):
    """Each choice is a text."""

    kind = "text_completion"
    further = '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null'

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
