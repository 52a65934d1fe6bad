"""The settings of a model: names, defaults, allowed values, and their lookup.

Names, aliases and defaults are LMI's. An `option.<name>` that is not here goes to the engine unchanged.
docs/configuration.md explains each setting. A test compares its tables with the options in this module and in `server`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from container.settings.settings import SettingEntry
from container.settings.values import (
    ADAPTERS,
    ASSIGNMENTS,
    BOOLEAN,
    DTYPE,
    FORMATTER,
    FUNCTION_NAME,
    HIDDEN,
    MILLISECONDS,
    NAMES,
    NETWORKS,
    PROMPT,
    SECONDS,
    SECONDS_OR_NEVER,
    STRINGS,
    TEXT,
    Parser,
    Scalar,
    Value,
    choice,
    integer,
    integer_or,
    size,
)
from engines.vllm.arguments.table import ARGUMENTS, WITHOUT_EFFECT

PREFIX = "option."
DEFAULT = "default"  # The source of a default value.
# Unknown names are an error, unless this variable is true.
ALLOW_UNKNOWN = "SERVING_ALLOW_UNKNOWN_SETTINGS"
# The least likeness of a name and the known name that is meant (difflib's ratio). A short name is like many others.
_ALIKE, _SHORT_ALIKE, _SHORT = 0.8, 0.88, 5


@dataclass(frozen=True, slots=True)
class Option:
    """A setting of the model, or of the server."""

    key: str  # The key in serving.properties, including a prefix `option.`.
    parser: Parser
    default: str | None = None  # The default value as text, which the parser reads. None: no default.
    _: KW_ONLY
    # Other keys for this option. Two of them with different values are an error, unless `first_counts` is set.
    aliases: tuple[str, ...] = ()
    # If the key and its aliases have different values, the first one counts, and a warning names the others.
    first_counts: bool = False
    variables: tuple[str, ...] = ()  # Environment variables that count if neither the key nor an alias is given.
    # The field of `ModelSettings`, `HandlerSettings` or `ServerSettings`. None: the key without `option.`.
    field_name: str | None = None
    argument: str | None = None  # The engine argument that takes the value as text, instead of a field.
    shows_default: bool = True  # Reports show the option even if it is not given.
    # The values that the server accepts. It does not start with other values of the parser. None: all values.
    serves: frozenset[Scalar] | None = None
    advice: str = ""  # The remedy for values that are not served.

    @property
    def field(self) -> str:
        return self.field_name or self.key.removeprefix(PREFIX)

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.aliases)

    @property
    def allowed(self) -> str:
        if self.serves is None:
            return self.parser.allowed
        words = (str(value).lower() if isinstance(value, bool) else str(value) for value in self.serves)
        return ", ".join(sorted(words)) or "nothing"


def _one_of(words: Mapping[str, Scalar]) -> Parser:
    """Return a parser of words in any case.

    It returns other text unchanged. `Option.serves` then refuses the text, and the message has the option's advice.
    """
    return Parser(
        lambda text: words.get(text.strip().lower(), text), ", ".join(map(str, dict.fromkeys(words.values())))
    )


def refused(key: str, parser: Parser, serves: tuple[Scalar, ...], advice: str, *variables: str) -> Option:
    """Return an option of LMI. The server starts only with its values in `serves`."""
    served = frozenset(serves)
    return Option(key, parser, variables=variables, shows_default=False, serves=served, advice=advice)


@dataclass(slots=True)
class Lookup:
    """Looks up the values of options, and collects entries of the report, warnings and problems."""

    entries: list[SettingEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    allows_unknown: bool = False  # Unknown names are warnings.

    def value(
        self, option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value] = MappingProxyType({})
    ) -> Scalar | None:
        """Return the value of an option: from its keys in `layer`, else from its variables, else its default.

        Return None if the option has no value. Return None for a wrong value, too, and add it to `problems`.
        """
        given = [(key, layer[key]) for key in option.keys if key in layer]
        given = given or [(option.key, variables[name]) for name in option.variables if name in variables][:1]
        if not given:
            value = None if option.default is None else option.parser(option.default)
            if option.shows_default:
                self.entries.append(SettingEntry(option.key, value, DEFAULT))
            return value
        parsed = [self._parse(option, key, text) for key, text in given]
        if None in parsed:
            return None
        (key, first), value = given[0], parsed[0]
        for (other_key, other), other_value in zip(given[1:], parsed[1:], strict=True):
            if other_value == value:
                continue
            if not option.first_counts:
                self.problems.append(
                    f"{first.describe(key)}, but {other.describe(other_key)}; both are the same option: "
                    "give one of them"
                )
                return None
            self.warnings.append(f"{other_key} ({other.source}) is ignored: {first.describe(key)}")
        self.entries.append(SettingEntry(option.key, value, first.source))
        return value

    def ignore(self, key: str, value: Value, reason: str) -> None:
        """Record a value that has no effect, and warn."""
        self.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
        self.entries.append(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))

    def unknown(self, key: str, value: Value, meant: str = "", *, stops: bool = True) -> None:
        """Add a problem for an unknown name, or a warning if unknown names are allowed.

        Args:
            key: The name.
            value: Its value. It is never shown: the name may be a misspelled name of a secret.
            meant: The known name that is probably meant.
            stops: False: it is a warning in any case.
        """
        hint = f"did you mean {meant}?" if meant else "docs/configuration.md has all names"
        if self.allows_unknown or not stops:
            self.ignore(key, replace(value, text=HIDDEN), f"there is no such setting; {hint}")
        else:
            self.problems.append(
                f"{key} ({value.place}): there is no such setting; {hint} ({ALLOW_UNKNOWN}=true makes this a warning)"
            )

    def replace(self, entry: SettingEntry) -> None:
        self.entries = [entry if other.name == entry.name else other for other in self.entries]

    def _parse(self, option: Option, key: str, given: Value) -> Scalar | None:
        try:
            value = option.parser(given.text)
        except ValueError:
            self.problems.append(f"{given.describe(key)}; allowed: {option.allowed}{_example(option, given.text)}")
            return None
        if option.serves is not None and value not in option.serves:
            self.problems.append(
                f"{given.describe(key)}: not served by this version of Slipway; {option.advice} "
                f"(served: {option.allowed})"
            )
            return None
        return value


def _example(option: Option, text: str) -> str:
    """Return the right value that is probably meant, or an example of one, for the end of a message."""
    completed = [word for word in option.parser.words if word.startswith(text.strip().lower())]
    if meant := completed[0] if len(completed) == 1 else closest(text.strip().lower(), option.parser.words, 0.6):
        return f"; did you mean {meant}?"
    return f"; for example {option.default}" if (option.default or "").isdigit() else ""


def closest(name: str, known: Iterable[str], likeness: float | None = None) -> str:
    """Return the known name that is most like `name`; "" if none is. The prefix `option.` does not count."""
    prefixed, bare = name.startswith(PREFIX), name.removeprefix(PREFIX).lower()
    ordered = sorted(known, key=lambda key: (key.startswith(PREFIX) == prefixed, key))  # the same form goes last
    by_name = {key.removeprefix(PREFIX).lower(): key for key in ordered}
    least = likeness or (_ALIKE if len(bare) > _SHORT else _SHORT_ALIKE)
    return next((by_name[found] for found in difflib.get_close_matches(bare, by_name, 1, least)), "")


def meant_by(key: str, value: Value) -> str:
    """Return the setting of a model that is probably meant by an unknown key; "" if none is.

    It has an effect, and the form of the value's source: a variable's name if a variable has the value.
    """
    bare = key.removeprefix(PREFIX)
    meant = next((name for name in (bare, PREFIX + bare) if name in SUGGESTED), "") or closest(key, SUGGESTED)
    source, _, variable = value.source.partition(": ")
    if not meant or source != "environment":
        return meant
    name = meant.removeprefix(PREFIX)
    name = name if name not in _NAMES_OF_VARIABLES and name != name.lower() else name.upper()
    if not meant.startswith(PREFIX):
        return f"ARGS_{name}"
    return f"SM_VLLM_{name}" if variable.startswith("SM_VLLM_") else f"OPTION_{name}"


@dataclass(frozen=True, slots=True)
class Sources:
    """The texts of all settings by key, each from the most important source that has it."""

    model_dir: Path
    has_model_dir: bool  # False: it is the default, because the given directory was not found.
    variables: Mapping[str, Value]
    server: Mapping[str, Value]
    model: dict[str, Value]
    # Keys of the model from its file, the environment and the management API, for the secure mode.
    given: Mapping[str, Value]
    empty: tuple[str, ...]  # Keys of the file without a value. They count as unset.
    # Fetches the small files of a model on S3 and returns its local directory. Raises SourceError.
    open_remote: Callable[[str], Path]
    is_open: Callable[[str], bool]  # Returns True if a URL names a model that was opened.
    gpus: int
    one_model: bool  # The server starts with this model and no other.
    lookup: Lookup

    def value(self, option: Option) -> Scalar | None:
        return self.lookup.value(option, self.model, self.variables)

    def workers(self) -> dict[str, Value]:
        """Return the model's settings. `gpu.` or `cpu.` forms of the numbers of workers replace the general numbers."""
        device = "gpu" if self.gpus else "cpu"
        keys = (MIN_WORKERS.key, MAX_WORKERS.key)
        return self.model | {key: self.model[own] for key in keys if (own := f"{device}.{key}") in self.model}


