"""Prints the metrics that vLLM without Slipway has for a model before its first request."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def metrics_of_bare_vllm(**arguments: object) -> str:
    """Return the text for Prometheus, from another process.

    Args:
        arguments: vLLM's engine arguments.
    """
    command = [sys.executable, __file__, json.dumps(arguments)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout[finished.stdout.index("# HELP") :]  # The log comes first.


def main(arguments: dict[str, Any]) -> None:
    from prometheus_client import generate_latest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    PrometheusStatLogger(config, [0]).log_engine_initialized()
    print(generate_latest(get_prometheus_registry()).decode())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
