from __future__ import annotations

import tracemalloc
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from djl_python import Input, Output
from djl_python.encode_decode import decode, decode_csv, encode, encode_csv
from djl_python.np_util import from_nd_list, from_npz, to_nd_list


def request(body: bytes | None, key: str = "data") -> Input:
    made = Input()
    made.content.add(key, body)
    return made


@pytest.mark.parametrize(
    ("content_type", "body", "expected"),
    [
        (None, b"", {"inputs": ""}),
        (None, None, {"inputs": ""}),
        ("", b'{"a": 1}', {"a": 1}),
        ("application/json", b"[1]", [1]),
        ("application/jsonlines", b"[1]\n", [1]),
        ("text/plain; charset=utf-8", b"hi", {"inputs": ["hi"]}),
        ("text/csv", b"inputs,x\na,1\nb,2\n", {"inputs": ["a", "b"]}),
        ("text/csv", b"Question,context\nq,c\n", {"inputs": [{"Question": "q", "context": "c"}]}),
        ("audio/wav", b"RIFF", {"inputs": b"RIFF"}),
        ("application/x-www-form-urlencoded", b"a=1&b=2", {"inputs": "a=1&b=2"}),
        ("application/octet-stream", b"\xff", {"inputs": b"\xff"}),
        ("text/html", b"<p>", {"inputs": b"<p>"}),
    ],
)
def test_a_body_is_decoded_by_its_content_type(content_type: str | None, body: bytes | None, expected: Any) -> None:
    assert decode(request(body), content_type) == expected


@pytest.mark.parametrize("content_type", ["tensor/ndlist", "application/x-npy"])
def test_arrays_are_the_inputs(content_type: str) -> None:
    decoded = decode(request(bytes(to_nd_list(np.arange(2)))), content_type)
    assert decoded["inputs"][0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("content_type", "method", "answer", "decoded"),
    [
        (None, "get_as_json", {"a": 1}, {"a": 1}),
        ("application/json", "get_as_json", {"a": 1}, {"a": 1}),
        ("text/csv", "get_as_string", "inputs\na\n", {"inputs": ["a"]}),
        ("text/plain", "get_as_string", "a", {"inputs": ["a"]}),
        ("text/html", "get_as_bytes", b"a", {"inputs": b"a"}),
        ("tensor/npz", "get_as_npz", [1], {"inputs": [1]}),
        ("tensor/ndlist", "get_as_numpy", [1], {"inputs": [1]}),
        ("application/x-npy", "get_as_numpy", [1], {"inputs": [1]}),
        ("application/x-www-form-urlencoded", "get_as_string", "a=1", {"inputs": "a=1"}),
        ("image/png", "get_as_image", "picture", {"inputs": "picture"}),
        ("audio/wav", "get_as_bytes", b"a", {"inputs": b"a"}),
        ("application/octet-stream", "get_as_bytes", b"a", {"inputs": b"a"}),
    ],
)
def test_a_request_of_another_class_is_read_by_lmis_methods(
    content_type: str | None, method: str, answer: Any, decoded: Any
) -> None:
    given = Mock(spec=["get_as_bytes", method])  # A call of any other method raises an AttributeError.
    getattr(given, method).return_value = answer
    assert decode(given, content_type) == decoded


def test_the_entry_under_a_key_is_decoded() -> None:
    made = request(b"1")
    made.content.add("other", b"inputs\nx\n")
    assert decode(made, "application/json", key="data") == 1
    assert decode(made, "text/csv", key="other") == {"inputs": ["x"]}


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (b"1,2.5\n3,4\n", [[1.0, 2.5], [3.0, 4.0]]),
        (b"# a, b\n1,2 # the first\n\n  \r\n # x\n 3, 4\r\n", [[1.0, 2.0], [3.0, 4.0]]),
        (b"1,2\n", [[1.0, 2.0]]),
        (b"1\n2", [[1.0], [2.0]]),
    ],
)
def test_csv_without_a_header_is_an_array_of_numbers(body: bytes, rows: list[list[float]]) -> None:
    assert decode(request(body), "text/csv", require_csv_headers=False).tolist() == rows


@pytest.mark.parametrize("body", [b"1,a\n", b"1,nan\n", b"1,\n", b"1,2\n3\n", b"", b"# 1\n\n"])
def test_csv_that_is_no_table_of_numbers_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"non-numeric data|no rows"):
        decode_csv(request(body), require_headers=False)


@pytest.mark.parametrize("body", [b"a,b\n1,2\n", b""])
def test_csv_with_a_header_that_names_nothing_needed_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match="correct CSV with Header columns"):
        decode_csv(request(body))


def encoded(prediction: Any, accept: str | None) -> tuple[bytes, str]:
    output = Output()
    encode(output, prediction, accept, key="k")
    return bytes(output.content.get("k")), output.properties["Content-Type"]


def test_json_is_what_a_client_gets_that_accepts_nothing_else() -> None:
    assert encoded([{"a": "é"}], None) == ('[\n  {\n    "a":"é"\n  }\n]'.encode(), "application/json")
    assert encoded(1, "application/json") == (b"1", "application/json")


def test_csv_has_a_header_and_is_named_as_csv() -> None:
    assert encoded([{"a": 1, "b": "x,y"}, {"a": 2, "c": 3}], "text/csv") == (
        b'a,b,c\r\n1,"x,y",\r\n2,,3\r\n',
        "text/csv",
    )


def test_csv_of_values_has_no_header() -> None:
    assert encode_csv([[1, 2], [3, 4]]) == "1,2\n3,4\n"
    assert encode_csv(np.array([1.5, 2])) == "1.5\n2.0\n"
    assert encode_csv({"a": 1}) == "a\r\n1\r\n"


@pytest.mark.parametrize("content", ["text", 1, [{"a": 1}, 2]])
def test_csv_of_what_has_no_rows_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="CSV needs rows"):
        encode_csv(content)


def test_arrays_are_npz_if_accepted_and_else_nd_list() -> None:
    data, content_type = encoded([np.arange(2)], "tensor/npz")
    assert (from_npz(data)[0].tolist(), content_type) == ([0, 1], "tensor/npz")
    data, content_type = encoded([np.arange(2)], "custom/type")
    assert (from_nd_list(data)[0].tolist(), content_type) == ([0, 1], "tensor/ndlist")


def test_csv_whose_rows_lack_some_cells_is_read() -> None:
    assert decode_csv(request(b"inputs,x,y\na\nb,1\n")) == {"inputs": ["a", "b"]}
    assert request(b"a,b\n" + b"1\n" * 2000).get_as_csv()[-1] == {"a": "1", "b": None}


def test_many_short_rows_below_a_long_header_do_not_fill_memory() -> None:
    body = b"inputs," * 50_000 + b"\n" + b"a\n" * 50_000
    for read in (lambda made: made.get_as_csv(), decode_csv):
        tracemalloc.start()
        with pytest.raises(ValueError, match="rows lack too many of the header's 50001 columns"):
            read(request(body))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1 << 27


@pytest.mark.parametrize("body", [b"inputs\n" + b"a" * 200_000, b"a" * 200_000 + b"\n1"])
def test_csv_with_a_cell_that_is_too_long_is_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="not CSV: field larger than field limit"):
        decode_csv(request(body))
    with pytest.raises(ValueError, match="non-numeric data") as refused:
        decode_csv(request(body), require_headers=False)
    assert len(str(refused.value)) < 200
