"""Settings that LMI knows and that have nothing to set here: accepted with a warning.

They come along in model directories made for LMI (contracts/lmi.md 2.9, 2.10, 2.12 to 2.14), and no answer depends on
them.
"""

from __future__ import annotations

from container.option import Option
from container.option_parsers import ANYTHING

_FOR_TRANSFORMERS = "it belongs to `option.rolling_batch=disable`"
_FOR_TENSORRT = "it belongs to TensorRT-LLM"
_FOR_LMI_DIST = "it belongs to lmi-dist"
_ONE_PROCESS = "one engine serves all requests of the model"


def _leftover(key: str, remark: str, quiet: frozenset[str] = frozenset()) -> Option:
    return Option(key=key, parser=ANYTHING, meaning="Ignored", remark=f"ignored: {remark}", quiet=quiet)


_OFF = frozenset({"false"})

TRANSFORMERS = tuple(
    _leftover(f"option.{name}", _FOR_TRANSFORMERS)
    for name in (
        *("device_map", "load_in_8bit", "load_in_4bit", "low_cpu_mem_usage", "disable_flash_attn"),
        *("attn_implementation", "is_peft_model", "normalize"),
    )
)
"""Arguments of the dynamic batch's engine, and leftovers on vLLM."""

_TENSORRT = (
    _leftover("option.kv_cache_free_gpu_mem_fraction", f"{_FOR_TENSORRT}; see `option.gpu_memory_utilization`"),
    _leftover("option.max_output_len", f"{_FOR_TENSORRT}; see `option.max_model_len`"),
    _leftover("option.max_input_len", f"{_FOR_TENSORRT}; see `option.max_model_len`"),
    _leftover("option.max_num_tokens", f"{_FOR_TENSORRT}; see `option.max_rolling_batch_prefill_tokens`"),
    *(
        _leftover(f"option.{name}", _FOR_TENSORRT)
        for name in (
            *("tokens_per_block", "batch_scheduler_policy", "enable_kv_cache_reuse", "backend", "enable_trt_overlap"),
            *("use_custom_all_reduce", "max_num_sequences", "multi_block_mode", "use_fused_mlp", "logits_dtype"),
            *("use_fp8_context_fmha", "trtllm_checkpoint_path", "load_by_shard", "baichuan_model_version"),
            *("chatglm_model_version", "gpt_model_version", "rotary_base", "rotary_dim", "rotary_scaling_type"),
            *("rotary_scaling_factor", "smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel"),
            *("multi_query_mode", "awq_format", "awq_calib_size", "q_format", "calib_size", "calib_batch_size"),
        )
    ),
)

LEFTOVERS = (
    *TRANSFORMERS,
    *_TENSORRT,
    _leftover("option.mpi_mode", _ONE_PROCESS, _OFF),
    _leftover("option.parallel_loading", _ONE_PROCESS, _OFF),
    _leftover("option.default_accept", "it belongs to scikit-learn and XGBoost models"),
    *(
        _leftover(f"{device}.{key}", _ONE_PROCESS, frozenset({"1"}))
        for device in ("gpu", "cpu")
        for key in ("minWorkers", "maxWorkers")
    ),
    *(
        _leftover(f"option.{name}", f"{_FOR_LMI_DIST}; see `option.speculative_config`")
        for name in (
            *("speculative_draft_model", "speculative_length", "draft_model_tp_size", "draft_model_compiled_path"),
            *("record_acceptance_rate", "use_passive_workers"),
        )
    ),
    *(_leftover(f"option.{name}", _ONE_PROCESS) for name in ("waiting_steps", "cluster_size", "device_id")),
    _leftover("option.enable_reasoning", "`option.reasoning_parser` alone switches it on"),
    *(_leftover(key, "metrics are at /metrics") for key in ("log_request_metric", "metrics_aggregation")),
)
