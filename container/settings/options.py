"""All names of a model's settings: names with an effect, and names of LMI and vLLM that have no effect.

Any other `option.<name>` is an argument of the engine, if the engine knows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from container.settings.lookup import closest
from container.settings.values import Value
from engines.settings.declaration import PREFIX, Setting, declared, refused
from engines.settings.engine_config import ENGINE, ENGINE_ARGUMENTS
from engines.settings.parsers import BOOLEAN, TEXT, integer
from engines.vllm.arguments.table import ARGUMENTS, WITHOUT_EFFECT
from handlers.custom.settings import HANDLER_SETTINGS, MAX_WORKERS, MIN_WORKERS
from handlers.lmi.settings import RERANKING
from handlers.model_config import GROUPS, ModelConfig

_OFFLOADING = "`option.kv_offloading_size=<GiB for all GPUs of a copy>` keeps KV cache in main memory"
# For an engine, each worker is a copy of the model. The default numbers depend on the engine's GPUs.
COPIES = (replace(MIN_WORKERS, default=None), replace(MAX_WORKERS, default=None))
# The settings for the workers of a custom handler. An engine has no such workers.
OF_WORKERS = tuple(
    setting
    for name, setting in HANDLER_SETTINGS.items()
    if name not in ("entry_point", "function", "async_mode", "environment")
)
# The settings of a model that an engine serves.
SERVED: tuple[Setting[Any], ...] = tuple(
    setting
    for setting in (
        *declared(ModelConfig).values(),
        *(setting for group in GROUPS.values() for setting in declared(group).values()),
        *ENGINE_ARGUMENTS.values(),
        ENGINE,
        RERANKING,
    )
    if setting not in HANDLER_SETTINGS.values()
)
MEMORY = tuple(
    Setting(f"{device}{key}", integer(0), default, shows_default=False)
    for device in ("", "gpu.", "cpu.")
    for key, default in (("required_memory_mb", None), ("reserved_memory_mb", None if device else "500"))
)
NOT_SERVED: tuple[Setting[Any], ...] = (
    refused("option.entry_point", TEXT, (), "`option.entryPoint` is meant (OPTION_ENTRYPOINT)"),
    refused("option.api_key", TEXT, (), "set SERVING_API_KEYS"),
    refused("option.s3url", TEXT, (), "`option.model_id` takes s3://"),
    refused("option.bedrock_compat", BOOLEAN, (False,), "leave it out"),
    refused("option.skip_tokenizer_init", BOOLEAN, (False,), "requests and answers are texts"),
    refused("option.max_num_queued_reqs", TEXT, (), "use `job_queue_size`"),
    refused("option.max_num_queued_tokens", TEXT, (), "use `job_queue_size`"),
    refused("option.enable_fault_tolerance", BOOLEAN, (False,), "use SERVING_ENGINE_RESTART"),
    refused("option.lmcache_auto_config", BOOLEAN, (False,), _OFFLOADING),
    refused("option.lmcache_config_file", TEXT, (), _OFFLOADING),
)
ALL_OF_MODEL = (*SERVED, *HANDLER_SETTINGS.values(), *MEMORY, *NOT_SERVED)
BY_KEY: Mapping[str, Setting[Any]] = {key: setting for setting in ALL_OF_MODEL for key in setting.keys}

_TRANSFORMERS = (
    "device_map load_in_8bit load_in_4bit low_cpu_mem_usage disable_flash_attn attn_implementation is_peft_model"
)
# `option.rolling_batch=disable` selects an engine that reads these arguments. vLLM ignores them.
DYNAMIC_BATCH_ARGUMENTS = tuple(f"option.{name}" for name in _TRANSFORMERS.split())
TENSORRT_LLM = (
    "tokens_per_block batch_scheduler_policy enable_kv_cache_reuse enable_trt_overlap use_custom_all_reduce "
    "max_num_sequences multi_block_mode use_fused_mlp logits_dtype use_fp8_context_fmha trtllm_checkpoint_path "
    "load_by_shard baichuan_model_version chatglm_model_version gpt_model_version rotary_base rotary_dim "
    "rotary_scaling_type rotary_scaling_factor smoothquant_alpha smoothquant_per_token smoothquant_per_channel "
    "multi_query_mode awq_format awq_calib_size q_format calib_size calib_batch_size"
)
# LMI's secure mode allows the settings in `TENSORRT_LLM`, but not these newer settings.
_NEWER_TENSORRT_LLM = (
    "max_beam_width enable_block_reuse host_cache_size onboard_blocks max_attention_window sink_token_length "
    "cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size enable_overlap_scheduler "
    "context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp auto_parallel "
    "auto_parallel_world_size iter_stats_max_iterations request_stats_max_iterations embedding_parallel_mode "
    "fast_build enable_build_cache batching_type normalize_log_probs gather_generation_logits "
    "extended_runtime_perf_knob_config num_checkpoint_workers num_engine_workers max_draft_len trt_llm_model_name "
    "quant_algo kv_cache_quant_algo group_size smoothquant_val clamp_val use_meta_recipe has_zero_point "
    "pre_quant_scales exclude_modules calib_dataset calib_batches calib_max_seq_length random_seed "
    "tokenizer_max_seq_length use_smoothquant"
)
# Options of LMI's former engines: DeepSpeed, FasterTransformer, transformers and Neuron.
_FORMER_ENGINES = (
    "checkpoint save_mp_checkpoint_path ds_config triangular_mask return_tuple training_mp_size max_tokens "
    "enable_cuda_graph replace_method smoothquant paged_attention decoding_strategy max_batch_size beam_width "
    "amp n_positions unroll load_split_model split_model_file neuron_optimize_level compiled_graph_path "
    "context_length_estimate group_query_attention fuse_qkv collectives_layout attention_layout cache_layout "
    "on_device_embedding on_device_generation shard_over_sequence all_reduce_dtype cast_logits_dtype model_loader "
    "partition_schema compilation_worker_count sequence_parallel_norm sequence_parallel_norm_threshold "
    "fold_scale_norm save_sharded_checkpoint continuous_batching deepspeed_config_path triangular_masking base_dir "
    "use_triton max_new_tokens max_sparsity max_splits multi_gpu enable_mixed_precision_accumulation "
    "enable_saturate_infinity fuse_mlp fused_rmsnorm_qkv mlp_out_weight_transpose multi_node sequence_parallel "
    "neuron_cc_pipeline_factor neuron_quant on_device_embedding_config qkv_tiling weight_tiling rolling_batch_strategy"
)
# Arguments of LMI's script that quantizes and partitions a model before it is served.
_PARTITION = (
    "awq_block_size awq_ignore_layers awq_mm_version awq_weight_bit_width awq_zero_point fp8_activation_scheme "
    "fp8_ignore fp8_ignore_patterns fp8_kv_cache_quant_targets fp8_scheme partition_handler properties_dir "
    "upload_checkpoints_s3url"
)
# Options of DJL's engines PyTorch and OnnxRuntime.
_DJL = (
    "mapLocation extraFiles modelName modelId optimization max_output_size cpuArenaAllocator customOpLibrary "
    "disablePerSessionThreads executionMode interOpNumThreads intraOpNumThreads memoryPatternOptimization optLevel "
    "ortDevice"
)
LMI_DIST = "draft_model_compiled_path record_acceptance_rate"
_IGNORED_OPTIONS = {
    "it belongs to `option.rolling_batch=disable`": _TRANSFORMERS,
    "it belongs to TensorRT-LLM; see `option.gpu_memory_utilization`": (
        "kv_cache_free_gpu_mem_fraction free_gpu_memory_fraction"
    ),
    "it belongs to TensorRT-LLM; see `option.max_model_len`": "max_output_len max_input_len max_seq_len",
    "it belongs to TensorRT-LLM; see `option.attention_backend`": "attn_backend",
    "it belongs to TensorRT-LLM; see `option.enforce_eager`": "use_cuda_graph",
    "it belongs to TensorRT-LLM; see `option.max_rolling_batch_prefill_tokens`": "max_num_tokens",
    "it belongs to TensorRT-LLM": f"{TENSORRT_LLM} {_NEWER_TENSORRT_LLM} backend",
    "it belongs to an engine that LMI no longer has": _FORMER_ENGINES,
    "it belongs to lmi-dist": f"{LMI_DIST} use_passive_workers speculative_telemetry",
    "it belongs to LMI's script that quantizes models": _PARTITION,
    "it belongs to DJL's engines PyTorch and OnnxRuntime": _DJL,
    "see `option.speculative_draft_model`": "draft_model_id speculative_draft_model_id",
    "see `option.speculative_length`": "spec_length",
    "see `option.speculative_config`": "speculative_method",
    "see `option.max_rolling_batch_prefill_tokens`": "max_batch_prefill_tokens",
    "see `option.dtype`": "torch_dtype",
    "see `option.attention_backend`": "enable_flash_attention",
    "see `option.lora_modules`": "adapters peft_model enable_loras",
    "a function of model.py with LMI's decorator `input_formatter` is used": "input_formatter",
    "the model directory is --model-dir, or SERVING_MODEL_STORE": "model_dir",
    "LMI sets it itself": "preloaded_model model_id_or_path is_mpi kwargs",
    "the processor of the model says it": "image_placeholder_token image_processor image_processor_revision",
    "sessions have no such limit": "sessions_limit sessions_file_size",
    "set HF_TOKEN": "use_auth_token",
    "it belongs to models of images": (
        "height width num_images_per_prompt save_compiled_model save_image_dir use_stable_diffusion"
    ),
    "vLLM shares a draft model out to the same GPUs as the model": "draft_model_tp_size",
    "it belongs to scikit-learn and XGBoost models": (
        "default_accept model_format skops_trusted_types trust_insecure_model_files"
    ),
    "the engine starts and numbers its processes itself": "mpi_mode waiting_steps cluster_size device_id",
    "`option.reasoning_parser` alone switches it on": "enable_reasoning",
}
_FORMER_ARGUMENTS = (
    "swap_space use_v2_block_manager disable_log_requests num_scheduler_steps multi_step_stream_outputs device "
    "max_seq_len_to_capture max_context_len_to_capture preemption_mode num_lookahead_slots scheduler_delay_factor "
    "worker_use_ray engine_use_ray enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token "
    "lora_extra_vocab_size long_lora_scaling_factors qlora_adapter_name_or_path disable_async_output_proc "
    "speculative_model_quantization speculative_draft_tensor_parallel_size speculative_disable_by_batch_size "
    "speculative_disable_mqa_scorer speculative_max_model_len ngram_prompt_lookup_max ngram_prompt_lookup_min "
    "spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold "
    "typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding tokenizer_pool_size "
    "tokenizer_pool_type tokenizer_pool_extra_config guided_decoding_disable_fallback "
    "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties logits_processor_pattern "
    "disable_mm_preprocessor_cache override_neuron_config override_attention_dtype calculate_kv_scales "
    "quantization_param_path max_num_partial_prefills max_long_partial_prefills cuda_graph_sizes full_cuda_graph "
    "enable_multimodal_encoder_data_parallel num_redundant_experts eplb_window_size eplb_step_interval "
    "eplb_log_balancedness image_input_type image_token_id image_input_shape image_feature_size "
    "disable_image_processor max_paddings"
)
_FORMER: Mapping[str, str] = {
    **dict.fromkeys(_FORMER_ARGUMENTS.split(), "vLLM no longer has this argument"),
    "guided_decoding_backend": "vLLM no longer has this argument; see `option.structured_outputs_config`",
    "override_pooler_config": "vLLM no longer has this argument; see `option.pooler_config`",
    **dict.fromkeys(
        ("rope_scaling", "rope_theta"),
        "vLLM no longer has this argument; set `option.hf_overrides` to all `rope_parameters`",
    ),
}
# The settings of LMI and of vLLM that have no effect if an engine serves the model, with the reasons.
IGNORED: Mapping[str, str] = {
    **{f"option.{name}": reason for name, reason in WITHOUT_EFFECT.items()},
    **{f"option.{name}": reason for reason, names in _IGNORED_OPTIONS.items() for name in names.split()},
    **{f"option.{name}": reason for name, reason in _FORMER.items() if name not in ARGUMENTS},
    "load_on_device": "LMI does not read it either; `load_on_devices` is meant",
    **dict.fromkeys(("log_request_metric", "metrics_aggregation"), "metrics are at /metrics"),
}
# All setting names of a model that an engine serves.
KNOWN = frozenset({*BY_KEY, *IGNORED, *(f"{PREFIX}{name}" for name in ARGUMENTS), "job_queue_size"})
# The names in `KNOWN` that have an effect.
SUGGESTED = KNOWN - IGNORED.keys() - {key for setting in NOT_SERVED for key in setting.keys}


def meant_by(key: str, value: Value) -> str:
    """Return the model setting that is probably meant by an unknown key. Empty if no setting is similar.

    Only settings that have an effect are considered. If the value is from a variable, the result is the name of a
    variable, too.
    """
    bare = key.removeprefix(PREFIX)
    meant = next((name for name in (bare, PREFIX + bare) if name in SUGGESTED), "") or closest(key, SUGGESTED)
    source, _, variable = value.source.partition(": ")
    if not meant or source != "environment":
        return meant
    name = meant.removeprefix(PREFIX)
    if name in (name.lower(), "entryPoint"):  # The variable of `option.entryPoint` is in capitals: OPTION_ENTRYPOINT.
        name = name.upper()
    if not meant.startswith(PREFIX):
        return f"ARGS_{name}"
    return f"SM_VLLM_{name}" if variable.startswith("SM_VLLM_") else f"OPTION_{name}"
