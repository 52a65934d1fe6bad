"""The route table: paths with and without a slash at their end."""

from __future__ import annotations

from typing import Any

import pytest

from container.http.request_head import RequestHead
from container.http.router import ANY_METHOD, FOR_BROWSERS, Application, Mount, Router


def application() -> Application:
    async def serve(scope: Any, receive: Any, send: Any) -> None: ...

    return serve


NOT_FOUND, PING, SLASH, MODEL, MOUNTED = (application() for _ in range(5))


def made() -> Router:
    router = Router(NOT_FOUND, [Mount("/mount/", MOUNTED)])
    router.add("/ping", ANY_METHOD, PING, without_key=True)
    router.add("/page/", "GET", SLASH)
    router.add("/page", "GET", PING, without_key=True)
    router.add("/models", "GET", MODEL)
    router.add("/models/{model}", "GET", MODEL)
    router.add("/v2/models/{model}", "GET", MODEL)
    return router


def head_of(path: str, raw: str = "") -> RequestHead:
    raw_path = (raw or path).encode()
    return RequestHead({"method": "GET", "path": path, "raw_path": raw_path, "query_string": b"", "headers": []})


@pytest.mark.parametrize(
    ("path", "raw", "found", "served", "is_open"),
    [
        ("/ping", "", PING, "/ping", True),
        ("/ping/", "", PING, "/ping", True),
        ("/ping//", "/p%69ng//", PING, "/ping", True),
        ("/ping//", "/ping%2F/", NOT_FOUND, "/ping//", False),
        ("/ping/x/", "", NOT_FOUND, "/ping/x/", False),
        ("//", "", NOT_FOUND, "//", False),
        ("/page/", "", SLASH, "/page/", False),
        ("/page//", "", NOT_FOUND, "/page//", False),
        ("/models//", "", MODEL, "/models", False),
        ("/v2/models/m/", "", NOT_FOUND, "/v2/models/m/", False),
        ("/mount/", "", MOUNTED, "/mount/", False),
        ("/models/m/", "", MODEL, "/models/m", False),
        ("/models/m//", "/models/m%2f/", MODEL, "/models/m/", False),
    ],
)
def test_slashes_at_the_end_count_only_if_a_route_has_them(
    path: str, raw: str, found: Application, served: str, is_open: bool
) -> None:
    head = head_of(path, raw)
    assert made().is_open(head) is is_open
    for _ in range(2):  # A second search finds the same.
        assert made().dispatch(head)[0] is found
        assert head.path == served


def test_the_parameters_of_a_path_with_a_slash_at_its_end_are_read() -> None:
    for raw, name in (("/models/m/", "m"), ("/models/m%2f/", "m/")):
        head = head_of(raw.replace("%2f", "/"), raw)
        made().dispatch(head)
        assert head.path_parameters == {"model": name}


@pytest.mark.parametrize(
    ("method", "accept", "found"),
    [("GET", b"text/html,*/*", PING), ("GET", b"*/*", MODEL), ("HEAD", b"text/html", SLASH), ("PUT", b"", SLASH)],
)
def test_a_page_for_browsers_goes_before_the_route_for_other_clients(
    method: str, accept: bytes, found: Application
) -> None:
    router = Router(NOT_FOUND)
    router.add("/", FOR_BROWSERS, PING)
    router.add("/", "GET", MODEL)
    router.add("/", ANY_METHOD, SLASH)
    headers = [(b"accept", accept)]
    head = RequestHead({"method": method, "path": "/", "raw_path": b"/", "query_string": b"", "headers": headers})
    assert router.dispatch(head) == (found, None)
    assert router.methods("/") == ["GET"]
