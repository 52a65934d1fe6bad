"""LMI's management of adapters, byte for byte, and the adapters that calls name."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import parse_qsl

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engines.adapters import Adapter, AdapterOrder
from engines.errors import (
    AdapterConflict,
    AdapterFailed,
    AdapterMissing,
    AdapterTaken,
    EngineDead,
    InternalError,
    InvalidParameter,
    InvalidRequest,
    NoRoomForAdapter,
    NotReady,
    NotServed,
    RequestError,
    UnknownAdapter,
    UnknownModel,
)
from handlers.contract import Call
from handlers.lmi.adapter_choice import adapters_in, adapters_of, named_adapter
from handlers.lmi.management import adapters as adapter_management
from handlers.openai import routes as vllm
from tests.contracts import exchange
from tests.contracts.exchange import parse
from tests.stand_ins.request_headers import request_headers

HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
ONE = Adapter(name="one", src="/adapters/one", path=Path("/adapters/one"), id=1)
TWO = Adapter(name="two", src="two", path=Path("/m/two"), id=2, preload=False)


def query(text: str, **fields: Any) -> Call:
    pairs = tuple(parse_qsl(text, keep_blank_values=True))
    return Call(body=b"", request_id="r", query=pairs, **fields)


def body(document: Any, **fields: Any) -> Call:
    content = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return Call(body=content, content_type="application/json; charset=utf-8", request_id="r", **fields)


def test_lmis_form_is_the_query() -> None:
    order = adapter_management.read_registration(query("name=a&src=/x&preload=FALSE&pin=true&rank=8&extra=%C3%BC"))
    options = {"rank": "8", "extra": "ü"}
    assert order == AdapterOrder(name="a", src="/x", preload=False, pin=True, options=options)
    assert adapter_management.read_registration(query("name=a&src=/x")) == AdapterOrder(name="a", src="/x")


def test_sagemakers_form_is_a_json_body() -> None:
    alias = request_headers(*(("X-Amzn-Sagemaker-Adapter-Alias", "nice"),))
    given = {"name": "a", "src": "/x", "preload": True, "pin": False, "rank": 8, "nothing": None}
    order = adapter_management.read_registration(body(given, headers=alias))
    assert order == AdapterOrder(name="a", src="/x", preload=True, pin=False, alias="nice", options={"rank": "8"})


@pytest.mark.parametrize("content", [{}, {"src": "/x", "pin": True}, {"name": None, "src": "/x"}])
def test_the_query_has_what_a_json_body_lacks(content: dict[str, Any]) -> None:
    given = (("name", "a"), ("src", "/x" if "src" not in content else "/other"), ("preload", "false"))
    call = body(content, query=given, path_parameters={"adapter": "a"})
    expected = AdapterOrder(name="a", src="/x", preload=False, pin=content.get("pin"))
    assert adapter_management.read_registration(call) == expected
    assert adapter_management.read_update(call) == expected


def test_the_answers_in_lmis_form() -> None:
    alias = request_headers((adapter_management.ALIAS_HEADER, "nice"))
    lmis = query("name=a&src=/x")
    for call, message, expected in (
        (lmis, "", b'{\n  "status": "Adapter a registered"\n}\n'),
        (lmis, "said", b'{\n  "status": "said"\n}\n'),
        (replace(lmis, headers=alias), "", b'{\n  "status": "Adapter nice registered"\n}\n'),
        (body({}, query=lmis.query), "", b'{\n  "status": "Adapter a registered"\n}\n'),
    ):
        reply = adapter_management.confirmation(call, "a", "registered", message)
        assert (reply.status, reply.content_type, reply.body) == (200, "application/json", expected)


def test_the_answers_in_sagemakers_form() -> None:
    reply = adapter_management.confirmation(body({"name": "a"}), "a", "registered", "")
    assert (reply.status, reply.content_type) == (200, "text/plain; charset=utf-8")
    assert reply.body == b"Adapter a registered"
    aliased = body({"name": "a"}, headers=request_headers((adapter_management.ALIAS_HEADER.lower(), "nice")))
    assert adapter_management.confirmation(aliased, "a", "registered", "").body == b"Adapter nice registered"


def test_an_adapter_described() -> None:
    reply = adapter_management.description(ONE)
    assert reply.body == (b'{\n  "name": "one",\n  "src": "/adapters/one",\n  "preload": true,\n  "pin": false\n}\n')


def test_adapters_listed_page_by_page() -> None:
    entries = [
        b'    {\n      "name": "one",\n      "src": "/adapters/one",\n      "preload": true,\n'
        b'      "pin": false\n    }',
        b'    {\n      "name": "two",\n      "src": "two",\n      "preload": false,\n      "pin": false\n    }',
    ]
    both = b'{\n  "adapters": [\n' + b",\n".join(entries) + b"\n  ]\n}\n"
    assert adapter_management.adapter_list(query(""), (ONE, TWO)).body == both
    first = b'{\n  "nextPageToken": "1",\n  "adapters": [\n' + entries[0] + b"\n  ]\n}\n"
    assert adapter_management.adapter_list(query("limit=1"), (ONE, TWO)).body == first
    second = b'{\n  "adapters": [\n' + entries[1] + b"\n  ]\n}\n"
    assert adapter_management.adapter_list(query("limit=1&next_page_token=1"), (ONE, TWO)).body == second
    assert adapter_management.adapter_list(query("next_page_token=9"), (ONE, TWO)).body == b'{\n  "adapters": []\n}\n'
    many = tuple(replace(ONE, name=str(number)) for number in range(150))
    page = msgspec.json.decode(adapter_management.adapter_list(query("limit=1000"), many).body)
    assert (len(page["adapters"]), page["nextPageToken"]) == (100, "100")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (query("src=/x"), "`name`"),
        (query("name=a"), "`src`"),
        (query("name=&src=/x"), "`name`"),
        (query("name=a&src=/x&pin=perhaps"), "`pin`"),
        (body({"name": "a"}), "`src`"),
        (body({"name": "a", "src": 5}), "`src`"),
        (body({"name": "a", "src": "/x", "preload": 1}), "`preload`"),
        (body([]), ""),
        (body(b"{"), ""),
    ],
)
def test_an_order_that_is_not_understood_names_what_is_wrong(call: Call, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        adapter_management.read_registration(call)
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("text", ["limit=x", "limit=-1", "next_page_token=abc", "limit=99999999999999"])
def test_a_page_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        adapter_management.adapter_list(query(text), (ONE,))
    assert text.partition("=")[0] in refused.value.message


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("m"), 400, "BadRequestException"),
        (NotServed("m"), 400, "BadRequestException"),
        (UnknownModel("x", "m"), 404, "ModelNotFoundException"),
        (AdapterConflict("m"), 409, "IllegalArgumentException"),
        (AdapterFailed("m"), 424, "EngineException"),
        (NoRoomForAdapter("m"), 507, "WlmOutOfMemoryException"),
        (NotReady("m"), 503, "ServiceUnavailableException"),
        (EngineDead("m"), 500, "EngineException"),
    ],
)
def test_errors_have_lmis_statuses_and_its_front_ends_object(error: RequestError, status: int, kind: str) -> None:
    reply = adapter_management.refuse(error)
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert reply.body == f'{{\n  "code": {status},\n  "type": "{kind}",\n  "message": "m"\n}}\n'.encode()


def test_further_errors() -> None:
    assert adapter_management.refuse(UnknownAdapter("a")).body == (
        b'{\n  "code": 404,\n  "type": "ResourceNotFoundException",\n'
        b'  "message": "the adapter \\u0027a\\u0027 is not registered"\n}\n'
    )
    assert adapter_management.refuse(InternalError()).status == 500
    assert adapter_management.wrong_method(Call(body=b"", request_id="", method="PUT", path="/adapters")).body == (
        b'{\n  "code": 405,\n  "type": "MethodNotAllowedException",\n'
        b'  "message": "Method PUT is not allowed for /adapters"\n}\n'
    )


def test_an_update_has_its_name_from_the_path() -> None:
    order = adapter_management.read_update(query("preload=true&name=b", path_parameters={"adapter": "a"}))
    assert order == AdapterOrder(name="a", preload=True)


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_no_body_makes_reading_an_order_fail_in_another_way(content: bytes) -> None:
    for read in (adapter_management.read_registration, vllm.read_load, vllm.read_unload):
        with contextlib.suppress(InvalidRequest):
            read(body(content))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3)
)


@given(JSON_VALUES, st.integers(1, 3))
@example(["a", "", "b"], 3)
def test_whatever_adapters_are_given_each_prompt_gets_one_or_the_call_is_refused(value: Any, prompts: int) -> None:
    names = value if isinstance(value, list) else [value] * prompts
    if len(names) != prompts or not all(name is None or isinstance(name, str) for name in names):
        with pytest.raises(InvalidRequest):
            adapters_of(body({}), value, prompts)
        return
    assert adapters_of(body({}), value, prompts) == tuple(name or None for name in names)


def test_the_header_goes_before_the_body_and_the_body_before_the_query() -> None:
    call = body({"inputs": "x", "adapters": "b"}, query=(("adapter", "q"),))
    assert named_adapter(call) == "b"
    assert named_adapter(replace(call, body=b'{"inputs": "x"}')) == "q"
    for name in (HEADER, HEADER.lower(), HEADER.upper()):
        assert named_adapter(replace(call, headers=request_headers((name, " h ")))) == "h"
    assert named_adapter(replace(call, headers=request_headers((HEADER, "")))) is None
    assert named_adapter(body({"adapters": ["b"]})) == "b"
    assert named_adapter(body({"adapters": ["b", "c"]})) is None
    assert named_adapter(body(b'{"adapters":')) is None


def test_adapters_are_ignored_with_a_note_where_they_are_off() -> None:
    for value in ("a", ["a", "b"], 5):
        exchange = parse({"inputs": "x", "adapters": value})
        assert exchange.requests[0].adapter is None
        assert exchange.notes == ("fields without effect: adapters",)


async def test_vllms_routes_answer_as_vllm_does() -> None:
    registry = AsyncMock()
    management = Mock(adapters=Mock(return_value=registry))
    load = body({"lora_name": "a", "lora_path": "/x", "load_inplace": True, "more": 1})
    reply = await vllm.load_adapter(load, management)
    assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'a' added successfully.")
    registry.register.assert_awaited_once_with(AdapterOrder(name="a", src="/x"), replacing=True)
    reply = await vllm.unload_adapter(body({"lora_name": "a"}), management)
    assert (reply.status, reply.body) == (200, b"Success: LoRA adapter 'a' removed successfully.")
    registry.unregister.assert_awaited_once_with("a")
    assert vllm.refuse_adapter(UnknownAdapter("a")).body == (
        b'{"error":{"message":"The lora adapter \'a\' cannot be found.","type":"NotFoundError","param":null,'
        b'"code":404}}'
    )
    assert vllm.refuse_adapter(AdapterFailed("m")).body == (
        b'{"error":{"message":"m","type":"InternalServerError","param":null,"code":500}}'
    )
    assert vllm.refuse_adapter(AdapterMissing("m")).status == 404
    assert vllm.refuse_adapter(AdapterConflict("m")).status == 400
    assert vllm.refuse_adapter(InvalidParameter("src", "cannot be fetched: m")).body == (
        b'{"error":{"message":"`lora_path` cannot be fetched: m","type":"BadRequestError","param":"lora_path",'
        b'"code":400}}'
    )
    taken = vllm.refuse_adapter(AdapterTaken("a"))
    assert (taken.status, b'"type":"InvalidUserInput"' in taken.body) == (400, True)
    assert b"The lora adapter 'a' has already been loaded." in taken.body
    assert vllm.refuse_adapter(NoRoomForAdapter("m")).status == 503
    assert vllm.refuse_adapter(NotServed("m")).status == 404
    for order in ({"lora_name": "", "lora_path": "/x"}, {"lora_name": "a"}):
        with pytest.raises(InvalidRequest):
            vllm.read_load(body(order))


@pytest.mark.parametrize("place", range(len("adapters")))
def test_the_field_that_names_an_adapter_is_found_whichever_letter_is_an_escape(place: int) -> None:
    name = "adapters"
    escaped = f"{name[:place]}\\u{ord(name[place]):04x}{name[place + 1 :]}"
    body = f'{{"inputs": "x", "{escaped}": "a"}}'.encode()
    assert adapters_in(body) == "a"
    assert named_adapter(replace(exchange.call({}), body=body)) == "a"
