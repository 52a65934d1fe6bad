"""Triton's routes for health, metadata, statistics and the repository, by the state of the model.

`requests/triton.yaml` and `cases/triton` have the bytes of a model that is ready.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.errors import BodyTooLarge, EngineDead, NotReady, NotServed, RequestError, UnknownModel
from handlers.contract import Call, Reply
from handlers.custom.settings import HandlerConfig
from handlers.route_declarations import GenerationRoute, InfoRoute, State
from handlers.triton.routes import TRITON
from tests.contracts.exchange import view
from tests.contracts.triton_exchange import NAMED, LoadedText, told

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version:int}"
CUSTOM = HandlerConfig(entry_point=str(Path("model.py")))
EMPTY = (200, "", b"")


def parts(reply: Reply) -> tuple[int, str, bytes]:
    return reply.status, reply.content_type, reply.body


def document(reply: Reply) -> Any:
    assert (reply.status, reply.content_type) == (200, "application/json")
    return json.loads(reply.body)


def test_statistics_count_calls_and_their_times() -> None:
    loaded = LoadedText()
    loaded.statistics.calls.count(0.5, failed=False)
    loaded.statistics.calls.count(0.25, failed=True)
    loaded.statistics.queue_time.observe(0.125)
    loaded.statistics.calls.last_at = 1700000000.5
    for reply in (
        told("/v2/models/stats", of=view(loaded=loaded)),
        told(MODEL + "/stats", NAMED, of=view(loaded=loaded)),
        told(VERSION + "/stats", NAMED | {"version": "1"}, of=view(loaded=loaded)),
    ):
        assert reply.body == (
            b'{"model_stats":[{"name":"model","version":"1","last_inference":1700000000500,"inference_count":1,'
            b'"execution_count":1,"inference_stats":{"success":{"count":1,"ns":500000000},'
            b'"fail":{"count":1,"ns":250000000},"queue":{"count":1,"ns":125000000},'
            b'"compute_input":{"count":1,"ns":0},"compute_infer":{"count":1,"ns":375000000},'
            b'"compute_output":{"count":1,"ns":0},"cache_hit":{"count":0,"ns":0},"cache_miss":{"count":0,"ns":0}},'
            b'"response_stats":{},"batch_stats":[],"memory_usage":[]}]}'
        )


def test_a_call_of_many_sequences_waits_once_and_no_longer_than_it_takes() -> None:
    loaded = LoadedText()
    loaded.statistics.calls.count(0.5, failed=False)
    for _ in range(8):
        loaded.statistics.queue_time.observe(0.125)
    (statistics,) = document(told("/v2/models/stats", of=view(loaded=loaded)))["model_stats"]
    stages = statistics["inference_stats"]
    parts = [stages[stage] for stage in ("queue", "compute_input", "compute_infer", "compute_output")]
    assert [part["count"] for part in parts] == [1, 1, 1, 1]
    assert sum(part["ns"] for part in parts) == stages["success"]["ns"] == 500_000_000


UNKNOWN = b'{"error":"Request for unknown model: \'nope\' is not found"}'


def test_the_repository_says_why_a_model_has_failed() -> None:
    reply = told("/v2/repository/index", method="POST", of=view("failed", "it broke"))
    assert reply.body == b'[{"name":"model","version":"1","state":"UNAVAILABLE","reason":"it broke"}]'


@given(st.binary(max_size=40))
def test_any_body_is_an_index_or_an_error(body: bytes) -> None:
    reply = told("/v2/repository/index", method="POST", body=body)
    assert reply.status in (200, 400)
    json.loads(reply.body)


def test_a_model_with_a_handler_of_its_own_takes_no_tensors() -> None:
    infer = next(route for route in TRITON.routes if isinstance(route, InfoRoute) and route.path == MODEL + "/infer")
    call = Call(body=b"{}", request_id="r", method="POST", path="/v2/models/model/infer", path_parameters=NAMED)
    own = infer.answer(call, view(handler=HandlerConfig(entry_point="model.py")))
    assert own.status == 501
    assert b"/infer is not served: this model has a handler of its own; /invocations" in own.body


@pytest.mark.parametrize(
    ("error", "status", "body"),
    [
        (UnknownModel("nope", "no such model"), 404, UNKNOWN),
        (NotServed("only /invocations"), 501, b'{"error":"only /invocations"}'),
        (NotReady("still loading"), 503, b'{"error":"still loading"}'),
        (BodyTooLarge("too large"), 400, b'{"error":"too large"}'),
        (EngineDead("gone"), 500, b'{"error":"gone"}'),
    ],
)
def test_what_the_server_refuses_is_an_error_object(error: RequestError, status: int, body: bytes) -> None:
    assert parts(TRITON.refuse(error)) == (status, "application/json", body)


@pytest.mark.parametrize("state", get_args(State))
def test_a_custom_handlers_model_is_described_as_far_as_it_is_known(state: State) -> None:
    custom = view(state, handler=CUSTOM)
    assert document(told(MODEL, NAMED, of=custom)) == {
        "name": "model",
        "versions": ["1"],
        "platform": "python",
        "inputs": [],
        "outputs": [],
    }
    assert document(told(MODEL + "/config", NAMED, of=custom))["input"] == []
    (statistics,) = document(told("/v2/models/stats", of=custom))["model_stats"]
    assert statistics["inference_count"] == 0
    assert told("/v2/health/ready", of=custom).status == (200 if state == "ready" else 400)


def test_every_route_is_below_v2_and_leaves_happy_vllms_alone() -> None:
    paths = [route.path for route in TRITON.routes if isinstance(route, GenerationRoute | InfoRoute)]
    assert all(path == "/v2" or path.startswith("/v2/") for path in paths)
    kinds = [(route.path, route.models) for route in TRITON.routes if isinstance(route, GenerationRoute | InfoRoute)]
    assert len(set(kinds)) == len(kinds)
    assert not {"/v2/tokenizer", "/v2/decode"} & set(paths)
