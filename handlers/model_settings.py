"""The settings of one model, as the handlers see them: typed, validated, defaults filled in.

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

DEFAULT_MAX_LORAS = 4
"""LMI's default of `option.max_loras`, where vLLM's is 1."""

LMI_ROLLING_BATCH_SIZE = 256
"""LMI's default of `option.max_rolling_batch_size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """A customer's handler, which runs in worker processes. Source: contracts/lmi.md sections 2.7, 2.10, 2.15 and 7."""

    entry_point: str
    """The absolute path of a `.py` file, or the name of a module."""
    function: str = "handle"
    properties: Mapping[str, str] = field(default_factory=dict)
    """What the handler's first call sees: the model's settings without `option.`, all text."""
    min_workers: int = 1
    max_workers: int = 1
    devices: tuple[str, ...] = ()
    """GPUs of a worker each, such as "0", or "0,1" for one that takes several; none: the CPU. Workers are spread."""
    async_mode: bool = False
    """The function is a coroutine function, and calls of it run together (`option.async_mode`)."""
    rolling_batch: bool = False
    """The function is called again and again with all active requests (contracts/lmi.md section 7.7)."""
    python_executable: str | None = None
    """None: the interpreter that runs this process."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables beside those of this process (`option.env`)."""
    enable_venv: bool = False
    """Packages of `requirements.txt` go into an environment of the model's own even where they need not."""
    offline: bool = False
    """Install `requirements.txt` without an index (DJL_OFFLINE)."""
    install_requirements: bool = True
    """False: `requirements.txt` is left alone (STANDARD_AUTO_INSTALL_REQ)."""
    pip_arguments: tuple[str, ...] = ()
    """Stand in the place of `-r requirements.txt` (STANDARD_PIP_ARGS)."""
    retry_threshold: int = 0
    """So many crashes or hangs of workers are survived; one more and the model has failed."""
    max_idle_time: float = 60.0
    """Seconds after which an idle worker beyond `min_workers` ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """One model and how to serve it. Option names are LMI's, without `option.`."""

    name: str
    """What the model is called in routes and in /ping."""
    model_dir: Path
    """Where serving.properties is."""
    model_id: str
    """What the engine loads: a directory or a hub id."""
    revision: str | None = None
    trust_remote_code: bool = False
    rolling_batch: RollingBatch = "auto"
    max_rolling_batch_size: int | None = None
    """Sequences that run together; None: as the engine has it by default."""
    output_formatter: OutputFormatter | None = None
    tgi_compat: bool = False
    async_mode: bool = False
    """`/invocations` speaks the schema of LMI's asynchronous handler, all kinds of bodies alike."""
    chat_format: ChatFormat = "lmi"
    """How `/invocations` answers chat: as LMI's rolling batch does, or in OpenAI's own objects and frames."""
    served_model_names: tuple[str, ...] = ()
    """What OpenAI's clients may call the model, besides `name`; the first is what answers call it."""
    do_sample_inferred: bool = True
    """Sampling parameters switch sampling on unless `do_sample` says otherwise (LMI 0.32 and later)."""
    token_logprobs: bool = True
    """Tokens carry their log probability; computing them costs the engine time, and `log_prob` may be null."""
    strict_parameters: bool = False
    """Refuse unknown generation parameters instead of ignoring them."""
    max_prompt_tokens: int | None = None
    """Longer prompts are refused; None: the model's context alone limits them."""
    max_stop_sequences: int = 4
    """Of a request on TGI's routes; the default is TGI's."""
    max_best_of: int = 2
    """On TGI's routes; the default is TGI's."""
    enable_lora: bool = False
    """LoRA adapters can be registered; requests name the one they want."""
    dtype: str = "auto"
    tensor_parallel_degree: int | None = None
    """GPUs that share each layer. None: the fewest that hold the model, or with `tensor_parallel_max` the most."""
    tensor_parallel_max: bool = False
    """"max" was asked for: as many GPUs as the model allows."""
    pipeline_parallel_degree: int = 1
    devices: tuple[int, ...] | None = None
    """GPUs that the engine may use, as CUDA counts those that this process sees; it takes those in front, as many as it
    needs. None: all; an empty tuple: the CPU."""
    batch_size: int = 1
    """Prompts, or calls of a custom handler, that are run together as one dynamic batch."""
    max_batch_delay: float = 0.1
    """Seconds that the first of a dynamic batch waits for others."""
    enable_streaming: Streaming = "false"
    """Answers of the dynamic batch are streamed."""
    handler: HandlerSettings | None = None
    """A customer's handler instead of an engine."""
    enable_stateful_sessions: bool = True
    """The built-in handlers serve sessions (contracts/lmi.md section 10)."""
    sessions_expiration: int = 1200
    """Seconds that a session lives."""
    sessions_path: str | None = None
    """Directory that holds them; None: one in shared memory."""
    sessions_s3url: str | None = None
    stop_sequences: tuple[str, ...] = ()
    """Stop strings of every request of the dynamic batch (`option.stop_sequence`)."""
    formatters: Path | None = None
    """A `model.py` that may have input and output formatters for the engine."""
    offline: bool = False
    """The model's packages are installed without an index (DJL_OFFLINE)."""
    install_requirements: bool = True
    """As `HandlerSettings.install_requirements`, for the model of an engine."""
    pip_arguments: tuple[str, ...] = ()
    """As `HandlerSettings.pip_arguments`."""
    formatter_function: str | None = None
    """The output formatter's name in it, where `option.output_formatter` is no built-in one."""
    predict_timeout: float = 240.0
    """Seconds without any new token after which a request fails."""
    model_loading_timeout: float = 1800.0
    """Seconds that loading may take."""
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    """Further `option.<name>` values, for the engine to interpret."""
    engine_argument_sources: Mapping[str, str] = field(default_factory=dict)
    """Where each engine argument came from, for error messages."""

    @property
    def rolling_batch_size(self) -> int:
        """Sequences that run together, by default LMI's number; vLLM has a default of its own."""
        return self.max_rolling_batch_size or LMI_ROLLING_BATCH_SIZE

    @property
    def public_names(self) -> tuple[str, ...]:
        """The names under which OpenAI's clients see the model."""
        return self.served_model_names or (self.name,)
