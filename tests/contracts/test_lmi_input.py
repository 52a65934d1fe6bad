"""HTTP requests as inputs of custom handlers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from handlers.contract import Call, ContractError
from handlers.custom.handler_input import input_of, priority_of
from handlers.custom.handler_reply import response_headers
from tests.stand_ins.request_headers import request_headers

FORM = "application/x-www-form-urlencoded"


def contents(body: bytes, content_type: str, **more: tuple[tuple[str, str], ...]) -> list[tuple[str | None, bytes]]:
    return list(input_of(Call(body=body, content_type=content_type, request_id="id", **more)).contents)


def multipart(*parts: tuple[str, bytes], boundary: str = "edge") -> bytes:
    blocks = [
        f"--{boundary}\r\nContent-Disposition: form-data; {disposition}\r\nContent-Type: text/plain\r\n\r\n".encode()
        + data
        + b"\r\n"
        for disposition, data in parts
    ]
    return b"".join(blocks) + f"--{boundary}--\r\n".encode()


def test_form_fields_become_entries_in_order() -> None:
    assert contents(b"a=1&b=%C3%BC+x&a=2&empty=", FORM) == [
        ("a", b"1"),
        ("b", "ü x".encode()),
        ("a", b"2"),
        ("empty", b""),
    ]


def test_multipart_fields_and_files_become_entries_in_order() -> None:
    body = multipart(('name="a"', b"1"), ('name="file"; filename="x.bin"', b"\x00\r\n--edg\xff"), ('name="ü"', b""))
    assert contents(body, "multipart/form-data; boundary=edge") == [
        ("a", b"1"),
        ("file", b"\x00\r\n--edg\xff"),
        ("ü", b""),
    ]


@given(st.lists(st.tuples(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.binary(max_size=300)), max_size=6))
def test_any_multipart_content_comes_through(parts: list[tuple[str, bytes]]) -> None:
    boundary = "a-boundary-that-does-not-occur"
    body = multipart(*((f'name="{name}"', data) for name, data in parts), boundary=boundary)
    if parts:
        assert contents(body, f'multipart/form-data; boundary="{boundary}"') == parts


@pytest.mark.parametrize(
    ("body", "content_type", "cause"),
    [
        (b"x", "multipart/form-data", "Content-Type has no boundary"),
        (multipart(('name="a"', b"1"))[:-6], "multipart/form-data; boundary=edge", "ends before its last boundary"),
        (b"no multipart", "multipart/form-data; boundary=edge", "boundary"),
        (
            multipart(('title="a"', b"1")),
            "multipart/form-data; boundary=edge",
            "a part of the multipart form",
        ),
        (b"", "multipart/form-data; boundary=edge", "ends before its last boundary"),
    ],
)
def test_a_broken_multipart_body_is_400_and_names_the_cause(body: bytes, content_type: str, cause: str) -> None:
    with pytest.raises(ContractError) as refused:
        contents(body, content_type)
    error = json.loads(refused.value.reply.body)
    assert (refused.value.reply.status, error["code"], error["type"]) == (400, 400, "BadRequestException")
    assert cause in error["message"]


def test_query_parameters_come_before_the_body() -> None:
    assert contents(b"x", "text/plain", query=(("k", "1"), ("k", "2"))) == [("k", b"1"), ("k", b"2"), ("data", b"x")]


def test_later_headers_replace_earlier_ones_whatever_their_case() -> None:
    call = Call(body=b"", request_id="id", headers=request_headers(("X-A", "1"), ("x-a", "2"), ("B", "3")))
    assert input_of(call).properties == (("X-A", "2"), ("B", "3"), ("requestId", "id"))


def test_a_handler_in_the_custom_attributes_is_refused() -> None:
    headers = request_headers(("X-Amzn-SageMaker-Custom-Attributes", "a=b; handler = other"))
    with pytest.raises(ContractError):
        input_of(Call(body=b"", request_id="id", headers=headers))


def test_a_priority_that_is_no_number_is_400() -> None:
    assert priority_of(input_of(Call(body=b"", request_id="id"))) == 3
    assert priority_of(input_of(Call(body=b"", request_id="id", headers=request_headers(("X-Priority", "-1"))))) == -1
    with pytest.raises(ContractError):
        priority_of(input_of(Call(body=b"", request_id="id", headers=request_headers(("X-Priority", "high")))))


@given(st.lists(st.tuples(st.text(max_size=10), st.text(max_size=10))))
def test_no_property_makes_an_illegal_header(properties: list[tuple[str, str]]) -> None:
    content_type, headers = response_headers(tuple(properties))
    for name, value in (("Content-Type", content_type), *headers):
        assert name.isascii()
        assert name
        assert not set(map(chr, [*range(32), 127])) & set(value)
        value.encode("latin-1")


def test_a_form_without_fields_has_its_body_as_content() -> None:
    assert contents(b"", "application/x-www-form-urlencoded") == [("data", b"")]
    assert contents(b"&&", "application/x-www-form-urlencoded") == [("data", b"&&")]


def test_empty_fields_do_not_hide_others() -> None:
    assert contents(b"&" * 900 + b"a=1&b=2", "application/x-www-form-urlencoded") == [("a", b"1"), ("b", b"2")]


def test_a_function_that_may_be_chosen_is_called_handler_whatever_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_REQUEST_HANDLER_OVERRIDE", "true")
    given = input_of(Call(body=b"", request_id="id", headers=request_headers(("Handler", "other"))))
    assert ("handler", "other") in given.properties


@pytest.mark.parametrize(
    "name",
    [
        *("batch_size", "BATCH_SIZE", "batch_000.x", "reset_rollingbatch", "model_dir", "device_id"),
        *("trust_remote_code", "input_formatter"),
    ],
)
def test_what_the_server_tells_a_handler_no_client_can(name: str) -> None:
    call = Call(body=b"", request_id="id", headers=request_headers((name, "1"), ("X-Other", "2")))
    assert input_of(call).properties == (("X-Other", "2"), ("requestId", "id"))
