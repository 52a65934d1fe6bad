from __future__ import annotations

import io
import json
import socket
import struct
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError

from djl_python import Input
from djl_python.np_util import to_nd_list, to_npz

NAMES = st.text(max_size=20)


def request(content_type: str | None = None, data: Any = None, key: str | None = "data") -> Input:
    made = Input()
    if content_type:
        made.properties["Content-Type"] = content_type
    made.content.add(key, data)
    return made


def message(properties: dict[str, str], content: list[tuple[str | None, bytes]]) -> bytes:
    """Return the input in LMI's binary form, encoded without the package."""

    def text(value: str | None) -> bytes:
        encoded = (value or "").encode()
        return struct.pack(">i", -1) if value is None else struct.pack(">i", len(encoded)) + encoded

    parts = [struct.pack(">h", len(properties))]
    parts += [text(key) + text(value) for key, value in properties.items()]
    parts += [struct.pack(">h", len(content))]
    parts += [text(key) + struct.pack(">i", len(value)) + value for key, value in content]
    return b"".join(parts)


def connection(data: bytes) -> socket.socket:
    """A socket that returns a few bytes at a time."""
    file = io.BytesIO(data)
    return Mock(socket.socket, recv=lambda size: file.read(min(size, 3)))


@given(st.dictionaries(NAMES, NAMES, max_size=4), st.lists(st.tuples(st.none() | NAMES, st.binary()), max_size=4))
def test_the_wire_form_gives_back_properties_and_content(
    properties: dict[str, str], content: list[tuple[str | None, bytes]]
) -> None:
    received = Input()
    received.read(connection(message(properties, content)))
    assert received.get_properties() == properties
    assert list(zip(received.content.keys, map(bytes, received.content.values), strict=True)) == content
    assert received.get_function_name() == properties.get("handler")


def test_a_connection_that_ends_too_early_is_an_error() -> None:
    data = message({"a": "b"}, [("data", b"12345")])
    with pytest.raises(ValueError, match="disconnected after 2 of 5 bytes"):
        Input().read(connection(data[:-3]))


def test_a_property_is_found_whatever_its_case() -> None:
    made = request("text/plain", b"")
    assert made.get_property("content-TYPE") == "text/plain"
    assert made.get_property("accept") is None


def test_an_input_without_content_initializes_and_one_with_an_empty_body_does_not() -> None:
    assert Input().is_empty()
    assert Input().get_as_bytes() is None
    assert Input().get_data() is None
    assert not request(data=b"").is_empty()
    with pytest.raises(ValueError, match="no content"):
        Input().get_as_string()


def test_without_a_key_the_body_comes_before_other_entries() -> None:
    made = request(data=b"query", key="q")
    assert made.get_as_bytes() == b"query"
    made.content.add("data", b"body")
    assert made.get_as_bytes() == b"body"
    assert made.get_as_bytes("q") == b"query"
    assert made.contains_key("q")
    assert not made.contains_key("Q")
    with pytest.raises(KeyError, match="requested data for key:x is not found!"):
        made.get_as_string("x")


def png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 3), "red").save(file, "PNG")
    return file.getvalue()


NUMBERS = np.arange(3)


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        ("application/json", b'{"a": 1}', {"a": 1}),
        ("application/json; charset=utf-8", b"[1]", [1]),
        ("APPLICATION/JSON", b"1", 1),
        ("application/jsonlines", b'{"a": 1}\n', {"a": 1}),
        ("application/jsonlines", b'{\n"a": 1\n}', {"a": 1}),
        ("text/plain", "grüß".encode(), "grüß"),
        ("text/csv", b"a,b\n1,2\n", "a,b\n1,2\n"),
        ("application/x-www-form-urlencoded", b"a=1&b=2", b"a=1&b=2"),
        ("application/x-npy", b"\x93NUMPY", b"\x93NUMPY"),
        ("application/octet-stream", b"\xff", b"\xff"),
        ("audio/wav", b"RIFF", b"RIFF"),
        (None, b"x", b"x"),
    ],
)
def test_data_is_read_as_its_content_type_says(content_type: str | None, body: bytes, expected: Any) -> None:
    assert request(content_type, body).get_data() == expected


@pytest.mark.parametrize(
    ("content_type", "body"), [("tensor/ndlist", bytes(to_nd_list(NUMBERS))), ("tensor/npz", to_npz([NUMBERS]))]
)
def test_arrays_are_read_as_their_content_type_says(content_type: str, body: bytes) -> None:
    (array,) = request(content_type, body).get_data()
    np.testing.assert_array_equal(array, NUMBERS)


