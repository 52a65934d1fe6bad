"""A model for Triton's Python backend that streams scripted tokens, at the pace of `benchmarks.scripted_engine`.

Triton loads this file in a separate process, which cannot import this project. The model has no tokenizer and no
engine, so it does less than Triton's backend for vLLM. A measurement covers Triton's own front end and its connection
to Python.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

sys.path.append(os.environ["PACKAGES"])  # Contains the NumPy release for which Triton's Python backend was built.

import numpy as np
import triton_python_backend_utils as triton

_WORDS = b" of the ship that leaves the slipway and of the people who built her".split(b" ")


class TritonPythonModel:
    """The class that Triton's Python backend looks for in a model's file."""

    def initialize(self, _: dict[str, Any]) -> None:
        """Start the thread that sends one token per step."""
        self._step_seconds = float(os.environ["STEP_MS"]) / 1000
        self._running: dict[Any, int] = {}  # The number of tokens still to send, keyed by the response's sender.
        self._changed = threading.Condition()
        threading.Thread(target=self._step, daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Send each request's first token."""
        for request in requests:
            sender, tokens = request.get_response_sender(), json.loads(request.parameters())["max_tokens"]
            _send(sender, tokens)
            if tokens > 1:
                with self._changed:
                    self._running[sender] = tokens - 1
                    self._changed.notify()

    def _step(self) -> None:
        due = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._running)
            due = max(due + self._step_seconds, time.monotonic())  # A late step delays all later steps.
            time.sleep(max(0.0, due - time.monotonic()))
            with self._changed:
                running = self._running
                for sender, left in running.items():
                    _send(sender, left)
                self._running = {sender: left - 1 for sender, left in running.items() if left > 1}


def _send(sender: Any, left: int) -> None:
    """Send a token. `left` is the number of tokens still to send, including this one. The last one ends the answer."""
    reason = b"length" if left == 1 else b""
    values = {"text_output": b" " + _WORDS[left % len(_WORDS)], "finish_reason": reason}
    tensors = [triton.Tensor(name, np.array([value], dtype=np.object_)) for name, value in values.items()]
    sender.send(triton.InferenceResponse(tensors))
    if left == 1:
        sender.send(flags=triton.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
