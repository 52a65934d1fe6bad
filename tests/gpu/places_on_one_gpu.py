"""Runs Slipway with places for two copies on the first GPU, to try copies on a machine with only one GPU.

python -m tests.gpu.places_on_one_gpu MODULE [ARGUMENTS...]

The model's options must leave memory for both copies (`gpu_memory_utilization`). Slipway itself never gives a GPU to
two copies.
"""

from __future__ import annotations

import runpy
import sys
from unittest.mock import patch

from vllm.engine.arg_utils import AsyncEngineArgs

from engines.settings.engine_config import EngineConfig
from engines.vllm import loading
from engines.vllm.copies.places import Place


def two_places(engine_args: AsyncEngineArgs, config: EngineConfig) -> list[Place]:
    """Return two places. Both are on the GPU that vLLM uses first. This function replaces `gpu_places`."""
    return [Place((0,))] * 2


if __name__ == "__main__":
    patch.object(loading, "gpu_places", two_places).start()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
