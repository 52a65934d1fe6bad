from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from container.openapi import openapi_document
from handlers.all_contracts import CONTRACTS
from handlers.custom.settings import HandlerConfig
from handlers.model_config import ModelConfig
from handlers.openai.routes import ALIASED
from handlers.route_declarations import GenerationRoute, InvocationRoute, ManagementRoute
from tests.contracts.exchange import MODEL
from tests.settings import configured

MODES = {
    "rolling": MODEL,
    "tgi": configured(MODEL, tgi_compat=True),
    "dynamic": replace(MODEL, rolling_batch="disable"),
    "adapters": replace(MODEL, enable_lora=True),
    "custom": replace(MODEL, handler=HandlerConfig(entry_point="/x/model.py")),
}


def as_json(document: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(document))


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_every_schema_that_is_named_is_there_and_no_other(config: ModelConfig) -> None:
    document = as_json(openapi_document(config))
    assert references(document) == document["components"]["schemas"].keys()


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_the_tags_have_descriptions_and_inference_is_before_management(config: ModelConfig) -> None:
    document = as_json(openapi_document(config, vllms()))
    names = [tag["name"] for tag in document["tags"]]
    assert set(names) == {tag for operation in operations(document) for tag in operation["tags"]}
    assert all(tag["description"] for tag in document["tags"])
    assert (names[0], names[-1]) == ("lmi", "management")
    assert names.index("server") > max(names.index(contract.name) for contract in CONTRACTS if contract.name in names)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/classify", "/rerank"])
def test_the_introduction_has_a_request_that_the_kind_of_model_takes(path: str) -> None:
    document = as_json(openapi_document(MODEL, {"paths": {path: vllms()["paths"][path]}}))
    command = re.search(r"curl http://localhost:8080(\S+) -H '[^']+' -d '([^']+)'", document["info"]["description"])
    assert command is not None
    asked, body = command[1], msgspec.json.decode(command[2])
    assert asked == ("/invocations" if path == "/v1/completions" else path)
    assert asked in document["paths"]
    assert body.keys() <= {"inputs", "parameters", "input", "query", "documents"}


@pytest.mark.parametrize(
    ("mode", "summary"),
    [("rolling", "LMI rolling batch"), ("dynamic", "LMI dynamic batch"), ("custom", "own handler (model.py)")],
)
def test_the_document_shows_the_mode_that_is_served(mode: str, summary: str) -> None:
    document = openapi_document(MODES[mode])
    assert summary in document["paths"]["/invocations"]["post"]["summary"]


def vllms() -> dict[str, Any]:
    """Return the relevant part of vLLM's description: a different schema for each route."""
    paths: dict[str, Any] = {}
    schemas: dict[str, Any] = {"Request-Input": {"type": "object", "properties": {"shared": {"type": "string"}}}}
    for route in (route for family in CONTRACTS for route in family.routes):
        if not isinstance(route, GenerationRoute) or route.contract is not None:
            continue
        path = route.path.removeprefix(ALIASED)
        name = re.sub(r"\W", "", path.title()) + "Request"
        schemas[name] = {"type": "object", "properties": {name.lower(): {"$ref": "#/components/schemas/Request-Input"}}}
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        answer = {"200": {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}}
        paths[path] = {
            method.lower(): {
                "summary": f"Create {name}",
                "operationId": f"{method}_{name}",
                "requestBody": {"content": content},
                "responses": answer,
            }
            for method in route.methods
        }
    return {"paths": paths, "components": {"schemas": schemas}}


def complete(**settings: Any) -> Any:
    return as_json(openapi_document(configured(MODEL, **settings), vllms()))


def body_schemas(document: Any, path: str) -> list[str]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return [one.get("$ref", "").rpartition("/")[2] for one in schema["anyOf"]]


def test_every_route_of_every_family_is_described() -> None:
    paths = complete()["paths"]
    for family in CONTRACTS:
        for route in family.routes:
            if isinstance(route, InvocationRoute | ManagementRoute):
                continue
            path = re.sub(r":\w+}", "}", route.path)
            for method in route.methods:
                assert method.lower() in paths.get(path, {}), f"{method} {path} of {family.name}"


def test_operations_have_names_of_their_own() -> None:
    names = [item["operationId"] for verbs in complete(enable_lora=True)["paths"].values() for item in verbs.values()]
    assert len(names) == len(set(names))


def test_the_routes_for_adapters_are_described_where_there_are_adapters() -> None:
    path = "/models/{model}/adapters/{adapter}"
    assert complete(enable_lora=True)["paths"][path].keys() == {"get", "delete"}
    assert path not in complete()["paths"]


def test_a_route_of_several_families_takes_the_bodies_of_all() -> None:
    document = complete()
    assert sorted(body_schemas(document, "/tokenize")) == ["TeiTokenizeRequest", "TgiRequest", "TokenizeRequest"]
    assert "inputs" in document["components"]["schemas"]["TgiRequest"]["properties"]
    assert document["paths"]["/tokenize"]["post"]["tags"] == ["tgi", "tei", "openai"]


