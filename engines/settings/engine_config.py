"""The settings of an engine: which model it loads, and how it runs the model. Names and defaults are as in LMI."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from engines.settings.declaration import Setting, declared, setting
from engines.settings.parsers import (
    ADAPTERS,
    ASSIGNMENTS,
    BOOLEAN,
    DTYPE,
    MILLISECONDS,
    NAMES,
    PROMPT,
    SECONDS,
    TEXT,
    choice,
    integer,
    integer_or,
    one_of,
    size,
)

RollingBatch = Literal["auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable"]
Streaming = Literal["false", "true", "huggingface"]
Task = Literal["auto", "generate", "embed", "classify"]

# The maximum numbers of images, videos and audio clips in a request, unless `option.limit_mm_per_prompt` is set. vLLM's
# default is 999 of each. If a model treats images and videos alike, vLLM calls both of them `vision_chunk`.
DEFAULT_MEDIA_COUNTS = {"image": 100, "vision_chunk": 100, "video": 4, "audio": 4}

DEFAULT_MAX_LORAS = 4  # LMI's default for `option.max_loras`. vLLM's default is 1.

LMI_ROLLING_BATCH_SIZE = 256  # LMI's default for `option.max_rolling_batch_size`.

# Tasks that are answered with generated text.
_GENERATION = ("generate", "text-generation", "text2text-generation", "conversational", "image-text-to-text")
_TASKS: Mapping[str, Any] = {
    "auto": "auto",
    **dict.fromkeys(_GENERATION, "generate"),
    **dict.fromkeys(("embed", "embedding", "text-embedding", "feature-extraction", "sentence-similarity"), "embed"),
    **dict.fromkeys(("classify", "text-classification", "text-ranking", "rerank"), "classify"),
}

MODEL_ID = Setting(
    "option.model_id",
    TEXT,
    aliases=("option.model",),
    variables=("HF_MODEL_ID",),
    doc="Hub id, `s3://bucket/prefix/`, or directory",
)
LORA_MODULES = Setting(
    "option.lora_modules",
    ADAPTERS,
    shows_default=False,
    doc="[Adapters](adapters.md) to register at the start, as in vLLM's `--lora-modules`",
)
TENSOR_PARALLEL_DEGREE = Setting(
    "option.tensor_parallel_degree",
    integer_or("max", 1),
    aliases=("option.tensor_parallel_size",),
    variables=("TENSOR_PARALLEL_DEGREE",),
    doc="[GPUs that share each layer](#how-many-gpus-share-a-model)",
)
DEVICES = Setting(
    "load_on_devices",
    TEXT,
    doc="[GPUs](#which-gpus-a-model-runs-on) such as `0;2`, or `cpu`; default or `*`: all",
)
ENVIRONMENT = Setting(
    "option.env",
    ASSIGNMENTS,
    doc="Variables of a custom handler's workers; with an engine, they are set in the server's process for all models",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One model, and how an engine runs it."""

    name: str  # The model's name in routes and in /ping.
    model_dir: Path  # The directory of serving.properties.
    # The model that the engine loads: a directory or a hub id.
    model_id: str = field(metadata=MODEL_ID.metadata)
    revision: str | None = setting("option.revision", TEXT, doc="Branch, tag or commit on the hub")
    trust_remote_code: bool = setting(
        "option.trust_remote_code", BOOLEAN, "false", doc="Run Python code that comes with the model"
    )
    rolling_batch: RollingBatch = setting(
        "option.rolling_batch",
        choice({name: name for name in get_args(RollingBatch)} | {"tnx": "vllm"}),
        "auto",
        doc="`auto`: vLLM, or [dynamic batch](dynamic_batch.md) if vLLM is not installed; `disable`: dynamic batch; "
        "others: vLLM, with [that backend's parameters](lmi.md)",
    )
    # The number of prompts, or of calls to a custom handler, that run together as one dynamic batch.
    batch_size: int = setting(
        "batch_size",
        integer(1, 100_000),
        "1",
        aliases=("max_dynamic_batch_size", "option.batch_size"),
        first_counts=True,
        doc="Maximum number of prompts in a dynamic batch. A value above 1 switches dynamic batching on. Custom "
        "handler: maximum number of calls in a batch",
    )
    max_batch_delay: float = setting(
        "max_batch_delay",
        MILLISECONDS,
        "100",
        doc="How long the first request of a dynamic batch waits for other requests",
    )
    enable_streaming: Streaming = setting(
        "option.enable_streaming",
        choice({word: word for word in get_args(Streaming)}),
        "false",
        doc="Stream answers of the dynamic batch",
    )
    # The number of sequences that run together. None: the engine's default.
    max_rolling_batch_size: int | None = setting(
        "option.max_rolling_batch_size",
        integer(1, 1_000_000),
        aliases=("option.max_num_seqs",),
        doc="Maximum number of sequences that run at the same time in each copy; default: "
        "[vLLM's default](operations.md#overload)",
    )
    # The model's names for OpenAI's clients, in addition to `name`. Answers carry the first name.
    served_model_names: tuple[str, ...] = setting(
        "option.served_model_name",
        NAMES,
        unset=(),
        doc="Names of the model for OpenAI's clients; default: the model's name",
    )
    # Whether the engine may enforce only a part of a JSON schema if it cannot enforce the whole schema. A `strict`
    # request never allows that. False: only OpenAI's forms without `strict` allow it.
    partial_schemas: bool = setting(
        "option.partial_schemas",
        BOOLEAN,
        "false",
        doc="Enforce a JSON schema [in part](constraints.md#schemas-that-cannot-be-held-whole) if the whole schema "
        "cannot be enforced",
    )
    # Longer prompts are refused. None: only the model's context limits prompts.
    max_prompt_tokens: int | None = setting(
        "option.max_prompt_tokens", integer(1), doc="Maximum number of tokens of a prompt; default: the model's context"
    )
    # Whether LoRA adapters can be registered and named in requests.
    enable_lora: bool = setting("option.enable_lora", BOOLEAN, "false", doc="Serve [LoRA adapters](adapters.md)")
    # The adapters to register at the start, by their names: a directory, an `s3://` URL or an `hf://` URL.
    adapters: Mapping[str, str] = field(default_factory=dict, metadata=LORA_MODULES.metadata)
    dtype: str = setting(
        "option.dtype",
        DTYPE,
        "auto",
        aliases=("option.data_type",),
        doc="Data type of the weights; for int8 use `option.quantize`",
    )
    # The number of GPUs that share each layer. None: the smallest number that holds the model, or the largest possible
    # number if `tensor_parallel_max` is set.
    tensor_parallel_degree: int | None = field(default=None, metadata=TENSOR_PARALLEL_DEGREE.metadata)
    tensor_parallel_max: bool = False  # Whether the setting is "max", which uses as many GPUs as the model allows.
    # The CUDA indices of the GPUs that the engine may use. The engine uses as many as it needs, beginning with the
    # first. None: all GPUs. Empty: the CPU.
    devices: tuple[int, ...] | None = field(default=None, metadata=DEVICES.metadata)
    pipeline_parallel_degree: int = setting(
        "option.pipeline_parallel_degree",
        integer(1),
        "1",
        aliases=("option.pipeline_parallel_size",),
        variables=("PIPELINE_PARALLEL_DEGREE",),
        doc="Number of pipeline stages: groups of GPUs, each with a part of the layers",
    )
    # The number of copies of the model on vLLM. Each has its own GPUs, or its share of the processors. None: as many as
    # fit on `devices`.
    max_copies: int | None = 1
    min_copies: int | None = None  # The number of copies that must serve before the model is ready. None: all.
    # Whether all copies after the first are loaded at the same time. Otherwise they are loaded one by one.
    parallel_loading: bool = setting(
        "option.parallel_loading", BOOLEAN, "false", doc="Load [copies](#how-many-copies-run) at the same time"
    )
    # A request fails after this many seconds without a new token.
    predict_timeout: float = setting(
        "option.predict_timeout",
        SECONDS,
        "240",
        variables=("PREDICT_TIMEOUT",),
        doc="Time without a new token after which a request fails",
    )
    model_loading_timeout: float = setting(
        "option.model_loading_timeout",
        SECONDS,
        "1800",
        variables=("MODEL_LOADING_TIMEOUT",),
        doc="Maximum time for loading the model",
    )
    # The task for which the model is loaded. "auto": the model's files decide.
    task: Task = setting(
        "option.task",
        one_of(_TASKS),
        "auto",
        variables=("HF_TASK",),
        shows_default=False,
        serves=frozenset(_TASKS.values()),
        advice="A model.py that says `from djl_python.huggingface import handle` serves the other tasks of "
        "transformers' pipelines",
        doc="Kind of model; `auto`: the model's files decide. Names of LMI and transformers (`text-embedding`, ...) "
        "are accepted, too",
    )
    # The method that makes one vector from the tokens' vectors, by vLLM's name. None: the model's files decide.
    pooling: str | None = setting(
        "option.pooling",
        choice({"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST", "last-token": "LAST"}),
        aliases=("pooling",),
        shows_default=False,
        doc="How the tokens' vectors become one vector; default: the model's files decide",
    )
    # The prefix for the texts of requests that name no prefix (`PoolingModel.default_prompt`).
    default_prompt: str | None = setting(
        "option.default_prompt",
        PROMPT,
        shows_default=False,
        doc="Text that is put in front of the texts of requests without `prompt_name`, on TEI's routes and "
        "`/invocations`. TEI's routes then refuse pairs",
    )
    default_prompt_name: str | None = setting(
        "option.default_prompt_name",
        TEXT,
        shows_default=False,
        doc="Name of a prompt in the model's files, in place of `option.default_prompt`",
    )
    djl_engine: bool = False  # Whether the setting `engine` is Rust, OnnxRuntime or PyTorch.
    # How many times a request may be continued after the engine process that ran it has died. After one more death, the
    # request is retried alone. 0: a request is never continued, and fails.
    continue_calls: int = 0
    stall_timeout: float | None = None  # The `limit` of `engines.interface.Progress`, in seconds.
    # Environment variables of the process that runs the engine.
    environment: Mapping[str, str] = field(default_factory=dict, metadata=ENVIRONMENT.metadata)
    # All other `option.<name>` values, which the engine interprets.
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    # The source of each engine argument, such as "environment: OPTION_DTYPE", for error messages.
    engine_argument_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine_options(self) -> str:
        """The names of the given engine arguments, for error messages. Empty if none is given."""
        return ", ".join(f"option.{name}" for name in self.engine_arguments)

    @property
    def rolling_batch_size(self) -> int:
        """The number of sequences that run together. The default is LMI's, which differs from vLLM's."""
        return self.max_rolling_batch_size or LMI_ROLLING_BATCH_SIZE

    @property
    def public_names(self) -> tuple[str, ...]:
        """The names under which OpenAI's clients see the model."""
        return self.served_model_names or (self.name,)


