"""Slipway's replacements for vLLM's functions on a CPU, compared with vLLM's own functions."""

from __future__ import annotations

import inspect
import os
import time

import pytest


def test_ranks_of_tokens_are_those_of_the_function_that_vllm_compiles() -> None:
    import torch
    from vllm.v1.sample.ops.logprobs import batched_count_greater_than

    from engines.vllm.processes.cpu import token_ranks

    vllms = inspect.unwrap(batched_count_greater_than)
    rows = torch.randn(5, 1000).round(decimals=1)  # with tokens that are equally likely
    chosen = rows[:, 7:8]
    assert torch.equal(token_ranks(rows, chosen), vllms(rows, chosen))
    assert token_ranks(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([[2.0]])).tolist() == [2]


def test_a_long_wait_for_a_message_leaves_the_processor_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    from engines.vllm.patches import processes
    from engines.vllm.processes import cpu

    monkeypatch.setattr(shm_broadcast, "sched_yield", shm_broadcast.sched_yield)  # restores it
    yields: list[bool] = []
    sleeps: list[float] = []
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(True))
    monkeypatch.setattr(time, "sleep", sleeps.append)
    processes.patch_waiting(cpu.Pause())
    reader = object.__new__(shm_broadcast.SpinCondition)
    reader.is_reader, reader.busy_loop_s = True, 600
    reader.record_read()
    reader.wait()
    assert yields
    assert not sleeps
    while not sleeps:
        reader.wait()
    assert max(sleeps) < 0.001
