"""Text from token ids, one at a time, and the end of a text at a stop string; the results are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from handlers.engines.model_texts import fast_tokenizer
from handlers.engines.token_text import decoding_context

_INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` begins to say that its stream has lost its place."""
_CONTEXT = 8
"""Tokens that a slow tokenizer needs to see in front of the next one."""


class TokenTexts:
    """What each token adds to the text: empty while a character is incomplete."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool, spaces: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._fast: Any = fast_tokenizer(tokenizer)
        context = list(decoding_context(tokenizer, prompt_ids, skip_special))
        if self._fast is not None:
            self._stream = DecodeStream(ids=context, skip_special_tokens=skip_special)
        self._window = context
        self._known = len(self._window)
        self._hidden = frozenset(tokenizer.all_special_ids) if skip_special else frozenset()
        # Only where special tokens are shown can there be blanks between them to leave out.
        self._joined: Mapping[int, str] = {} if spaces or skip_special else _added_tokens(tokenizer)
        self._after_added = False

    def add(self, token_id: int) -> str:
        """The text of the next token."""
        text = self._step_fast(token_id) if self._fast is not None else self._step_slow(token_id)
        if not self._joined:
            return text
        added = self._joined.get(token_id)
        joined = added is not None and self._after_added
        self._after_added = added is not None
        return added if joined and added is not None else text

    def _step_fast(self, token_id: int) -> str:
        try:
            return self._stream.step(self._fast, token_id) or ""
        except Exception as error:
            # Some tokenizers can write invalid UTF-8, on which the stream gives up.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._fast, token_id) or ""

    def _step_slow(self, token_id: int) -> str:
        """Decode with the tokens before, since a token's text may depend on them."""
        if token_id in self._hidden:
            return ""  # it has no text, and a row of such tokens would make the window grow and grow
        self._window.append(token_id)
        before, whole = self._decode(self._window[: self._known]), self._decode(self._window)
        if whole.endswith("\ufffd") or len(whole) <= len(before):
            return ""
        self._window = self._window[max(self._known - _CONTEXT, 0) :]
        self._known = len(self._window)
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special)
        return text


class StopStrings:
    """Finds the first stop string in a growing text, and says how much of the text is safe to show."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop = tuple(stop)
        self._include = include
        self._reach = max(map(len, self._stop), default=1) - 1
        self._tail = ""

    def add(self, text: str, count: bool) -> int | None:
        """Take what was added; where a stop string ends in it, how many characters of the text are to be taken back.

        Without `count` the text is taken note of, but a stop string that ends in it does not.
        """
        if not self._stop or not text:
            return None
        whole = self._tail + text
        surplus = self._surplus(whole, len(self._tail)) if count else None
        self._tail = whole[-self._reach :] if self._reach else ""
        return surplus

    def held(self) -> int:
        """How many characters at the end of the text could be the beginning of a stop string."""
        if self._include:
            return 0
        longest = min(self._reach, len(self._tail))
        for length in range(longest, 0, -1):
            end = self._tail[-length:]
            if any(stop.startswith(end) and len(stop) > length for stop in self._stop):
                return length
        return 0

    def _surplus(self, whole: str, old: int) -> int | None:
        """From the earliest end of a stop string that lies beyond the first `old` characters."""
        ends: list[tuple[int, int]] = []
        for stop in self._stop:
            start = whole.find(stop, max(old - len(stop) + 1, 0))
            if start >= 0:
                ends.append((start + len(stop), start))
        if not ends:
            return None
        # The first of those that end at the same place is the request's first, as in vLLM.
        end, start = min(ends, key=lambda place: place[0])
        return len(whole) - (end if self._include else start)


def _added_tokens(tokenizer: Any) -> Mapping[int, str]:
    return {token_id: str(token) for token_id, token in tokenizer.added_tokens_decoder.items()}
