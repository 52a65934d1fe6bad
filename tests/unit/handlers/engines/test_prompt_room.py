"""Which prompts the model's context has room for."""

from __future__ import annotations

import asyncio

import pytest

from handlers.engines.texts import ModelTexts, PromptTokenizer
from handlers.errors import ContextExceeded
from handlers.request import GenerationRequest


class _Tokenizer:
    """A token for each word."""

    all_special_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [7] * len(text.split())


def token_ids(prompt: str, **fields: int) -> list[int]:
    request = GenerationRequest(request_id="r", prompt=prompt, **fields)  # type: ignore[arg-type]
    return asyncio.run(PromptTokenizer(ModelTexts(_Tokenizer()), 10).token_ids(request))


def test_the_context_must_have_room_for_one_new_token_unless_the_request_wants_more() -> None:
    assert len(token_ids("a " * 9)) == 9
    assert len(token_ids("a " * 6, room=4)) == 6
    with pytest.raises(
        ContextExceeded, match=r"the prompt has 10 tokens; .* of 10 tokens must .* at least one new token"
    ):
        token_ids("a " * 10)
    with pytest.raises(ContextExceeded, match="at least 5 new tokens") as caught:
        token_ids("a " * 6, room=5)
    assert (caught.value.prompt_tokens, caught.value.new_tokens, caught.value.context) == (6, 5, 10)


def test_a_prompt_that_is_truncated_makes_room() -> None:
    assert len(token_ids("a " * 50, room=5, truncate_prompt_tokens=5)) == 5
