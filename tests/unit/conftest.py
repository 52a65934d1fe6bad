"""What all unit tests share."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest


@pytest.fixture(scope="session", autouse=True)
def _descriptions_of_aws() -> Iterator[None]:
    """Let all sessions of boto3 share a loader, so that the descriptions of AWS's services are read only once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield
