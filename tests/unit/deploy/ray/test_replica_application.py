"""The application of a replica serves some routes itself. It passes other calls to the server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from container.settings.server import ServerConfig
from deploy.ray.replica_application import ReplicaApplication


async def metrics() -> bytes:
    return b"all 1\n"


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    headers = [(b"x-request-id", b"r"), (b"a", b"b")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    assert (await receive())["type"] == "http.disconnect"


def client() -> httpx.AsyncClient:
    transport = httpx.ASGITransport(ReplicaApplication(metrics, echo, ServerConfig()))
    return httpx.AsyncClient(transport=transport, base_url="http://replica")


async def test_other_calls_are_the_servers_own_and_the_requests_id_is_there_once() -> None:
    answer = await client().post("/invocations", content=b"x", headers={"x-request-id": "r"})
    # Serve's own middleware adds the id.
    assert (answer.content, answer.headers.get_list("x-request-id"), answer.headers["a"]) == (b"x", [], "b")
    answer = await client().post("/invocations", content=b"x")
    assert answer.headers.get_list("x-request-id") == ["r"]


async def test_the_end_of_a_reply_is_told_though_the_connection_stays() -> None:
    sent: list[Any] = []
    bodies = [{"type": "http.request", "body": b"a"}]

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()
        return bodies.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    client_application = ReplicaApplication(metrics, echo, ServerConfig())
    scope = {"type": "http", "method": "POST", "raw_path": b"/x", "headers": []}
    await asyncio.wait_for(client_application(scope, receive, send), 60)
    assert sent[-1] == {"type": "http.response.body", "body": b"a"}


async def test_metrics_concern_all_replicas() -> None:
    for path in ("/metrics", "/server/metrics", "/server/metrics/"):
        assert (await client().get(path)).text == "all 1\n"


ADAPTERS = (
    *(("POST", "/adapters?name=a&src=b"), ("POST", "/adapters/a/update"), ("DELETE", "/adapters/a")),
    *(("POST", "/models/m/adapters"), ("POST", "/models/m/adapters/a/update"), ("DELETE", "/models/m/adapters/a")),
)


@pytest.mark.parametrize(("method", "path"), ADAPTERS)
async def test_adapters_stay_as_they_were_deployed(method: str, path: str) -> None:
    answer = await client().request(method, path, content=b"{}")
    body = answer.json()
    assert (answer.status_code, body["code"], body["type"]) == (501, 501, "NotImplementedException")
    assert "option.lora_modules" in body["message"]
    assert (await client().request("GET", path, content=b"x")).text == "x"


@pytest.mark.parametrize("path", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
async def test_vllms_routes_for_adapters_refuse_with_vllms_error(path: str) -> None:
    answer = await client().post(path, content=b"{}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (501, 501, "NotImplementedError")
    assert "option.lora_modules" in error["message"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/models"), ("PUT", "/models/m"), ("DELETE", "/models/m/1"), ("POST", "/workflows")],
)
async def test_models_stay_as_they_were_deployed(method: str, path: str) -> None:
    answer = await client().request(method, path)
    assert answer.status_code == 501
    assert "deploy another one" in json.loads(answer.content)["message"]
    for own in ("/models/m/invoke", "/models/m/x/y"):
        assert (await client().post(own, content=b"x")).text == "x"
    assert (await client().request("GET", path, content=b"x")).text == "x"


@pytest.mark.parametrize(
    "headers", [{"sec-fetch-site": "cross-site"}, {"user-agent": "Mozilla/5.0", "host": "evil.example"}]
)
async def test_what_a_browser_sends_for_another_site_is_the_servers_own_to_refuse(headers: dict[str, str]) -> None:
    assert (await client().request("GET", "/metrics", content=b"own", headers=headers)).text == "own"
    assert (await client().post("/adapters?a=1", content=b"own", headers=headers)).text == "own"


@pytest.mark.parametrize(
    "path",
    [
        *("/%61dapters?name=a&src=b", "/models/m/%61dapters?name=a&src=b", "/adapters/?name=a&src=b"),
        *("/%6Dodels", "/models/"),
    ],
)
async def test_a_path_with_escaped_letters_is_the_same_path(path: str) -> None:
    answer = await client().post(httpx.URL("http://replica").copy_with(raw_path=path.encode()))
    assert answer.status_code == 501
