"""The documents of OpenAI's contract that are not streamed: the end of each text, and the counts of all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.request import FinishReason, TokenDelta
from handlers.contract import Call
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.contract import OpenAIContract
from tests.contracts.openai_exchange import FRONT_END


def answered(document: Any, path: str, *deltas: tuple[int, TokenDelta]) -> Any:
    """Return the document that a call gets. `deltas`: each with the number of its prompt."""
    call = Call(body=json.dumps(document).encode(), content_type="application/json", request_id="r")
    exchange = OpenAIContract(FRONT_END).parse(call, path)
    assert exchange is not None
    return json.loads(b"".join([exchange.answer.feed(prompt, delta) for prompt, delta in deltas]))


def ended(text: str, tokens: int, prompt_tokens: int = 3, **fields: Any) -> TokenDelta:
    fields.setdefault("finish_reason", FinishReason.LENGTH)
    return TokenDelta(text, [], prompt_token_count=prompt_tokens, token_count=tokens, last=True, **fields)


@pytest.mark.parametrize(
    ("reason", "stop", "shown"),
    [
        (FinishReason.STOP, "###", ("stop", "###")),
        (FinishReason.STOP, 7, ("stop", 7)),
        (FinishReason.EOS, None, ("stop", None)),
        (FinishReason.LENGTH, None, ("length", None)),
    ],
)
@pytest.mark.parametrize(
    ("path", "document"),
    [(COMPLETIONS, {"prompt": "Hi"}), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})],
)
def test_a_text_has_the_reason_of_its_end_and_the_stop_string_or_token(
    path: str, document: Any, reason: FinishReason, stop: Any, shown: Any
) -> None:
    (choice,) = answered(document, path, (0, ended("a", 1, finish_reason=reason, stop_reason=stop)))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == shown


def test_the_usage_counts_all_prompts_and_all_texts() -> None:
    document = answered(
        {"prompt": ["Hi", "Hello"]}, COMPLETIONS, (1, ended("b", 4, 5)), (0, ended("a", 2, prompt_tokens=3))
    )
    assert [choice["text"] for choice in document["choices"]] == ["a", "b"]
    usage = document["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (8, 6, 14)
