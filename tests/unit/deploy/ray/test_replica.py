"""A replica's health."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

pytest.importorskip("ray.serve", reason="Ray is not installed")

from deploy.ray.replica import Replica


class WithoutServer(Replica):  # type: ignore[misc]
    """A replica without a server, so that no server is stopped at its end."""

    def __del__(self) -> None:  # type: ignore[override]
        pass


async def test_a_replica_is_healthy_while_its_ping_is_200() -> None:
    statuses = iter((200, 503))
    transport = httpx.MockTransport(lambda request: httpx.Response(next(statuses), text="how it is"))
    replica: Any = object.__new__(WithoutServer)
    replica._own = httpx.AsyncClient(transport=transport, base_url="http://replica")
    await replica.check_health()
    with pytest.raises(RuntimeError, match="503"):
        await replica.check_health()
