from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.adapters import Adapter
from engines.errors import (
    BodyTooLarge,
    EngineDead,
    GenerationFailed,
    InternalError,
    InvalidParameter,
    InvalidRequest,
    NotReady,
    NotServed,
    Overloaded,
    RequestError,
    UnknownModel,
)
from handlers.contract import Call
from handlers.openai.routes import OPENAI, model, models
from handlers.route_declarations import GenerationRoute, InfoRoute
from tests.contracts.exchange import view

CALL = Call(body=b"", request_id="r", path="/v1/models", method="GET")


@pytest.mark.parametrize(
    ("error", "status", "kind", "field"),
    [
        (UnknownModel("x", "there is no x"), 404, "NotFoundError", "model"),
        (NotServed("needs vLLM"), 501, "NotImplementedError", None),
        (NotReady("loading"), 503, "Service Unavailable", None),
        (Overloaded("the queue is full"), 503, "Service Unavailable", None),
        (BodyTooLarge("too large"), 413, "Request Entity Too Large", None),
        (InvalidParameter("n", "must be 1"), 400, "BadRequestError", "n"),
        (InvalidRequest("bad"), 400, "BadRequestError", None),
        (GenerationFailed("failed"), 500, "InternalServerError", None),
        (EngineDead("dead"), 500, "InternalServerError", None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_is_one_of_vllm(error: RequestError, status: int, kind: str, field: str | None) -> None:
    reply = OPENAI.refuse(error)
    assert (reply.status, reply.content_type) == (status, "application/json")
    expected = {"message": error.message, "type": kind, "param": field, "code": status}
    assert msgspec.json.decode(reply.body) == {"error": expected}


@given(st.text())
def test_any_message_makes_a_valid_error(message: str) -> None:
    for error in (NotServed(message), InvalidParameter(message, message), InternalError()):
        reply = OPENAI.refuse(error)
        assert msgspec.json.decode(reply.body)["error"]["code"] == reply.status


def test_lone_surrogates_of_a_client_do_not_break_an_error() -> None:
    assert OPENAI.refuse(InvalidRequest("\ud800")).body == (
        b'{"error":{"message":"?","type":"BadRequestError","param":null,"code":400}}'
    )


def test_every_versioned_route_is_there_under_openai_too() -> None:
    paths = {(route.path, route.methods) for route in OPENAI.routes}
    versioned = {(path, methods) for path, methods in paths if path.startswith("/v1/") and "adapter" not in path}
    assert versioned
    assert {("/openai" + path, methods) for path, methods in versioned} <= paths


def test_models_can_be_listed_whatever_runs_them() -> None:
    listing = [route for route in OPENAI.routes if route.path.endswith("/models")]
    assert all(isinstance(route, InfoRoute) for route in listing)
    assert any(isinstance(route, GenerationRoute) for route in OPENAI.routes)


def test_a_model_that_is_still_loading_is_listed_under_all_its_names() -> None:
    reply = models(CALL, (view("starting", served_model_names=("a", "b")),))
    document = msgspec.json.decode(reply.body)
    assert document["object"] == "list"
    assert [card["id"] for card in document["data"]] == ["a", "b"]
    card = document["data"][0]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    assert (card["object"], card["owned_by"], card["parent"], card["max_model_len"]) == ("model", "vllm", None, None)
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["id"].startswith("modelperm-")


def test_the_list_of_models_has_the_adapters_with_their_parent() -> None:
    adapter = Adapter(name="a", src="/x", path=Path("/x"), id=1)
    of_base = replace(view(served_model_names=("base", "other")), adapters=(adapter,))
    cards = msgspec.json.decode(models(CALL, (of_base,)).body)["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    root = of_base.config.model_id
    assert shown == [("base", root, None), ("other", root, None), ("a", "/x", "base")]


@pytest.mark.parametrize("name", ["base", "org/other", "a"])
def test_one_of_the_models_is_what_the_list_has_of_it(name: str) -> None:
    adapter = Adapter(name="a", src="s3://b/x", path=Path("/x"), id=1)
    views = (replace(view(served_model_names=("base", "org/other")), adapters=(adapter,)),)
    listed = msgspec.json.decode(models(CALL, views).body)["data"]
    reply = model(Call(body=b"", request_id="r", path_parameters={"id": name}), views)
    assert (reply.status, reply.content_type) == (200, "application/json")
    card = msgspec.json.decode(reply.body)
    assert list(card) == list(listed[0])
    varying = {"created": 0, "permission": []}
    assert [one | varying for one in listed if one["id"] == name] == [card | varying]


def test_a_model_that_is_none_of_these_is_not_found_in_vllms_words() -> None:
    call = Call(body=b"", request_id="r", path_parameters={"id": "org/nope"})
    with pytest.raises(UnknownModel) as caught:
        model(call, (view(),))
    reply = OPENAI.refuse(caught.value)
    assert (reply.status, reply.body) == (
        404,
        b'{"error":{"message":"The model `org/nope` does not exist.","type":"NotFoundError","param":"model",'
        b'"code":404}}',
    )
