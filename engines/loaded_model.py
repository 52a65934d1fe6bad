"""A loaded model as contracts see it: its tokenizer, limits and status. Every engine is a loaded model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from tokenizers import Tokenizer, decoders

from engines.pooling import PoolingModel, Side
from engines.request import Token
from engines.statistics import EngineStatistics
from engines.tokenized_segments import by_segments, encode_all, special_tokens_around

T = TypeVar("T", str, list[int])

_LONG_IDS = 4096
_CHARACTERS_PER_TOKEN = 256  # The assumed length of the longest token, if the tokenizer does not give it.


def fast_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """Return the `tokenizers.Tokenizer` inside a Hugging Face tokenizer; None if there is none."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    return fast if isinstance(fast, Tokenizer) else None


def copied(tokenizer: Any) -> Any:
    """Return a copy with its own truncation and padding. A tokenizer without such state is not copied."""
    return tokenizer if fast_tokenizer(tokenizer) is None else copy.deepcopy(tokenizer)


class ModelTexts:
    """Converts texts to a model's token ids, and back."""

    truncation_side = "left"  # The side at which every engine truncates the prompts of every model.

    def __init__(self, tokenizer: Any, image_mark: Callable[[int], str] | None = None) -> None:
        """Create the converter.

        Args:
            tokenizer: A tokenizer that no other code changes.
            image_mark: A function that returns the placeholder of an image in a prompt. Its argument is the image's
                number, from 1. None: the model takes text only.
        """
        self.tokenizer, self.image_mark = tokenizer, image_mark
        self._fast = fast = fast_tokenizer(tokenizer)
        if fast is not None:
            # A tokenizer's file may still set truncation and padding for training. Switch both off, as the Hugging Face
            # class does.
            fast.no_truncation()
            fast.no_padding()
        segments = by_segments(fast) if fast is not None else None
        # Returns the token ids of a text. With `special=False`, the model's special tokens around the text are omitted.
        self.encode: Callable[..., list[int]] = segments.encode if segments is not None else self._encode_whole
        self.special_ids = frozenset(tokenizer.all_special_ids)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        return dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))

    @cached_property
    def vocabulary_size(self) -> int:
        """The number of tokens, including added tokens."""
        return len(self.tokenizer)

    @cached_property
    def joins_bytes(self) -> bool:
        """Whether the text of tokens depends only on their joined bytes, and not on the tokens before them."""
        return self._fast is not None and isinstance(self._fast.decoder, decoders.ByteLevel)

    @property
    def longest_token(self) -> int:
        return int(getattr(self.tokenizer, "max_chars_per_token", 0)) or _CHARACTERS_PER_TOKEN

    def _encode_whole(self, text: str, *, special: bool = True) -> list[int]:
        if (fast := self._fast) is not None:
            # Skip the Hugging Face class. For a short text, the class takes longer than the tokenization itself.
            return encode_all(fast, [text], special=special)[0]
        tokenizer = self.tokenizer
        return list(tokenizer.encode(text) if special else tokenizer.encode(text, add_special_tokens=False))

    def encode_cut(
        self, text: str, second: str | None, most: int, side: Side, *, special: bool = True
    ) -> tuple[list[int], int]:
        """Return at most `most` token ids of a text, or of a pair of texts.

        A text that is too long is cut at `side`, and keeps its special tokens. If a pair is too long, the longer text
        is cut first.

        Args:
            text: The text.
            second: The second text of a pair.
            most: The maximum number of tokens. It must be at least the number of special tokens.
            side: The side at which texts are cut.
            special: Whether to include the special tokens that the model wants around a text.

        Returns:
            The ids, and the position of the first id that belongs to the second text.
        """
        if self._fast is None:
            return self._encode_cut_slowly(text, second, most, side, special)
        # `tokenizers` can truncate, but it also encodes each part that it cuts off. Of a pair of texts, it also encodes
        # each combination of a part of the first text and a part of the second.
        around = _Surroundings() if not special else self._around_pair if second is not None else self._around_text
        room = max(most - around.length, 0)
        ids = self.encode(text, special=False)
        if second is None:
            ids = cut(ids, room, side)
            return [*around.before, *ids, *around.after], around.length + len(ids)
        second_ids = self.encode(second, special=False)
        first_room, second_room = _shares(len(ids), len(second_ids), room)
        ids, second_ids = cut(ids, first_room, side), cut(second_ids, second_room, side)
        whole = [*around.before, *ids, *around.between, *second_ids, *around.after]
        if around.of_second is None:
            return whole, len(whole)
        return whole, len(around.before) + len(ids) + around.of_second

    @cached_property
    def _around_text(self) -> _Surroundings:
        assert self._fast is not None
        before, after = special_tokens_around(self._fast)
        return _Surroundings(before=tuple(before), after=tuple(after))

    @cached_property
    def _around_pair(self) -> _Surroundings:
        assert self._fast is not None
        encoding: Any = self._fast.encode("a", "a")
        ids, of = encoding.ids, encoding.sequence_ids
        first, second = ([place for place, text in enumerate(of) if text == which] for which in (0, 1))
        first_of_type = _first_of_second(encoding.type_ids)
        return _Surroundings(
            before=tuple(ids[: first[0]]),
            between=tuple(ids[first[-1] + 1 : second[0]]),
            after=tuple(ids[second[-1] + 1 :]),
            of_second=None if first_of_type == len(ids) else first_of_type - first[-1] - 1,
        )

    def _encode_cut_slowly(
        self, text: str, second: str | None, most: int, side: Side, special: bool
    ) -> tuple[list[int], int]:
        tokenizer = self.tokenizer
        tokenizer.truncation_side = side
        found = tokenizer(text, second, add_special_tokens=special, truncation="longest_first", max_length=most)
        types = found.get("token_type_ids")
        return list(found["input_ids"]), _first_of_second(types if types is not None else [0] * len(found["input_ids"]))

    def places(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Return the token ids and each token's character range. The ranges are None if the tokenizer has none."""
        if self._fast is None:
            return self.encode(text, special=special), None
        encoding = self._fast.encode_batch([text], add_special_tokens=special)[0]
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Return the text of all ids, with or without special tokens."""
        fast, ids = self._fast, list(token_ids)
        if fast is None or len(ids) <= _LONG_IDS or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return str(self.tokenizer.decode(ids, skip_special_tokens=skip_special))
        # `decode_batch` releases the GIL, unlike `decode`.
        return str(fast.decode_batch([ids], skip_special_tokens=skip_special)[0])

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return list(self.tokenizer.convert_ids_to_tokens(list(token_ids)))

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """The special tokens around a text, or around the texts of a pair."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    # The position of the first token that has the second text's token type, from the start of `between`. None: no
    # token has this type.
    of_second: int | None = 0

    @property
    def length(self) -> int:
        return len(self.before) + len(self.between) + len(self.after)


def cut(whole: T, most: int, side: Side) -> T:
    """Cut a text, or token ids, to at most this length."""
    if len(whole) <= most:
        return whole
    return whole[:most] if side == "right" else whole[len(whole) - most :]


def _shares(first: int, second: int, most: int) -> tuple[int, int]:
    """Return how many tokens each of two texts keeps, if the longer text is cut first."""
    if first + second <= most:
        return first, second
    half = most // 2
    if first <= half:
        return first, most - first
    if second <= half:
        return most - second, second
    # If `most` is odd, the longer text gets the extra token, as in `tokenizers`.
    return (half, most - half) if first <= second else (most - half, half)


def _first_of_second(types: Sequence[int]) -> int:
    """Return the position of the first token of type 1, or the number of tokens if there is none."""
    return next((place for place, kind in enumerate(types) if kind), len(types))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The load of an engine, as its scheduler reports it."""

    running_requests: int
    waiting_requests: int
    kv_cache_usage: float  # The share of the KV cache that is in use, from 0 to 1.


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningSequence:
    """A running or waiting sequence of an engine. It contains no text of the prompt or the answer."""

    request_id: str
    seconds: float  # Seconds since the request arrived.
    quiet_seconds: float | None  # Seconds since the last token. None: there is no token yet.
    prompt_tokens: int
    tokens: int  # The number of tokens of the answer so far.
    adapter: str | None = None
    constraint: str | None = None  # The kind of constraint, such as "json".
    copy: int | None = None  # The number of the copy that has the sequence.


class LoadedModel(Protocol):
    """A loaded model."""

    statistics: EngineStatistics
    max_model_len: int  # The limit on the tokens of prompt and answer together.
    max_top_tokens: int  # The maximum number of alternatives of a token.
    eos_token_ids: frozenset[int]
    pooling: PoolingModel | None  # None if the model generates text.
    takes_images: bool  # Whether messages may contain images.

    @property
    def texts(self) -> ModelTexts: ...

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        """Return the tokens with their texts.

        Appended to the text of `prompt_ids`, these texts give the text of all tokens.
        """

    def status(self) -> EngineStatus: ...

    def sequences(self) -> Sequence[RunningSequence]:
        """Return the running and waiting sequences. Other threads may call this method."""
