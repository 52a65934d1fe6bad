"""Routing over ASGI: the family that answers each path, and the server's refusals in each family's format."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urljoin, urlsplit

import httpx
import pytest
import pytest_asyncio

from container.api_keys import ApiKeys
from container.models.life_cycle import State
from container.observability.logs import access_log
from engines.interface import EngineHealth
from handlers import entry_point
from handlers.all_contracts import CONTRACTS
from handlers.contract import Call, Contract, ReplyWriter, Running
from handlers.custom.settings import HandlerConfig
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.loaded_service import Service
from handlers.queue import EngineQueue
from handlers.route_declarations import GenerationRoute, InfoRoute, takes
from tests.contracts.exchange import MODEL
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.unit.container.one_model import make, ready, with_engine

with_docs = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="the page /docs needs files of vLLM")

ROUTES = [
    (family, route, method)
    for family in CONTRACTS
    for route in family.routes
    if isinstance(route, GenerationRoute | InfoRoute)
    for method in route.methods
]
# The keys of an error's body, and the paths whose errors have exactly these keys.
ERRORS = {
    "error": "/v2/models/model/generate /v2/models/model/generate_stream /v1/completions /v1/chat/completions",
    "detail": "/v1/generate /v1/generate_stream",
    "error error_type": "/generate",
    "type error": "/v1/messages /openai/v1/messages/count_tokens",
    "code type message": "/invocations",
}
ERROR_KEYS = {path: set(keys.split()) for keys, paths in ERRORS.items() for path in paths.split()}
POSTS = list(ERROR_KEYS)
BODY = {"inputs": "x", "prompt": "x", "text_input": "x", "model": "model"}


class Faulty:
    """A handler with a bug."""

    async def handle(self, call: Call, writer: ReplyWriter) -> Running:
        raise ZeroDivisionError("a bug with a secret")


class Custom:
    """The part of a custom handler's runtime that routing uses."""

    def health(self) -> EngineHealth:
        return EngineHealth(True)

    async def stop(self) -> None: ...


@pytest_asyncio.fixture
async def starting() -> AsyncIterator[httpx.AsyncClient]:
    _, client = make(State.STARTING)
    async with client:
        yield client


def fill(path: str) -> str:
    return path.replace("{model}", "model").replace("{id:path}", "model").replace("{version:int}", "1")


@pytest.mark.parametrize("pooling", [False, True])
async def test_no_two_families_declare_one_route_unless_the_body_or_the_models_kind_decides(pooling: bool) -> None:
    seen: dict[tuple[str, str, str | None], str] = {}
    for family, route, method in ROUTES:
        if not takes(route, pooling=pooling):
            continue
        key = (route.path, method, route.with_field)
        assert key not in seen, f"{route.path} is {seen.get(key)}'s and {family.name}'s"
        seen[key] = family.name


async def test_every_declared_route_is_served(starting: httpx.AsyncClient) -> None:
    for _, route, method in ROUTES:
        response = await starting.request(method, fill(route.path), content=b"{}")
        assert response.status_code not in (404, 405), f"{method} {route.path}: {response.status_code}"
        assert "x-request-id" in response.headers


async def test_one_model_of_openais_list_is_found_by_a_name_with_a_slash(starting: httpx.AsyncClient) -> None:
    for prefix in ("/v1", "/openai/v1"):
        assert (await starting.get(f"{prefix}/models/model")).json()["id"] == "model"
        for path in ("org/name", "org%2Fname"):
            response = await starting.get(f"{prefix}/models/{path}")
            message = "The model `org/name` does not exist."
            error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
            assert (response.status_code, response.json()) == (404, {"error": error})


@pytest.mark.parametrize("path", POSTS)
async def test_a_model_that_is_loading_is_said_in_the_words_of_each_family(
    starting: httpx.AsyncClient, path: str
) -> None:
    response = await starting.post(path, json=BODY)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    assert response.json().keys() == ERROR_KEYS[path]
    assert "not loaded yet" in response.text


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/predictions/some%2Fmodel", 404),
        ("/predictions/some%2fmodel", 404),
        ("/models/model%2finvoke", 405),
        ("/v1%2fmodels", 404),
        ("/predictions/mod%65l", 503),
    ],
)
async def test_an_encoded_slash_is_a_character_of_a_name_and_separates_nothing(
    starting: httpx.AsyncClient, path: str, status: int
) -> None:
    response = await starting.post(path, json={"inputs": "x"})
    assert response.status_code == status
    if "some" in path:
        assert "Model not found: some/model." in response.text
    elif status == 404:
        assert "resource is not found" in response.text


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/ping"),
        ("POST", "/invocations"),
        ("POST", "/predictions/model"),
        ("GET", "/models"),
        ("GET", "/models/model"),
        ("PATCH", "/models/model"),
        ("GET", "/adapters"),
        ("PUT", "/adapters"),
    ],
)
async def test_a_slash_at_the_end_of_a_path_of_lmi_changes_nothing(
    starting: httpx.AsyncClient, method: str, path: str
) -> None:
    answer = await starting.request(method, path, content=b"{}")
    same = await starting.request(method, path + "/", content=b"{}")
    assert (same.status_code, same.content) == (answer.status_code, answer.content)
    assert same.status_code != 404
    assert f'{path}/"' not in (await starting.get("/metrics")).text


