"""Converts texts to token ids and back with any Hugging Face tokenizer, within limits on time and memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

from tokenizers.decoders import DecodeStream

from engines.errors import ContextExceeded, InvalidParameter, InvalidRequest, PromptTooLong
from engines.loaded_model import ModelTexts, cut, fast_tokenizer
from engines.pooling import Pooling
from engines.request import GenerationRequest, SamplingParameters, Token
from engines.tokenized_segments import LONG_TEXT


def check_token_ids(name: str, token_ids: Collection[int], limit: int, vocabulary_size: int) -> None:
    """Refuse too many ids, and ids beyond the vocabulary.

    Raises:
        InvalidParameter: The ids of the parameter `name` are not allowed.
    """
    if len(token_ids) > limit:
        raise InvalidParameter(name, f"must hold at most {limit} token ids, got {len(token_ids)}")
    # The engine's process uses token ids as indices into the logits. An id beyond the vocabulary would be an index
    # beyond the end of the logits.
    largest = max(token_ids, default=0)
    if largest >= vocabulary_size:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({vocabulary_size}), got {largest}"
        )


def end_token_ids(configured: int | list[int] | None, tokenizer: Any) -> frozenset[int]:
    """Return the ids of the end tokens: `configured` (from the model's generation config), and the tokenizer's own."""
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(token_id for token_id in (*ids, tokenizer.eos_token_id) if token_id is not None)


def check_beams(sampling: SamplingParameters) -> None:
    """Refuse parameters that a beam search would ignore, because it uses only the model's probabilities.

    Raises InvalidParameter: such a parameter is given.
    """
    if sampling.constraint is not None:
        raise InvalidParameter(sampling.constraint.parameter, _NOT_WITH_BEAMS)
    for name in ("allowed_token_ids", "bad_words", "logit_bias"):
        if getattr(sampling, name):
            raise InvalidParameter(name, _NOT_WITH_BEAMS)


_NOT_WITH_BEAMS = "cannot be used together with beam search"
# The last tokens of the prompt are decoded with the answer. Decoding all of a long prompt would take milliseconds.
_PROMPT_CONTEXT = 16
_CONTEXT = 8  # The number of preceding tokens that a slow tokenizer needs to decode the next token.
_LONGEST_CHARACTER = 4  # The maximum number of tokens of one character: one for each byte of UTF-8.
# After more than `_MOST_SILENT` consecutive tokens without text, a new `DecodeStream` may begin at the start of a
# character. After more than `_MOST_BROKEN`, it may begin in the middle of a character as well.
_MOST_SILENT = 8
_MOST_BROKEN = 64
# If a `DecodeStream` cannot continue, the error message of `tokenizers` starts with this text.
_INVALID_PREFIX = "Invalid prefix encountered"


class TokenTexts:
    """Finds the text that each token adds to an answer. The text is "" while a character is incomplete.

    Appended to the text of `prompt_ids`, these texts give the text of all tokens.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._fast: Any = fast_tokenizer(tokenizer)
        self._window = list(prompt_ids[-_PROMPT_CONTEXT:])
        if self._window and self._decode(self._window).endswith("\ufffd"):
            # The prompt ends within a character. A decoder would wait for the rest of the character, and then return
            # the end of the prompt as part of the answer. A prompt whose own text ends with U+FFFD looks the same.
            self._window = []
        self._known = len(self._window)
        self._hidden = frozenset[int](tokenizer.all_special_ids if skip_special else ())
        # The tokens up to the last token that has text. Only the last `_PROMPT_CONTEXT` of these tokens are kept.
        self._recent = deque(self._window, maxlen=_PROMPT_CONTEXT)
        self._silent: list[int] = []  # The tokens after those in `_recent`. They have no text yet.
        if self._fast is not None:
            self._stream = DecodeStream(ids=self._window, skip_special_tokens=skip_special)

    def add(self, token_id: int) -> str:
        if token_id in self._hidden:
            # Hidden tokens have no text. If they were decoded, a whole row of them would be decoded again at each step.
            return ""
        if self._fast is None:
            return self._step_slow(token_id)
        text = self._step_fast(token_id)
        self._silent.append(token_id)
        if not text and len(self._silent) > _MOST_SILENT:
            text = self._without_stream()
        elif text:
            self._recent.extend(self._silent)
            self._silent.clear()
        return text

    def _without_stream(self) -> str:
        """Return the text of the silent tokens if they are a row of U+FFFD.

        A `DecodeStream` takes such a row for an incomplete character, and would decode the whole row again at each
        step. The last tokens stay silent, because they may belong to an incomplete character.
        """
        silent, whole = self._silent, self._decode(self._silent)
        if whole.strip("\ufffd"):
            return ""
        # A cut within a character would put a U+FFFD into both parts. Then the joined parts would differ from the whole
        # text.
        cuts = (len(silent) - rest for rest in range(_LONGEST_CHARACTER, 2 * _LONGEST_CHARACTER))
        texts = ((cut, self._decode(silent[:cut])) for cut in cuts)
        found = next((each for each in texts if each[1] + self._decode(silent[each[0] :]) == whole), None)
        if found is None:
            if len(silent) <= _MOST_BROKEN:
                return ""
            found = len(silent), whole
        cut, text = found
        self._stream = DecodeStream(ids=self._beginning(), skip_special_tokens=self._skip_special)
        self._silent = silent[cut:]
        return text + "".join(map(self._step_fast, self._silent))

    def _beginning(self) -> list[int]:
        """Return the recent tokens, from the start of a character."""
        recent = list(self._recent)
        starts = range(min(_LONGEST_CHARACTER, len(recent)))
        return next((recent[start:] for start in starts if not self._decode(recent[start:]).endswith("\ufffd")), [])

    def _step_fast(self, token_id: int) -> str:
        try:
            return self._stream.step(self._fast, token_id) or ""
        except Exception as error:
            # The stream fails if a tokenizer writes invalid UTF-8. In this case, a new stream begins, as in vLLM.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return self._stream.step(self._fast, token_id) or ""

    def _step_slow(self, token_id: int) -> str:
        """Decode the token together with the tokens before it, because its text may depend on them."""
        self._window.append(token_id)
        before, whole = self._decode(self._window[: self._known]), self._decode(self._window)
        if whole.endswith("\ufffd") or len(whole) <= len(before):
            return ""
        self._window = self._window[max(self._known - _CONTEXT, 0) :]
        self._known = len(self._window)
        return whole[len(before) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special))


