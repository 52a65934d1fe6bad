"""Golden bytes of happy_vllm's generating routes. Source: happy_vllm, "Generating endpoints"."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.request import FinishReason, TokenDelta
from handlers.contract import Exchange
from tests.contracts.exchange import call
from tests.contracts.happy_vllm_exchange import contract

PROMPT = {"prompt": "Tell me"}
EOS, LENGTH = FinishReason.EOS, FinishReason.LENGTH


def parse(document: Any, *, stream: bool = False) -> Exchange:
    return contract(stream=stream).parse(call(document))


def lines(document: Any, *deltas: TokenDelta) -> list[bytes]:
    exchange = parse(document, stream=True)
    return [exchange.answer.feed(0, delta) or exchange.answer.latest() for delta in deltas]


def whole(document: Any, *deltas: TokenDelta) -> bytes:
    exchange = parse(document)
    return b"".join(exchange.answer.feed(0, delta) for delta in deltas)


def delta(text: str, tokens: int, reason: FinishReason | None = None, **fields: Any) -> TokenDelta:
    fields.setdefault("last", reason is not None)
    return TokenDelta(text, prompt_token_count=3, token_count=tokens, finish_reason=reason, **fields)


def test_every_line_has_all_sequences() -> None:
    streamed = lines(
        PROMPT | {"n": 2},
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


@pytest.mark.parametrize("extra", [{}, {"prompt_in_response": True}, {"n": 2}])
def test_the_last_line_says_what_the_plain_answer_says(extra: dict[str, Any]) -> None:
    document = {"prompt": "Ünï \U0001f917"} | extra
    deltas = [delta("é", 1), delta(' "🤗"\n', 4, EOS, last="n" not in extra)]
    if "n" in extra:
        deltas.append(delta("other", 1, LENGTH, sequence=1))
    assert json.loads(lines(document, *deltas)[-1]) == json.loads(whole(document, *deltas))


def test_the_lines_are_what_pythons_json_writes() -> None:
    for line in lines(PROMPT | {"n": 2, "prompt_in_response": True}, delta("\x00 \x7f\u2028</script>", 1)):
        assert line == (json.dumps(json.loads(line)) + "\n").encode()


def test_a_stream_has_no_content_type_and_the_plain_answer_has_jsons() -> None:
    assert parse(PROMPT, stream=True).answer.content_type == ""
    assert parse(PROMPT).answer.content_type == "application/json"
