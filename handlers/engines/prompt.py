"""From a request's prompt to token ids, with any Hugging Face tokenizer; bounded in time and memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from handlers.errors import ContextExceeded, InvalidRequest
from handlers.request import GenerationRequest

LONG_PROMPT = 4096
"""Characters above which a prompt is tokenized in a thread: below it the event loop waits for less than a step."""
_CHARACTERS_PER_TOKEN = 256
"""No token is longer, where the tokenizer does not say how long its longest is."""


class PromptTokenizer:
    """Tokenizes prompts for one model."""

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._special_ids = frozenset(tokenizer.all_special_ids)
        longest = int(getattr(tokenizer, "max_chars_per_token", 0)) or _CHARACTERS_PER_TOKEN
        self._most_characters = max_model_len * longest
        # The wrapper around `tokenizers` costs more than the tokenizing of a short prompt.
        self._fast = getattr(tokenizer, "_tokenizer", None)
        if self._fast is not None:
            # A tokenizer file may have kept them from training; the wrapper would switch them off as well.
            self._fast.no_truncation()
            self._fast.no_padding()

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids with the special tokens that the model wants."""
        ids: Sequence[int] = self._fast.encode(text).ids if self._fast is not None else self._tokenizer.encode(text)
        return ids

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
            if len(text) > LONG_PROMPT:
                return list(await asyncio.to_thread(self.tokenize, text))
            return list(self.tokenize(text))
        except Exception as error:
            raise InvalidRequest(f"the tokenizer cannot encode the prompt: {error}") from error

    def _truncate(self, ids: list[int], limit: int) -> list[int]:
        """Keep the last `limit` tokens, and the special tokens that the tokenizer puts in front."""
        if len(ids) <= limit:
            return ids
        lead = next((i for i, token_id in enumerate(ids) if token_id not in self._special_ids), 0)
        lead = min(lead, limit - 1)
        return ids[:lead] + ids[len(ids) - (limit - lead) :]
