from __future__ import annotations

import subprocess
import sys


def test_the_process_that_answers_ping_starts_without_torch_and_vllm() -> None:
    code = "import sys, container.server, slipway.cli; print(*({'torch', 'vllm', 'transformers'} & sys.modules.keys()))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert finished.stdout.strip() == ""
