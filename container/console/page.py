"""The console's page. Its files are in this package and load nothing from other servers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import RedirectResponse, Response

from container.http.router import Application

DIRECTORY = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_INDEX = "index.html"
POLICY = "; ".join(
    (
        "default-src 'none'",
        *("script-src 'self'", "style-src 'self'", "img-src 'self'", "connect-src 'self'"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        # Strings cannot become markup, even if the script is faulty: the browser refuses `innerHTML` and similar calls.
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    )
)
HEADERS = {
    "cache-control": "no-store",  # Another release of Slipway may serve the page at this address later.
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def _read(path: Path, **more: str) -> Application:
    """Return an ASGI application that serves a file of the page."""
    content, headers = path.read_bytes(), {**HEADERS, "content-type": _TYPES[path.suffix], **more}

    async def reply(scope: Any, receive: Any, send: Any) -> None:
        # The middleware changes the headers of a response, so each request gets a new response.
        await Response(content, headers=headers)(scope, receive, send)

    return GZipMiddleware(reply)


def files() -> Mapping[str, Application]:
    """Return the applications that serve the page's files, by path.

    The page has relative links only, so a proxy may add a prefix.
    """
    found = {f"/console/{path.name}": _read(path) for path in sorted(DIRECTORY.iterdir()) if path.name != _INDEX}
    return {"/console": _read(DIRECTORY / _INDEX), "/console/": RedirectResponse("../console"), **found}


def front_page() -> Application:
    """Return an application that serves the page to browsers on a path where other clients get another answer."""
    return _read(DIRECTORY / _INDEX, vary="accept")