_ENGINES = ("auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable")
_OFFLOADING = "`option.kv_offloading_size=<GiB of a copy's GPUs>` keeps KV cache in main memory"
# Tasks that are answered by generated text.
_GENERATION = ("generate", "text-generation", "text2text-generation", "conversational", "image-text-to-text")
_TASKS = {
    "auto": "auto",
    **dict.fromkeys(_GENERATION, "generate"),
    **dict.fromkeys(("embed", "embedding", "text-embedding", "feature-extraction", "sentence-similarity"), "embed"),
    **dict.fromkeys(("classify", "text-classification", "text-ranking", "rerank"), "classify"),
}
_WORKERS = integer(0, 1024)
MODEL_ID = Option("option.model_id", TEXT, aliases=("option.model",), variables=("HF_MODEL_ID",))
ROLLING_BATCH = Option("option.rolling_batch", choice({name: name for name in _ENGINES} | {"tnx": "vllm"}), "auto")
BATCH_SIZE = Option(
    "batch_size", integer(1, 100_000), "1", aliases=("max_dynamic_batch_size", "option.batch_size"), first_counts=True
)
MAX_ROLLING_BATCH_SIZE = Option(
    "option.max_rolling_batch_size", integer(1, 1_000_000), aliases=("option.max_num_seqs",)
)
TASK = Option(
    "option.task",
    _one_of(_TASKS),
    "auto",
    variables=("HF_TASK",),
    shows_default=False,
    serves=frozenset(_TASKS.values()),
    advice="A model.py that says `from djl_python.huggingface import handle` serves the other tasks of transformers' "
    "pipelines",
)
# DJL's engines other than Python serve embedding, reranking and classification. Slipway answers in their form.
DJL_ENGINES = ("Rust", "OnnxRuntime", "PyTorch")
_ALL_ENGINES = ("Python", "MPI", *DJL_ENGINES)
ENGINE = refused(
    "engine",
    _one_of({name.lower(): name for name in _ALL_ENGINES}),
    _ALL_ENGINES,
    "give Python or leave it out: vLLM runs the model",
)
RERANKING = Option("option.reranking", BOOLEAN, "false", aliases=("reranking",), shows_default=False)
DRAFT_MODEL = Option(
    "option.speculative_draft_model", TEXT, aliases=("option.speculative_model",), argument="speculative_draft_model"
)
DRAFT_LENGTH = Option(
    "option.speculative_length", integer(1), aliases=("option.num_speculative_tokens",), argument="speculative_length"
)
# The settings of a model that an engine serves.
SERVED = (
    MODEL_ID,
    Option("option.revision", TEXT),
    Option("option.trust_remote_code", BOOLEAN, "false"),
    ROLLING_BATCH,
    BATCH_SIZE,
    Option("max_batch_delay", MILLISECONDS, "100"),
    Option("option.enable_streaming", choice(("false", "true", "huggingface")), "false"),
    MAX_ROLLING_BATCH_SIZE,
    Option("option.stop_sequence", STRINGS),
    Option("option.output_formatter", FORMATTER),
    Option("option.tgi_compat", BOOLEAN, "false"),
    Option("option.chat_format", choice(("lmi", "openai")), "lmi"),
    Option("option.served_model_name", NAMES),
    Option("option.do_sample_inferred", BOOLEAN, "true"),
    Option("option.token_logprobs", BOOLEAN, "true"),
    Option("option.strict_parameters", BOOLEAN, "false"),
    Option("option.partial_schemas", BOOLEAN, "false"),
    Option("option.max_prompt_tokens", integer(1)),
    Option("option.max_stop_sequences", integer(0, 1024), "4"),
    Option("option.max_best_of", integer(1, 64), "2"),
    Option("option.max_image_pixels", integer(1, 178_956_970), "64000000"),
    Option("option.max_request_pixels", integer(1), "256000000"),
    Option("option.max_media_download_mb", integer(1), "64"),
    Option("option.max_media_memory_mb", integer(1), "4096"),
    Option("option.allowed_media_networks", NETWORKS),
    Option("option.enable_lora", BOOLEAN, "false"),
    Option("option.lora_modules", ADAPTERS, shows_default=False, field_name="adapters"),
    Option("option.dtype", DTYPE, "auto", aliases=("option.data_type",)),
    Option(
        "option.tensor_parallel_degree",
        integer_or("max", 1),
        aliases=("option.tensor_parallel_size",),
        variables=("TENSOR_PARALLEL_DEGREE",),
    ),
    Option("load_on_devices", TEXT, field_name="devices"),
    Option(
        "option.pipeline_parallel_degree",
        integer(1),
        "1",
        aliases=("option.pipeline_parallel_size",),
        variables=("PIPELINE_PARALLEL_DEGREE",),
    ),
    Option("option.parallel_loading", BOOLEAN, "false"),
    Option("option.predict_timeout", SECONDS, "240", variables=("PREDICT_TIMEOUT",)),
    Option("option.model_loading_timeout", SECONDS, "1800", variables=("MODEL_LOADING_TIMEOUT",)),
    Option("option.enable_stateful_sessions", BOOLEAN, "true"),
    Option("option.sessions_expiration", integer(1, 10**9), "1200"),
    Option("option.sessions_path", TEXT),
    Option("option.sessions_s3url", TEXT),
    Option("option.quantize", TEXT, aliases=("option.quantization",), argument="quantization"),
    Option(
        "option.max_rolling_batch_prefill_tokens",
        size(1),
        aliases=("option.max_num_batched_tokens",),
        argument="max_num_batched_tokens",
    ),
    Option("option.cpu_offload_gb_per_gpu", TEXT, aliases=("option.cpu_offload_gb",), argument="cpu_offload_gb"),
    DRAFT_MODEL,
    DRAFT_LENGTH,
    TASK,
    Option(
        "option.pooling",
        choice({"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST", "last-token": "LAST"}),
        aliases=("pooling",),
        shows_default=False,
    ),
    Option("option.normalize", BOOLEAN, "true", aliases=("normalize",), shows_default=False),
    Option("option.sigmoid", BOOLEAN, "true", aliases=("sigmoid",), shows_default=False),
    Option("option.auto_truncate", BOOLEAN, "true", shows_default=False),
    Option("option.max_client_batch_size", integer(1), "32", shows_default=False),
    Option("option.default_prompt", PROMPT, shows_default=False),
    Option("option.default_prompt_name", TEXT, shows_default=False),
)

