"""The model's settings that Slipway knows: names, what is allowed, what is served.

Names, aliases and defaults are LMI's (contracts/lmi.md 2.7 to 2.14). An `option.<name>` that is not here goes to the
engine unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from container.settings.parsers import (
    ANYTHING,
    BOOLEAN,
    DTYPE,
    FORMATTER,
    MILLISECONDS,
    NAMES,
    SECONDS,
    STRINGS,
    TEXT,
    Parser,
    Scalar,
    choice,
    integer,
    integer_or,
    matching,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of serving.properties, with its prefix if it has one."""

    key: str
    parser: Parser
    meaning: str
    default: str = ""
    """The text that would give the default; empty: no value."""
    aliases: tuple[str, ...] = ()
    """Other keys for the same; two of them with different values are an error, unless `first_counts`."""
    first_counts: bool = False
    """Of the key and its aliases the first that is given counts, with a warning."""
    variables: tuple[str, ...] = ()
    """Environment variables that count when neither key nor alias is given."""
    field: str | None = None
    """The field of `ModelSettings` or `ServerSettings` that takes the value."""
    argument: str | None = None
    """The engine argument that takes the value as text."""
    serves: frozenset[Scalar] | None = None
    """The values that Slipway serves; None: all that the parser allows. Others are refused at start."""
    advice: str = ""
    """What to do instead of a value that is not served."""
    remark: str = ""
    """A warning that goes with any value but those in `quiet`."""
    quiet: frozenset[str] = frozenset()
    """Texts, in lower case, that need no remark."""

    @property
    def ignored(self) -> bool:
        """Whether the value goes nowhere."""
        return self.field is None and self.argument is None

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        if self.serves is None:
            return self.parser.allowed
        return ", ".join(sorted(_word(value) for value in self.serves)) or "nothing"


def _word(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


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


_ASSIGNMENT = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)


def assignments(text: str) -> dict[str, str]:
    """The variables of `K=V,K=V`; a comma without a name after it belongs to the value before.

    Raises:
        ValueError: it does not begin with a name and `=`.
    """
    variables: dict[str, str] = {}
    name = ""
    for part in text.split(","):
        if found := _ASSIGNMENT.fullmatch(part):
            name, variables[found[1]] = found[1], found[2]
        elif name:
            variables[name] += f",{part}"
        else:
            raise ValueError(text)
    return variables


def _environment(text: str) -> str:
    assignments(text)
    return text


ENTRY_POINT = Option(
    key="option.entryPoint",
    parser=TEXT,
    variables=("DJL_ENTRY_POINT",),
    meaning="The handler: a `.py` file of the model directory, a module, or one of LMI's names; without it, `model.py`",
)
FUNCTION = Option(
    key="option.handler",
    parser=matching(re.compile(r"[^\W\d]\w*"), "the name of a function"),
    default="handle",
    field="function",
    meaning="The handler's function",
)

HANDLER_OPTIONS = (
    FUNCTION,
    Option(
        key="option.async_mode",
        parser=BOOLEAN,
        default="false",
        field="async_mode",
        meaning="The function is `async`, and calls of it run together; without a handler of the model's own: "
        "`/invocations` has the schema of LMI's asynchronous handler",
    ),
    Option(
        key="minWorkers",
        parser=integer(0, 1024),
        default="1",
        field="min_workers",
        aliases=("min_workers",),
        meaning="Worker processes that always run; `gpu.minWorkers` or `cpu.minWorkers` go before it on such a machine",
    ),
    Option(
        key="maxWorkers",
        parser=integer(0, 1024),
        default="1",
        field="max_workers",
        aliases=("max_workers",),
        meaning="Worker processes under load, at least `minWorkers`; `gpu.` and `cpu.` as above",
    ),
    Option(
        key="max_idle_time",
        parser=SECONDS,
        default="60",
        field="max_idle_time",
        meaning="Seconds after which an idle worker beyond `minWorkers` ends",
    ),
    Option(
        key="retry_threshold",
        parser=integer(0),
        default="0",
        field="retry_threshold",
        meaning="Crashes and hangs of workers after which the model still counts as healthy",
    ),
    Option(
        key="option.pythonExecutable",
        parser=TEXT,
        field="python_executable",
        aliases=("option.python_executable",),
        variables=("PYTHON_EXECUTABLE",),
        meaning="Interpreter of the workers",
    ),
    Option(
        key="option.env",
        parser=Parser(_environment, "NAME=value, further ones after a comma"),
        field="environment",
        meaning="Environment variables of the workers",
    ),
    Option(
        key="option.enable_venv",
        parser=BOOLEAN,
        default="false",
        field="enable_venv",
        meaning="An environment of the model's own for packages, even without a `requirements.txt`",
    ),
)


PREFIX = "option."
_ENGINES = ("auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable")


def _refused(key: str, parser: Parser, serves: tuple[Scalar, ...], meaning: str, advice: str) -> Option:
    return Option(key=key, parser=parser, serves=frozenset(serves), meaning=meaning, advice=advice)