OF_FASTAPI = {
    (method, fill(route.path).replace("{response_id}", "r"))
    for family, route, method in ROUTES
    if family.name in ("openai", "anthropic", "happy_vllm")
} | {("GET", path) for path in ("/health", "/metrics", "/docs", "/openapi.json")}


async def test_tgis_teis_and_tritons_paths_have_no_slash_at_their_end(starting: httpx.AsyncClient) -> None:
    for _, route, method in ROUTES:
        path = fill(route.path).replace("{response_id}", "r")
        if path != "/" and path not in {path for _, path in OF_FASTAPI}:
            assert (await starting.request(method, path + "/", content=b"{}")).status_code == 404, path


@with_docs
@pytest.mark.parametrize(("slashes", "query"), [("/", ""), ("/", "?a=b%2Fc&d=%25"), ("///", "?a")])
async def test_a_path_of_vllm_and_happy_vllm_with_slashes_at_its_end_is_redirected(
    starting: httpx.AsyncClient, slashes: str, query: str
) -> None:
    assert {("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("POST", "/tokenize")} < OF_FASTAPI
    for method, path in OF_FASTAPI:
        address = f"{path}{slashes}{query}"
        redirect = await starting.request(method, address, content=b"{}")
        assert (redirect.status_code, redirect.content) == (307, b""), path
        for prefix in ("https://elsewhere:8443", *(["https://elsewhere/a/prefix"] if slashes == "/" else [])):
            expected = f"{prefix}{path}{query}"
            assert urljoin(prefix + address, redirect.headers["location"]) == expected
        assert redirect.next_request is not None
        assert str(redirect.next_request.url) == f"http://server{path}{query}"
        assert (await starting.send(redirect.next_request)).status_code not in (307, 404), path


@pytest.mark.parametrize(
    "path", ["//evil.example/", "//evil.example/v1/models/", "/v1//models/", "/v1//models", "//", "/nope/", "/v1/"]
)
async def test_only_whole_paths_of_vllm_are_redirected(starting: httpx.AsyncClient, path: str) -> None:
    response = await starting.get(httpx.URL(scheme="http", host="server", raw_path=path.encode()))
    assert (response.status_code, "location" in response.headers) == (404, False)


@pytest.mark.parametrize("name", ["evil.example", "%2f%2fevil.example", "..%2f..", "http:%2f%2fevil.example"])
async def test_a_redirect_never_leads_to_another_host(starting: httpx.AsyncClient, name: str) -> None:
    response = await starting.get(f"/v1/models/{name}/")
    assert response.status_code == 307
    address = urlsplit(urljoin(f"http://server/v1/models/{name}/", response.headers["location"]))
    assert (address.netloc, address.path) == ("server", f"/v1/models/{name}")


async def test_a_browsers_preflight_is_not_redirected() -> None:
    async with ready(cors_allowed_origin="*") as client:
        preflight = await client.options("/v1/chat/completions/")
        redirect = await client.post("/v1/chat/completions/")
    assert (preflight.status_code, redirect.status_code) == (200, 307)
    assert redirect.headers["access-control-allow-origin"] == "*"


async def test_a_redirect_needs_the_key_of_its_path() -> None:
    async with ready(api_keys=ApiKeys.of(["sk-one"])) as client:
        refused = await client.post("/v1/chat/completions/")
        unknown = await client.get("/v1/nope")
        assert [refused.status_code, (await client.get("/health/")).status_code] == [401, 307]
        assert refused.json() == unknown.json() == {"error": "Unauthorized"}
        key = {"authorization": "Bearer sk-one"}
        assert (await client.post("/v1/chat/completions/", headers=key)).status_code == 307


@pytest.mark.parametrize("path", ["/v2/models/nope/generate", "/v2/models/model/versions/2/generate_stream"])
async def test_a_model_that_is_never_going_to_be_there_is_unknown_while_another_is_loading(
    starting: httpx.AsyncClient, path: str
) -> None:
    response = await starting.post(path, json={"text_input": "x"})
    assert response.status_code == 404
    assert "Request for unknown model" in response.json()["error"]


@pytest.mark.parametrize(
    "path",
    ["/metrics", "/server/metrics", pytest.param("/docs", marks=with_docs), "/openapi.json", "/execution-parameters"],
)
async def test_the_servers_own_pages_answer_head_as_they_answer_get(starting: httpx.AsyncClient, path: str) -> None:
    page, head = await starting.get(path), await starting.head(path)
    assert (page.status_code, head.status_code) == (200, 200)
    assert head.headers["content-type"] == page.headers["content-type"]
    assert (await starting.delete(path)).status_code == 404


@pytest.mark.parametrize("path", POSTS)
async def test_a_body_that_is_too_large_is_413_in_the_words_of_each_family(path: str) -> None:
    async with ready(max_request_size=100) as client:
        response = await client.post(path, content=b"x" * 101)
    assert response.status_code == (400 if path.startswith("/v2") else 413)
    if path not in ("/invocations", "/generate"):  # LMI's refusal has no body, and TGI's refusal is plain text
        assert response.json().keys() == ERROR_KEYS[path]
        assert "100 bytes" in response.text


async def begun() -> AsyncIterator[bytes]:
    """Send the beginning of a body, and never the rest."""
    yield b'{"inputs":'
    await asyncio.Event().wait()


@pytest.mark.parametrize("path", [*POSTS, "/v2/tokenizer", "/models"])
async def test_a_body_that_does_not_go_on_is_408_in_the_words_of_each_family_and_ends_the_connection(path: str) -> None:
    async with ready(request_read_timeout=0.05) as client:
        response = await asyncio.wait_for(client.post(path, content=begun()), 60)
    assert (response.status_code, response.headers["connection"]) == (408, "close")
    assert "nothing of the body's rest has come for 0.05 s (request_read_timeout)" in response.text.replace(
        "\\u0027", "'"
    )
    if path in ERROR_KEYS and path != "/generate":  # TGI's is plain text
        assert response.json().keys() == ERROR_KEYS[path]


async def test_a_body_that_comes_slowly_has_time_from_piece_to_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    now = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now)

    async def slowly() -> AsyncIterator[bytes]:
        nonlocal now
        for piece in (b'{"inputs"', b": ", b'"x", ', b'"parameters": 1}'):
            yield piece
            now += 14.0
            for _ in range(2):
                await asyncio.sleep(0)  # The loop runs the timers that are due.

    async with ready(request_read_timeout=20.0) as client:
        response = await client.post("/invocations", content=slowly())
    assert response.status_code == 424


@pytest.mark.parametrize("path", [path for path in POSTS if not re.search("completions|messages", path)])
async def test_a_fault_of_our_own_is_500_without_its_traceback(path: str) -> None:
    lifecycle, client = make()
    engine = ScriptedEngine()
    generation = {r.path: Faulty() for f in CONTRACTS for r in f.routes if isinstance(r, GenerationRoute)}
    lifecycle.service = Service(MODEL, Faulty(), engine, engine=engine, generation=generation)
    async with client:
        response = await client.post(path, json=BODY)
    assert response.status_code == (424 if path == "/generate" else 500)
    happy = {"error", "messages"}  # what happy_vllm answers under EXPLICIT_ERRORS
    assert response.json().keys() == (happy if path.startswith("/v1") else ERROR_KEYS[path])
    assert "secret" not in response.text
    assert "Traceback" not in response.text


@pytest.mark.parametrize("path", [path for path in POSTS if path not in ("/invocations", "/v1/chat/completions")])
async def test_a_model_with_a_handler_of_its_own_refuses_other_contracts_and_says_why(path: str) -> None:
    lifecycle, client = make()
    lifecycle.config = MODEL.__class__(
        name="model", model_dir=MODEL.model_dir, model_id="model", handler=HandlerConfig(entry_point="/x/model.py")
    )
    custom: Any = Custom()
    lifecycle.service = Service(lifecycle.config, Faulty(), custom, custom=custom)
    async with client:
        response = await client.post(path, json=BODY)
    assert 400 <= response.status_code <= 501
    assert response.json().keys() == ERROR_KEYS[path]
    assert "handler of its own" in response.text


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        *(("GET", path, "POST") for path in ("/v2/models/model/generate", "/v1/generate", "/generate")),
        *(("HEAD", "/v2/health/live", "GET"), ("DELETE", "/v1/models", "GET"), ("PUT", "/v1/chat/completions", "POST")),
    ],
)
async def test_a_wrong_method_is_405_and_says_what_is_allowed(
    starting: httpx.AsyncClient, method: str, path: str, allow: str
) -> None:
    response = await starting.request(method, path)
    assert response.status_code == 405
    assert allow in response.headers["allow"]


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        *(("/v2/nope", "text/plain"), ("/nope", "application/json"), ("/v2//health/live", "text/plain")),
        *((path, "application/json") for path in ("/v1", "/v1/nope", "/v1/messages/nope", "/v1//models")),
        *((path, "application/json") for path in ("/openai", "/openai/v1/messages/nope", "/openai/v1")),
    ],
)
async def test_an_unknown_path_is_404_in_the_words_of_whose_prefix_it_has(
    starting: httpx.AsyncClient, path: str, content_type: str
) -> None:
    response = await starting.get(path)
    assert response.status_code == 404
    if path.startswith(("/v1", "/openai")):
        error = {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}
        if "/messages/" in path:
            error = {"message": "Not Found", "type": "not_found_error"}
        assert response.json()["error"] == error
    assert response.headers["content-type"].startswith(content_type)


