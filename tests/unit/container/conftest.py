from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stand_ins.s3 import BUCKET, CREDENTIALS, Gate, gate_to, moto, put


@pytest.fixture(scope="session")
def s3_address() -> Iterator[str]:
    with moto() as address:
        put(address, {})
        yield address


@pytest.fixture
def gate(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A gate in front of S3's stand-in. boto3's environment variables have its address."""
    with gate_to(s3_address) as gate:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gate.url)
        yield gate


@pytest.fixture
def prefix() -> str:
    """A folder of the bucket that no other test uses."""
    return f"{uuid.uuid4().hex}/tiny-model"


@pytest.fixture
def url(prefix: str) -> str:
    return f"s3://{BUCKET}/{prefix}/"


@pytest.fixture
def downloads(tmp_path: Path) -> Path:
    return tmp_path / "downloads"
