"""Tries each argument that Slipway passes on to vLLM, and records the results.

A server loads a small model with the option, answers requests on several routes, and shows its metrics. If something
fails, vLLM's own server is tried with the same arguments. The program writes rows into docs/engine_arguments.md, for
the named options or for all options:

    python -m tests.engine_arguments max_logprobs block_size
    python -m tests.engine_arguments

The exit code is 1 if an option fails: if requests fail, or if vLLM's own server accepts an option that Slipway refuses.
`TRIALS` lists every argument in the table `engines.vllm.arguments.table`.
"""

from __future__ import annotations

import copy
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from benchmarks.peers import Server as Process
from benchmarks.peers import ServerError
from container.settings.options import NOT_SERVED
from tests.live.server import Server, free_port, write_model
from tests.live.small_model import prepare_small_model

PAGE = Path(__file__).parents[1] / "docs" / "engine_arguments.md"
START, END = "<!-- table engine arguments -->\n", "<!-- end of table engine arguments -->\n"
HEAD = "| result | arguments |\n| --- | --- |\n"
BASE = {"dtype": "float32", "max_model_len": "1024", "kv_cache_memory_bytes": str(64 << 20)}
"""The options of every trial, unless the trial overrides or omits them."""
LOAD_SECONDS = 180.0
REQUEST_SECONDS = 60.0
REFUSED = {option.key.removeprefix("option.") for option in NOT_SERVED}
AT_ONCE = 12
"""The number of options that are tried together."""
ANY_CORE = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment variables of the servers. If an engine is bound to a core, it may have to wait for another one."""
PROMPT = "Once upon a time"
TOKENS = 5
MODEL = "model"
"""The name of the model on vLLM's own server."""

GPU = "needs a GPU"
MACHINES = "needs several machines, or processes that start together"
EXPERTS = "is for models with experts"
MEDIA = "is for models that take images, sound or video"
MAMBA = "is for models with Mamba layers"


@dataclass(frozen=True)
class Trial:
    """A trial of an option. In its value, `{model}`, `{directory}` and similar names stand for paths."""

    value: str
    beside: Mapping[str, str] = field(default_factory=dict)
    """Other options that the option needs."""
    without: tuple[str, ...] = ()
    """Options in BASE that would contradict the option."""
    about: str = ""
    """The reason why the small model on a CPU cannot show the option's effect. Empty if it can."""

    def options(self, name: str, paths: Mapping[str, Path]) -> dict[str, str]:
        """Return all options of the trial's server, except those that name the model."""
        given = {**BASE, **self.beside, name: self.value}
        return {option: filled(text, paths) for option, text in given.items() if option not in self.without}


def _on_gpus(value: str, **beside: str) -> Trial:
    return Trial(value, beside, about=f"its effect {GPU}")


def _of_media(value: str, **beside: str) -> Trial:
    return Trial(value, beside, about=f"it {MEDIA}")


