"""TGI's routes /health and /info."""

from __future__ import annotations

import pytest

from engines.errors import NotReady
from handlers.contract import Reply
from tests.contracts.tgi_exchange import info_reply, view


@pytest.mark.parametrize("path", ["/", "/health"])
def test_health_is_200_without_a_body_or_503_with_an_error(path: str) -> None:
    assert info_reply("GET", path) == Reply(200, "", b"")
    for state in ("starting", "failed", "draining", "stopped"):
        assert info_reply("GET", path, model=view(state)) == Reply(  # type: ignore[arg-type]
            503, "application/json", b'{"error":"unhealthy","error_type":"healthcheck"}'
        )


def test_info_tells_model_and_limits() -> None:
    assert info_reply("GET", "/info") == Reply(
        200,
        "application/json",
        b'{"model_id":"org/model","model_sha":"abc","model_pipeline_tag":"text-generation",'
        b'"max_concurrent_requests":256,"max_best_of":2,"max_stop_sequences":4,"max_input_tokens":2047,'
        b'"max_total_tokens":2048,"validation_workers":2,"max_client_batch_size":4,"router":"slipway",'
        b'"version":"3.3.6","sha":null,"docker_label":null}',
    )


def test_info_is_refused_while_the_model_loads() -> None:
    with pytest.raises(NotReady):
        info_reply("GET", "/info", model=view("starting", loaded=False))
