"""/ping: the statuses for the faults and the states of a model, as in LMI."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from container.models.life_cycle import State
from container.models.registry import Model, Models
from container.observability.error_rates import ErrorRates
from container.ping import ping
from container.settings.server import ServerConfig
from handlers.model_config import ModelConfig

MODEL = ModelConfig(name="m", model_dir=Path("."), model_id="m")
STALLED = "the engine is stalled"
MISSING = "copy 2 of 3 has died"


@dataclass
class Life:
    """The part of a life cycle that /ping reads."""

    state: State = State.READY
    unhealthy: str = ""
    missing: str = ""
    reason: str = ""
    short_of_workers: bool = False
    config: ModelConfig = MODEL


def models(*lives: Any) -> Models:
    return Models(Model(life, "") for life in lives)


def asked(life: Life, rates: ErrorRates | None = None, **settings: Any) -> tuple[int, dict[str, str]]:
    reply = ping(models(life), ServerConfig(**settings), rates or ErrorRates({}, frozenset()))
    return reply.status, json.loads(reply.body)["m"]


@pytest.mark.parametrize(
    ("life", "settings", "status", "model"),
    [
        (Life(State.STARTING), {}, 503, {"status": "PENDING"}),
        (Life(State.STARTING), {"allow_multi_status": True}, 207, {"status": "PENDING"}),
        (Life(), {}, 200, {"status": "Healthy"}),
        (Life(short_of_workers=True), {}, 200, {"status": "Unhealthy"}),
        (Life(short_of_workers=True), {"workers_health_check": True}, 500, {"status": "Unhealthy"}),
        (Life(unhealthy=STALLED), {}, 500, {"status": "Unhealthy", "reason": STALLED}),
        (Life(missing=MISSING), {}, 200, {"status": "Healthy", "reason": MISSING}),
        (Life(missing=MISSING, short_of_workers=True), {}, 200, {"status": "Unhealthy", "reason": MISSING}),
        (Life(State.FAILED, reason="dead"), {}, 500, {"status": "FAILED", "reason": "dead"}),
        (Life(State.FAILED, reason='no "a\\b"\n'), {}, 500, {"status": "FAILED", "reason": 'no "a\\b"\n'}),
        (Life(State.DRAINING), {}, 503, {"status": "DRAINING"}),
    ],
)
def test_each_state_has_its_status_and_text(
    life: Life, settings: dict[str, Any], status: int, model: dict[str, str]
) -> None:
    assert asked(life, **settings) == (status, model)


@pytest.mark.parametrize("lives", [(), (Life(),)], ids=["no model", "a model that is still ready"])
def test_a_server_that_drains_is_503_whatever_its_models_are(lives: tuple[Life, ...]) -> None:
    served = models(*lives)
    rates = ErrorRates({}, frozenset())
    assert ping(served, ServerConfig(), rates).status == 200
    served.draining = True
    assert ping(served, ServerConfig(), rates).status == 503


def test_the_bytes_are_lmis() -> None:
    reply = ping(models(Life()), ServerConfig(), ErrorRates({}, frozenset()))
    assert reply.body == b'{\n  "m": {\n    "status": "Healthy"\n  }\n}\n'


def test_too_many_errors_go_before_everything_else() -> None:
    rates = ErrorRates({"any": "0"}, frozenset())
    rates.count(500)
    reason = "more than 0 errors in 60 s (error_rate_any)"
    assert asked(Life(), rates) == (503, {"status": "Healthy", "reason": reason})
    assert asked(Life(State.FAILED, reason="dead"), rates) == (503, {"status": "FAILED", "reason": "dead"})


def test_one_model_that_is_not_well_makes_the_server_unhealthy_and_its_entry_alone_says_so() -> None:
    other = ModelConfig(name="other", model_dir=Path("."), model_id="m")
    reply = ping(models(Life(), Life(unhealthy=STALLED, config=other)), ServerConfig(), ErrorRates({}, frozenset()))
    assert reply.status == 500
    assert json.loads(reply.body) == {
        "m": {"status": "Healthy"},
        "other": {"status": "Unhealthy", "reason": STALLED},
    }