MANY_MACHINES = (
    *("master_addr", "master_port", "nnodes", "node_rank", "data_parallel_rank", "data_parallel_start_rank"),
    *("data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_hybrid_lb"),
    *("data_parallel_external_lb", "data_parallel_multi_port_external_lb"),
)
TRIALS: dict[str, Trial | str] = {
    # The model, and how it is loaded.
    "model": "is `option.model_id` here",
    "model_weights": Trial("{model}"),
    "served_model_name": Trial("first,second"),
    "tokenizer": Trial("{model}"),
    "tokenizer_mode": Trial("hf"),
    "tokenizer_revision": Trial("main"),
    "skip_tokenizer_init": Trial("true"),
    "hf_config_path": Trial("{model}"),
    "hf_token": Trial("hf_none"),
    "hf_overrides": Trial('{"rope_theta": 20000}'),
    "model_class_overrides": Trial('{"NoModel": "vllm.model_executor.models.llama:LlamaForCausalLM"}'),
    "config_format": Trial("hf"),
    "revision": Trial("main"),
    "code_revision": Trial("main"),
    "trust_remote_code": Trial("true"),
    "download_dir": Trial("{directory}"),
    "load_format": Trial("dummy"),
    "model_loader_extra_config": Trial('{"enable_multithread_load": true, "num_threads": 2}'),
    "ignore_patterns": Trial("*.bin"),
    "safetensors_load_strategy": Trial("eager"),
    "safetensors_prefetch_num_threads": Trial("2", {"safetensors_load_strategy": "prefetch"}),
    "safetensors_prefetch_block_size": Trial("1048576", {"safetensors_load_strategy": "prefetch"}),
    "use_tqdm_on_load": Trial("false"),
    "pt_load_map_location": Trial("cpu"),
    "max_parallel_loading_workers": Trial("2"),
    "model_impl": Trial("transformers"),
    "generation_config": Trial("vllm"),
    "override_generation_config": Trial('{"temperature": 0.5}'),
    "runner": Trial("generate"),
    "convert": Trial("none"),
    "dtype": Trial("bfloat16"),
    "quantization": "needs quantized weights, or a quantization that a GPU does",
    "quantization_config": "needs quantized weights, or a quantization that a GPU does",
    "allow_deprecated_quantization": Trial("true", about="its effect needs a model with such quantized weights"),
    "seed": Trial("7"),
    "max_model_len": Trial("512"),
    "max_logprobs": Trial("5"),
    "logprobs_mode": Trial("processed_logprobs"),
    "use_fp64_gumbel": Trial("true"),
    "enforce_eager": Trial("true"),
    "enable_prompt_embeds": Trial("true"),
    "enable_return_routed_experts": Trial("true"),
    "return_sampling_mask": Trial("true"),
    "enable_trace_replay": Trial("true"),
    "logits_processors": Trial("engines.vllm.sampling:TypicalLogitsProcessor"),
    "io_processor_plugin": "is for models that make no text",
    "pooler_config": "is for models that make no text",
    "renderer_num_workers": Trial("2"),
    "allowed_local_media_path": _of_media("{directory}"),
    "allowed_media_domains": _of_media("example.com"),
    # Generated text.
    "reasoning_parser": Trial("granite"),
    "reasoning_parser_plugin": Trial("{plugin}"),
    "reasoning_config": Trial('{"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}'),
    "structured_outputs_config": Trial('{"backend": "xgrammar"}'),
    "aux_output_config": Trial('{"max_bytes": 1048576}'),
    "speculative_config": Trial('{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}'),
    "spec_method": Trial("ngram", {"spec_tokens": "2"}),
    "spec_model": Trial("{model}", {"spec_method": "draft_model", "spec_tokens": "2"}),
    "spec_tokens": Trial("3", {"spec_method": "ngram"}),
    "per_request_spec_decode_metrics": Trial("summary", {"spec_method": "ngram", "spec_tokens": "2"}),
    "watermark_config": Trial('{"key": "1"}'),
    "diffusion_config": "is for models that make text by diffusion",
    "engram_config": "is for models with engrams",
    # Memory and cache.
    "block_size": Trial("32"),
    "gpu_memory_utilization": Trial("0.05", without=("kv_cache_memory_bytes",)),
    "kv_cache_memory_bytes": Trial(str(32 << 20)),
    "num_gpu_blocks_override": Trial("200"),
    "kv_cache_dtype": Trial("fp8"),
    "kv_cache_dtype_skip_layers": Trial("0", {"kv_cache_dtype": "fp8"}),
    "enable_prefix_caching": Trial("false"),
    "prefix_caching_hash_algo": Trial("xxhash"),
    "prefix_cache_retention_interval": Trial("1024"),
    "prefix_match_unit": Trial("128", {"block_size": "128"}),
    "disable_sliding_window": Trial("true", about="it is for models with a sliding window"),
    "swa_bounded_replay": Trial("false", about="it is for models with a sliding window"),
    "disable_hybrid_kv_cache_manager": Trial("true"),
    "kv_sharing_fast_prefill": Trial("true"),
    "kv_cache_metrics": Trial("true"),
    "kv_cache_metrics_sample": Trial("0.5", {"kv_cache_metrics": "true"}),
    "kv_offloading_size": Trial("0.1"),
    "kv_offloading_backend": Trial("native", {"kv_offloading_size": "0.1"}),
    "kv_transfer_config": Trial(
        '{"kv_connector": "ExampleConnector", "engine_id": "e", "kv_role": "kv_both",'
        ' "kv_connector_extra_config": {"shared_storage_path": "{directory}"}}'
    ),
    "kv_events_config": Trial('{"enable_kv_cache_events": true, "publisher": "null"}'),
    "ec_transfer_config": MEDIA,
    "ec_manager_config": _of_media('{"manager_config": {}}'),
    "offload_backend": _on_gpus("uva"),
    "cpu_offload_gb": Trial("0.1"),
    "cpu_offload_params": _on_gpus("mlp"),
    "offload_group_size": Trial("2", {"offload_backend": "prefetch"}),
    "offload_num_in_group": Trial("1", {"offload_backend": "prefetch", "offload_group_size": "2"}),
    "offload_prefetch_step": Trial("2", {"offload_backend": "prefetch", "offload_group_size": "2"}),
    "offload_params": Trial("mlp", {"offload_backend": "prefetch", "offload_group_size": "2"}),
    "enable_sleep_mode": Trial("true"),
    "sleep_mode_offload_cudagraph": Trial("true", {"enable_sleep_mode": "true"}),
    "sleep_preserve_parameter_names": Trial("lm_head.weight", {"enable_sleep_mode": "true"}),
    "enable_cumem_allocator": Trial("true"),
    "enable_nccl_comm_suspend": Trial("true"),
    # The schedule.
    "max_num_batched_tokens": Trial("1024"),
    "max_num_scheduled_tokens": Trial("512"),
    "max_num_seqs": Trial("4"),
    "max_num_active_seqs": Trial("2"),
    "max_num_queued_reqs": Trial("8"),
    "max_num_queued_tokens": Trial("4096"),
    "long_prefill_token_threshold": Trial("128"),
    "long_prefill_token_threshold_adaptive": Trial("true"),
    "enable_chunked_prefill": Trial("false"),
    "disable_chunked_mm_input": _of_media("true"),
    "scheduler_reserve_full_isl": Trial("false"),
    "prefill_schedule_interval": Trial("2"),
    "watermark": Trial("0.05"),
    "scheduling_policy": Trial("priority"),
    "scheduler_cls": Trial("vllm.v1.core.sched.scheduler.Scheduler"),
    "async_scheduling": Trial("false"),
    "stream_interval": Trial("3"),
    "disable_cascade_attn": Trial("false"),
    # LoRA.
    "enable_lora": Trial("true"),
    "max_loras": Trial("2", {"enable_lora": "true"}),
    "max_lora_rank": Trial("8", {"enable_lora": "true"}),
    "max_cpu_loras": Trial("6", {"enable_lora": "true"}),
    "lora_dtype": Trial("bfloat16", {"enable_lora": "true"}),
    "lora_target_modules": Trial("q_proj,v_proj", {"enable_lora": "true"}),
    "fully_sharded_loras": Trial("true", {"enable_lora": "true"}),
    "specialize_active_lora": Trial("true", {"enable_lora": "true"}),
    "default_mm_loras": _of_media('{"image": "{model}"}', enable_lora="true"),
    "enable_tower_connector_lora": _of_media("true", enable_lora="true"),
    "enable_mixed_moe_lora_format": Trial("true", {"enable_lora": "true"}, about=f"it {EXPERTS}"),
    "enable_moe_shared_loras": Trial("true", {"enable_lora": "true"}, about=f"it {EXPERTS}"),
    "max_lora_cls_labels": "is for models that classify",
    # Several devices and machines.
    "tensor_parallel_size": Trial("2"),
    "pipeline_parallel_size": f"{GPU}: on a CPU, vLLM fails at the first request",
    "data_parallel_size": Trial("2"),
    "prefill_context_parallel_size": Trial("2"),
    "decode_context_parallel_size": Trial("2", {"tensor_parallel_size": "2"}),
    "distributed_executor_backend": Trial("uni"),
    "dcp_comm_backend": _on_gpus("a2a"),
    "dcp_q_replicate": _on_gpus("true"),
    "dcp_kv_cache_interleave_size": _on_gpus("2"),
    "cp_kv_cache_interleave_size": _on_gpus("2"),
    "device_ids": _on_gpus("0"),
    "numa_bind": _on_gpus("true"),
    "numa_bind_nodes": _on_gpus("0", numa_bind="true"),
    "numa_bind_cpus": _on_gpus("0", numa_bind="true"),
    "disable_custom_all_reduce": _on_gpus("true"),
    "disable_nccl_for_dp_synchronization": _on_gpus("true"),
    "enable_shm_tensor_arena": Trial("true"),
    "enable_batch_sharded_sampling": _on_gpus("false"),
    "enable_hc_sp": Trial("true", about="its effect needs several GPUs and a model with hyper-connections"),
    "distributed_timeout_seconds": Trial("600"),
    "cpu_distributed_timeout_seconds": Trial("600"),
    **dict.fromkeys(MANY_MACHINES, MACHINES),
    "data_parallel_backend": Trial("mp"),
    "ray_workers_use_nsight": "needs Ray's executor, a GPU and NVIDIA's profiler",
    "dp_sync_interval": Trial("8"),
    "enable_dbo": _on_gpus("true"),
    "ubatch_size": _on_gpus("2"),
    "dbo_decode_token_threshold": _on_gpus("16"),
    "dbo_prefill_token_threshold": _on_gpus("256"),
    "worker_cls": Trial("vllm.v1.worker.cpu_worker.CPUWorker"),
    "worker_extension_cls": Trial("tests.engine_arguments.WorkerExtension"),
    "_api_process_count": Trial("2"),
    "_api_process_rank": Trial("1"),
    # Models with experts.
    "enable_expert_parallel": Trial("true", about=f"it {EXPERTS}"),
    "enable_ep_weight_filter": Trial("true", about=f"it {EXPERTS}"),
    "moe_backend": Trial("triton", about=f"it {EXPERTS}"),
    "all2all_backend": Trial("naive", about=f"it {EXPERTS}"),
    "enable_elastic_ep": f"{EXPERTS}, on several GPUs with Ray",
    "elastic_ep_max_dp_size": f"{EXPERTS}, on several GPUs with Ray",
    "eplb_config": Trial('{"window_size": 500}', about=f"it {EXPERTS}"),
    "enable_eplb": f"{EXPERTS}, on several GPUs",
    "expert_placement_strategy": Trial("round_robin", about=f"it {EXPERTS}"),
    # Kernels and compilation.
    "compilation_config": Trial('{"mode": 0}'),
    "optimization_level": Trial("1"),
    "performance_mode": Trial("interactivity"),
    "cudagraph_capture_sizes": _on_gpus("1,2,4"),
    "max_cudagraph_capture_size": _on_gpus("4"),
    "cudagraph_metrics": Trial("true"),
    "attention_config": _on_gpus('{"flash_attn_version": 2}'),
    "attention_backend": Trial("CPU_ATTN"),
    "kernel_config": _on_gpus('{"enable_cutedsl_warmup": false}'),
    "ir_op_priority": Trial('{"rms_norm": ["native"]}'),
    "linear_backend": _on_gpus("triton"),
    "sparse_indexer_topk_backend": _on_gpus("torch"),
    "enable_flashinfer_autotune": _on_gpus("false"),
    "jit_monitor_mode": _on_gpus("error"),
    "jit_monitor_verbose": _on_gpus("true"),
    "gdn_prefill_backend": _on_gpus("triton"),
    "kda_prefill_backend": _on_gpus("triton"),
    "kda_decode_backend": _on_gpus("triton"),
    "mamba_config": Trial('{"backend": "triton"}'),
    "mamba_cache_dtype": Trial("float32", about=f"it {MAMBA}"),
    "mamba_ssm_cache_dtype": Trial("float32", about=f"it {MAMBA}"),
    "mamba_block_size": Trial("16", about=f"it {MAMBA}"),
    "mamba_cache_mode": Trial("align", about=f"it {MAMBA}"),
    "mamba_backend": Trial("triton", about=f"it {MAMBA}"),
    "mamba_ssu_algorithm": Trial("simple", about=f"it {MAMBA}"),
    "enable_mamba_shared_prefix_checkpoint": Trial("true", about=f"it {MAMBA}"),
    "enable_mamba_cache_stochastic_rounding": Trial("true", about=f"it {MAMBA}"),
    "mamba_cache_philox_rounds": Trial("4", about=f"it {MAMBA}"),
    "use_replayssm": Trial("true", about=f"it {MAMBA}"),
    "replayssm_buffer_len": Trial("8", about=f"it {MAMBA}"),
    # Images, audio and video.
    "language_model_only": _of_media("true"),
    "limit_mm_per_prompt": _of_media('{"image": 2}'),
    "enable_mm_embeds": _of_media("true"),
    "interleave_mm_strings": _of_media("true"),
    "media_io_kwargs": _of_media('{"video": {"num_frames": 8}}'),
    "mm_processor_kwargs": _of_media('{"num_crops": 2}'),
    "mm_processor_cache_gb": _of_media("1"),
    "mm_processor_cache_type": _of_media("shm"),
    "mm_hasher_algorithm": _of_media("sha256"),
    "mm_shm_cache_max_object_size_mb": _of_media("64"),
    "mm_encoder_only": MEDIA,
    "mm_encoder_tp_mode": _of_media("data"),
    "mm_encoder_attn_backend": _of_media("TORCH_SDPA"),
    "mm_encoder_attn_dtype": _of_media("fp8"),
    "mm_encoder_fp8_scale_path": _of_media("{directory}/scales.json"),
    "mm_encoder_fp8_scale_save_path": _of_media("{directory}/scales.json"),
    "mm_encoder_fp8_scale_save_margin": _of_media("1.2"),
    "skip_mm_profiling": _of_media("true"),
    "video_pruning_rate": _of_media("0.3"),
    "video_pruning_method": _of_media("evs", video_pruning_rate="0.3"),
    "mm_tensor_ipc": _of_media("torch_shm"),
    "mm_processor_device": _of_media("cpu"),
    "mm_ipc_gpu_memory_gb": _of_media("0.5"),
    "mm_device_do_normalize": _of_media("true"),
    "enable_mm_processor_stats": Trial("true"),
    # Logs, metrics, traces.
    "disable_log_stats": Trial("true"),
    "enable_log_requests": Trial("true"),
    "aggregate_engine_logging": Trial("true"),
    "logging_config": Trial('{"log_level": "DEBUG"}'),
    "log_level": Trial("DEBUG"),
    "log_config_file": Trial("{logging}"),
    "show_hidden_metrics_for_version": Trial("0.31"),
    "otlp_traces_endpoint": Trial("http://127.0.0.1:9/v1/traces"),
    "collect_detailed_traces": Trial("all", {"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}),
    "custom_histogram_buckets": Trial('{"inter_token_latency": [0.1, 1.0]}'),
    "enable_layerwise_nvtx_tracing": _on_gpus("true"),
    "enable_mfu_metrics": Trial("true"),
    "enable_logging_iteration_details": Trial("true"),
    "profiler_config": Trial('{"profiler": "torch", "torch_profiler_dir": "{directory}"}'),
    # The rest.
    "additional_config": Trial('{"anything": 1}'),
    "fault_tolerance_config": Trial('{"engine_recovery_timeout_sec": 60}'),
    "enable_fault_tolerance": Trial("true"),
    "tokens_only": Trial("true"),
    "shutdown_timeout": Trial("2"),
    "weight_transfer_config": Trial('{"backend": "ipc"}'),
    "fail_on_environ_validation": Trial("true"),
    # vLLM's OpenAI front end.
    "chat_template": Trial("{template}"),
    "chat_template_content_format": Trial("string"),
    "trust_request_chat_template": Trial("true"),
    "response_role": Trial("helper"),
    "default_chat_template_kwargs": Trial('{"enable_thinking": false}'),
    "trust_request_mm_kwargs": Trial("true"),
    "return_tokens_as_token_ids": Trial("true"),
    "enable_auto_tool_choice": Trial("true", {"tool_call_parser": "hermes"}),
    "exclude_tools_when_tool_choice_none": Trial("true"),
    "tool_call_parser": Trial("hermes"),
    "tool_parser_plugin": Trial("{plugin}"),
    "tool_strict_level": Trial("function"),
    "tool_server": Trial("demo"),
    "enable_prompt_tokens_details": Trial("true"),
    "enable_force_include_usage": Trial("true"),
    "sse_keep_alive_interval": Trial("5"),
    "anthropic_disabled_thinking_effort": Trial("none"),
    "fingerprint_mode": Trial("custom", {"fingerprint_value": "fp"}),
    "fingerprint_value": Trial("fp", {"fingerprint_mode": "custom"}),
    "cohere_format": Trial("cmd3"),
    "log_error_stack": Trial("true"),
}


def filled(text: str, paths: Mapping[str, Path]) -> str:
    """Return a value with the paths filled in."""
    for name, path in paths.items():
        text = text.replace("{" + name + "}", str(path))
    return text


class WorkerExtension:
    """A class for the trial of `worker_extension_cls`."""


def files(directory: Path) -> dict[str, Path]:
    """Return the paths that values refer to.

    They are a model, a chat template, an empty module, a logging configuration, and a directory for other files.
    """
    template, plugin, logging = (directory / name for name in ("template.jinja", "plugin.py", "logging.json"))
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    plugin.write_text("")
    logging.write_text('{"version": 1, "disable_existing_loggers": false}')
    own = {"template": template, "plugin": plugin, "logging": logging}
    return {"directory": directory, "model": prepare_small_model(), **own}


def requests(model: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the path and the body of one request of each kind."""
    lmi = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}
    chat = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
    completion = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    return {
        "LMI": ("/invocations", lmi),
        "LMI, streamed": ("/invocations", {**lmi, "stream": True}),
        "LMI, one token": ("/invocations", {**lmi, "parameters": {"max_new_tokens": 1}}),
        "chat": ("/v1/chat/completions", chat),
        "completions, streamed": ("/v1/completions", completion),
        # Because of this field, vLLM's own front end answers the request.
        "vLLM's chat": ("/v1/chat/completions", {**chat, "add_generation_prompt": True}),
    }


def ask(client: httpx.Client, model: str, names: Sequence[str]) -> str:
    """Send requests. Return the error of the first wrong answer, or an empty string."""
    for name in names:
        path, body = requests(model)[name]
        try:
            answer = client.post(path, json=body, params={"model_name": model}, timeout=REQUEST_SECONDS)
        except httpx.TransportError as error:
            return f"{name}: {type(error).__name__}"
        if answer.status_code != 200 or '"error"' in answer.text or not answer.text:
            return f"{name}: {answer.status_code} {answer.text}"
    return ""


_BY_SLIPWAY = "not served by this version of Slipway; "  # Part of some error messages about settings.


_LATE = "vLLM: not ready"


class Slipway:
    """A running server. Each trial loads a model into this server."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._paths, self._count = directory, files(directory), 0
        self._start()

    def _start(self) -> None:
        environment = {
            "SAGEMAKER_MULTI_MODEL": "true",
            "HF_MODULES_CACHE": str(self._directory / "modules"),
            **ANY_CORE,
        }
        self._server = Server(None, self._directory / "server.log", environment, name=None)
        self._server.client.timeout = httpx.Timeout(LOAD_SECONDS)
        self._server.wait_until_ready()

    def stop(self) -> None:
        self._server.stop()

    def results(self, names: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
        """Yield each option, whether its result is as expected, and the text to record.

        Options are tried together if vLLM accepts them and they do not contradict each other. If a request fails, each
        half of these options is tried by itself.
        """
        taken = []
        for name in names:
            options = _trial(name).options(name, self._paths)
            if name in REFUSED or refused_at_once(options, self._paths["model"]):
                yield name, *self._alone(name, options)
            else:
                taken.append(name)
        while taken:
            together = self._first_that_agree(taken)
            taken = [name for name in taken if name not in together]
            yield from self._together(together)

    def _first_that_agree(self, names: Sequence[str]) -> list[str]:
        """Return the first of these options, with further options that do not contradict it or each other."""
        merged: dict[str, str] = {}
        found: list[str] = []
        for name in names:
            trial = _trial(name)
            options = trial.options(name, self._paths)
            alone = trial.without or any(merged.get(option, text) != text for option, text in options.items())
            if found and (alone or len(found) == AT_ONCE):
                continue
            merged |= options
            found.append(name)
            if trial.without:
                break
        return found

    def _together(self, names: list[str]) -> Iterator[tuple[str, bool, str]]:
        options: dict[str, str] = {}
        for name in names:
            options |= _trial(name).options(name, self._paths)
        if len(names) == 1:
            yield names[0], *self._alone(names[0], options)
            return
        tried = self._tried(options)
        if tried.problem:
            half = len(names) // 2
            yield from self._together(names[:half])
            yield from self._together(names[half:])
            return
        for name in names:
            yield name, True, tried.works(name)

    def _alone(self, name: str, options: Mapping[str, str]) -> tuple[bool, str]:
        tried = self._tried(options)
        if not tried.problem:
            return True, tried.works(name)
        if _BY_SLIPWAY in tried.problem:
            return True, f"refused by Slipway: {tried.problem.partition(_BY_SLIPWAY)[2].partition(' (served')[0]}"
        theirs = tried_on_vllm(options, self._paths["model"], self._directory / "vllm.log")
        if not theirs or theirs.startswith(_LATE):
            return False, f"FAILS, unlike on `vllm serve` ({theirs or 'it works'}): {tried.problem}"
        if f"option.{name}" in tried.refusal:
            return True, "refused by both"
        return False, f"FAILS, as on `vllm serve`: {tried.problem}"

    def _tried(self, options: Mapping[str, str]) -> Tried:
        self._count += 1
        model, server = f"m{self._count}", self._server
        own = {"model_id": self._paths["model"], "rolling_batch": "vllm", **options}
        model_dir = write_model(self._directory / model / "model", **own)
        logged = len(server.log_text())
        try:
            answer = server.client.post("/models", json={"model_name": model, "url": str(model_dir)})
        except httpx.TransportError as error:
            server.stop()
            self._start()
            return Tried(f"it was not loaded ({type(error).__name__})")
        if answer.status_code != 200:
            message = answer.json()["message"]
            return Tried(_reason(message), refusal=message)
        try:
            problem = ask(server.client, model, list(requests(model)))
            counted = f'slipway_generated_tokens_total{{model="{model}"}}' in server.client.get("/metrics").text
        finally:
            server.client.delete(f"/models/{model}")
        return Tried(problem or ("" if counted else "/metrics has none of its tokens"), log=server.log_text()[logged:])


@dataclass(frozen=True)
class Tried:
    """The result of loading a model and sending requests to it."""

    problem: str
    """The first error, or an empty string."""
    refusal: str = ""
    """The complete message if the model could not be loaded."""
    log: str = ""

    def works(self, name: str) -> str:
        """Return the text to record for an option that caused no error."""
        if re.search(rf"option\.{name} \(.*?\) is ignored: ", self.log):
            return "no effect"
        about = _trial(name).about
        return f"works; {about}" if about else "works"


def _trial(name: str) -> Trial:
    trial = TRIALS[name]
    assert isinstance(trial, Trial), f"{name} {trial}"
    return trial


def _reason(message: str) -> str:
    """Return the text of a refusal without the model's name and without other options' names."""
    return re.sub(r"^model \w+ cannot be loaded: (vLLM cannot load [^:]*: )?", "", " ".join(message.split()))


def _serve_arguments(options: Mapping[str, str], model: Path) -> list[str]:
    return ["--model", str(model), "--served-model-name", MODEL, "--enforce-eager", *command_line(options)]


def refused_at_once(options: Mapping[str, str], model: Path) -> str:
    """Return the reason if vLLM refuses arguments before it starts an engine, or an empty string."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    try:
        # vLLM modifies the defaults, which the parser keeps.
        parsed = copy.deepcopy(_parser().parse_args(_serve_arguments(options, model)))
        AsyncEngineArgs.from_cli_args(parsed).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except (Exception, SystemExit) as error:
        return str(error)
    return ""


def tried_on_vllm(options: Mapping[str, str], model: Path, log: Path) -> str:
    """Return the error if vLLM's own server fails with these arguments, or an empty string."""
    if refusal := refused_at_once(options, model):
        return refusal
    port = free_port()
    arguments = [*_serve_arguments(options, model), "--port", str(port)]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments]
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=REQUEST_SECONDS) as client,
        Process("vLLM", command, log, environment={"HF_HUB_OFFLINE": "1"} | ANY_CORE) as process,
    ):

        def ready() -> bool:
            with suppress(httpx.TransportError):
                return client.get("/health").status_code == 200
            return False

        try:
            process.wait_until(ready, LOAD_SECONDS)
        except ServerError as error:
            return str(error).partition(";")[0]
        return ask(client, MODEL, ("chat", "completions, streamed", "vLLM's chat"))


@cache
def _parser() -> Any:
    """Return the parser of `vllm serve`."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser())


def command_line(options: Mapping[str, str]) -> list[str]:
    """Return options as arguments of `vllm serve`. Options that `vllm serve` does not have are left out."""
    actions = {action.dest: action for action in _parser()._actions}
    line: list[str] = []
    for name, text in options.items():
        if (action := actions.get(name)) is None:
            continue
        flag = next(option for option in action.option_strings if option.startswith("--"))
        if action.nargs == 0:
            line.append(flag if text == "true" else flag.replace("--", "--no-", 1))
        elif action.nargs in ("+", "*"):
            line += [flag, *text.split(",")]
        else:
            line.append(f"{flag}={text}")
    return line


def results_in(page: str) -> dict[str, str]:
    """Return the results in the page's table, by argument."""
    table = page.partition(START)[2].partition(END)[0]
    rows = re.findall(r"^\| (.*) \| (`.*`) \|$", table, re.MULTILINE)
    return {name: result for result, names in rows for name in re.findall(r"`(\w+)`", names)}


def with_results(page: str, new: Mapping[str, str]) -> str:
    """Return the page with additional results. Its table has one row per result, in alphabetical order."""
    known = {name: result for name, result in results_in(page).items() if name in TRIALS} | new
    groups: dict[str, list[str]] = {}
    for name in sorted(known):
        groups.setdefault(known[name], []).append(f"`{name}`")
    lines = "".join(f"| {result} | {', '.join(names)} |\n" for result, names in sorted(groups.items()))
    return page.partition(START)[0] + START + HEAD + lines + END + page.partition(END)[2]


def cell(result: str) -> str:
    return " ".join(result.split()).replace("|", "\\|")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Arguments of vLLM to try. Default: all.")] = None,
    page: Annotated[Path, typer.Option(help="Page whose table gets the results.")] = PAGE,
) -> None:
    """Try arguments of vLLM, and write down what came of them."""
    new = {name: cell(f"not tried: it {trial}") for name, trial in TRIALS.items() if isinstance(trial, str)}
    failed = False
    page.write_text(with_results(page.read_text(), new))
    with tempfile.TemporaryDirectory() as directory:
        slipway = Slipway(Path(directory))
        try:
            wanted = names or [name for name, trial in TRIALS.items() if isinstance(trial, Trial)]
            for name, fits, result in slipway.results(wanted):
                failed |= not fits
                print(f"{name}: {result}", flush=True)
                page.write_text(with_results(page.read_text(), {name: cell(result)}))
        finally:
            slipway.stop()
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)
