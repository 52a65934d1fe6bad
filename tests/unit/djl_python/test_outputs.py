from __future__ import annotations

import datetime
import json
import socket
import struct
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_python import Output
from djl_python.test_model import decode_encoded_output_binary


def parts(output: Output) -> list[bytes]:
    """Return the sent bytes, one item for each `sendall`."""
    connection = Mock(socket.socket)
    output.send(connection)
    return [call.args[0] for call in connection.sendall.call_args_list]


def sent(output: Output) -> bytes:
    return b"".join(parts(output))


def text(value: str) -> bytes:
    return struct.pack(">i", len(value.encode())) + value.encode()


def only_value(output: Output) -> Any:
    assert output.content.size() == 1
    return output.content.value_at(0)


def test_an_answer_has_the_exact_wire_form() -> None:
    output = Output(200, "OK").add_property("Content-Type", "text/plain").add_property("n", 1).add("hé").add(b"x", "k")
    assert sent(output) == (
        struct.pack(">h", 200)
        + text("OK")
        + struct.pack(">h", 2)
        + text("Content-Type")
        + text("text/plain")
        + text("n")
        + text("1")
        + struct.pack(">h", 2)
        + struct.pack(">i", -1)
        + text("hé")
        + text("k")
        + text("x")
    )


def test_a_stream_is_sent_chunk_by_chunk() -> None:
    output = Output().add_stream_content(["a", b"b", bytearray(b"c"), {"d": 1}], None)
    head, *chunks, end = parts(output)
    assert head == struct.pack(">h", 200) + text("OK") + struct.pack(">hh", 0, -1)
    assert chunks == [b"\x01" + text(each) for each in ("a", "b", "c", '{\n  "d":1\n}')]
    assert end == b"\x00" + text("")


def test_the_default_formatter_of_a_stream_makes_escaped_json_lines() -> None:
    output = Output().add_stream_content(iter([["é", "b"]]))
    assert list(output.stream_chunks()) == [b'{"outputs": ["\\u00e9", "b"]}\n']


def test_a_stream_may_be_an_object_with_next_alone() -> None:
    class Countdown:
        left = 2

        def __next__(self) -> str:
            if not self.left:
                raise StopIteration
            self.left -= 1
            return str(self.left)

    stream: Any = Countdown()
    assert [*Output().add_stream_content(stream, None).stream_chunks()] == [b"1", b"0"]


@pytest.mark.parametrize(("reason", "shown"), [("out of tokens", "out of tokens"), ("no \ud800", "no ?")])
def test_a_stream_that_fails_ends_with_the_errors_text(reason: str, shown: str) -> None:
    def failing() -> Iterator[str]:
        yield "a"
        raise RuntimeError(reason)

    assert sent(Output().add_stream_content(failing(), None)).endswith(b"\x01" + text("a") + b"\x00" + text(shown))


def test_a_connection_that_breaks_is_no_error_of_the_stream() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours, pytest.raises(OSError, match="Broken pipe"):
        Output().add_stream_content(["a"] * 10, None).send(ours)


def test_mutators_can_be_chained() -> None:
    output = Output()
    assert output.set_code(201).set_message("Created").add_property("a", "b").add("x").finalize(print) is output
    assert (output.code, output.message) == (201, "Created")


def test_properties_are_found_whatever_their_case() -> None:
    output = Output().add_property("Content-Type", "text/plain")
    assert output.get_property("content-type") == "text/plain"
    assert output.get_property("accept") is None
    assert output.get_properties() == {"Content-Type": "text/plain"}


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ("it is <b>rött</b>", '"it is <b>rött</b>"'),
        ("no \ud800 é", '"no ? é"'),
        ({"detail": ["bad field"]}, '{\n    "detail":[\n      "bad field"\n    ]\n  }'),
    ],
)
def test_an_error_has_the_exact_body_of_the_contract(error: Any, shown: str) -> None:
    output = Output().error(error)
    assert (output.code, output.message) == (424, "invoke handler failure")
    assert output.get_properties() == {"content-type": "application/json"}
    expected = f'{{\n  "code":424,\n  "message":"invoke handler failure",\n  "error":{shown}\n}}'
    assert only_value(output) == expected.encode()