SERVED = (
    Option(
        key="option.model_id",
        parser=TEXT,
        field="model_id",
        variables=("HF_MODEL_ID",),
        meaning="Hub id, `s3://bucket/prefix/`, or a directory; a relative one is looked for below the model directory",
    ),
    Option(key="option.revision", parser=TEXT, field="revision", meaning="Branch, tag or commit on the hub"),
    Option(
        key="option.trust_remote_code",
        parser=BOOLEAN,
        default="false",
        field="trust_remote_code",
        meaning="Run Python code that comes with the model",
    ),
    Option(
        key="option.rolling_batch",
        parser=choice({name: name for name in _ENGINES} | {"tnx": "vllm"}),
        default="auto",
        field="rolling_batch",
        remark="it runs on vLLM",
        quiet=frozenset(_ENGINES),
        meaning="The engine: `vllm`; `auto` is vLLM, or dynamic batch where vLLM is not installed; `lmi-dist`, "
        "`trtllm` and `scheduler` are vLLM with those backends' parameters, `scheduler` also with transformers' code "
        "of the model; `disable` is dynamic batch",
    ),
    Option(
        key="batch_size",
        parser=integer(1, 100_000),
        default="1",
        field="batch_size",
        aliases=("max_dynamic_batch_size", "option.batch_size"),
        first_counts=True,
        meaning="Prompts of a dynamic batch; above 1 means `option.rolling_batch=disable`. With a custom handler: "
        "calls that it gets together",
    ),
    Option(
        key="max_batch_delay",
        parser=MILLISECONDS,
        default="100",
        field="max_batch_delay",
        meaning="Milliseconds that the first of a dynamic batch waits for others",
    ),
    Option(
        key="option.enable_streaming",
        parser=choice(("false", "true", "huggingface")),
        default="false",
        field="enable_streaming",
        meaning="Stream the answers of the dynamic batch",
    ),
    Option(
        key="option.max_rolling_batch_size",
        parser=integer(1, 1_000_000),
        field="max_rolling_batch_size",
        aliases=("option.max_num_seqs",),
        meaning="Sequences that run together; without it, vLLM's own default for the device",
    ),
    Option(
        key="option.stop_sequence",
        parser=STRINGS,
        field="stop_sequence",
        meaning="Stop strings of every request of the dynamic batch",
    ),
    Option(
        key="option.output_formatter",
        parser=FORMATTER,
        field="output_formatter",
        meaning="Format of answers: `json`, `jsonlines`, `sse`, or a function of the model's `model.py`; without it, "
        "the request decides",
    ),
    Option(
        key="option.tgi_compat",
        parser=BOOLEAN,
        default="false",
        field="tgi_compat",
        meaning="Answer `inputs` with the field names of Text Generation Inference",
    ),
    Option(
        key="option.chat_format",
        parser=choice(("lmi", "openai")),
        default="lmi",
        field="chat_format",
        meaning="How `/invocations` answers `messages`: `lmi` as LMI's rolling batch does, `openai` as vLLM does",
    ),
    Option(
        key="option.served_model_name",
        parser=NAMES,
        field="served_model_name",
        meaning="What OpenAI's clients call the model, several names with commas; without it, the model's name",
    ),
    Option(
        key="option.do_sample_inferred",
        parser=BOOLEAN,
        default="true",
        field="do_sample_inferred",
        meaning="Sampling parameters switch sampling on unless `do_sample` is given",
    ),
    Option(
        key="option.token_logprobs",
        parser=BOOLEAN,
        default="true",
        field="token_logprobs",
        meaning="Compute `log_prob` for each token; false: it is null, and generation is faster",
    ),
    Option(
        key="option.strict_parameters",
        parser=BOOLEAN,
        default="false",
        field="strict_parameters",
        meaning="Refuse unknown generation parameters",
    ),
    Option(
        key="option.max_prompt_tokens",
        parser=integer(1),
        field="max_prompt_tokens",
        meaning="Tokens of the longest prompt that is taken; without it, the model's context alone limits it",
    ),
    Option(
        key="option.max_stop_sequences",
        parser=integer(0, 1024),
        default="4",
        field="max_stop_sequences",
        meaning="Stop sequences of a request on TGI's routes",
    ),
    Option(
        key="option.max_best_of",
        parser=integer(1, 64),
        default="2",
        field="max_best_of",
        meaning="The largest `best_of` on TGI's routes",
    ),
    Option(
        key="option.enable_lora",
        parser=BOOLEAN,
        default="false",
        field="enable_lora",
        meaning="Serve LoRA adapters, on vLLM or by a custom handler; `option.max_loras` (4 without it), "
        "`option.max_lora_rank`, `option.max_cpu_loras`, ... are vLLM's",
    ),
    Option(
        key="option.dtype",
        parser=DTYPE,
        default="auto",
        field="dtype",
        meaning="Type of weights and activations; int8 is not a type here: use `option.quantize`",
    ),
    Option(
        key="option.tensor_parallel_degree",
        parser=integer_or("max", 1),
        field="tensor_parallel_degree",
        aliases=("option.tensor_parallel_size",),
        variables=("TENSOR_PARALLEL_DEGREE",),
        meaning="GPUs that share each layer; `max`: as many as the model allows; without it vLLM takes the fewest that "
        "hold the model",
    ),
    Option(
        key="load_on_devices",
        parser=TEXT,
        field="devices",
        meaning="GPUs that the model may use, such as `0;2`, or `cpu`; without it or with `*`, all. Of those it takes "
        "the ones with the most free memory",
    ),
    Option(
        key="option.pipeline_parallel_degree",
        parser=integer(1),
        default="1",
        field="pipeline_parallel_degree",
        aliases=("option.pipeline_parallel_size",),
        variables=("PIPELINE_PARALLEL_DEGREE",),
        meaning="Groups of devices that share the layers among them",
    ),
    Option(
        key="option.predict_timeout",
        parser=SECONDS,
        default="240",
        field="predict_timeout",
        variables=("PREDICT_TIMEOUT",),
        meaning="Seconds without a new token after which a request fails",
    ),
    Option(
        key="option.model_loading_timeout",
        parser=SECONDS,
        default="1800",
        field="model_loading_timeout",
        variables=("MODEL_LOADING_TIMEOUT",),
        meaning="Seconds that loading may take",
    ),
    Option(
        key="option.enable_stateful_sessions",
        parser=BOOLEAN,
        default="true",
        field="enable_stateful_sessions",
        meaning="Serve stateful sessions on `/invocations`",
    ),
    Option(
        key="option.sessions_expiration",
        parser=integer(1, 10**9),
        default="1200",
        field="sessions_expiration",
        meaning="Seconds that a session lives",
    ),
    Option(
        key="option.sessions_path",
        parser=TEXT,
        field="sessions_path",
        meaning="Directory for sessions; without it, `/dev/shm/djl_sessions`",
    ),
    Option(
        key="option.sessions_s3url",
        parser=TEXT,
        field="sessions_s3url",
        meaning="Where in S3 sessions are kept, so that another container can go on with them",
    ),
    Option(
        key="option.quantize",
        parser=TEXT,
        argument="quantization",
        aliases=("option.quantization",),
        meaning="How weights are quantized, in the engine's words: with vLLM `awq`, `gptq`, `fp8`, ...; `bitsandbytes` "
        "with `option.rolling_batch=disable`",
    ),
    Option(
        key="option.max_rolling_batch_prefill_tokens",
        parser=integer(1),
        argument="max_num_batched_tokens",
        aliases=("option.max_num_batched_tokens",),
        meaning="Tokens in one step of the engine",
    ),
    Option(
        key="option.cpu_offload_gb_per_gpu",
        parser=TEXT,
        argument="cpu_offload_gb",
        aliases=("option.cpu_offload_gb",),
        meaning="GiB of weights, for each GPU, that stay in main memory",
    ),
)

