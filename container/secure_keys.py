"""The settings that a model may have in SageMaker's secure mode. Source: contracts/lmi.md section 11.1."""

from __future__ import annotations

_PLAIN = (
    "engine job_queue_size max_idle_time batch_size max_batch_delay max_dynamic_batch_size minWorkers maxWorkers "
    "load_on_devices"
)
_GENERAL = (
    "mpi_mode entryPoint pythonExecutable task model_id revision dtype trust_remote_code batch_size rolling_batch "
    "max_rolling_batch_size tensor_parallel_degree pipeline_parallel_degree parallel_loading "
    "model_loading_timeout output_formatter tgi_compat enable_streaming low_cpu_mem_usage"
)
_VLLM = (
    "max_rolling_batch_prefill_tokens max_model_len load_format enforce_eager gpu_memory_utilization quantize "
    "speculative_draft_model speculative_length draft_model_tp_size draft_model_compiled_path "
    "record_acceptance_rate enable_lora max_loras max_lora_rank max_cpu_loras lora_extra_vocab_size "
    "enable_chunked_prefill enable_prefix_caching cpu_offload_gb_per_gpu disable_sliding_window"
)
_NEURON = (
    "n_positions load_in_8bit unroll context_length_estimate load_split_model compiled_graph_path "
    "group_query_attention enable_mixed_precision_accumulation enable_saturate_infinity"
)
_TENSORRT_LLM = (
    "max_input_len max_output_len max_num_tokens max_num_sequences use_custom_all_reduce tokens_per_block "
    "batch_scheduler_policy kv_cache_free_gpu_mem_fraction enable_trt_overlap enable_kv_cache_reuse "
    "multi_block_mode use_fused_mlp use_fp8_context_fmha logits_dtype trtllm_checkpoint_path load_by_shard "
    "baichuan_model_version chatglm_model_version gpt_model_version rotary_base rotary_dim rotary_scaling_type "
    "rotary_scaling_factor smoothquant_alpha smoothquant_per_token smoothquant_per_channel multi_query_mode "
    "awq_format awq_calib_size q_format calib_size calib_batch_size"
)

ALLOWED_KEYS = frozenset(_PLAIN.split()) | frozenset(
    f"option.{name}" for group in (_GENERAL, _VLLM, _NEURON, _TENSORRT_LLM) for name in group.split()
)
"""Exact, upper and lower case told apart; everything else is refused."""