def test_numpy_values_dates_and_text_become_json() -> None:
    value = {
        "i": np.int64(1),
        "f": np.float32(0.5),
        "b": np.bool_(True),
        "a": np.array([[1, 2]]),
        "d": datetime.datetime(2024, 5, 6, 7, 8),
        "e": datetime.date(2024, 5, 6),
    }
    assert json.loads(only_value(Output().add(value))) == {
        "i": 1,
        "f": 0.5,
        "b": True,
        "a": [[1, 2]],
        "d": "2024-05-06 07:08:00",
        "e": "2024-05-06",
    }
    assert only_value(Output().add_as_json("é")) == '"é"'.encode()


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], np.float64("nan"), np.array([np.nan])])
def test_nan_and_infinity_cannot_become_json(value: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Output().add_as_json(value)


def test_what_json_does_not_know_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        Output().add({"a": object()})


def test_a_batch_index_goes_before_the_key_without_leading_zeros() -> None:
    output = Output().add("a", "data", 0).add_as_json(1, batch_index=12).add_as_numpy([np.zeros(1)], "n", 3)
    assert output.content.keys == ["batch_0.data", "batch_12.", "batch_3.n"]


def test_a_key_that_is_no_string_is_made_one_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Output().add("a", key=7).content.keys == ["7"]
    assert "Output key should be str type" in caplog.text


def test_the_function_to_call_at_the_end_is_called_with_its_arguments() -> None:
    assert Output().finalize(lambda a, b, c: a + b + c, 1, 2, 3).execute_finalize() == 6
    assert Output().execute_finalize() is None


def test_a_binary_map_has_the_exact_bytes_of_the_contract() -> None:
    encoded = Output.binary_encode({"data": "é", "last": True})
    assert encoded == struct.pack(">h", 2) + text("data") + text("é") + text("last") + text("True")


@given(st.dictionaries(st.text(), st.text() | st.booleans() | st.integers() | st.none(), max_size=6))
def test_a_binary_map_comes_back_as_text(data: dict[str, Any]) -> None:
    assert decode_encoded_output_binary(Output.binary_encode(data)) == {key: str(value) for key, value in data.items()}


@given(st.integers(0, 30))
def test_a_binary_map_that_is_cut_off_is_refused(length: int) -> None:
    encoded = Output.binary_encode({"data": "0123456789", "last": False})
    with pytest.raises(ValueError, match=r"cut off|bytes of text wanted"):
        decode_encoded_output_binary(encoded[:length])


def test_strings_are_written_with_their_length_and_none_as_minus_one() -> None:
    written = bytearray()
    Output.write_utf8(written, "é")
    Output.write_utf8(written, None)
    assert written == b"\x00\x00\x00\x02\xc3\xa9\xff\xff\xff\xff"


def test_more_entries_than_the_wire_form_can_count_are_refused() -> None:
    output = Output()
    for _ in range(0x8000):
        output.add(b"")
    with pytest.raises(ValueError, match="does not fit into the 16 bits"):
        sent(output)


def test_an_output_shows_its_types_instead_of_its_content() -> None:
    shown = json.loads(str(Output(201, "Created").add_property("a", object).add("secret", "k")))
    assert shown["code"] == 201
    assert shown["content"] == {"k": "type: <class 'bytes'>"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("é", "é".encode()),
        (b"\xff", b"\xff"),
        (bytearray(b"x"), b"x"),
        (memoryview(b"y"), b"y"),
        (5, b"5"),
        (["é", 1], '[\n  "é",\n  1\n]'.encode()),
    ],
)
def test_a_value_that_was_put_into_the_content_itself_is_encoded_as_if_it_had_been_added(
    value: Any, expected: bytes
) -> None:
    encoded = Output.encode_value(value)
    assert (type(encoded), encoded) == (bytes, expected)
    output = Output()
    output.content.add("k", value)
    assert sent(output).endswith(text("k") + struct.pack(">i", len(expected)) + expected)
    assert only_value(Output().add(value)) == expected
    assert list(Output().add_stream_content([value], None).stream_chunks()) == [expected]


def test_a_text_that_utf_8_cannot_hold_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        Output().add("\ud800")
    with pytest.raises(UnicodeEncodeError):
        Output.encode_value("\ud800")
