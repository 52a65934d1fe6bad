from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from djl_python import Output
from djl_python.async_utils import create_non_stream_output, create_stream_chunk_output, handle_streaming_response
from djl_python.test_model import decode_encoded_output_binary


def chunk(output: Output) -> dict[str, str]:
    return decode_encoded_output_binary(output.content.value_at(0))


async def words() -> AsyncIterator[str]:
    for word in ("a", "b", "c"):
        yield word


def outputs(formatter: Any, **arguments: Any) -> list[dict[str, str]]:
    async def collect() -> list[dict[str, str]]:
        return [chunk(output) async for output in handle_streaming_response(words(), formatter, **arguments)]

    return asyncio.run(collect())


def test_an_answer_is_json_or_the_text_as_it_is_with_a_line_feed() -> None:
    output = create_non_stream_output({"a": "é"}, properties={"x-id": "1"})
    assert chunk(output) == {"data": '{"a": "é"}\n', "last": "True"}
    assert output.get_properties() == {"Content-Type": "application/json", "x-id": "1"}
    part = create_stream_chunk_output("a", False)
    assert chunk(part) == {"data": "a\n", "last": "False"}
    assert part.get_property("content-type") == "application/jsonlines"
    failed = chunk(create_non_stream_output("", error="no", code=424))
    assert failed == {"data": "\n", "last": "True", "error": "no", "code": "424"}


def test_a_stream_ends_where_the_formatter_says_so() -> None:
    sent = outputs(lambda word, suffix: (word + suffix, word == "b"), suffix="!")
    assert sent == [{"data": "a!\n", "last": "False"}, {"data": "b!\n", "last": "True"}]


def test_a_formatter_may_collect_what_came_before() -> None:
    def formatter(word: str, history: list[str]) -> tuple[str, bool, list[str]]:
        history = [*history, word]
        return "".join(history), word == "c", history

    sent = outputs(formatter, accumulate_chunks=True)
    assert [each["data"] for each in sent] == ["a\n", "ab\n", "abc\n"]


@pytest.mark.parametrize(("reason", "shown"), [("no b", "no b"), ("\ud800", "?")])
def test_a_formatter_that_fails_ends_the_stream_with_an_error(reason: str, shown: str) -> None:
    def formatter(word: str) -> tuple[str, bool]:
        if word == "b":
            raise ValueError(reason)
        return word, False

    assert outputs(formatter)[1:] == [{"data": "\n", "last": "True", "error": shown, "code": "424"}]
