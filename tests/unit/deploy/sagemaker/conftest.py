from __future__ import annotations

import pytest

from container.models import placement
from container.sources.download import RemoteModels
from container.sources.location import SourceError


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(autouse=True)
def _no_look_at_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run plans the GPUs without a look at the hub or S3."""

    def refuse(self: RemoteModels, url: str) -> None:
        raise SourceError("there is no S3 here")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(placement, "hub_file", lambda *_: None)
    monkeypatch.setattr(RemoteModels, "open", refuse)
