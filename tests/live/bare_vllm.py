"""The texts that bare vLLM, without Slipway, generates for the test prompts.

Run as a program, the module generates them.
"""

from __future__ import annotations

from typing import Any

from tests.live.preloaded import answer_order, result_of
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS


def texts_of_bare_vllm(**arguments: object) -> dict[str, dict[str, Any]]:
    """Return the text for each prompt from a new process. `arguments`: vLLM's engine arguments."""
    texts: dict[str, dict[str, Any]] = result_of(__name__, arguments, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    return texts


def _texts(arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    from vllm import LLM, SamplingParams

    engine = LLM(**arguments, distributed_executor_backend="uni")
    outputs = engine.generate(list(PROMPTS), SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS))
    answers = {str(output.prompt): output.outputs[0] for output in outputs}
    return {prompt: {"text": each.text, "ids": list(each.token_ids)} for prompt, each in answers.items()}


if __name__ == "__main__":
    answer_order(_texts)
