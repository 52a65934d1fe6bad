"""Prints what bare AsyncLLM, without any of Slipway, generates for the test prompts."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from typing import Any

sys.path.insert(0, str(__import__("pathlib").Path(__file__).parents[2]))

from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS


def texts_of_bare_engine(**arguments: object) -> dict[str, dict[str, Any]]:
    """What it generates for each prompt, in a process of its own; `arguments`: vLLM's engine arguments."""
    command = [sys.executable, __file__, json.dumps(arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    texts: dict[str, dict[str, Any]] = json.loads(finished.stdout.splitlines()[-1])
    return texts


async def main(arguments: dict[str, object]) -> None:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))  # type: ignore[arg-type]
    answers = {}
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS, output_kind=RequestOutputKind.FINAL_ONLY)
        async for output in engine.generate(prompt, params, str(number)):
            answers[prompt] = {"text": output.outputs[0].text, "ids": list(output.outputs[0].token_ids)}
    engine.shutdown()
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
