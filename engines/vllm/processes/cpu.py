"""Replacements for functions of vLLM (`engines.vllm.patches.processes`). The originals are slow or wrong on a CPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import torch

from engines.memory.cpu_memory import page_cache
from engines.vllm.patches import processes

_SPIN_SECONDS = 0.002  # Pauses begin after this time. The wait between two steps is shorter, so it has no pause.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.002  # Seconds.
_PAUSE_SHARE = 1 / 64  # The length of a pause, as a share of the time that the process has waited so far.
_NEW_WAIT_SECONDS = 0.0005  # If two polls are further apart, a step has run in between.


class Pause:
    """The pause between two polls for a message, on a CPU.

    The engine process polls its workers for answers, and each worker polls for its next step. After a second without
    messages, they block. Between two polls, vLLM only yields the processor, so each process keeps a processor busy. On
    a CPU, the model and the front end need these processors. So this pause grows with the waiting time.
    """

    def __init__(self) -> None:
        self._begun = self._last = 0.0

    def __call__(self) -> None:
        now = time.monotonic()
        if now - self._last > _NEW_WAIT_SECONDS:
            self._begun = now
        if (waited := now - self._begun) < _SPIN_SECONDS:
            os.sched_yield()
        else:
            time.sleep(min(max(waited * _PAUSE_SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE))
        self._last = time.monotonic()


def token_ranks(logprobs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """For each row, count the tokens that are at least as likely as the chosen token.

    The arguments have the shapes [n, vocabulary] and [n, 1]. The result has the shape [n].

    On a CPU, it replaces the sampler's function, which vLLM compiles for 15 to 90 seconds at the first log probability.
    Without compilation, the sampler's function takes eleven times as long as this function: a fifth of the time of a
    step with 128 sequences.
    """
    as_likely = (logprobs >= chosen).numpy()
    return torch.tensor([np.count_nonzero(row) for row in as_likely])


def usage_without_page_cache() -> int | None:
    """Return the memory that a container uses, in bytes. vLLM uses it to check whether the KV cache fits.

    vLLM's own function counts cached pages of files as used. So no KV cache would fit just after the weights were read.
    """
    used = processes.cgroup_usage()
    if used is None:
        return None
    return max(used - max(page_cache(Path("/sys/fs/cgroup", version)) for version in (".", "memory")), 0)
