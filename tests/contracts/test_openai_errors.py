from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from handlers.model_config import ModelConfig
from handlers.openai.routes import OPENAI, models
from handlers.route_declarations import GenerationRoute, InfoRoute, ModelView

CALL = Call(body=b"", request_id="r", path="/v1/models", method="GET")


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (
            UnknownModel("x", "The model `x` does not exist."),
            404,
            b'{"error":{"message":"The model `x` does not exist.","type":"NotFoundError","param":"model","code":404}}',
        ),
        (
            NotServed("needs vLLM"),
            501,
            b'{"error":{"message":"needs vLLM","type":"NotImplementedError","param":null,"code":501}}',
        ),
        (
            NotReady("loading"),
            503,
            b'{"error":{"message":"loading","type":"Service Unavailable","param":null,"code":503}}',
        ),
        (
            Overloaded("the queue is full"),
            503,
            b'{"error":{"message":"the queue is full","type":"Service Unavailable","param":null,"code":503}}',
        ),
        (
            BodyTooLarge("too large"),
            413,
            b'{"error":{"message":"too large","type":"Request Entity Too Large","param":null,"code":413}}',
        ),
        (
            InvalidParameter("n", "must be 1"),
            400,
            b'{"error":{"message":"`n` must be 1","type":"BadRequestError","param":"n","code":400}}',
        ),
        (
            InvalidRequest("bad"),
            400,
            b'{"error":{"message":"bad","type":"BadRequestError","param":null,"code":400}}',
        ),
        (
            GenerationFailed("failed"),
            500,
            b'{"error":{"message":"failed","type":"InternalServerError","param":null,"code":500}}',
        ),
        (
            EngineDead("dead"),
            500,
            b'{"error":{"message":"dead","type":"InternalServerError","param":null,"code":500}}',
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_error_is_one_of_vllm(error: RequestError, status: int, body: bytes) -> None:
    reply = OPENAI.refuse(error)
    assert (reply.status, reply.content_type, reply.body) == (status, "application/json", body)


@given(st.text())
def test_any_message_makes_a_valid_error(message: str) -> None:
    for error in (NotServed(message), InvalidParameter(message, message), InternalError()):
        reply = OPENAI.refuse(error)
        assert msgspec.json.decode(reply.body)["error"]["code"] == reply.status


def test_lone_surrogates_of_a_client_do_not_break_an_error() -> None:
    assert OPENAI.refuse(InvalidRequest("\ud800")).body == (
        b'{"error":{"message":"?","type":"BadRequestError","param":null,"code":400}}'
    )


def test_wrong_methods_and_unknown_paths_are_those_of_vllm() -> None:
    assert OPENAI.wrong_method(CALL).body == (
        b'{"error":{"message":"Method Not Allowed","type":"Method Not Allowed","param":null,"code":405}}'
    )
    assert OPENAI.not_found is not None
    reply = OPENAI.not_found(CALL)
    assert reply.status == 404
    assert reply.body == b'{"error":{"message":"Not Found","type":"Not Found","param":null,"code":404}}'


def test_every_versioned_route_is_there_under_openai_too() -> None:
    paths = {(route.path, route.methods) for route in OPENAI.routes}
    versioned = {(path, methods) for path, methods in paths if path.startswith("/v1/") and "adapter" not in path}
    assert versioned
    assert {("/openai" + path, methods) for path, methods in versioned} <= paths


def test_models_can_be_listed_whatever_runs_them() -> None:
    listing = [route for route in OPENAI.routes if route.path.endswith("/models")]
    assert all(isinstance(route, InfoRoute) for route in listing)
    assert any(isinstance(route, GenerationRoute) for route in OPENAI.routes)


def view(**settings: object) -> ModelView:
    return ModelView(
        settings=ModelConfig(name="model", model_dir=Path("."), model_id="m", **settings),  # type: ignore[arg-type]
        state="starting",
        reason="",
        started_at=0.0,
        loaded=None,
        engine="python",
        engine_version="",
        max_requests=1,
        model_aliases=("", "dummy", "tgi"),
        abort=lambda request_id: None,
    )


def test_a_model_that_is_still_loading_is_listed_under_all_its_names() -> None:
    reply = models(CALL, (view(served_model_names=("a", "b")),))
    document = msgspec.json.decode(reply.body)
    assert document["object"] == "list"
    assert [card["id"] for card in document["data"]] == ["a", "b"]
    card = document["data"][0]
    assert list(card) == ["id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"]
    assert (card["object"], card["owned_by"], card["parent"], card["max_model_len"]) == ("model", "vllm", None, None)
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["id"].startswith("modelperm-")
