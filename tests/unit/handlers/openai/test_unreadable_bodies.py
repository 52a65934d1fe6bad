"""Bodies that vLLM can read and Slipway cannot. They are refused, because Slipway could not translate them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import InvalidRequest
from handlers.contract import Call
from handlers.openai.current_call import OpenAICall
from handlers.openai.vllm_body import for_vllm
from handlers.queue import EngineQueue
from tests.stand_ins.scripted_engine import ScriptedEngine

BODY = {"prompt": "Once", "guided_regex": "[0-9]{3}", "max_tokens": 8}
TEXT = json.dumps(BODY)


def translated(body: bytes) -> bytes:
    return for_vllm(
        Call(body=body, request_id="id"), "/v1/completions", OpenAICall(EngineQueue(ScriptedEngine(), 1))
    ).body


@pytest.mark.parametrize(
    "body",
    [
        TEXT.replace("8}", "NaN}").encode(),
        TEXT.replace("8}", '8, "unknown": -Infinity}').encode(),
        b"\xef\xbb\xbf" + TEXT.encode(),
        TEXT.encode("utf-16"),
        TEXT.encode("utf-32-le"),
        TEXT.replace("[0-9]", r"\ud83d[0-9]").encode(),
        TEXT.replace("Once", "\x01").encode(),
    ],
    ids=["NaN", "infinity", "byte order mark", "UTF-16", "UTF-32", "half a pair", "control character"],
)
def test_a_body_that_only_vllm_reads_is_refused(body: bytes) -> None:
    try:
        document = json.loads(body)
    except ValueError:
        assert translated(body) == body, "vLLM refuses it in its own words"
        return
    assert document["guided_regex"]
    with pytest.raises(InvalidRequest, match="UTF-8"):
        translated(body)


@pytest.mark.parametrize("wrong", [b"\xed\xa0\xbd", b"\xff"])
@pytest.mark.parametrize("field", ["prompt", "user", "unknown", "tools"])
def test_a_body_that_is_not_in_utf_8_is_refused_wherever_the_fault_is(field: str, wrong: bytes) -> None:
    document = BODY | {field: [{"description": "<mark>"}] if field == "tools" else "<mark>"}
    with pytest.raises(InvalidRequest, match="UTF-8"):
        translated(json.dumps(document).encode().replace(b"<mark>", wrong))


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"text"', b"{" * 10_000])
def test_a_body_that_nobody_reads_goes_on_as_it_came(body: bytes) -> None:
    assert translated(body) == body


@given(st.binary(max_size=40), st.integers(0, len(TEXT)))
def test_a_constraint_never_reaches_vllm_untranslated(noise: bytes, place: int) -> None:
    body = TEXT.encode()[:place] + noise + TEXT.encode()[place:]
    try:
        sent = translated(body)
    except InvalidRequest:
        return
    try:
        seen = json.loads(sent)
    except (ValueError, RecursionError):
        return
    assert not isinstance(seen, dict) or "guided_regex" not in seen or not seen["guided_regex"]
