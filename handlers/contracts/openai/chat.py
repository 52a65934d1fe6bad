"""The answers of `/v1/chat/completions`. Source: vLLM, `entrypoints/openai/chat_completion/serving.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
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

_PLAIN = '},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n'
"""What follows the text in a record that has nothing but text."""
_DETAILS = ',"completion_tokens_details":null'


class ChatStream(StreamAnswer):
    """The first records say whose turn it is."""

    kind = "chat.completion.chunk"

    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        self._heads = [f'{self._head}{{"index":{index},"delta":{{"content":' for index in range(options.sequences)]
        self._begun = False

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """The records of a step. The hot path: called for each token of each stream."""
        if self._begun and self._plain and delta.finish_reason is None:
            return f"{self._heads[delta.sequence]}{quote(delta.text)}{_PLAIN}".encode()
        data = ""
        if not self._begun:
            self._begun = True
            data = self._roles(delta.prompt_token_count)
        if delta.text or delta.token_count:  # otherwise it was aborted before its first token
            data += self._record(delta)
        if delta.finish_reason is not None:
            self._tokens += delta.token_count
        if delta.last:
            data += self._end(delta.prompt_token_count)
        return data.encode()

    def _roles(self, prompt_tokens: int) -> str:
        options = self._options
        usage = f',"usage":{usage_of(prompt_tokens, 0)}{_DETAILS}}}' if options.running_usage else ""
        end = f'}}]{usage},"prompt_token_ids":null,"prompt_text":null}}\n\n'
        delta = f'"delta":{{"role":{quote(options.role)},"content":""}},"logprobs":null,"finish_reason":null'
        return "".join([f'{self._head}{{"index":{i},{delta}{end}' for i in range(options.sequences)])

    def _record(self, delta: TokenDelta) -> str:
        options, ended = self._options, delta.finish_reason is not None
        logprobs = _logprobs(delta.tokens, options.top, in_stream) if options.logprobs else "null"
        stop = f',"stop_reason":{stop_reason(delta)}' if ended else ""
        reason = f'"finish_reason":{FINISH_REASONS[delta.finish_reason]}{stop}'
        end = "]"
        if options.running_usage:
            end += f',"usage":{usage_of(delta.prompt_token_count, delta.token_count)}{_DETAILS}}}'
        if ended and not options.usage and options.fingerprint is not None:
            end += f',"system_fingerprint":{quote(options.fingerprint)}'
        return (
            f'{self._heads[delta.sequence]}{quote(delta.text)}}},"logprobs":{logprobs},{reason},"token_ids":null}}'
            f"{end}}}\n\n"
        )


class ChatDocument(DocumentAnswer):
    """Each choice is a message."""

    kind = "chat.completion"
    further = (
        '"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
        '"ec_transfer_params":null,"metrics":null'
    )

    def _choice(self, index: int) -> str:
        options, sequence = self._options, self._sequences[index]
        logprobs = _logprobs(sequence.tokens, options.top, in_document) if options.logprobs else "null"
        return (
            f'{{"index":{index},"message":{{"role":{quote(options.role)},"content":{quote("".join(sequence.text))},'
            '"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},'
            f'"logprobs":{logprobs},"finish_reason":{FINISH_REASONS[sequence.finish_reason]},'
            f'"stop_reason":{self._stops[index]},"token_ids":null,"routed_experts":null}}'
        )


def _logprobs(tokens: Iterable[Token], top: int, number: Callable[[Token], str]) -> str:
    return f'{{"content":[{",".join([_token(token, top, number) for token in tokens])}]}}'


def _token(token: Token, top: int, number: Callable[[Token], str]) -> str:
    # The token itself counts as one of its alternatives.
    shown = ",".join([_entry(other, number) + "}" for other in alternatives(token)[:top]]) if top else ""
    return f'{_entry(token, number)},"top_logprobs":[{shown}]}}'


def _entry(token: Token, number: Callable[[Token], str]) -> str:
    text, octets = _spelled(token.text)
    return f'{{"token":{text},"logprob":{number(token)},"bytes":{octets}'


@lru_cache(maxsize=65536)
def _spelled(text: str) -> tuple[str, str]:
    """A token's text as JSON, and its bytes as a list of numbers."""
    return quote(text), f"[{','.join(map(str, text.encode('utf-8', 'replace')))}]"
