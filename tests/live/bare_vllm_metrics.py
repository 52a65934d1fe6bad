"""The metrics that vLLM, without Slipway, has for a model before its first request. As a program, it makes them."""

from __future__ import annotations

from typing import Any

from tests.live.preloaded import answer_order, result_of


def metrics_of_bare_vllm(**arguments: object) -> str:
    """Return the text for Prometheus, from another process.

    Args:
        arguments: vLLM's engine arguments.
    """
    text: str = result_of(__name__, arguments)
    return text


def _metrics(arguments: dict[str, Any]) -> str:
    from prometheus_client import generate_latest
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    config = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    PrometheusStatLogger(config, [0]).log_engine_initialized()
    return generate_latest(get_prometheus_registry()).decode()


if __name__ == "__main__":
    answer_order(_metrics)
