"""An answer that a customer's output formatter writes. Source: contracts/lmi.md sections 8.2 and 8.4."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from djl_python.output_formatter import legacy_call_arguments
from djl_python.request_io import RequestInput, TextGenerationOutput
from djl_python.request_io import Token as FormatterToken
from handlers.contracts.lmi.errors import JSON, overloaded, payload_error, status_of
from handlers.contracts.lmi.rolling_batch_answer import FINISH_REASONS
from handlers.contracts.protocol import Reply
from handlers.errors import GenerationFailed, Overloaded, RequestError
from handlers.request import Token, TokenDelta

logger = logging.getLogger(__name__)

FAILED = "Custom formatter failed"


class FormatterAnswer:
    """Keeps the output as the formatter wants to see it, and calls it; see `handlers.contracts.protocol.Answer`.

    The newer kind of formatter is called with the output: while there are unread tokens if the answer is streamed,
    else once for each engine step. The older kind is called with each token. As in LMI there is no content type.
    """

    headers: tuple[tuple[str, str], ...] = ()
    content_type = ""

    def __init__(
        self, write: Callable[..., Any], request: RequestInput, stream: bool, by_token: bool, overload_status: int
    ) -> None:
        self._write, self._request, self._stream, self._by_token = write, request, stream, by_token
        self._overload_status = overload_status
        self._output = TextGenerationOutput(request_id=request.request_id, input=request)

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        """See `Answer.feed`.

        Raises:
            GenerationFailed: the formatter raised an error, or returned something else than text.
        """
        self._take(delta)
        try:
            return "".join(self._by_tokens() if self._by_token else self._by_output()).encode()
        except Exception as error:
            logger.exception("the output formatter failed", extra={"request_id": self._request.client_request_id})
            raise GenerationFailed(f"{FAILED}: {error}") from None

    def fail(self, error: RequestError) -> Reply:
        """See `Answer.fail`."""
        if isinstance(error, Overloaded):
            return overloaded(error, self._overload_status)
        status = status_of(error)
        return Reply(status, JSON, payload_error(error.message, status))

    def fail_midway(self, error: RequestError) -> bytes:
        """See `Answer.fail_midway`."""
        return payload_error(error.message, status_of(error))

    def _take(self, delta: TokenDelta) -> None:
        output, reason = self._output, delta.finish_reason
        tokens = delta.tokens
        if reason is not None and not tokens:
            tokens = [Token(-1, "")]
        for place, token in enumerate(tokens):
            last = reason is not None and place == len(tokens) - 1
            output.set_next_token(
                _token(token), delta.sequence, last, FINISH_REASONS[reason] if last and reason else None
            )
            if token.top:
                output.set_next_top_tokens([_token(one) for one in token.top], delta.sequence)
        if delta.cumulative_logprob is not None:
            output.sequences[delta.sequence].cumulative_log_prob = delta.cumulative_logprob
        if delta.prompt_tokens is not None:
            output.prompt_tokens_details = [_token(token) for token in delta.prompt_tokens]
        if delta.last:
            output.other_sequences_indices = sorted(output.sequences.keys() - {output.best_sequence_index})
            output.finished = True

    def _by_output(self) -> list[str]:
        if not self._stream:
            return [self._text(self._write(self._output))]
        sequence = self._output.best_sequence
        texts = []
        while sequence.has_next_token():
            before = sequence.unread
            texts.append(self._text(self._write(self._output)))
            if sequence.unread == before:
                raise ValueError("the output formatter must read tokens with get_next_token() when it streams")
        return texts

    def _by_tokens(self) -> list[str]:
        sequence, texts = self._output.best_sequence, []
        while sequence.has_next_token():
            texts.append(self._text(self._write(*legacy_call_arguments(self._output, sequence.advance()))))
        return texts

    @staticmethod
    def _text(value: Any) -> str:
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        raise TypeError(f"the output formatter returned {type(value).__name__}; expected str")


def _token(token: Token) -> FormatterToken:
    return FormatterToken(token.id, token.text, token.logprob, True if token.special else None)
