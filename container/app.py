"""The ASGI application: every route, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from container.health import ping
from container.inference import InferenceEndpoint
from container.lifecycle import Lifecycle
from container.metrics import CONTENT_TYPE, HttpCounts, Metrics
from container.openapi import openapi_document, openapi_page
from container.settings import ServerSettings
from handlers.contracts.lmi_errors import JSON, front_end_error
from handlers.contracts.protocol import Reply

_ANY = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@dataclass(frozen=True, slots=True)
class Application:
    """Dispatches by path. `/invocations`, where nearly all requests go, is found without a search."""

    invocations: InferenceEndpoint
    router: Router

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one ASGI connection."""
        if scope["type"] == "http" and scope["path"] == "/invocations":
            await self.invocations(scope, receive, send)
            return
        await self.router(scope, receive, send)


def create_app(lifecycle: Lifecycle, settings: ServerSettings) -> Application:
    """The application for one model's service."""
    counts = HttpCounts()
    metrics = Metrics(lifecycle, counts)
    inference = InferenceEndpoint(lifecycle, settings, counts)
    document = openapi_document(lifecycle.model)
    page = openapi_page(document)

    async def show_ping(_: Request) -> Response:
        return _response(ping(lifecycle, settings))

    async def show_options(_: Request) -> Response:
        return Response(b"{}\n", media_type=JSON)

    async def show_metrics(_: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def show_openapi(_: Request) -> Response:
        return Response(document.json, media_type=JSON)

    async def show_docs(_: Request) -> Response:
        return HTMLResponse(page)

    routes = [
        Route("/ping", show_ping, methods=_ANY),
        Route("/", show_options, methods=["OPTIONS"]),
        Route("/metrics", show_metrics, methods=["GET"]),
        Route("/openapi.json", show_openapi, methods=["GET"]),
        Route("/docs", show_docs, methods=["GET"]),
        # Classes and instances are plain ASGI applications to Starlette and take any method, as LMI does.
        Route("/predictions/{model}", inference),
        Route("/predictions/{model}/{version}", inference),
    ]
    return Application(inference, Router(routes, redirect_slashes=False, default=_front_end_errors))


async def _front_end_errors(scope: Scope, receive: Receive, send: Send) -> None:
    """Any path that is not served: LMI's error object."""
    if scope["type"] != "http":
        return
    message = f"Requested resource is not found: {scope['path']}"
    body = front_end_error(404, "ResourceNotFoundException", message)
    await _response(Reply(404, JSON, body))(scope, receive, send)


def _response(reply: Reply) -> Response:
    return Response(reply.body, reply.status, {"content-type": reply.content_type})
