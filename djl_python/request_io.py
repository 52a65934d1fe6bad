"""The tokens, requests and outputs that are passed to custom formatters."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# An environment variable. If its value is 3, `Sequence.get_next_token` returns the same tuples as in LMI up to 0.31.
NEXT_TOKEN_ARITY = "SLIPWAY_NEXT_TOKEN_ARITY"


class Token:
    """A generated token, or a token of the prompt."""

    def __init__(
        self,
        id: int,
        text: str,
        log_prob: float | None = None,
        special_token: bool | None = None,
        error_msg: str | None = None,
    ) -> None:
        self.id = id
        self.text = text
        self.log_prob = log_prob
        self.special_token = special_token
        self.error_msg = error_msg
        self.request_id: Any = None

    def __repr__(self) -> str:
        return f"Token({self.id}, {self.text!r}, {self.log_prob})"

    def as_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self.id, "text": self.text, "log_prob": self.log_prob}
        if self.special_token:
            shown["special_token"] = self.special_token
        if self.error_msg:
            shown["error_msg"] = self.error_msg
        return shown

    def as_tgi_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"id": self.id, "text": self.text, "logprob": self.log_prob}
        if self.special_token:
            shown["special"] = self.special_token
        return shown


class NextToken(NamedTuple):
    """A token and its position in the sequence."""

    token: Token | None
    position: int
    is_first: bool
    is_last: bool


@dataclass
class Sequence:
    """A generated sequence. Each token is read once, from the first to the last."""

    tokens: list[Token] = field(default_factory=list)
    top_tokens: list[list[Token]] = field(default_factory=list)
    cumulative_log_prob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | None = None
    _last_token_index: int | None = field(init=False, default=None)
    _next_token: int = field(init=False, default=0)
    _next_top_tokens: int = field(init=False, default=0)

    def set_next_token(self, token: Token, is_last_token: bool = False) -> None:
        self.tokens.append(token)
        if is_last_token:
            self._last_token_index = len(self.tokens) - 1

    def set_next_top_tokens(self, top_tokens: list[Token]) -> None:
        self.top_tokens.append(top_tokens)

    @property
    def unread(self) -> int:
        return len(self.tokens) - self._next_token

    def has_next_token(self) -> bool:
        return self.unread > 0

    def has_next_top_tokens(self) -> bool:
        return self._next_top_tokens < len(self.top_tokens)

    def advance(self) -> NextToken:
        """Read the next token. If all tokens have been read, the returned `token` is None."""
        if not self.has_next_token():
            return NextToken(None, 0, False, False)
        index = self._next_token
        self._next_token += 1
        return NextToken(self.tokens[index], index, index == 0, index == self._last_token_index)

    def get_next_token(self) -> tuple[Any, ...]:
        """Read the next token.

        Returns:
            `(token, index, is_first, is_last)`. If the environment sets `SLIPWAY_NEXT_TOKEN_ARITY=3`, this is
            `(token, is_first, is_last)`, as in LMI up to 0.31.

        Raises:
            ValueError: The environment variable is neither 3 nor 4.
        """
        arity = os.environ.get(NEXT_TOKEN_ARITY, "4")
        if arity not in {"3", "4"}:
            raise ValueError(f"{NEXT_TOKEN_ARITY} must be 3 or 4, not {arity!r}")
        following = self.advance()
        return tuple(following) if arity == "4" else (following.token, following.is_first, following.is_last)

    def get_last_token(self) -> Token | None:
        """Return the token that was set as the last token, or None if none was set yet."""
        return None if self._last_token_index is None else self.tokens[self._last_token_index]

    def get_next_top_tokens(self) -> list[Token] | None:
        """Read the alternatives for the next token. Return None if all have been read."""
        if not self.has_next_top_tokens():
            return None
        self._next_top_tokens += 1
        return self.top_tokens[self._next_top_tokens - 1]


@dataclass
class RequestInput:
    """The fields of every request."""

    request_id: Any = None
    client_request_id: str | None = None
    output_formatter: Callable[..., str] | str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)  # The client's parameters.
    server_parameters: dict[str, Any] = field(default_factory=dict)  # The engine's parameters.
    tgi_compat: bool = False


@dataclass
class TextInput(RequestInput):
    """A request for text generation."""

    input_text: Any = None
    adapters: Any = None
    tokenizer: Any = None
    # If the prompt's tokens are unknown, the prompt's token count is the number of these ids. They have no other use.
    input_ids: list[int] = field(default_factory=list)


@dataclass
class RequestOutput:
    """The fields of every output."""

    request_id: Any
    input: Any
    finished: bool = False


@dataclass
class TextGenerationOutput(RequestOutput):
    """The generated sequences, by index. The best sequence always exists."""

    sequences: dict[int, Sequence] = field(default_factory=dict)
    best_sequence_index: int = 0
    prompt_tokens_details: list[Token] = field(default_factory=list)
    other_sequences_indices: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._sequence(self.best_sequence_index)

    @property
    def best_sequence(self) -> Sequence:
        return self.sequences[self.best_sequence_index]

    def set_next_token(
        self, token: Token, sequence_index: int = 0, is_last_token: bool = False, finish_reason: str | None = None
    ) -> None:
        """Add a token to a sequence. Create the sequence if it does not exist."""
        sequence = self._sequence(sequence_index)
        sequence.set_next_token(token, is_last_token)
        if finish_reason:
            sequence.finish_reason = finish_reason

    def set_next_top_tokens(self, top_tokens: list[Token], sequence_index: int = 0) -> None:
        self._sequence(sequence_index).set_next_top_tokens(top_tokens)

    def set_best_sequence_index(self, sequence_index: int) -> None:
        self.best_sequence_index = sequence_index

    def set_finish_reason(self, finish_reason: str, sequence_index: int = 0) -> None:
        self.sequences[sequence_index].finish_reason = finish_reason

    def get_tokens_as_dict(self, sequence_index: int = 0) -> list[dict[str, Any]]:
        return self._as_dicts(self.sequences[sequence_index].tokens)

    def get_prompt_tokens_as_dict(self) -> list[dict[str, Any]]:
        return self._as_dicts(self.prompt_tokens_details)

    def get_top_tokens_as_dict(self, sequence_index: int = 0) -> list[list[dict[str, Any]]]:
        return [self._as_dicts(tokens) for tokens in self.sequences[sequence_index].top_tokens]

    def _as_dicts(self, tokens: list[Token]) -> list[dict[str, Any]]:
        return [token.as_tgi_dict() if self.input.tgi_compat else token.as_dict() for token in tokens]

    def _sequence(self, index: int) -> Sequence:
        return self.sequences.setdefault(index, Sequence())
