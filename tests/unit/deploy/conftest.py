from __future__ import annotations

import io

import pytest

from deploy.sagemaker.presence import Surroundings
from deploy.sagemaker.progress import Progress
from tests.unit.deploy.cloud import MemoryCloud, TurnedClock


@pytest.fixture
def cloud() -> MemoryCloud:
    return MemoryCloud()


@pytest.fixture
def told() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def around(cloud: MemoryCloud, told: io.StringIO) -> Surroundings:
    clock = TurnedClock()
    return Surroundings(cloud, Progress(told, clock), clock)


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
