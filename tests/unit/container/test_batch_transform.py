"""The parameters that SageMaker's batch transform asks for."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from container.batch_transform import execution_parameters
from container.models.life_cycle import State
from container.models.registry import Model, Models
from container.settings.server import ServerConfig
from handlers.custom.settings import HandlerConfig
from handlers.model_config import ModelConfig

HANDLER = HandlerConfig(entry_point="model.py")


@dataclass
class Life:
    """A life cycle with only the parts that the route reads."""

    config: ModelConfig
    state: State = State.STARTING


def parameters(*models: dict[str, Any], **settings: Any) -> tuple[int, int]:
    lives: list[Any] = [Life(ModelConfig(name="m", model_dir=Path("."), model_id="m", **model)) for model in models]
    registered = Models(Model(life, "", str(version)) for version, life in enumerate(lives))
    reply = execution_parameters(registered, ServerConfig(**settings))
    assert (reply.status, reply.content_type) == (200, "application/json")
    found = json.loads(reply.body)
    assert found.pop("BatchStrategy") == "SINGLE_RECORD"
    return found["MaxConcurrentTransforms"], found["MaxPayloadInMB"]


@pytest.mark.parametrize(
    ("models", "settings", "expected"),
    [
        ([{}], {}, (16, 6)),
        ([{"max_rolling_batch_size": 4}], {}, (4, 6)),
        ([{}], {"max_request_size": 2 << 20}, (50, 2)),
        ([{}], {"max_request_size": 1}, (100, 1)),
        ([{}], {"max_request_size": 1 << 40}, (16, 6)),
        ([{}], {"job_queue_size": 2}, (16, 6)),
        ([{"handler": HANDLER}], {"job_queue_size": 2}, (2, 6)),
        ([{"max_rolling_batch_size": 9}, {"max_rolling_batch_size": 3}], {}, (3, 6)),
        ([], {}, (1, 6)),
    ],
)
def test_the_parameters_follow_the_settings_within_sagemakers_limits(
    models: list[dict[str, Any]], settings: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert parameters(*models, **settings) == expected
    assert expected[0] * expected[1] <= 100
