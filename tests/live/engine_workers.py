"""Worker processes of vLLM for tests. Their classes are values of `option.worker_cls`."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from tests.live.deadly_prompts import IS_KILLED, RAISES

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class SteppedWorker(Worker):
    """A worker that pauses while the file PERMITTED_STEPS exists. It makes one step whenever the file has grown.

    So a test decides how many tokens an answer has at some time, on any machine.
    """

    _seen = 0  # The size of the file at the last step.

    def execute_model(self, scheduler_output: Any) -> Any:
        while (size := self._permitted()) is not None and size <= self._seen:
            time.sleep(0.001)
        self._seen = size or 0
        return super().execute_model(scheduler_output)

    @staticmethod
    def _permitted() -> int | None:
        try:
            return Path(os.environ["PERMITTED_STEPS"]).stat().st_size
        except FileNotFoundError:
            return None


class DeadlyWorker(SteppedWorker):
    """A worker with two faults: an error like CUDA's, and an exit without a message."""

    def execute_model(self, scheduler_output: Any) -> Any:
        for request in scheduler_output.scheduled_new_reqs:
            beginning = (request.prompt_token_ids or [])[: len(RAISES)]
            if beginning == RAISES:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if beginning == IS_KILLED:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().execute_model(scheduler_output)


class LoadingWorker(Worker):
    """A worker whose load never ends."""

    def load_model(self, *_: Any, **__: Any) -> None:
        threading.Event().wait()
