"""The settings of one model as the handlers see them: typed and validated, with defaults filled in.

`container.settings.load` makes them from serving.properties and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

RollingBatch = Literal["auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable"]
OutputFormatter = Literal["json", "jsonlines", "sse"]
Streaming = Literal["false", "true", "huggingface"]
ChatFormat = Literal["lmi", "openai"]
Task = Literal["auto", "generate", "embed", "classify"]
VectorFormat = Literal["djl", "vllm"]

# Images, videos and sounds of a request, unless `option.limit_mm_per_prompt` says otherwise; vLLM takes 999 of each.
# `vision_chunk`: vLLM's name for images and videos of models that do not tell them apart.
DEFAULT_MEDIA_COUNTS = {"image": 100, "vision_chunk": 100, "video": 4, "audio": 4}

DEFAULT_MAX_LORAS = 4  # LMI's default of `option.max_loras`. vLLM's is 1.

LMI_ROLLING_BATCH_SIZE = 256  # LMI's default of `option.max_rolling_batch_size`.


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """A customer's handler, which runs in worker processes."""

    entry_point: str  # The absolute path of a `.py` file, or the name of a module.
    function: str = "handle"
    # The properties of the handler's first call: the model's settings without `option.`, all text.
    properties: Mapping[str, str] = field(default_factory=dict)
    min_workers: int = 1
    max_workers: int = 1
    # GPUs of one worker each, such as "0", or "0,1" for two; empty: the CPU. Workers are spread over them.
    devices: tuple[str, ...] = ()
    # Other GPUs are hidden from a worker with one GPU, as they always are from a worker with several.
    sees_own_gpus: bool = False
    # The function is a coroutine function, and calls of it run together (`option.async_mode`).
    async_mode: bool = False
    rolling_batch: bool = False  # The function is called for each step, with all active requests.
    python_executable: str | None = None  # None: the interpreter that runs this process.
    # Environment variables in addition to the variables of this process (`option.env`).
    environment: Mapping[str, str] = field(default_factory=dict)
    # Packages of `requirements.txt` go into a virtual environment of the model's own even if that is unnecessary.
    enable_venv: bool = False
    offline: bool = False  # Install `requirements.txt` without an index (DJL_OFFLINE).
    install_requirements: bool = True  # False: `requirements.txt` is not installed (STANDARD_AUTO_INSTALL_REQ).
    pip_arguments: tuple[str, ...] = ()  # Replace `-r requirements.txt` (STANDARD_PIP_ARGS).
    # Number of crashes or hangs of workers after which they are restarted; with one more the model has failed.
    retry_threshold: int = 0
    max_idle_time: float = 60.0  # Seconds after which an idle worker beyond `min_workers` ends.


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model and how to serve it. Option names are LMI's, without `option.`."""

    name: str  # The model's name in routes and in /ping.
    model_dir: Path  # The directory of serving.properties.
    model_id: str  # The model that the engine loads: a directory or a hub id.
    revision: str | None = None
    trust_remote_code: bool = False
    rolling_batch: RollingBatch = "auto"
    max_rolling_batch_size: int | None = None  # Sequences that run together; None: the engine's default.
    output_formatter: OutputFormatter | None = None
    tgi_compat: bool = False
    async_mode: bool = False  # `/invocations` has the schemas of the asynchronous handler of LMI.
    # How `/invocations` answers chat: in the objects of LMI's rolling batch, or in OpenAI's.
    chat_format: ChatFormat = "lmi"
    # Names of the model for OpenAI's clients, besides `name`; the first is the one in answers.
    served_model_names: tuple[str, ...] = ()
    # Sampling parameters switch sampling on unless `do_sample` says otherwise (LMI 0.32 and later).
    do_sample_inferred: bool = True
    # Tokens carry their log probability, which costs time to compute; otherwise `log_prob` is null.
    token_logprobs: bool = True
    strict_parameters: bool = False  # Refuse unknown generation parameters instead of ignoring them.
    # The answer follows the part of a JSON schema that the engine can hold, unless a request says `strict`. Otherwise
    # only OpenAI's forms without `strict` allow that.
    partial_schemas: bool = False
    max_prompt_tokens: int | None = None  # Longer prompts are refused; None: only the model's context limits them.
    max_stop_sequences: int = 4  # Limit of a request on TGI's routes; the default is TGI's.
    max_best_of: int = 2  # The same for `best_of`.
    max_image_pixels: int = 64_000_000  # Larger images, and videos with larger frames, are refused.
    max_request_pixels: int = 256_000_000  # The same for all images and video frames of a request together.
    max_media_download_mb: int = 64  # MiB that the URLs of a request may send together.
    # MiB of media in memory, of all requests whose prompts the engine does not have yet.
    max_media_memory_mb: int = 4096
    # Networks such as "10.0.0.0/8" that media may be fetched from, in addition to public addresses.
    allowed_media_networks: tuple[str, ...] = ()
    # The task that the model is loaded for. "auto": the task in its files.
    task: Task = "auto"
    pooling: str | None = None  # How one vector is made, in vLLM's words. None: as the model's files say.
    # On `/invocations`: vectors have the length 1, and a score of one label passes a sigmoid.
    normalize: bool = True
    sigmoid: bool = True
    # The form of vectors on `/invocations`: DJL's engines' form, or the form of LMI's vLLM handler.
    vector_format: VectorFormat = "djl"
    djl_engine: bool = False  # `engine` is Rust, OnnxRuntime or PyTorch.
    scores_in_order: bool = False  # `query` and `texts` on `/invocations` get DJL's scores; otherwise TEI's ranks.
    auto_truncate: bool = True  # TEI's routes cut texts that are too long, unless a request says otherwise.
    max_client_batch_size: int = 32  # Texts of a request on TEI's routes. The default is TEI's.
    # The text in front of inputs on TEI's routes, and on LMI's for vectors, if a request names no prompt; or its name.
    default_prompt: str | None = None
    default_prompt_name: str | None = None
    enable_lora: bool = False  # LoRA adapters can be registered; requests name an adapter.
    # Adapters to register at the start: directories, `s3://` or `hf://`, by names.
    adapters: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "auto"
    # GPUs that share each layer. None: the fewest that hold the model, or with `tensor_parallel_max` the most.
    tensor_parallel_degree: int | None = None
    tensor_parallel_max: bool = False  # "max" was asked for: as many GPUs as the model allows.
    pipeline_parallel_degree: int = 1
    # The CUDA numbers of the GPUs that the engine may use. The engine uses the first GPUs, as many as it needs. None:
    # all; an empty tuple: the CPU.
    devices: tuple[int, ...] | None = None
    # Copies of the model on vLLM, each with its own GPUs or share of the processors. None: as many as `devices` hold.
    max_copies: int | None = 1
    min_copies: int | None = None  # The copies that serve before the model is ready. None: all.
    parallel_loading: bool = False  # The copies after the first are loaded at the same time, and not one by one.
    batch_size: int = 1  # Prompts, or calls of a custom handler, that are run together as one dynamic batch.
    max_batch_delay: float = 0.1  # Seconds that the first of a dynamic batch waits for others.
    enable_streaming: Streaming = "false"  # The way to stream answers of the dynamic batch.
    handler: HandlerSettings | None = None  # A customer's handler instead of an engine.
    # A customer's `handle` that gets every call of `/invocations` first, and may leave it to the engine.
    handler_before_engine: HandlerSettings | None = None
    enable_stateful_sessions: bool = True  # The built-in handlers serve sessions.
    sessions_expiration: int = 1200  # Seconds that a session lives.
    sessions_path: str | None = None  # The directory of sessions; None: one in shared memory.
    sessions_s3url: str | None = None
    stop_sequences: tuple[str, ...] = ()  # Stop strings of every request of the dynamic batch (`option.stop_sequence`).
    formatters: Path | None = None  # A `model.py` that may have input and output formatters for the engine.
    offline: bool = False  # The model's packages are installed without an index (DJL_OFFLINE).
    install_requirements: bool = True  # False: `requirements.txt` is not installed (STANDARD_AUTO_INSTALL_REQ).
    pip_arguments: tuple[str, ...] = ()  # Replace `-r requirements.txt` (STANDARD_PIP_ARGS).
    # The name of the output formatter in it, if `option.output_formatter` is not a built-in one.
    formatter_function: str | None = None
    predict_timeout: float = 240.0  # Seconds without a new token after which a request fails.
    model_loading_timeout: float = 1800.0  # Seconds that loading may take.
    # Deaths of the engine after which a request continues; 0: none. After one more, requests continue one by one.
    continue_calls: int = 0
    # Environment variables of the process that runs the engine (`option.env`).
    environment: Mapping[str, str] = field(default_factory=dict)
    # Further `option.<name>` values, for the engine to interpret.
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    # The origin of each engine argument, for error messages.
    engine_argument_sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def engine_options(self) -> str:
        """The names of the engine's options that are set, for error messages; empty if none is."""
        return ", ".join(f"option.{name}" for name in self.engine_arguments)

    @property
    def rolling_batch_size(self) -> int:
        """Sequences that run together, by LMI's default if the settings do not say; vLLM has another default."""
        return self.max_rolling_batch_size or LMI_ROLLING_BATCH_SIZE

    @property
    def public_names(self) -> tuple[str, ...]:
        """The names under which OpenAI's clients see the model."""
        return self.served_model_names or (self.name,)
