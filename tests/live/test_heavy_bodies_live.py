"""The bodies that take the longest to read, on every route of a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.live.heavy_bodies import ALL, PingWatch, Target, forms, send
from tests.live.server import Server, serving

pytestmark = pytest.mark.asyncio

SIZE = 2 << 20
LONGEST = 60.0
"""The limit for `/ping`, in seconds, for a machine that is slow and stalls. The promise for two quiet cores is 0.25.
Without Slipway's checks, it takes minutes.
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("heavy")
    with serving(directory, enable_lora="true", **small_options) as server:
        yield server


@pytest.fixture(scope="module")
def watch(small: Server) -> Iterator[PingWatch]:
    watch = PingWatch("127.0.0.1", small.port)
    yield watch
    watch.stop()


async def statuses(server: Server, path: str, content_type: str, body: bytes, times: int = 1) -> set[int]:
    sent = [send("127.0.0.1", server.port, path, content_type, body) for _ in range(times)]
    return {status for status, _ in await asyncio.gather(*sent)}


@pytest.mark.long
@pytest.mark.parametrize("target", ALL, ids=lambda target: f"{target.path} {'+'.join(target.fields)}")
async def test_a_costly_value_in_any_field_is_answered_and_nothing_else_waits(
    small: Server, watch: PingWatch, target: Target
) -> None:
    watch.longest()
    for title, body in target.bodies(SIZE):
        found = await statuses(small, target.path, target.content_type, body)
        assert found <= {200, 400, 404, 413, 422, 424}, title
        if title.endswith(("large exponents", "empty arrays")) and "/load" not in title:  # that reads no body
            assert 200 not in found, title
        assert watch.longest() < LONGEST, title


@pytest.mark.slow
async def test_a_costly_form_is_answered_and_nothing_else_waits(server: Server) -> None:
    watch = PingWatch("127.0.0.1", server.port)
    try:
        for shape, (content_type, body) in forms(SIZE).items():
            assert await statuses(server, "/invocations", content_type, body) <= {200, 413, 424}, shape
            assert watch.longest() < LONGEST, shape
    finally:
        watch.stop()


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_short_bodies_of_wrong_items_are_refused_by_the_first(server: Server, path: str) -> None:
    name = b"input" if path == "/v1/responses" else b"messages"
    body = b'{"model":"model","%b":[%b]}' % (name, b",".join([b"{}"] * 2_000))
    _, reply = await send("127.0.0.1", server.port, path, "application/json", body)
    assert reply.startswith(b"HTTP/1.1 400 ")
    assert f"body.{name.decode()}.1." not in reply.decode()


@pytest.mark.long
async def test_eight_at_a_time_hold_up_nothing_either(small: Server, watch: PingWatch) -> None:
    watch.longest()
    for target in ALL:
        for title, body in target.bodies(SIZE, ["different keys"]):
            found = await statuses(small, target.path, target.content_type, body, times=8)
            assert found <= {200, 400, 404, 413, 422, 424}, title
    assert watch.longest() < LONGEST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/invocations", b'{"inputs":"a","parameters":{"max_new_tokens":1,"stop_sequences":%b}}'),
        ("/invocations", b'{"inputs":"a","parameters":{"max_new_tokens":1,"guided_json":%b}}'),
        ("/v1/completions", b'{"model":"model","prompt":"a","max_tokens":1,"structured_outputs":{"json":%b}}'),
        ("/generate", b'{"inputs":"a","parameters":{"max_new_tokens":1,"grammar":{"type":"json","value":%b}}}'),
        ("/v1/generate", b'{"prompt":"a","max_tokens":1,"json_format":%b}'),
        ("/v2/models/model/generate", b'{"text_input":"a","max_tokens":1,"guided_json":%b}'),
    ],
)
async def test_a_document_of_any_depth_is_served_or_refused(server: Server, path: str, body: bytes) -> None:
    # Near the recursion limit, a document can be read, but code deeper in the stack cannot write it.
    for depth in range(900, 1000, 3):
        document = b'{"items":' * depth + b"{}" + b"}" * depth
        assert await statuses(server, path, "application/json", body % document) <= {200, 400, 422, 424}, depth
