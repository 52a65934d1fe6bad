"""The exact bytes of the answers on happy_vllm's generating routes. Source: happy_vllm, "Generating endpoints"."""

from __future__ import annotations

import json
from typing import Any

from engines.request import FinishReason, TokenDelta
from tests.contracts.exchange import call
from tests.contracts.happy_vllm_exchange import contract

EOS, LENGTH = FinishReason.EOS, FinishReason.LENGTH


def lines(document: Any, *deltas: TokenDelta) -> list[bytes]:
    answer = contract(stream=True).parse(call(document)).answer
    return [answer.feed(0, delta) or answer.latest() for delta in deltas]


def delta(text: str, tokens: int, reason: FinishReason | None = None, **fields: Any) -> TokenDelta:
    fields.setdefault("last", reason is not None)
    return TokenDelta(text, prompt_token_count=3, token_count=tokens, finish_reason=reason, **fields)


def test_every_line_has_all_sequences() -> None:
    streamed = lines(
        {"prompt": "Tell me", "n": 2},
        delta(" a", 1),
        delta(" the", 1, sequence=1),
        delta(" joke", 2, EOS, last=False),
        delta(" sun", 2, LENGTH, sequence=1),
    )
    assert [json.loads(line)["responses"] for line in streamed] == [
        [" a", ""],
        [" a", " the"],
        [" a joke", " the"],
        [" a joke", " the sun"],
    ]
    assert [json.loads(line)["finish_reasons"] for line in streamed] == [
        ["None", "None"],
        ["None", "None"],
        ["stop", "None"],
        ["stop", "length"],
    ]
    assert streamed[2] == (
        b'{"responses": [" a joke", " the"], "finish_reasons": ["stop", "None"], "usages": ['
        b'{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, '
        b'{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}]}\n'
    )
