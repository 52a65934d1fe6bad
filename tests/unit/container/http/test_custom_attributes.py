"""The attribute `route` in SageMaker's custom attributes: its syntax, and the routes that it reaches."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.api_keys import ApiKeys
from container.app import create_app
from container.http.custom_attributes import is_plain_path, named_route
from container.http.request_head import RequestHead
from container.http.route import HttpRoute
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from handlers.all_contracts import CONTRACTS
from handlers.model_config import ModelConfig
from tests.unit.container.one_model import make, with_engine

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
INVOCATIONS = {"/invocations", "/predictions/{model}", "/predictions/{model}/{version}"}
REACHED = INVOCATIONS | {
    *("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens", "/openai/v1/chat/completions", "/openai/v1/chat/completions/batch"),
    *("/openai/v1/completions", "/openai/v1/responses", "/openai/v1/messages", "/openai/v1/messages/count_tokens"),
    *("/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/openai/v1/audio/transcriptions", "/openai/v1/audio/translations"),
    *("/generate", "/generate_stream", "/", "/tokenize", "/detokenize", "/chat_tokenize"),
    *("/v2/models/{model}/generate", "/v2/models/{model}/generate_stream", "/v2/models/{model}/infer"),
    "/v2/models/{model}/versions/{version:int}/infer",
    *(
        "/v2/models/{model}/versions/{version:int}/generate",
        "/v2/models/{model}/versions/{version:int}/generate_stream",
    ),
    *("/v1/generate", "/v1/generate_stream", "/v1/tokenizer", "/v2/tokenizer", "/v1/decode", "/v2/decode"),
    *("/v1/split_text", "/v1/metadata_text"),
    *("/v1/embeddings", "/openai/v1/embeddings", "/embeddings", "/v2/embed", "/pooling", "/classify"),
    *("/rerank", "/v1/rerank", "/v2/rerank", "/openai/v1/rerank", "/score", "/v1/score", "/openai/v1/score"),
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode"),
}
# Paths of the server's own routes, and of the management API.
OTHERS = {
    *("/ping", "/metrics", "/console", "/console/state", "/docs", "/openapi.json", "/models", "/models/model"),
    *("/models/model/invoke", "/models/model/adapters", "/models/model/adapters/a", "/adapters", "/adapters/a"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/workflows", "/endpoints/e/invocations", "/nothing"),
}
DECLARED = {route.path for contract in CONTRACTS for route in contract.routes}


def path_of(declared: str) -> str:
    parts = (
        ("{model}", "model"),
        ("{version:int}", "1"),
        ("{version}", "1"),
        ("{response_id}", "r"),
        ("{adapter}", "a"),
        ("{id:path}", "m"),
    )
    for part, value in parts:
        declared = declared.replace(part, value)
    return declared


async def call(
    attributes: str, method: str = "POST", path: str = "/invocations", **settings: Any
) -> tuple[int, dict[str, Any]]:
    """Return the status of a call, and the counted routes."""
    lifecycle, client = make(**settings)
    with_engine(lifecycle)
    async with client:
        answer = await client.request(method, path, content=b"{}", headers={ATTRIBUTES: attributes})
        text = (await client.get("/metrics")).text
    counted = {line.split('"')[1] for line in text.splitlines() if line.startswith("slipway_requests_total{")}
    return answer.status_code, {
        "routes": counted,
        "body": answer.json().get("message", "") if answer.status_code == 400 else "",
    }


@pytest.mark.parametrize(
    ("header", "route"),
    [
        ("route=/v1/messages", "/v1/messages"),
        ("a=1,route=/generate", "/generate"),
        ("model_name=b; route=/generate", "/generate"),
        ("route=/generate model_name=b", "/generate"),
        ("route=/generate;route=/tokenize", "/generate"),
        ("route=http://host/x", "http://host/x"),
        ("route=/a?b#c%2F", "/a?b#c%2F"),
        ("", None),
        ("route=", None),
        ("route=blue", None),
        ("route = /generate", None),
        ("myroute=/generate", None),
        ("myroute=1,route=/generate", "/generate"),
        ("Route=/generate", None),
        ("model_name=b", None),
    ],
)
def test_the_attribute_stands_between_separators_and_a_word_has_no_effect(header: str, route: str | None) -> None:
    assert named_route(header.encode()) == (route.encode() if route is not None else None)


@pytest.mark.parametrize("path", ["/", "/v1/chat/completions", "/predictions/a.b_c-d:1", "/v2/models/..a/generate"])
def test_paths_of_visible_characters_are_plain(path: str) -> None:
    assert is_plain_path(path.encode())


@pytest.mark.parametrize(
    "path",
    ["//host", "/a//b", "/a/", "/..", "/.", "/a/../b", "/a/..", "/%2e%2e", "/a?b", "/a#b", "/a\\b", "/a\0", "/ÿ", ""],
)
def test_other_paths_are_not(path: str) -> None:
    assert not is_plain_path(path.encode("latin-1"))


@given(st.binary(max_size=200))
def test_any_header_is_read_in_linear_time(header: bytes) -> None:
    route = named_route(b"route=/" + header)
    assert route is not None
    assert route.startswith(b"/")
    is_plain_path(route)


@pytest.mark.parametrize("declared", sorted(DECLARED | INVOCATIONS))
async def test_the_attribute_reaches_the_routes_that_infer_or_tokenize_and_no_other(declared: str) -> None:
    status, seen = await call(f"route={path_of(declared)}")
    if declared in REACHED:
        counted = "/predictions" if declared.startswith("/predictions") else declared
        assert seen["routes"] == {counted}
        return
    assert (status, seen["routes"]) == (400, {"/invocations"})
    assert "`route` in X-Amzn-SageMaker-Custom-Attributes " in seen["body"]


@pytest.mark.parametrize(
    "path",
    [*sorted(OTHERS), "http://host/generate", "//host", "/v1/../metrics", "/tokenize?a=b", "/%67enerate", "/generate/"],
)
async def test_routes_of_the_server_and_other_paths_are_refused(path: str) -> None:
    status, seen = await call(f"route={path}")
    assert (status, seen["routes"]) == (400, {"/invocations"})
    assert f"got POST {path}" in seen["body"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
async def test_other_methods_reach_nothing(method: str) -> None:
    status, seen = await call("route=/generate", method)
    assert (status, seen["routes"]) == (400, {"/invocations"})
    assert f"got {method} /generate" in seen["body"]


async def test_a_model_that_the_server_does_not_have_is_refused() -> None:
    assert await call("route=/generate,model_name=nope") == (404, {"routes": {"/invocations"}, "body": ""})


async def test_a_long_route_is_shown_in_part() -> None:
    _, seen = await call("route=/" + "x" * 9000)
    assert len(seen["body"]) < 500


async def test_a_word_leaves_the_call_where_it_is() -> None:
    assert (await call("route=blue"))[1]["routes"] == {"/invocations"}


@pytest.mark.parametrize(
    ("state", "settings"), [(State.STARTING, {}), (State.READY, {"api_keys": ApiKeys.of(["secret"])})]
)
async def test_a_refusal_by_state_or_without_a_key_has_the_form_of_the_named_route(
    state: State, settings: dict[str, Any]
) -> None:
    _, client = make(state, **settings)
    async with client:
        for path in ("/generate", "/v1/chat/completions", "/v2/models/model/generate", "/v1/generate"):
            direct = await client.post(path, content=b"{}")
            routed = await client.post("/invocations", content=b"{}", headers={ATTRIBUTES: f"route={path}"})
            assert (routed.status_code, routed.content) == (direct.status_code, direct.content)
            assert routed.status_code == (401 if settings else 503)
        key = {ATTRIBUTES: "route=/tokenize", "authorization": "Bearer secret"}
        assert (await client.post("/invocations", content=b"{}", headers=key)).status_code != 401


@pytest.mark.parametrize("route", ["/predictions/other", "/v2/models/other/generate"])
@pytest.mark.parametrize("path", ["/models/model/invoke", "/predictions/model"])
async def test_the_attribute_gives_no_call_to_another_model_than_its_path(path: str, route: str) -> None:
    status, seen = await call(f"route={route}", path=path)
    assert status == 400
    assert "got other" in seen["body"]


@pytest.mark.parametrize(
    ("path", "headers", "named"),
    [
        ("/invocations", {ATTRIBUTES: "route=/generate,model_name=b"}, {"model": "b"}),
        ("/invocations", {ATTRIBUTES: "model_name=b; route=/generate"}, {"model": "b"}),
        ("/invocations", {ATTRIBUTES: "route=/generate", "X-Amzn-SageMaker-Target-Model": "b.tar.gz"}, {"model": "b"}),
        ("/models/b/invoke", {ATTRIBUTES: "route=/generate"}, {"model": "b"}),
        ("/invocations", {ATTRIBUTES: "route=/v2/models/a/generate,model_name=b"}, {"model": "a"}),
        ("/invocations", {ATTRIBUTES: "route=/generate"}, {}),
    ],
)
def test_a_call_keeps_the_model_that_it_names(path: str, headers: dict[str, str], named: dict[str, str]) -> None:
    server_config = ServerConfig()
    configs = [ModelConfig(name=name, model_dir=Path(), model_id=name) for name in "ab"]
    models = Models(Model(Lifecycle(Settings(server_config=server_config, config=config)), "m") for config in configs)
    router = create_app(models, server_config, Registrar(models, server_config, Mock())).router
    sent = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    scope = {"method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": sent}
    head = RequestHead(scope)
    route, _ = router.dispatch(head)
    assert isinstance(route, HttpRoute)
    assert route.path == head.path.replace("/models/a/", "/models/{model}/")
    assert head.path_parameters == named
