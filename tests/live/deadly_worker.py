"""Worker processes of vLLM with faults. Their classes are values of `option.worker_cls`."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.live.deadly_prompts import IS_KILLED, RAISES


class DeadlyWorker(CPUWorker):
    """A worker with two faults: an error like CUDA's, and an exit without a message."""

    def execute_model(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            beginning = (request.prompt_token_ids or [])[: len(RAISES)]
            if beginning == RAISES:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if beginning == IS_KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(scheduler_output)


class LoadingWorker(CPUWorker):
    """A worker whose load never ends."""

    def load_model(self, *_: Any, **__: Any) -> None:
        threading.Event().wait()
