"""From a request's prompt to token ids, with any Hugging Face tokenizer; bounded in time and memory."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from handlers.errors import ContextExceeded, InvalidParameter, InvalidRequest, PromptTooLong
from handlers.request import GenerationRequest, Token

LONG_TEXT = 4096
"""Characters above which a text is tokenized in a thread: below it the event loop waits for less than a step."""
_LONG_IDS = 4096
_TRUNCATION_SIDE = "left"
_CHARACTERS_PER_TOKEN = 256
"""No token is longer, where the tokenizer does not say how long its longest is."""


def fast_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """What is in the wrapper of a tokenizer of `tokenizers`; None for one that is not of that library."""
    fast = getattr(tokenizer, "_tokenizer", None)
    return fast if isinstance(fast, Tokenizer) else None


def copied(tokenizer: Any) -> Any:
    """A tokenizer that shares no truncation and no padding with the given one; others have no such state."""
    return tokenizer if fast_tokenizer(tokenizer) is None else copy.deepcopy(tokenizer)


class ModelTexts:
    """Texts to token ids, and back. `tokenizer`: one that no other code changes."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._fast = fast = fast_tokenizer(tokenizer)
        if fast is not None:
            # A tokenizer file may have kept them from training; the wrapper would switch them off as well.
            fast.no_truncation()
            fast.no_padding()
        self.special_ids = frozenset(tokenizer.all_special_ids)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by their texts."""
        return dict(zip(self.tokenizer.all_special_tokens, self.tokenizer.all_special_ids, strict=True))

    @cached_property
    def vocabulary_size(self) -> int:
        """How many tokens there are, added ones included."""
        return len(self.tokenizer)

    @property
    def truncation_side(self) -> str:
        """Where prompts are truncated.

        vLLM sets its tokenizers to this for every model that generates, whatever the model's files say, and it is what
        all engines here do; the attribute of transformers' own tokenizers, mostly `right`, is not heeded by anything.
        """
        return _TRUNCATION_SIDE

    @property
    def longest_token(self) -> int:
        """Characters that no token exceeds."""
        return int(getattr(self.tokenizer, "max_chars_per_token", 0)) or _CHARACTERS_PER_TOKEN

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids. `special`: with the special tokens that the model wants around a text.

        Whatever the tokenizer raises passes through.
        """
        fast = self._fast
        if fast is None:
            tokenizer = self.tokenizer
            return list(tokenizer.encode(text) if special else tokenizer.encode(text, add_special_tokens=False))
        # The wrapper around `tokenizers` costs more than the tokenizing of a short text.
        if len(text) <= LONG_TEXT:
            ids: list[int] = fast.encode(text, add_special_tokens=special).ids
        else:  # `encode` would hold the interpreter's lock, and every other thread with it
            ids = fast.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return ids

    def places(self, text: str, *, special: bool = True) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Token ids, and between which characters of the text each is; None if the tokenizer does not know."""
        if self._fast is None:
            return self.encode(text, special=special), None
        encoding = self._fast.encode_batch([text], add_special_tokens=special)[0]
        return encoding.ids, encoding.offsets

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of all ids, special tokens included."""
        fast, ids = self._fast, list(token_ids)
        if fast is None or len(ids) <= _LONG_IDS or getattr(self.tokenizer, "clean_up_tokenization_spaces", False):
            return str(self.tokenizer.decode(ids))
        return str(fast.decode_batch([ids], skip_special_tokens=False)[0])  # `decode` would hold the lock, too

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's entry for each id."""
        return list(self.tokenizer.convert_ids_to_tokens(list(token_ids)))

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be called."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The prompt that the model's template makes of a conversation.

        A template is the model's own code, and says in any way, by any exception, that it does not take them.
        """
        return str(
            self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        )


def check_token_ids(name: str, token_ids: Collection[int], limit: int, vocabulary_size: int) -> None:
    """Refuse too many of them, and those that no token has.

    Raises:
        InvalidParameter: naming the parameter.
    """
    if len(token_ids) > limit:
        raise InvalidParameter(name, f"must hold at most {limit} token ids, got {len(token_ids)}")
    # An id beyond the vocabulary would be an index beyond the logits in the engine's process.
    largest = max(token_ids, default=0)
    if largest >= vocabulary_size:
        raise InvalidParameter(
            name, f"must hold token ids below the vocabulary's size ({vocabulary_size}), got {largest}"
        )


_CONTEXT = 16
"""Tokens of the prompt in front of the answer; decoding all of a long one would take milliseconds."""
_INVALID_PREFIX = "Invalid prefix encountered"
"""How `tokenizers` begins to say that its stream has lost its place."""


def split_text(
    tokenizer: Any,
    token_ids: Sequence[int],
    special_ids: frozenset[int],
    skip_special_tokens: bool,
    prompt_ids: Sequence[int] = (),
) -> list[Token]:
    """Tokens whose texts, joined, are the text of `token_ids` where it follows that of `prompt_ids`.

    A character that takes several tokens comes whole with the last of them.
    """
    prompt_ids = decoding_context(tokenizer, prompt_ids, skip_special_tokens)
    fast = fast_tokenizer(tokenizer)
    if fast is not None:
        texts = _split_fast(fast, token_ids, skip_special_tokens, prompt_ids)
    else:
        texts = _split_slow(tokenizer, token_ids, skip_special_tokens, prompt_ids)
    return [Token(i, text, None, i in special_ids) for i, text in zip(token_ids, texts, strict=True)]


def decoding_context(tokenizer: Any, prompt_ids: Sequence[int], skip_special_tokens: bool) -> Sequence[int]:
    """What of a prompt a decoder has to see in front of the answer: its end, for a token's text may depend on it.

    Nothing where the prompt ends within a character, or in U+FFFD, which looks the same: a decoder would wait for the
    character's rest, and then give the prompt as if it were part of the answer.
    """
    end = prompt_ids[-_CONTEXT:]
    text: str = tokenizer.decode(end, skip_special_tokens=skip_special_tokens) if end else ""
    return () if text.endswith("\ufffd") else end


def _split_fast(tokenizer: Any, token_ids: Sequence[int], skip: bool, prompt_ids: Sequence[int]) -> list[str]:
    stream = DecodeStream(ids=list(prompt_ids), skip_special_tokens=skip)
    texts = []
    for token_id in token_ids:
        try:
            texts.append(stream.step(tokenizer, token_id) or "")
        except Exception as error:
            # Some tokenizers can write invalid UTF-8, on which the stream gives up; vLLM begins a new one, too.
            if not str(error).startswith(_INVALID_PREFIX):
                raise
            stream = DecodeStream(skip_special_tokens=skip)
            texts.append(stream.step(tokenizer, token_id) or "")
    return texts


def _split_slow(tokenizer: Any, token_ids: Sequence[int], skip: bool, prompt_ids: Sequence[int]) -> list[str]:
    before = list(prompt_ids)
    length = len(tokenizer.decode(before, skip_special_tokens=skip)) if before else 0
    texts = []
    for end in range(1, len(token_ids) + 1):
        text = tokenizer.decode([*before, *token_ids[:end]], skip_special_tokens=skip)
        complete = not text.endswith("\ufffd")
        texts.append(text[length:] if complete else "")
        length = len(text) if complete else length
    return texts


class PromptTokenizer:
    """Tokenizes prompts for one model."""

    def __init__(self, texts: ModelTexts, max_model_len: int, max_prompt_tokens: int | None = None) -> None:
        """`max_prompt_tokens`: longer prompts are refused, however much the context holds."""
        self._texts, self._most = texts, max_prompt_tokens
        self._max_model_len = max_model_len
        self._most_characters = max_model_len * texts.longest_token

    async def token_ids(self, request: GenerationRequest) -> list[int]:
        """The request's prompt as token ids, truncated as it asks.

        Raises:
            InvalidRequest: it is empty, or too long for the model.
        """
        ids = list(request.prompt) if isinstance(request.prompt, tuple) else await self._encode(request.prompt, request)
        if request.truncate_prompt_tokens is not None:
            ids = self._truncate(ids, request.truncate_prompt_tokens)
        if not ids:
            raise InvalidRequest("the prompt has no tokens")
        if self._most is not None and len(ids) - request.generated_before > self._most:
            raise PromptTooLong(len(ids), self._most)
        if len(ids) + request.room > self._max_model_len:
            raise ContextExceeded(len(ids), request.room, self._max_model_len)
        return ids

    async def _encode(self, text: str, request: GenerationRequest) -> list[int]:
        if len(text) > self._most_characters:
            # Too long whatever its tokens are; tokenizing megabytes would cost seconds and gigabytes.
            if request.truncate_prompt_tokens is None:
                raise InvalidRequest(
                    f"the prompt has {len(text)} characters; the model's context of {self._max_model_len} tokens "
                    f"cannot hold it"
                )
            text = text[-self._most_characters :]
        try:
            encode = partial(self._texts.encode, text, special=request.add_special_tokens)
            return await asyncio.to_thread(encode) if len(text) > LONG_TEXT else encode()
        except Exception as error:
            raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from error

    def _truncate(self, ids: list[int], limit: int) -> list[int]:
        """Keep the last `limit` tokens, and the special tokens that the tokenizer puts in front."""
        if len(ids) <= limit:
            return ids
        lead = next((i for i, token_id in enumerate(ids) if token_id not in self._texts.special_ids), 0)
        lead = min(lead, limit - 1)
        return ids[:lead] + ids[len(ids) - (limit - lead) :]