async def test_refusals_of_paths_and_methods_have_an_id_cors_and_a_count() -> None:
    async with ready(cors_allowed_origin="*") as client:
        for method, path in (("GET", "/nope"), ("GET", "/generate"), ("GET", "/v2/nope")):
            response = await client.request(method, path, headers={"x-request-id": "mine"})
            assert response.headers["x-request-id"] == "mine"
            assert response.headers["access-control-allow-origin"] == "*"
        text = (await client.get("/metrics")).text
    assert 'slipway_requests_total{route="unknown",status="404"} 2.0' in text
    assert 'slipway_requests_total{route="/generate",status="405"} 1.0' in text


@pytest.mark.parametrize("prefix", ["", "/openai"])
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/v1/messages/nope", 404),
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages/", 307),
        ("POST", "/v1/messages/count_tokens/", 307),
        ("POST", "/v1/messages", 503),
    ],
)
async def test_refusals_of_messages_have_the_id_as_anthropic_names_it(
    starting: httpx.AsyncClient, prefix: str, method: str, path: str, status: int
) -> None:
    response = await starting.request(method, prefix + path, headers={"x-request-id": "mine"})
    assert response.status_code == status
    assert (response.headers["request-id"], response.headers["x-request-id"]) == ("mine", "mine")
    other = await starting.request("GET", "/v1/completions")
    assert (other.status_code, "request-id" in other.headers) == (405, False)


