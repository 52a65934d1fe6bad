"""TGI's routes /health and /info while the model is not ready. `cases/tgi` has the bytes of a ready one."""

from __future__ import annotations

import pytest

from engines.errors import NotReady
from handlers.contract import Reply
from tests.contracts.tgi_exchange import info_reply, view


@pytest.mark.parametrize("path", ["/", "/health"])
def test_a_model_that_is_not_ready_is_503_with_an_error(path: str) -> None:
    for state in ("starting", "failed", "draining", "stopped"):
        assert info_reply("GET", path, model=view(state)) == Reply(  # type: ignore[arg-type]
            503, "application/json", b'{"error":"unhealthy","error_type":"healthcheck"}'
        )


def test_info_is_refused_while_the_model_loads() -> None:
    with pytest.raises(NotReady):
        info_reply("GET", "/info", model=view("starting", loaded=False))