class HeldTokens:
    """Tokens of an answer that are held back, because their text may be the beginning of a stop string."""

    __slots__ = ("_free", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[Token] = []
        self._free = 0  # The number of characters that may be shown and belong to no released token.

    def add(self, token: Token) -> None:
        self._tokens.append(token)

    def release(self, characters: int, finished: bool) -> list[Token]:
        """Return the tokens whose text may be shown.

        Args:
            characters: The number of further characters of the answer that may be shown.
            finished: Whether the answer has ended. If so, all tokens are returned, without the text that belongs to a
                stop string.
        """
        tokens = self._tokens
        self._free += characters
        released = 0
        for token in tokens:
            if len(token.text) > self._free:
                if not finished:
                    break
                token.text = token.text[: self._free]
            self._free -= len(token.text)
            released += 1
        self._tokens = tokens[released:]
        return tokens[:released]


def split_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    special_ids: frozenset[int],
    skip_special_tokens: bool,
    prompt_ids: Sequence[int] = (),
) -> list[Token]:
    """Return the tokens with their texts.

    Appended to the text of `prompt_ids`, these texts give the text of all tokens. If a character takes several tokens,
    the last of them has the whole character.
    """
    texts = TokenTexts(tokenizer, prompt_ids, skip_special_tokens)
    return [Token(i, texts.add(i), None, i in special_ids) for i in token_ids]


def prompt_tokens(
    tokenizer: Any,
    prompt_ids: Sequence[int],
    special_ids: frozenset[int],
    logprobs: Iterable[float],
    ranks: Iterable[int] = (),
) -> list[Token]:
    """Return a prompt's tokens. `logprobs` and `ranks` are empty, or begin with the second token."""
    tokens = split_text(tokenizer, prompt_ids, special_ids, skip_special_tokens=False)
    for token, value in zip(tokens[1:], logprobs, strict=False):
        token.logprob = value
    for token, rank in zip(tokens[1:], ranks, strict=False):
        token.rank = rank
    return tokens