_SETTINGS = declared(EngineConfig)
ROLLING_BATCH = _SETTINGS["rolling_batch"]
BATCH_SIZE = _SETTINGS["batch_size"]
MAX_ROLLING_BATCH_SIZE = _SETTINGS["max_rolling_batch_size"]
DRAFT_MODEL = Setting(
    "option.speculative_draft_model",
    TEXT,
    aliases=("option.speculative_model",),
    doc="Draft model for speculative decoding: directory, hub id or `s3://`. For other methods, use "
    "`option.speculative_config`",
)
DRAFT_LENGTH = Setting(
    "option.speculative_length",
    integer(1),
    aliases=("option.num_speculative_tokens",),
    doc="Number of tokens that the draft model proposes at a time; default: 5",
)
# LMI's settings that are engine arguments with a different name.
ENGINE_ARGUMENTS: Mapping[str, Setting[Any]] = {
    "quantization": Setting(
        "option.quantize",
        TEXT,
        aliases=("option.quantization",),
        doc="Quantization, by the engine's name for it: `awq`, `gptq`, `fp8`, ...; `bitsandbytes` needs "
        "`option.rolling_batch=disable`",
    ),
    "max_num_batched_tokens": Setting(
        "option.max_rolling_batch_prefill_tokens",
        size(1),
        aliases=("option.max_num_batched_tokens",),
        doc="Maximum number of tokens in a step of the engine",
    ),
    "cpu_offload_gb": Setting(
        "option.cpu_offload_gb_per_gpu",
        TEXT,
        aliases=("option.cpu_offload_gb",),
        doc="GiB of the weights that are kept in main memory, for each GPU",
    ),
    DRAFT_MODEL.name: DRAFT_MODEL,
    DRAFT_LENGTH.name: DRAFT_LENGTH,
}
# DJL's engines other than Python serve embedding, reranking and classification. If `engine` names one of them,
# Slipway's answers have the form of that engine's answers.
DJL_ENGINES = ("Rust", "OnnxRuntime", "PyTorch")
_ALL_ENGINES = ("Python", "MPI", *DJL_ENGINES)
ENGINE = Setting(
    "engine",
    one_of({name.lower(): name for name in _ALL_ENGINES}),
    shows_default=False,
    serves=frozenset(_ALL_ENGINES),
    advice="give Python or leave it out: vLLM runs the model",
    doc="With `Rust`, `OnnxRuntime` and `PyTorch`, answers have the form of [DJL's engines](retrieval.md#lmi); vLLM "
    "runs the model",
)
