"""Fixtures for all unit tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest
import typer.testing


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """Read the descriptions of AWS's services, and make the commands of a command line, only once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((botocore.session, "create_loader"), (typer.testing, "_get_command")):
            patch.setattr(module, function, functools.cache(getattr(module, function)))
        yield
