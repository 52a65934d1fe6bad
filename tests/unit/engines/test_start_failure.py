"""The check for whether an engine failed to start for lack of memory, with real errors of Python and PyTorch."""

from __future__ import annotations

import errno
import os

import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from engines.interface import EngineOutOfMemory, EngineStartError
from engines.start_failure import failure_of


def on_the_host() -> Exception:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(1 << 50, dtype=torch.uint8)
    return refused.value


class OwnError(torch.OutOfMemoryError):
    """A library's own subclass of the error."""


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OwnError(),
        RuntimeError("Worker failed with error 'CUDA out of memory. Tried to allocate 2.00 GiB.', please check the"),
        RuntimeError("CUDA error: out of memory"),
        on_the_host(),
    ],
    ids=str,
)
def test_memory_is_the_reason_by_the_type_of_an_error_or_by_pytorchs_own_text(error: Exception) -> None:
    refused = failure_of(error).error("it cannot be loaded")
    assert type(refused) is EngineOutOfMemory
    assert str(refused) == f"it cannot be loaded: {str(error) or type(error).__name__}"


INITIALIZATION = "Engine core initialization failed. See root cause above. Failed core proc(s): "


@pytest.mark.parametrize(
    "error",
    [
        ValueError("no such file: /models/out of memory/config.json"),
        RuntimeError("name 'MemoryErrorHandler' is not defined"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError(INITIALIZATION + "{'EngineCore': 1}"),
        RuntimeError(INITIALIZATION + "{'EngineCore': -11}"),
    ],
    ids=str,
)
def test_a_word_about_memory_in_passing_is_no_reason(error: Exception) -> None:
    assert type(failure_of(error).error("it cannot be loaded")) is EngineStartError


def test_an_engine_process_that_was_killed_is_said_in_words() -> None:
    refused = failure_of(RuntimeError(INITIALIZATION + "{'EngineCore': -9}")).error("it cannot be loaded")
    assert type(refused) is EngineOutOfMemory
    assert str(refused) == (
        "it cannot be loaded: its engine process was killed (SIGKILL), as the kernel does when memory runs out"
    )
