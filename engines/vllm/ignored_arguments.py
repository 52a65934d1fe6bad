"""The arguments of `vllm serve` that have no effect here, and the reasons. This module needs no vLLM."""

from __future__ import annotations

from collections.abc import Mapping

_NOT_TAKEN = "`vllm serve` has no such argument"
# Fields of vLLM's `AsyncEngineArgs` that its command line cannot set.
NO_ARGUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("_api_process_count", "_api_process_rank", "model_weights"), f"{_NOT_TAKEN}; vLLM sets it"),
    "enable_mm_processor_stats": _NOT_TAKEN,
    "mamba_config": f"{_NOT_TAKEN}; option.mamba_backend and others are its parts",
}
_LOGS = "vLLM logs as Slipway does; see SERVING_LOG_LEVEL and SERVING_LOG_FORMAT"
_TLS = "let a proxy in front of the container do TLS"
_SERVER = {
    # In the server's process, vLLM would put its logging in the place of Slipway's.
    _LOGS: "log_level logging_config log_config_file uvicorn_log_level",
    "vLLM's statistics are not logged; metrics are at /metrics": (
        "disable_log_stats aggregate_engine_logging cudagraph_metrics enable_server_load_tracking"
    ),
    "SERVING_LOG_PROMPTS has requests logged": ("enable_log_requests enable_log_outputs enable_log_deltas max_log_len"),
    "SERVING_LOG_LEVEL=warning switches the access log off": (
        "disable_uvicorn_access_log disable_access_log_for_endpoints"
    ),
    "there are no routes that start and stop vLLM's profiler": "profiler_config",
    "it is for replicas of vLLM's own server that take and return tokens": "tokens_only",
    "SERVING_DRAIN_TIMEOUT says how long running requests get": "shutdown_timeout",
    "set SERVING_CORS_ALLOWED_ORIGIN, SERVING_CORS_ALLOWED_METHODS and SERVING_CORS_ALLOWED_HEADERS": (
        "allowed_origins allowed_methods allowed_headers allow_credentials"
    ),
    _TLS: "ssl_keyfile ssl_certfile ssl_ca_certs ssl_cert_reqs ssl_ciphers enable_ssl_refresh",
    "let a proxy in front of the container add or remove the path": "root_path",
    "use formatters, a handler or a proxy": "middleware",
    "set SERVING_HOST": "host",
    "set SERVING_PORT": "port",
    "the server listens on one port (SERVING_PORT), with HTTP": "uds grpc grpc_port",
    "one front end serves all engines": "api_server_count headless enable_scale_out",
    "it is for the supervisor of vLLM's own replicas": (
        "data_parallel_supervisor_port dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s"
    ),
    "give each argument as an option of its own": "config",
    "set HF_MODEL_ID": "model_tag",
    "the server has limits of its own": "h11_max_header_count h11_max_incomplete_event_size",
    "every reply has the header x-request-id": "enable_request_id_headers",
    "the API description is at /docs": "disable_fastapi_docs enable_offline_docs",
    "it belongs to a route or a part of vLLM's own server that Slipway does not have": (
        "enable_tokenizer_info_endpoint enable_per_request_metrics enable_flash_late_interaction "
        "cohere_is_reasoning_model"
    ),
}
# All arguments without effect: fields that are no arguments, and arguments of parts of vLLM that Slipway does not use.
WITHOUT_EFFECT: Mapping[str, str] = {
    **NO_ARGUMENTS,
    **{name: reason for reason, names in _SERVER.items() for name in names.split()},
}
