"""Fixtures for all unit tests."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import botocore.session
import pytest
import typer.testing


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """In a process, read the descriptions of AWS's services only once. Make each command line's commands only once."""
    with pytest.MonkeyPatch.context() as patch:
        for module, function in ((botocore.session, "create_loader"), (typer.testing, "_get_command")):
            patch.setattr(module, function, functools.cache(getattr(module, function)))
        yield