HANDLER = (ENTRY_POINT, *HANDLER_OPTIONS)

NOT_SERVED = (
    _refused("engine", choice(("Python", "MPI")), ("Python", "MPI"), "The runtime", "give Python or leave it out"),
    _refused("option.entry_point", TEXT, (), "No option of LMI", "`option.entryPoint` is meant (OPTION_ENTRYPOINT)"),
    _refused("option.model", TEXT, (), "No option of LMI", "`option.model_id` is meant"),
    _refused("option.s3url", TEXT, (), "`option.model_id` of LMI's first versions", "`option.model_id` takes s3://"),
    _refused("option.bedrock_compat", BOOLEAN, (False,), "Format of Bedrock", "leave it out"),
    Option(
        key="option.task",
        parser=choice(
            {name: name for name in ("auto", "text-embedding", "feature-extraction", "classify", "embed")}
            | {"text-generation": "generate", "generate": "generate"}
        ),
        serves=frozenset({"auto", "generate"}),
        variables=("HF_TASK",),
        meaning="What the model does; `text-generation` is `generate`",
        advice="only text generation is served",
    ),
    _refused("option.lmcache_auto_config", BOOLEAN, (False,), "LMCache", "use `option.kv_transfer_config`"),
    _refused("option.lmcache_config_file", TEXT, (), "LMCache", "use `option.kv_transfer_config`"),
)

ENGINE_ASYNC_MODE = Option(
    key="option.async_mode",
    parser=BOOLEAN,
    default="false",
    field="async_mode",
    meaning="`/invocations` answers in the schema of LMI's asynchronous handler",
)
"""Without a custom handler."""

MEMORY = tuple(
    Option(key=f"{device}{key}", parser=integer(0), default=default, meaning=meaning)
    for device in ("", "gpu.", "cpu.")
    for key, default, meaning in (
        ("required_memory_mb", "", "MiB that the model needs, where it is loaded into a running server"),
        ("reserved_memory_mb", "" if device else "500", "MiB that have to stay free then"),
    )
)
"""`container.models.memory` compares them with what is free."""
MODEL_OPTIONS = (*SERVED, *HANDLER, *MEMORY, *NOT_SERVED, *LEFTOVERS)
BY_KEY: Mapping[str, Option] = {key: option for option in MODEL_OPTIONS for key in (option.key, *option.aliases)}