class PromptTokenizer:
    """Tokenizes prompts for one model."""

    def __init__(self, texts: ModelTexts, max_model_len: int, max_prompt_tokens: int | None = None) -> None:
        """Create the prompt tokenizer.

        Args:
            max_prompt_tokens: The maximum number of tokens of a prompt. Longer prompts are refused even if the context
                has room for them.
        """
        self._texts, self._most = texts, max_prompt_tokens
        self._max_model_len = max_model_len
        self._most_characters = max_model_len * texts.longest_token

    async def pair(self, text: str, pooling: Pooling, *, special: bool = True) -> tuple[list[int], int]:
        """Return the token ids of a text or of a pair of texts for a pooling model.

        Args:
            text: The text, or the first text of a pair.
            pooling: Gives the second text, and the side at which texts that are too long are cut.
            special: Whether to include the special tokens that the model wants around a text.

        Returns:
            The ids, and the position of the first id that belongs to the second text.

        Raises:
            InvalidRequest: The texts are empty, or too long for the model.
        """
        second, most = pooling.second, self._most_characters
        if pooling.cut is None and len(text) + len(second or "") > most:
            raise self._too_long(len(text) + len(second or ""))
        # If the text is not cut, the limit exceeds the context, so that the error message gives the true length.
        limit = min(self._max_model_len, self._most or self._max_model_len) if pooling.cut is not None else most
        side = pooling.cut or "right"
        # Keep only the characters that can remain. Tokenizing megabytes of text would take gigabytes of memory.
        text, second = cut(text, most, side), None if second is None else cut(second, most, side)
        try:
            encode = partial(self._texts.encode_cut, text, second, limit, side, special=special)
            is_long = len(text) + len(second or "") > LONG_TEXT
            ids, boundary = await asyncio.to_thread(encode) if is_long else encode()
        except Exception as error:
            raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from error
        self.check(ids)
        return ids, boundary

    async def token_ids(self, request: GenerationRequest) -> list[int]:
        """Return the request's prompt as token ids. If the request asks for it, a prompt without images is truncated.

        Raises:
            InvalidRequest: The prompt is empty, or too long for the model.
        """
        prompt, most = request.prompt, request.truncate_prompt_tokens
        if isinstance(prompt, tuple):
            ids = list(prompt)
        else:
            if len(prompt) > self._most_characters:
                # The prompt is too long, however it is tokenized. Tokenizing megabytes of text would take seconds and
                # gigabytes of memory.
                if most is None:
                    raise self._too_long(len(prompt))
                prompt = prompt[-self._most_characters :]
            encode, special = self._texts.encode, request.add_special_tokens
            try:
                if len(prompt) > LONG_TEXT:
                    ids = await asyncio.to_thread(encode, prompt, special=special)
                else:
                    ids = encode(prompt, special=special)
            except Exception as error:
                raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from error
        if most is not None and len(ids) > most and not request.images:
            ids = self._truncate(ids, most)
        self.check(ids, request.generated_before, request.room)
        return ids

    def check(self, ids: Sequence[int], generated_before: int = 0, room: int = 0) -> None:
        """Check the length of a prompt.

        Args:
            ids: The prompt.
            generated_before: `GenerationRequest.generated_before`.
            room: `GenerationRequest.room`.

        Raises:
            InvalidRequest: The prompt is empty, or too long for the model.
        """
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        if self._most is not None and len(ids) - generated_before > self._most:
            raise PromptTooLong(len(ids), self._most)
        if len(ids) + room > self._max_model_len:
            raise ContextExceeded(len(ids), room, self._max_model_len)

    def _too_long(self, characters: int) -> InvalidRequest:
        return InvalidRequest(
            f"the prompt has {characters} characters; the model's context of {self._max_model_len} tokens "
            "cannot hold it"
        )

    def _truncate(self, ids: list[int], limit: int) -> list[int]:
        """Keep `limit` tokens: the special tokens at the beginning, and the end of the prompt."""
        lead = next((i for i, token_id in enumerate(ids) if token_id not in self._texts.special_ids), 0)
        lead = min(lead, limit - 1)
        return ids[:lead] + ids[len(ids) - (limit - lead) :]


class StopStrings:
    """Finds the first stop string in a growing text, and counts the characters that must be held back."""

    def __init__(self, stop: Sequence[str], include: bool) -> None:
        self._stop, self._include = tuple(stop), include
        self._reach = max(map(len, self._stop), default=1) - 1
        self._tail = ""

    def add(self, text: str, count: bool) -> int | None:
        """Add text. If it completes a stop string, return how many characters to remove from the end of the whole text.

        If `count` is False, stop strings that this text completes are ignored.
        """
        old, whole = len(self._tail), self._tail + text
        self._tail = whole[-self._reach :] if self._reach else ""
        found = ((whole.find(stop, max(old - len(stop) + 1, 0)), len(stop)) for stop in self._stop if text and count)
        ends = [(start + length, start) for start, length in found if start >= 0]
        if not ends:
            return None
        # If several stop strings end at the same position, the first of them in the request counts, as in vLLM.
        end, start = min(ends, key=lambda place: place[0])
        return len(whole) - (end if self._include else start)

    def held(self) -> int:
        """Return how many characters at the end of the text could be the beginning of a stop string."""
        if self._include:
            return 0
        ends = (self._tail[-length:] for length in range(len(self._tail), 0, -1))
        begun = (end for end in ends if any(stop.startswith(end) and stop != end for stop in self._stop))
        return len(next(begun, ""))


def ends_in_stop_string(stop: Sequence[str], before: str, last: str) -> bool:
    """Return True if a stop string ends in `last`, the text that follows `before`."""
    strings = StopStrings(stop, include=False)
    strings.add(before, count=False)
    return strings.add(last, count=True) is not None
