"""The framing and the records of a reply."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.answer import Answer, Framing, parse
from replay.comparison import compare
from replay.request import Reply

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ("text", "logprobs", "content", "id", "finish_reason", "error", "usage", "7", "delta", "token")
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
TYPES = st.sampled_from(("", "application/json", "text/event-stream", "application/jsonlines", "text/plain"))


def answer(body: bytes, content_type: str = "", *, streams: bool = False) -> Answer:
    return parse(Reply(200, (("content-type", content_type),) if content_type else (), body), streams=streams)


@given(st.binary(max_size=300), TYPES, st.booleans())
def test_any_bytes_are_parsed(body: bytes, content_type: str, streams: bool) -> None:
    answer(body, content_type, streams=streams)


@given(st.lists(VALUES, min_size=1, max_size=5), st.booleans())
def test_records_come_back(records: list[Any], as_events: bool) -> None:
    if as_events:
        body = "".join(f"data: {json.dumps(record)}\n\n" for record in records) + "data: [DONE]\n\n"
        found = answer(body.encode(), "text/event-stream")
        assert found.events is not None
        assert found.events.done
    else:
        found = answer("".join(json.dumps(record) + "\n" for record in records).encode(), "application/jsonlines")
    assert found.records == records
    assert found.is_stream


@pytest.mark.parametrize("content_type", ["application/json", "application/jsonlines"])
@given(old=st.lists(VALUES, min_size=1, max_size=5), new=st.lists(VALUES, min_size=1, max_size=5), greedy=st.booleans())
def test_an_answer_equals_itself_and_any_two_are_compared(
    content_type: str, old: list[Any], new: list[Any], greedy: bool
) -> None:
    count = 1 if content_type == "application/json" else 5
    one, other = (
        answer("".join(json.dumps(record) + "\n" for record in records[:count]).encode(), content_type)
        for records in (old, new)
    )
    assert compare(one, one, greedy=greedy).differences == ()
    compare(one, other, greedy=greedy)


@pytest.mark.parametrize(
    ("body", "content_type", "framing"),
    [
        (b"", "application/json", Framing.EMPTY),
        (b'{"a": 1}', "application/json", Framing.OBJECT),
        (b'{"a": 1}\n', "", Framing.OBJECT),
        (b"[1]", "application/json", Framing.ARRAY),
        (b'{"a": 1}\n{"a": 2}\n', "", Framing.LINES),
        (b'{"a": 1}\n', "application/jsonlines", Framing.LINES),
        (b"data: 1\n\n", "", Framing.EVENTS),
        (b": hello\r\n\r\ndata: 1\r\n\r\n", "", Framing.EVENTS),
        (b"not JSON", "application/json", Framing.TEXT),
        (b"\xff\x00", "application/json", Framing.BINARY),
    ],
)
def test_the_framing_is_found_by_type_and_content(body: bytes, content_type: str, framing: Framing) -> None:
    assert answer(body, content_type).framing is framing


def test_one_line_without_a_type_is_a_stream_if_the_request_asks_for_one() -> None:
    assert answer(b'{"responses": ["a"]}\n', streams=True).framing is Framing.LINES


@pytest.mark.parametrize(
    ("record", "failed"),
    [
        ({"error": "x", "code": 424}, True),
        ({"error": {"message": "x"}}, True),
        ({"object": "error", "message": "x"}, True),
        ({"generated_text": "", "details": {"finish_reason": "error"}}, True),
        ({"token": {"error_msg": "x"}}, True),
        ({"error": None, "generated_text": ""}, False),
        ({"details": {"finish_reason": "length"}}, False),
    ],
)
def test_the_errors_of_each_contract_are_known(record: Any, failed: bool) -> None:
    assert (answer(json.dumps(record).encode()).error is not None) is failed
