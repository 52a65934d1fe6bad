"""The ASGI application of a replica: the server's own application, and the routes that concern all replicas."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response

from container.http.cross_site import KnownHosts
from container.http.router import Application, without_slashes
from container.observability.prometheus_text import CONTENT_TYPE
from container.settings.server import ServerConfig

_ESCAPE = re.compile(rb"%([0-9A-Fa-f]{2})")
_UNRESERVED = {
    b"%02x" % character: bytes([character])
    for character in b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~"
}
_ADAPTERS = re.compile(rb"(/models/[^/]+)?/adapters(/[^/]+(/update)?)?")
_VLLM_ADAPTERS = (b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter")
_ADAPTERS_STAY = (
    "on Ray Serve adapters are not loaded, updated or removed by a call, which one replica alone would get: put them "
    "in the folder `adapters` of the model, or in `option.lora_modules`, and deploy again"
)
_MODELS_STAY = (
    "on Ray Serve models are not registered, scaled or unregistered by a call, which one replica alone would get: "
    "change the model directory, or deploy another one"
)


class ReplicaApplication:
    """The ASGI application of a replica."""

    def __init__(
        self, metrics: Callable[[], Awaitable[bytes]], application: Application, server_config: ServerConfig
    ) -> None:
        """Create the application.

        Args:
            metrics: Returns the metrics of all replicas.
            application: The server's own application.
        """
        self._metrics, self._application = metrics, application
        self._hosts = KnownHosts(server_config.allowed_hosts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        method, path = scope["method"], _normalized(scope["raw_path"])
        if self._hosts.fault(dict(scope["headers"])):
            await self._serve(scope, receive, send)  # The server refuses the call, or serves a contract's route.
        elif method == "GET" and path in (b"/metrics", b"/server/metrics"):
            await Response(await self._metrics(), 200, {"content-type": CONTENT_TYPE})(scope, receive, send)
        elif (refused := _refusal(method, path)) is not None:
            await Response(json.dumps(refused), 501, {"content-type": "application/json"})(scope, receive, send)
        else:
            await self._serve(scope, receive, send)

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        """Call the server's own application.

        ASGI requires that `receive` returns a disconnect after the end of the reply. Serve's `receive` does not, so
        this method replaces it.
        """
        complete = asyncio.Event()
        whole = False

        async def received() -> Any:
            nonlocal whole
            if not whole:
                message = await receive()
                whole = not message.get("more_body")
                return message
            tasks = [asyncio.ensure_future(receive()), asyncio.ensure_future(complete.wait())]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
            return {"type": "http.disconnect"}

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _without_id(scope, message["headers"])
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                complete.set()

        await self._application(scope, received, sent)


def _normalized(path: bytes) -> bytes:
    """Decode escaped unreserved characters, which mean the same as unescaped ones (RFC 3986, 6.2.2.2).

    `%2F` is not decoded. Trailing slashes of LMI's paths are removed, as in the server.
    """
    decoded = _ESCAPE.sub(lambda escape: _UNRESERVED.get(escape[1].lower(), escape[0]), path)
    return without_slashes(decoded.decode("latin-1")).encode("latin-1")


def _refusal(method: str, path: bytes) -> dict[str, Any] | None:
    """Return the error for a call that changes models or adapters, because only one replica would receive the call."""
    if method == "POST" and path in _VLLM_ADAPTERS:
        return {"error": {"message": _ADAPTERS_STAY, "type": "NotImplementedError", "param": None, "code": 501}}
    if method in ("POST", "DELETE") and _ADAPTERS.fullmatch(path):
        return {"code": 501, "type": "NotImplementedException", "message": _ADAPTERS_STAY}
    if method in ("POST", "PUT", "DELETE") and _changes_models(method, path):
        return {"code": 501, "type": "NotImplementedException", "message": _MODELS_STAY}
    return None


def _changes_models(method: str, path: bytes) -> bool:
    parts = path.split(b"/")[1:]
    if parts[0] not in (b"models", b"workflows"):
        return False
    return len(parts) == 1 if method == "POST" else len(parts) in (2, 3)


def _without_id(scope: Any, headers: Any) -> list[tuple[bytes, bytes]]:
    """Return the headers without the request's id if Serve will add the same id."""
    own = dict(scope["headers"]).get(b"x-request-id")
    return [pair for pair in headers if pair[0] != b"x-request-id" or pair[1] != own]


def merged_metrics(texts: Mapping[str, str]) -> bytes:
    """Merge the metrics of replicas. Each series gets the label `replica`.

    The texts are not parsed, because prometheus_client's parser renames counters without `_total`, such as Triton's.

    Args:
        texts: The text of each replica's /metrics, by the name of the replica.

    Returns:
        The merged text, in Prometheus format.
    """
    metrics: dict[str, dict[str, list[str]]] = {}  # Lines by the name of the metric, then by the kind of the line.
    for replica, text in texts.items():
        lines: dict[str, list[str]] = {}
        for line in filter(None, text.split("\n")):
            if line.startswith("#"):
                _, kind, name = line.split(" ", 3)[:3]
                lines = metrics.setdefault(name, {"HELP": [], "TYPE": [], "": []})
                lines[kind] = [line]
            else:
                lines[""].append(_of_replica(line, replica))
    return "".join(f"{line}\n" for kinds in metrics.values() for lines in kinds.values() for line in lines).encode()


def _of_replica(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'