@pytest.mark.parametrize(
    ("settings", "own", "summary"),
    [({}, "LmiRequest", "LMI rolling batch"), ({"async_mode": True}, "LmiAsyncRequest", "LMI asynchronous handler")],
)
def test_lmis_routes_take_chats_and_completions_as_well(settings: dict[str, Any], own: str, summary: str) -> None:
    document = complete(**settings)
    for path in ("/invocations", "/predictions/model"):
        assert body_schemas(document, path) == [own, "V1ChatCompletionsRequest", "V1CompletionsRequest"]
        assert summary in document["paths"][path]["post"]["summary"]
    assert references(document) <= document["components"]["schemas"].keys()


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/chat_tokenize"])
def test_tgis_refusals_are_shown_by_their_media_types(path: str) -> None:
    answers = as_json(openapi_document(MODEL))["paths"][path]["post"]["responses"]
    shown = {status: sorted(answer["content"]) for status, answer in answers.items() if "400" <= status < "423"}
    plain = {status: ["text/plain"] for status in ("400", "408", "413", "415")}
    assert shown == plain | {"404": ["application/json"], "422": ["application/json", "text/plain"]}


JSON, BOTH = ["application/json"], ["application/json", "text/plain"]


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        ("post /generate", {"404": JSON, "424": JSON, "429": JSON, "503": JSON}),
        ("post /tokenize", {"400": BOTH, "408": BOTH, "413": BOTH, "415": ["text/plain"], "422": BOTH}),
        ("get /info", {"404": JSON, "503": JSON}),
        ("get /health", {"503": JSON}),
        ("post /v1/generate", {"404": JSON, "408": JSON, "413": JSON, "422": JSON, "500": JSON, "503": JSON}),
        ("post /v2/decode", {"400": JSON, "404": JSON, "422": JSON, "503": JSON}),
        ("get /liveness", {}),
        ("post /v2/models/{model}/generate", {"400": JSON, "404": JSON, "500": JSON, "501": JSON, "503": JSON}),
        ("post /v2/models/{model}/versions/{version}/generate", {"400": JSON, "404": BOTH}),
        ("get /v2/models/{model}/versions/{version}/config", {"400": JSON, "404": BOTH, "503": JSON}),
        ("post /v1/responses/{response_id}/cancel", {"400": JSON, "404": JSON, "500": JSON, "501": JSON, "503": JSON}),
        ("post /openai/v1/chat/completions", {"400": JSON, "404": JSON, "413": JSON, "503": JSON}),
        ("post /v1/load_lora_adapter", {"400": JSON, "404": JSON, "413": JSON, "503": JSON}),
        ("post /v1/unload_lora_adapter", {"400": JSON, "404": JSON}),
        ("post /adapters", {"400": JSON, "409": JSON, "424": JSON, "507": JSON}),
        ("post /models", {"400": JSON, "404": JSON, "409": JSON, "507": JSON}),
    ],
)
def test_errors_are_shown_as_they_are_answered(operation: str, expected: dict[str, list[str]]) -> None:
    method, path = operation.split()
    responses = complete(enable_lora=True)["paths"][path][method]["responses"]
    shown = {status: sorted(answer["content"]) for status, answer in responses.items() if status >= "400"}
    assert expected.items() <= shown.items()
    assert bool(expected) == bool(shown)


def test_a_version_in_a_path_is_a_number() -> None:
    parameters = complete()["paths"]["/v2/models/{model}/versions/{version}/config"]["get"]["parameters"]
    assert {one["name"]: one["schema"]["type"] for one in parameters} == {"model": "string", "version": "integer"}


def test_our_schemas_and_vllms_have_different_names() -> None:
    schemas = complete(enable_lora=True)["components"]["schemas"]
    ours = as_json(openapi_document(replace(MODEL, enable_lora=True)))["components"]["schemas"]
    assert {"Request-Input", "TokenizeRequest"} <= schemas.keys() - ours.keys()
    prefixes = ("Lmi", "Tei", "Tgi", "Triton", "HappyVllm")
    assert [name for name in ours if not name.startswith(prefixes)] == []


@pytest.mark.parametrize("config", MODES.values(), ids=MODES)
def test_every_field_of_a_request_has_a_meaning(config: ModelConfig) -> None:
    document = as_json(openapi_document(config))
    schemas = {name: schema for name, schema in document["components"]["schemas"].items() if name.endswith("Request")}
    found = [schema["requestBody"]["content"].values() for schema in operations(document) if "requestBody" in schema]
    for schema in (*schemas.values(), *(content["schema"] for contents in found for content in contents)):
        unexplained = [name for name, field in properties(schema) if not (field.get("description") or "$ref" in field)]
        assert unexplained == [], schema


def operations(document: Any) -> list[Any]:
    return [operation for verbs in document["paths"].values() for operation in verbs.values()]


def properties(schema: Any) -> list[tuple[str, Any]]:
    own = list(schema.get("properties", {}).items())
    return own + [found for _, field in own for found in properties(field)]


@pytest.mark.parametrize(
    ("settings", "name", "expected"),
    [
        ({}, "top_p", {"type": "number", "default": 1.0, "exclusiveMinimum": 0.0, "maximum": 1.0}),
        ({"rolling_batch": "trtllm"}, "top_p", {"type": "number", "default": 0.85, "minimum": 0.0, "maximum": 1.0}),
        ({}, "max_new_tokens", {"type": "integer", "default": 30, "minimum": 1}),
        ({"max_rolling_batch_size": 8}, "n", {"type": "integer", "default": 1, "minimum": 1, "maximum": 8}),
        ({"rolling_batch": "trtllm"}, "bad_sequences", {"type": ["array", "string"], "maxItems": 64}),
        ({"tgi_compat": True}, "details", {"type": "boolean", "default": True}),
    ],
)
def test_parameters_are_shown_as_they_are_read_under_these_settings(
    settings: dict[str, Any], name: str, expected: dict[str, Any]
) -> None:
    shown = complete(**settings)["components"]["schemas"]["LmiRequest"]["properties"]["parameters"]["properties"]
    assert expected.items() <= shown[name].items()
