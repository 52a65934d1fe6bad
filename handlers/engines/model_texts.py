"""The text side of a model: its tokenizer as Slipway itself uses it, with any tokenizer of Hugging Face's kind.

It has a tokenizer of its own. One that is shared changes under its users: a call of Hugging Face's wrapper with
`truncation=True` leaves truncation switched on for the next one, and vLLM's pool copies the tokenizer, for tenths of a
second, whenever a thread holds the last copy. Nothing here changes the tokenizer, so the event loop and threads may use
one `ModelTexts` at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

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
