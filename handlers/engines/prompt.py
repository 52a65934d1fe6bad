"""From a request's prompt to token ids, with any Hugging Face tokenizer; bounded in time and memory."""

from __future__ import annotations

import asyncio
from functools import partial

from handlers.engines.model_texts import LONG_TEXT, ModelTexts
from handlers.errors import ContextExceeded, InvalidRequest, PromptTooLong
from handlers.request import GenerationRequest


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
