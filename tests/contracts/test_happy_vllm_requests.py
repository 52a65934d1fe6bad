"""Bodies of every kind for happy_vllm's routes, and the lines of several sequences. `requests/happy_vllm.yaml` has the
requests that bodies become.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import RequestError
from engines.request import FinishReason, TokenDelta
from handlers.contract import Reply
from handlers.happy_vllm.request import read_generation
from handlers.happy_vllm.routes import HAPPY_VLLM, HappyVllmContract
from handlers.parsing.parameter_memo import ParameterMemo
from tests.contracts.exchange import ENCODABLE, MODEL, call
from tests.settings import configured

NAMES = (
    *("prompt", "prompt_in_response", "response_pool", "json_format", "json_format_is_json_schema", "n", "best_of"),
    *("temperature", "max_tokens", "min_tokens", "stop", "use_beam_search", "structured_outputs", "detokenize"),
)


def contract(*, stream: bool = False) -> HappyVllmContract:
    return HappyVllmContract(configured(MODEL), stream=stream)


def test_the_body_is_read_as_json_whatever_its_content_type_says() -> None:
    for content_type in ("", "text/plain", "application/x-www-form-urlencoded"):
        assert contract().parse(call({"prompt": "p"}, content_type)).requests[0].prompt == "p"


def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert contract().parse(call(b'\xef\xbb\xbf{"prompt": "p"}')).requests[0].prompt == "p"


@given(document=ENCODABLE | st.dictionaries(st.sampled_from(NAMES) | st.text(), ENCODABLE), stream=st.booleans())
def test_any_json_is_understood_or_refused_with_a_detail(document: Any, stream: bool) -> None:
    refusal: Reply | None = None
    try:
        contract(stream=stream).parse(call(document))
    except RequestError as error:
        refusal = HAPPY_VLLM.refuse(error)
    if refusal is not None:
        assert refusal.status == 422
        assert json.loads(refusal.body)["detail"]


@given(body=st.binary())
def test_any_bytes_are_understood_or_refused_with_a_detail(body: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        contract().parse(call(body))
    assert HAPPY_VLLM.refuse(caught.value).status == 422
    assert json.loads(HAPPY_VLLM.refuse(caught.value).body)["detail"]


@pytest.mark.parametrize(("value", "shown"), [(1, True), ("yes", True), ("t", True), (0, False), ("No", False)])
def test_the_prompt_in_the_response_may_be_asked_for_as_pydantic_allows(value: Any, shown: bool) -> None:
    assert read_generation({"prompt": "p", "prompt_in_response": value}, ParameterMemo()).prompt_in_response is shown


def test_every_line_has_all_sequences() -> None:
    answer = contract(stream=True).parse(call({"prompt": "Tell me", "n": 2})).answer
    steps = [(" a", 0, 1, None), (" the", 1, 1, None), (" joke", 0, 2, FinishReason.EOS)]
    streamed = []
    for text, sequence, tokens, reason in steps:
        delta = TokenDelta(text, [], sequence, finish_reason=reason, token_count=tokens, prompt_token_count=3)
        streamed.append(answer.feed(0, delta) or answer.latest())
    assert [json.loads(line)["responses"] for line in streamed[:2]] == [[" a", ""], [" a", " the"]]
    assert [json.loads(line)["finish_reasons"] for line in streamed[:2]] == [["None", "None"]] * 2
    assert streamed[2] == (
        b'{"responses": [" a joke", " the"], "finish_reasons": ["stop", "None"], "usages": ['
        b'{"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}, '
        b'{"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}]}\n'
    )
