"""Whether the container can serve yet, and what it has to be told before its first call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping

from deploy.local.container_client import ContainerClient, read_up_to
from deploy.local.errors import model_not_ready

logger = logging.getLogger(__name__)

_PING_SECONDS = 2.0
_REGISTER_SECONDS = 60.0
_MAX_ANSWER = 65536
_CONFLICT = 409
_LOADING = frozenset({207, 503})
"""What containers answer while a model loads; any other failure is the model's own, and a call will show it."""


class Readiness:
    """Remembers that a container has come into service, so that calls do not ask for it each time."""

    def __init__(self, container: ContainerClient, adapters: Mapping[str, str]) -> None:
        """`adapters`: name and source of those that the container is to load; see `POST /adapters`."""
        self._container = container
        self._adapters = {name: source for name, source in adapters.items() if source}
        self._in_service = False
        self._asking = asyncio.Lock()

    async def check(self, endpoint: str) -> None:
        """Let a call pass, or not.

        Raises:
            RuntimeApiError: ModelNotReadyException, the model is still loading.
            ContainerUnreachable, ContainerBroken, ContainerBusy: there is no asking.
        """
        if self._in_service:
            return
        async with self._asking:
            if self._in_service:
                return
            try:
                async with (
                    asyncio.timeout(_PING_SECONDS),
                    self._container.request("GET", "/ping", (), b"") as response,
                ):
                    status = response.status_code
                    await read_up_to(response, _MAX_ANSWER)  # so that the connection can serve the call
            except TimeoutError:
                raise model_not_ready(endpoint) from None
            if status in _LOADING:
                raise model_not_ready(endpoint)
            if status == 200:
                for name, source in self._adapters.items():
                    await self._register(name, source)
                self._in_service = True

    def lost(self) -> None:
        """The container could not be reached, or serve: it may be starting again, and then has no adapters yet."""
        self._in_service = False

    async def _register(self, name: str, source: str) -> None:
        """Have an adapter loaded. A failure is logged: calls for the adapter get the container's own error."""
        body = json.dumps({"name": name, "src": source}).encode()
        headers = [("content-type", "application/json")]
        try:
            async with (
                asyncio.timeout(_REGISTER_SECONDS),
                self._container.request("POST", "/adapters", headers, body) as response,
            ):
                answer = await read_up_to(response, _MAX_ANSWER) or b""
        except TimeoutError:
            logger.error("adapter %s: the container did not load it within %g s", name, _REGISTER_SECONDS)
            return
        if response.status_code == _CONFLICT:
            # As a rule it has the adapter from an earlier time; if not, calls for it show what else is wrong.
            logger.info("adapter %s: %s", name, answer[:500].decode(errors="replace"))
        elif response.is_success:
            logger.info("adapter %s is registered, from %s", name, source)
        else:
            logger.error(
                "adapter %s: POST /adapters answered %d: %s",
                name,
                response.status_code,
                answer[:500].decode(errors="replace"),
            )