ENTRY_POINT = Option("option.entryPoint", TEXT, variables=("DJL_ENTRY_POINT",), shows_default=False)
FUNCTION = Option("option.handler", FUNCTION_NAME, "handle", field_name="function")
ASYNC_MODE = Option("option.async_mode", BOOLEAN, "false")
ENVIRONMENT = Option("option.env", ASSIGNMENTS, field_name="environment")
MIN_WORKERS = Option("minWorkers", _WORKERS, "1", aliases=("min_workers",), field_name="min_workers")
MAX_WORKERS = Option("maxWorkers", _WORKERS, "1", aliases=("max_workers",), field_name="max_workers")
# The same for an engine: they are numbers of copies of the model. Without them, the engine's GPUs decide.
COPIES = (replace(MIN_WORKERS, default=None), replace(MAX_WORKERS, default=None))
# The settings of a customer's handler, except the settings that select the handler.
HANDLER_OPTIONS = (
    ASYNC_MODE,
    MIN_WORKERS,
    MAX_WORKERS,
    Option("max_idle_time", SECONDS_OR_NEVER, "60"),
    Option("retry_threshold", integer(0), "0"),
    Option(
        "option.pythonExecutable",
        TEXT,
        aliases=("option.python_executable",),
        variables=("PYTHON_EXECUTABLE",),
        field_name="python_executable",
    ),
    ENVIRONMENT,
    Option("option.enable_venv", BOOLEAN, "false"),
)

