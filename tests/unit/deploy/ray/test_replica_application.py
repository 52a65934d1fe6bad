"""The routes that a replica's application serves before the server does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from container.replicated_calls import Refusal, adapter_call_failed
from container.settings.settings import ServerSettings
from deploy.ray.adapter_changes import ReplicaReply
from deploy.ray.replica_application import ReplicaApplication

pytestmark = pytest.mark.asyncio


SETTINGS = ServerSettings(max_request_size=1000, request_read_timeout=0.05)


class Replica:
    """Records the changes that it is asked for."""

    def __init__(self) -> None:
        self.changed: list[tuple[str, bytes, bytes]] = []

    async def metrics(self) -> bytes:
        return b"all 1\n"

    async def change(self, method: str, target: bytes, headers: Any, body: bytes) -> ReplicaReply | Refusal:
        self.changed.append((method, target, body))
        if body == b"away":
            return adapter_call_failed(target, "try again", again=True)
        return ReplicaReply("one", 200, ((b"x-request-id", b"r"),), b"done")


async def echo(scope: Any, receive: Any, send: Any) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message["body"], message.get("more_body", False)
    headers = [(b"x-request-id", b"r"), (b"a", b"b")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    assert (await receive())["type"] == "http.disconnect"


def client(replica: Replica, application: Any = echo) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(ReplicaApplication(replica.change, replica.metrics, application, SETTINGS))
    return httpx.AsyncClient(transport=transport, base_url="http://replica")


async def test_other_calls_are_the_servers_own_and_the_requests_id_is_there_once() -> None:
    answer = await client(Replica()).post("/invocations", content=b"x", headers={"x-request-id": "r"})
    # Serve's own middleware adds the id.
    assert (answer.content, answer.headers.get_list("x-request-id"), answer.headers["a"]) == (b"x", [], "b")
    answer = await client(Replica()).post("/invocations", content=b"x")
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

    client_application = ReplicaApplication(Replica().change, Replica().metrics, echo, SETTINGS)
    scope = {"type": "http", "method": "POST", "raw_path": b"/x", "headers": []}
    await asyncio.wait_for(client_application(scope, receive, send), 60)
    assert sent[-1] == {"type": "http.response.body", "body": b"a"}


async def test_metrics_and_adapters_concern_all_replicas() -> None:
    replica = Replica()
    for path in ("/metrics", "/server/metrics", "/server/metrics/"):
        assert (await client(replica).get(path)).text == "all 1\n"
    answer = await client(replica).post("/adapters?a=1", content=b"{}", headers={"x-request-id": "r"})
    assert (answer.status_code, answer.text, answer.headers.get_list("x-request-id")) == (200, "done", [])
    assert replica.changed == [("POST", b"/adapters?a=1", b"{}")]
    assert (await client(replica).request("GET", "/adapters", content=b"x")).text == "x"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/models"), ("PUT", "/models/m"), ("DELETE", "/models/m/1"), ("POST", "/workflows")],
)
async def test_models_stay_as_they_were_deployed(method: str, path: str) -> None:
    answer = await client(Replica()).request(method, path)
    assert answer.status_code == 501
    assert "deploy another one" in json.loads(answer.content)["message"]
    for own in ("/models/m/invoke", "/models/m/x/y"):
        assert (await client(Replica()).post(own, content=b"x")).text == "x"
    assert (await client(Replica()).request("GET", path, content=b"x")).text == "x"


@pytest.mark.parametrize(
    "headers", [{"sec-fetch-site": "cross-site"}, {"user-agent": "Mozilla/5.0", "host": "evil.example"}]
)
async def test_what_a_browser_sends_for_another_site_is_the_servers_own_to_refuse(headers: dict[str, str]) -> None:
    replica = Replica()
    assert (await client(replica).request("GET", "/metrics", content=b"own", headers=headers)).text == "own"
    assert (await client(replica).post("/adapters?a=1", content=b"own", headers=headers)).text == "own"
    assert replica.changed == []


@pytest.mark.parametrize(
    ("path", "shape"), [("/adapters", {"code", "type", "message"}), ("/v1/load_lora_adapter", {"error"})]
)
async def test_what_no_replica_is_asked_for_is_refused_as_the_route_does(path: str, shape: set[str]) -> None:
    replica = Replica()
    answer = await client(replica).post(path, content=b"x" * 1001)
    assert (answer.status_code, answer.headers["connection"], replica.changed) == (413, "close", [])
    answer = await client(replica).post(path, content=b"away")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert answer.json().keys() == shape


async def test_a_body_that_does_not_come_changes_nothing() -> None:
    replica, sent = Replica(), list[Any]()
    messages = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def send(message: Any) -> None:
        sent.append(message)

    async def slow() -> Any:
        if not messages:
            await asyncio.Event().wait()
        return messages.pop()

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    application = ReplicaApplication(replica.change, replica.metrics, echo, SETTINGS)
    scope = {"type": "http", "method": "POST", "raw_path": b"/adapters", "query_string": b"", "headers": []}
    await application(scope, gone, send)
    assert sent == []
    await application(scope, slow, send)
    assert sent[0]["status"] == 408
    assert replica.changed == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/%61dapters?name=a&src=b", 200),
        ("/models/m/%61dapters?name=a&src=b", 200),
        ("/%6Dodels", 501),
        ("/adapters/?name=a&src=b", 200),
        ("/models/", 501),
    ],
)
async def test_a_path_with_escaped_letters_is_the_same_path(path: str, status: int) -> None:
    replica = Replica()
    answer = await client(replica).post(httpx.URL("http://replica").copy_with(raw_path=path.encode()))
    assert answer.status_code == status
    assert answer.content != b""