def test_a_real_npy_file_is_read() -> None:
    file = io.BytesIO()
    np.save(file, NUMBERS)
    (array,) = request("application/x-npy", file.getvalue()).get_as_numpy()
    np.testing.assert_array_equal(array, NUMBERS)


def test_an_image_is_decoded() -> None:
    image = request("image/png", png()).get_data()
    assert (image.format, image.size, image.getpixel((0, 0))) == ("PNG", (2, 3), (255, 0, 0))


@pytest.mark.parametrize(
    ("content_type", "body", "error", "wrong"),
    [
        # Handlers of LMI catch these errors.
        ("application/json", b"{", json.JSONDecodeError, "The body is not JSON: Expecting property name"),
        ("application/json", b"\xff{}", UnicodeDecodeError, "byte 0xff in position 0.*the body is not UTF-8"),
        ("image/png", b"no image", UnidentifiedImageError, "not an image that can be read"),
        ("application/json", b"[" * 100_000, ValueError, "nested too deeply"),
        ("application/jsonlines", b"", ValueError, "The body is not JSON"),
        ("text/plain", b"ab\xe4", ValueError, "byte 0xe4 in position 2"),
        ("image/png", png()[:50], ValueError, "not an image that can be read"),
        ("tensor/npz", b"PK", ValueError, "npz body cannot be read"),
        ("tensor/ndlist", b"\x00", ValueError, "ends too early"),
        ("tensor/ndlist", b"\x93NUMPY\x01\x00", ValueError, "npy body cannot be read"),
    ],
)
def test_a_broken_body_says_what_is_wrong(content_type: str, body: bytes, error: type[Exception], wrong: str) -> None:
    with pytest.raises(error, match=wrong) as raised:
        request(content_type, body).get_data()
    assert isinstance(raised.value, ValueError)


def test_csv_rows_are_mappings_by_the_header() -> None:
    made = request("text/csv", '\ufeffa,b\r\n1,"x,\ny"\r\n'.encode())
    assert made.get_as_csv() == [{"a": "1", "b": "x,\ny"}]


def test_content_that_a_handler_or_a_test_has_put_there_is_read_like_a_clients() -> None:
    assert request("application/json", {"a": 1}).get_data() == {"a": 1}
    assert request("text/plain", "text").get_as_string() == "text"
    assert request("tensor/ndlist", memoryview(to_nd_list(NUMBERS))).get_data()[0].tolist() == [0, 1, 2]


def test_an_input_that_is_no_batch_is_its_own_only_request() -> None:
    made = request(data=b"x")
    assert not made.is_batch()
    assert made.get_batch_size() == 1
    assert made.get_batches() == [made]


PART = st.text(alphabet=st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8)


@given(
    st.lists(
        st.tuples(st.dictionaries(PART, PART, max_size=3), st.lists(st.tuples(PART, st.binary()), max_size=3)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from("._"),
)
def test_a_batch_is_split_into_the_requests_it_was_made_of(
    requests: list[tuple[dict[str, str], list[tuple[str, bytes]]]], separator: str
) -> None:
    batch = Input()
    batch.properties = {"batch_size": str(len(requests)), "batch_timeout": "3", "device_id": "0"}
    for index, (properties, content) in enumerate(requests):
        prefix = f"batch_{index:03d}{separator}"
        batch.properties |= {prefix + name: value for name, value in properties.items()}
        for name, value in content:
            batch.content.add(prefix + name, value)
    split = batch.get_batches()
    assert batch.get_batch_size() == len(split) == len(requests)
    for made, (properties, content) in zip(split, requests, strict=True):
        assert made.properties == properties
        assert list(zip(made.content.keys, made.content.values, strict=True)) == content


@pytest.mark.parametrize("key", ["data", None, "batch_1.data", "batch_abc.data", "batch_002.data"])
def test_content_that_belongs_to_no_request_of_the_batch_is_refused(key: str | None) -> None:
    batch = request(data=b"x", key=key)
    batch.properties["batch_size"] = "2"
    with pytest.raises(ValueError, match=r"Unexpected key in batch input|does not belong to a batch of 2"):
        batch.get_batches()


def test_an_input_shows_its_properties_and_each_entry() -> None:
    made = request("tensor/ndlist", to_nd_list(np.ones((1, 2))))
    assert str(made) == "properties: {'Content-Type': 'tensor/ndlist'}\ndata: [array([[1., 1.]])]"