async def test_a_family_that_cannot_serve_a_model_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Contract:
        raise ValueError("a tokenizer that it cannot do with")

    works = GenerationRoute(path="/works", contract=lambda config, _: LmiRollingContract(config))
    families = [
        replace(CONTRACTS[0], routes=(route,)) for route in (GenerationRoute(path="/broken", contract=broken), works)
    ]
    monkeypatch.setattr(entry_point, "CONTRACTS", families)
    assert entry_point.generation_handlers(MODEL, EngineQueue(ScriptedEngine(), 4)).keys() == {"/works"}


async def test_a_route_that_a_model_cannot_have_says_so() -> None:
    async with ready() as client:
        response = await client.post("/generate", json={"inputs": "x"})
    assert response.status_code >= 400
    assert "cannot be served with this model" in response.text


async def test_a_route_that_tells_something_refuses_in_its_own_words(starting: httpx.AsyncClient) -> None:
    response = await starting.post("/v1/abort_request", content=b"no json")
    assert response.status_code == 422
    assert response.json()["detail"][0]["type"] == "json_invalid"


async def test_tokenize_is_tgis_for_inputs_and_vllms_for_anything_else(starting: httpx.AsyncClient) -> None:
    tgi = await starting.post("/tokenize", json={"inputs": "x"})
    vllm = await starting.post("/tokenize", json={"prompt": '"inputs": is only in the text'})
    assert "error_type" in tgi.json()
    assert "error_type" not in vllm.json()
    assert isinstance(vllm.json()["error"], dict)


async def test_metrics_count_routes_and_not_what_stands_in_them(starting: httpx.AsyncClient) -> None:
    await starting.post("/v2/models/model/generate", json={"text_input": "x"})
    await starting.post("/v2/models/a-secret-name/generate", json={"text_input": "x"})
    text = (await starting.get("/metrics")).text
    assert 'slipway_requests_total{route="/v2/models/{model}/generate"' in text
    assert "secret" not in text