MEMORY = tuple(
    Option(f"{device}{key}", integer(0), default, shows_default=False)
    for device in ("", "gpu.", "cpu.")
    for key, default in (("required_memory_mb", None), ("reserved_memory_mb", None if device else "500"))
)
NOT_SERVED = (
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
MODEL_OPTIONS = (*SERVED, ENGINE, RERANKING, ENTRY_POINT, FUNCTION, *HANDLER_OPTIONS, *MEMORY, *NOT_SERVED)
BY_KEY: Mapping[str, Option] = {key: option for option in MODEL_OPTIONS for key in option.keys}

_TRANSFORMERS = (
    "device_map load_in_8bit load_in_4bit low_cpu_mem_usage disable_flash_attn attn_implementation is_peft_model"
)
# Arguments of the engine of `option.rolling_batch=disable`; vLLM ignores them.
DYNAMIC_BATCH_ARGUMENTS = tuple(f"option.{name}" for name in _TRANSFORMERS.split())
TENSORRT_LLM = (
    "tokens_per_block batch_scheduler_policy enable_kv_cache_reuse enable_trt_overlap use_custom_all_reduce "
    "max_num_sequences multi_block_mode use_fused_mlp logits_dtype use_fp8_context_fmha trtllm_checkpoint_path "
    "load_by_shard baichuan_model_version chatglm_model_version gpt_model_version rotary_base rotary_dim "
    "rotary_scaling_type rotary_scaling_factor smoothquant_alpha smoothquant_per_token smoothquant_per_channel "
    "multi_query_mode awq_format awq_calib_size q_format calib_size calib_batch_size"
)
# Settings that LMI's secure mode does not allow.
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
# Names of LMI's former engines: DeepSpeed, FasterTransformer, transformers and Neuron.
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
# Arguments of the script with which LMI quantizes and partitions a model before it is served.
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
# The settings of LMI and of vLLM that have no effect if an engine serves the model, and the reason.
IGNORED: Mapping[str, str] = {
    **{f"option.{name}": reason for name, reason in WITHOUT_EFFECT.items()},
    **{f"option.{name}": reason for reason, names in _IGNORED_OPTIONS.items() for name in names.split()},
    **{f"option.{name}": reason for name, reason in _FORMER.items() if name not in ARGUMENTS},
    "load_on_device": "LMI does not read it either; `load_on_devices` is meant",
    **dict.fromkeys(("log_request_metric", "metrics_aggregation"), "metrics are at /metrics"),
}
# All names of the settings of a model that an engine serves.
KNOWN = frozenset({*BY_KEY, *IGNORED, *(f"{PREFIX}{name}" for name in ARGUMENTS), "job_queue_size"})
# The known names that have an effect.
SUGGESTED = KNOWN - IGNORED.keys() - {key for option in NOT_SERVED for key in option.keys}
_NAMES_OF_VARIABLES = frozenset({"entryPoint"})  # A variable has them in capitals.
