"""What each token adds to a text, with any Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from handlers.engines.model_texts import fast_tokenizer
from handlers.request import Token

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
