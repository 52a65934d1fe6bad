"""The route table: finds the application for a request by path, then by method."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from starlette.routing import compile_path

Application = Callable[[Any, Any, Any], Awaitable[None]]

ANY_METHOD = "*"  # Serves the methods for which the path has no other application.
WITH_SLASHES = "/"  # In place of a method: serves the path with slashes at its end.
_ENCODED_SLASH = re.compile("%2f", re.IGNORECASE)
# LMI's paths, which may end in slashes (DJL Serving, `InferenceRequestHandler` and `ManagementRequestHandler`). vLLM
# and happy_vllm redirect such a path (`WITH_SLASHES`). The servers of other contracts do not know it.
_ENDS_IN_SLASHES = re.compile(r"/(?:ping|invocations|predictions|models|adapters|workflows|server)(?:/.*)?/").fullmatch
# Replaces an encoded slash while a route is looked up. An encoded slash belongs to a name and separates nothing (RFC
# 3986, section 2.2). No decoded path has this character.
_SLASH_IN_NAME = "\udc2f"


@dataclass(frozen=True, slots=True)
class Mount:
    """Another application, for the paths below a prefix. The container's own routes go first."""

    prefix: str
    application: Application
    endpoints: tuple[str, ...] = ()  # Names of the SageMaker endpoints that it serves, for the console.
    # Ends its work in the background. The argument is the time in seconds that running work may take.
    drain: Callable[[float], Awaitable[None]] | None = None


class Router:
    """Finds the application of a request. Most paths have no parameters and are found without a search."""

    def __init__(self, not_found: Application, mounts: Sequence[Mount] = ()) -> None:
        self._plain: dict[str, dict[str, Application]] = {}
        # Sorted by the number of parameters: `/models/{model}/invoke` comes before `/models/{model}/{version}`.
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Application]]] = {}
        self._mounts = tuple(mounts)
        self._not_found = not_found
        self._open: set[tuple[str, str]] = set()

    def add(self, path: str, method: str, application: Application, *, without_key: bool = False) -> None:
        """Serve a path.

        The first application that is added for a path and method stays.

        Args:
            path: May have `{name}` for a segment.
            method: An HTTP method, `ANY_METHOD` or `WITH_SLASHES`.
            application: Serves the requests.
            without_key: Callers need no API key, even if the server asks for keys. Such a path has no `{name}`.
        """
        if without_key:
            self._open.add((path, method))
        if "{" not in path:
            self._plain.setdefault(path, {}).setdefault(method, application)
            return
        if path not in self._patterns:
            self._patterns[path] = (compile_path(path)[0], {})
            self._patterns = dict(sorted(self._patterns.items(), key=lambda known: known[0].count("{")))
        self._patterns[path][1].setdefault(method, application)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.find(scope)(scope, receive, send)

    def find(self, scope: Any) -> Application:
        """Return the application that serves a request."""
        if scope["path"].endswith("/") and (redirect := self._with_slashes(scope)) is not None:
            return redirect
        methods = self._lookup(scope)
        if methods is None:
            path = _path(scope)
            scope.setdefault("app", self)  # Starlette's key: a mounted application may call the container's own routes
            return next((m.application for m in self._mounts if path.startswith(m.prefix)), self._not_found)
        return methods.get(scope["method"]) or methods.get(ANY_METHOD) or self._head(scope["method"], methods)

    def is_open(self, scope: Any) -> bool:
        """Return True if a request needs no API key."""
        path, method = without_slashes(_path(scope)), scope["method"]
        if path.endswith("/") and self._with_slashes({**scope}) is not None:
            path = path.rstrip("/")
        return not self._open.isdisjoint({(path, ANY_METHOD), (path, "GET" if method == "HEAD" else method)})

    def methods(self, path: str) -> list[str]:
        """Return the HTTP methods that were added for a path, sorted."""
        methods = self._patterns[path][1] if path in self._patterns else self._plain.get(path, {})
        return sorted(methods.keys() - {ANY_METHOD, WITH_SLASHES})

    def _head(self, method: str, methods: Mapping[str, Application]) -> Application:
        """Serve HEAD on every path that has GET (RFC 9110, section 9.1). The HTTP server leaves the body out."""
        return (methods.get("GET") if method == "HEAD" else None) or self._not_found

    def _with_slashes(self, scope: Any) -> Application | None:
        path = _path(scope)
        bare = path.rstrip("/")
        if bare in ("", path):
            return None
        methods = self._plain.get(bare) or self._match(scope, bare)
        return None if methods is None else methods.get(WITH_SLASHES)

    def _lookup(self, scope: Any) -> Mapping[str, Application] | None:
        """Return the applications of a path by their methods.

        The scope then has the path without the slashes that LMI's paths may end in: contracts compare paths.
        """
        path = _path(scope)
        served = without_slashes(path)
        methods = self._plain.get(served) or self._match(scope, served)
        if methods is not None and served != path:
            scope["path"] = scope["path"][: len(served) - len(path)]
            scope["raw_path"] = scope["raw_path"].rstrip(b"/")
        return methods

    def _match(self, scope: Any, path: str) -> Mapping[str, Application] | None:
        for pattern, methods in self._patterns.values():
            if (found := pattern.fullmatch(path)) is not None:
                scope["path_params"] = {
                    key: text.replace(_SLASH_IN_NAME, "/") for key, text in found.groupdict().items()
                }
                return methods
        return None


def without_slashes(path: str) -> str:
    """Return a path without the slashes at its end if it is one of LMI's; any other path unchanged."""
    return path.rstrip("/") if path.endswith("/") and _ENDS_IN_SLASHES(path) else path


def _path(scope: Any) -> str:
    if b"%2" not in scope["raw_path"]:
        path: str = scope["path"]
        return path
    return unquote(_ENCODED_SLASH.sub(_SLASH_IN_NAME, scope["raw_path"].decode("ascii")))
