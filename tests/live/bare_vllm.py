"""Prints the texts that bare vLLM, without any of Slipway, generates for the test prompts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS


def texts_of_bare_vllm(**arguments: object) -> dict[str, dict[str, Any]]:
    """Return the text for each prompt from a new process. `arguments`: vLLM's engine arguments."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    # One process, which imports vLLM once.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    assert finished.returncode == 0, finished.stderr[-4000:]
    texts: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return texts


def main(arguments: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments, distributed_executor_backend="uni")
    outputs = engine.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS))
    answers = {output.prompt: output.outputs[0] for output in outputs}
    print(json.dumps({prompt: {"text": each.text, "ids": list(each.token_ids)} for prompt, each in answers.items()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