@with_docs
async def test_the_page_of_the_api_description_has_its_files(starting: httpx.AsyncClient) -> None:
    assert "swagger-ui" in (await starting.get("/docs")).text
    for asset in ("swagger-ui-bundle.js", "swagger-ui.css"):
        assert (await starting.get(f"/docs/{asset}")).status_code == 200


async def test_a_full_queues_refusal_is_one_line_of_the_log_and_a_wrong_bodys_is_two(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lifecycle, client = make()
    with_engine(lifecycle)
    assert lifecycle.service is not None
    assert lifecycle.service.queue is not None
    lines: list[str] = []
    monkeypatch.setattr(access_log, "_writer", Mock(add=lambda size, make, *given: lines.append(make(*given))))
    with caplog.at_level("INFO", "slipway.access"):
        async with client:
            assert (await client.post("/invocations", json=[])).status_code == 424
            (wrong,) = [record.getMessage() for record in caplog.records]
            assert wrong.startswith("refused: ")
            caplog.clear()
            lifecycle.service.queue.open_sequences = lifecycle.service.queue.limit
            full = await client.post("/invocations", json={"inputs": "a"})
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
    assert not caplog.records
    assert re.findall(r"\]: (POST /invocations \d+) [\d.]+ ms \d+ bytes\n", "\n".join([*lines, ""])) == [
        "POST /invocations 424",
        "POST /invocations 503",
    ]


async def test_others_are_answered_while_the_api_description_is_made() -> None:
    lifecycle, client = make()
    with_engine(lifecycle)
    asked, made = threading.Event(), threading.Event()

    def openapi() -> dict[str, Any]:
        asked.set()
        assert made.wait(30)
        return {}

    assert lifecycle.service is not None
    lifecycle.service = replace(lifecycle.service, openai=Mock(openapi=openapi))
    async with client:
        document = asyncio.create_task(client.get("/openapi.json"))
        assert await asyncio.to_thread(asked.wait, 30)
        assert (await client.get("/ping")).status_code == 200
        assert not document.done()
        made.set()
        assert (await document).status_code == 200


@pytest.mark.parametrize("prefix", ["", "/models/model"])
async def test_adapters_are_refused_in_lmis_words_where_they_are_off(prefix: str) -> None:
    async with ready() as client:
        for method, path in (("GET", ""), ("POST", "?name=a&src=/x"), ("DELETE", "/a"), ("POST", "/a/update")):
            response = await client.request(method, f"{prefix}/adapters{path}")
            assert (response.status_code, response.json()["type"]) == (400, "BadRequestException")
            assert "option.enable_lora" in response.json()["message"]
        refused = await client.put(f"{prefix}/adapters")
        assert (refused.status_code, refused.json()["type"]) == (405, "MethodNotAllowedException")
        unknown = await client.get("/models/nope/adapters")
        assert (unknown.status_code, unknown.json()["type"]) == (404, "ModelNotFoundException")
        vllms = await client.post("/v1/load_lora_adapter", json={"lora_name": "a", "lora_path": "/x"})
        assert (vllms.status_code, vllms.json()["error"]["type"]) == (404, "NotFoundError")


OF_SAGEMAKER = "X-Amzn-SageMaker-Custom-Attributes"


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"x-starting-token": "t"}, True),
        ({"x-synchronous": "false"}, True),
        ({OF_SAGEMAKER: "a=b; X-Synchronous = False"}, True),
        ({OF_SAGEMAKER: "x-starting-token=t"}, True),
        ({OF_SAGEMAKER: "x-synchronous=false;route=/invocations"}, True),
        ({"x-synchronous": "True"}, False),
        ({OF_SAGEMAKER: "x-synchronous=true;x-synchronous"}, False),
    ],
)
async def test_asynchronous_inference_is_refused(
    starting: httpx.AsyncClient, headers: dict[str, str], refused: bool
) -> None:
    for path in ("/invocations", "/predictions/model", "/models/model/invoke"):
        answer = await starting.post(path, json=BODY, headers=headers)
        if not refused:
            assert answer.status_code == 503
            continue
        assert (answer.status_code, answer.json()["type"]) == (400, "BadRequestException")
        assert "asynchronous inference" in answer.json()["message"]
    assert (await starting.options("/invocations", headers=headers)).status_code == 200
    to_tgi = {OF_SAGEMAKER: "x-synchronous=false,route=/generate"}
    assert (await starting.post("/invocations", json=BODY, headers=to_tgi)).status_code == 503


async def test_adapters_of_a_model_that_is_loading_are_not_ready(starting: httpx.AsyncClient) -> None:
    response = await starting.post("/adapters?name=a&src=/x")
    assert (response.status_code, response.json()["type"]) == (503, "ServiceUnavailableException")
