"""Reads the server's environment variables, and derives settings from them.

The rules are LMI's. Variables of TGI, variables of AWS's vLLM image and older variables of LMI are aliases for
variables of LMI. An alias counts only if LMI's variable is not set. This module does not check values. `options` and
`server` define the allowed values.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from container.gpus import gpu_count
from container.settings.options import SUGGESTED
from container.settings.values import NOT_TEXT, Value, is_true
from container.sources.download import download_dir
from engines.settings.declaration import PREFIX
from engines.settings.parsers import FALSE, TRUE

# SageMaker's variables that override a model key.
SAGEMAKER_MODEL_KEYS = (
    ("SAGEMAKER_STARTUP_TIMEOUT", "option.model_loading_timeout"),
    ("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", "option.predict_timeout"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "minWorkers"),
    ("SAGEMAKER_NUM_MODEL_WORKERS", "maxWorkers"),
    ("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", "option.default_accept"),
    ("SAGEMAKER_ENABLE_STATEFUL_SESSIONS", "option.enable_stateful_sessions"),
    ("SAGEMAKER_SESSIONS_EXPIRATION", "option.sessions_expiration"),
    ("SAGEMAKER_SESSIONS_PATH", "option.sessions_path"),
)
_SAGEMAKER_SERVER_KEYS = (
    ("SAGEMAKER_BIND_TO_PORT", "port"),
    ("SAGEMAKER_MULTI_MODEL", "multi_model"),
    ("SAGEMAKER_HEALTH_CHECK_OVERRIDE", "workers_health_check"),
    ("SAGEMAKER_MAX_REQUEST_SIZE", "max_request_size"),
)
# If one of these server keys is set, it is the default of a model key.
SERVER_DEFAULTS_OF_MODEL_KEYS = (
    *("batch_size", "max_batch_delay", "max_idle_time", "min_workers", "max_workers"),
    *("load_on_devices", "reserved_memory_mb", "retry_threshold"),
)
_LEVELS = frozenset({"10", "20", "30", "40", "50"})
_OPTION_KEYS = {"ENTRYPOINT": "option.entryPoint", "ENGINE": "engine"}
_UPPER_CASE_NAME = re.compile(r"[A-Z0-9_]+")
_MOST_BYTES = 10**18 - 1  # The largest number that a setting may have.
_MEBIBYTE = 1 << 20
_TGI_ADAPTER = re.compile(r"([^=@]+)(?:=([^=@]+))?(?:@([^=@]+))?")
VLLM_PREFIX = "SM_VLLM_"
API_KEYS, API_KEYS_FILE = "SERVING_API_KEYS", "SERVING_API_KEYS_FILE"
_PREFIXES = ("OPTION_", "ARGS_", "SERVING_", VLLM_PREFIX)
# LMI's variables that have none of the prefixes.
_VARIABLES = frozenset(
    {
        *(name for name, _ in (*SAGEMAKER_MODEL_KEYS, *_SAGEMAKER_SERVER_KEYS)),
        *("SAGEMAKER_MAX_PAYLOAD_IN_MB", "SAGEMAKER_SECURE_MODE", "SAGEMAKER_PROGRAM"),
        *("SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"),
        *("HF_MODEL_ID", "HF_REVISION", "HF_TASK", "HF_TOKEN", "DJL_ENTRY_POINT", "DJL_OFFLINE"),
        *("PYTHON_EXECUTABLE", "STANDARD_AUTO_INSTALL_REQ", "STANDARD_PIP_ARGS"),
        *("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE", "PREDICT_TIMEOUT", "MODEL_LOADING_TIMEOUT"),
    }
)
_LMI, _TGI, _TEI, _VLLM, _AWS, _HUB = "LMI", "TGI", "TEI", "vLLM", "AWS's vLLM image", "Hugging Face"
_TOOLKIT, _TORCHSERVE = "SageMaker's inference toolkit", "SageMaker's PyTorch images"


@dataclass(frozen=True, slots=True)
class Alias:
    """A variable (`variable`) that stands for another variable (`target`)."""

    variable: str
    target: str
    of: str  # The container that defines the variable.
    convert: Callable[[str], str] = str


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables that count, as they were when the process started."""

    variables: Mapping[str, Value] = field(default_factory=dict)  # The variables, including the targets of aliases.
    aliases: tuple[Alias, ...] = ()  # The aliases that are in effect.
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    downloads: Path = Path("/tmp/slipway")  # The directory for models that are fetched from S3.
    gpus: int = 0  # The number of GPUs of this process, or of a planned machine.
    one_model: bool = False  # Whether the server starts with exactly one model.

    @property
    def exports(self) -> dict[str, str]:
        """The environment variables to set for libraries."""
        token = self.variables.get("HF_TOKEN")
        offline = is_true(self.variables.get("DJL_OFFLINE"))
        return ({"HF_TOKEN": token.text.strip()} if token else {}) | ({"HF_HUB_OFFLINE": "1"} if offline else {})


def _inverted(text: str) -> str:
    return "false" if text.strip().lower() == "true" else "true"


def _negated(text: str) -> str:
    """Replace a word for true by a word for false, and vice versa. Other text is kept, and refused later."""
    word = text.strip().lower()
    return "false" if word in TRUE else "true" if word in FALSE else text


def _lora_modules(text: str) -> str:
    """Convert TGI's list of `id`, `id=path` and `id=path@revision` to vLLM's form. Other text is kept."""
    parts = [_TGI_ADAPTER.fullmatch(part.strip()) for part in text.split(",")]
    if not all(parts):
        return text
    named = [{"name": part[1], "path": part[2] or part[1], "revision": part[3]} for part in parts if part]
    return json.dumps([{key: value for key, value in adapter.items() if value} for adapter in named])


def _log_format(text: str) -> str:
    return "json" if text.strip().lower() in TRUE else "plain"


def _log_level(text: str) -> str:
    """Convert a number of one of Python's log levels to its name. SageMaker's toolkit accepts these numbers."""
    return logging.getLevelName(int(text)).lower() if text.strip() in _LEVELS else text


def _chat_format(text: str) -> str:
    return "openai" if text.strip().lower() in TRUE else "lmi"


def _all_gpus_or_one(text: str) -> str:
    """Convert TGI's `sharded` to a parallel degree: all GPUs if true, else one. Other text is refused later."""
    word = text.strip().lower()
    return "max" if word in TRUE else "1" if word in FALSE else text


def _quantization(text: str) -> str:
    return "bitsandbytes" if text.strip().lower() in ("bitsandbytes-nf4", "bitsandbytes-fp4") else text


def _kv_cache_dtype(text: str) -> str:
    """Convert TGI's `fp8_e4m3fn` to vLLM's `fp8_e4m3`. Other text is kept."""
    return "fp8_e4m3" if text.strip().lower() == "fp8_e4m3fn" else text


def _one_key(text: str) -> str:
    """Return a list with this one key. A comma in the text is part of the key."""
    return json.dumps([text.strip()])


# If two aliases for the same variable are set, the first in this list counts.
ALIASES = (
    Alias("MODEL_ID", "HF_MODEL_ID", _TGI),
    Alias("HF_MODEL_REVISION", "HF_REVISION", f"{_TGI} on SageMaker"),
    Alias("REVISION", "HF_REVISION", _TGI),
    Alias("HF_MODEL_QUANTIZE", "OPTION_QUANTIZE", f"{_LMI}, {_TGI}", _quantization),
    Alias("QUANTIZE", "OPTION_QUANTIZE", _TGI, _quantization),
    Alias("HF_MODEL_TRUST_REMOTE_CODE", "OPTION_TRUST_REMOTE_CODE", f"{_LMI}, {_TGI}"),
    Alias("TRUST_REMOTE_CODE", "OPTION_TRUST_REMOTE_CODE", _TGI),
    Alias("SM_NUM_GPUS", "TENSOR_PARALLEL_DEGREE", f"{_LMI}, {_TGI}"),
    Alias("NUM_SHARD", "TENSOR_PARALLEL_DEGREE", _TGI),
    Alias("SHARDED", "TENSOR_PARALLEL_DEGREE", _TGI, _all_gpus_or_one),
    Alias("MAX_CONCURRENT_REQUESTS", "SERVING_JOB_QUEUE_SIZE", f"{_LMI}, {_TGI}"),
    Alias("MAX_BATCH_PREFILL_TOKENS", "OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS", f"{_LMI}, {_TGI}"),
    Alias("MAX_BATCH_SIZE", "OPTION_MAX_ROLLING_BATCH_SIZE", f"{_LMI}, {_TGI}"),
    Alias("ENABLE_CUDA_GRAPHS", "OPTION_ENFORCE_EAGER", _LMI, _inverted),
    Alias("CUDA_MEMORY_FRACTION", "OPTION_GPU_MEMORY_UTILIZATION", f"{_LMI}, {_TGI}"),
    Alias("MAX_INPUT_TOKENS", "OPTION_MAX_PROMPT_TOKENS", _TGI),
    Alias("MAX_INPUT_LENGTH", "OPTION_MAX_PROMPT_TOKENS", _TGI),
    Alias("MAX_TOTAL_TOKENS", "OPTION_MAX_MODEL_LEN", _TGI),
    Alias("MAX_STOP_SEQUENCES", "OPTION_MAX_STOP_SEQUENCES", _TGI),
    Alias("MAX_BEST_OF", "OPTION_MAX_BEST_OF", _TGI),
    Alias("MESSAGES_API_ENABLED", "OPTION_CHAT_FORMAT", _TGI, _chat_format),
    Alias("DTYPE", "OPTION_DTYPE", _TGI),
    Alias("KV_CACHE_DTYPE", "OPTION_KV_CACHE_DTYPE", _TGI, _kv_cache_dtype),
    Alias("CORS_ALLOW_ORIGIN", "SERVING_CORS_ALLOWED_ORIGIN", _TGI),
    Alias("PAYLOAD_LIMIT", "SERVING_MAX_REQUEST_SIZE", _TGI),
    Alias("AUTO_TRUNCATE", "OPTION_AUTO_TRUNCATE", _TEI),
    Alias("MAX_CLIENT_BATCH_SIZE", "OPTION_MAX_CLIENT_BATCH_SIZE", _TEI),
    Alias("POOLING", "OPTION_POOLING", _TEI),
    Alias("DEFAULT_PROMPT", "OPTION_DEFAULT_PROMPT", _TEI),
    Alias("DEFAULT_PROMPT_NAME", "OPTION_DEFAULT_PROMPT_NAME", _TEI),
    Alias("API_KEY", API_KEYS, _TGI, _one_key),
    Alias("VLLM_API_KEY", API_KEYS, _VLLM, _one_key),
    Alias("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", _HUB),
    Alias("HF_API_TOKEN", "HF_TOKEN", _TGI),
    Alias("LORA_ADAPTERS", "OPTION_LORA_MODULES", _TGI, _lora_modules),
    Alias("JSON_OUTPUT", "SERVING_LOG_FORMAT", _TGI, _log_format),
    Alias("OTLP_ENDPOINT", "OPTION_OTLP_TRACES_ENDPOINT", _TGI),
    Alias("GRACEFUL_TERMINATION_TIMEOUT", "SERVING_DRAIN_TIMEOUT", _TGI),
    Alias("PREFIX_CACHING", "OPTION_ENABLE_PREFIX_CACHING", _TGI),
    Alias("SERVED_MODEL_NAME", "OPTION_SERVED_MODEL_NAME", _TEI),
    Alias("MAX_BATCH_REQUESTS", "OPTION_MAX_ROLLING_BATCH_SIZE", _TEI),
    Alias("SAGEMAKER_MODEL_SERVER_WORKERS", "SAGEMAKER_NUM_MODEL_WORKERS", _TOOLKIT),
    Alias("SAGEMAKER_MODEL_SERVER_TIMEOUT", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", _TOOLKIT),
    Alias("SAGEMAKER_TS_RESPONSE_TIMEOUT", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS", _TORCHSERVE),
    Alias("SAGEMAKER_TS_MIN_WORKERS", "SERVING_MIN_WORKERS", _TORCHSERVE),
    Alias("SAGEMAKER_TS_MAX_WORKERS", "SERVING_MAX_WORKERS", _TORCHSERVE),
    Alias("SAGEMAKER_CONTAINER_LOG_LEVEL", "SERVING_LOG_LEVEL", _TOOLKIT, _log_level),
)
_IGNORED = {
    "it has no counterpart here": "VALIDATION_WORKERS TOKENIZATION_WORKERS SHARD_UDS_PATH UDS_PATH DISABLE_SPANS "
    "DISABLE_CUSTOM_KERNELS TGI_WIGGLE_ROOM COMPUTE_TYPE LOG_COLORIZE EXLLAMA_VERSION DISABLE_EXLLAMA "
    "ROCM_USE_CUSTOM_PAGED_ATTN ROCM_USE_SKINNY_GEMM XPU_MEMORY_FRACTION SAGEMAKER_MODEL_SERVER_VMARGS "
    "SAGEMAKER_SAFE_PORT_RANGE",
    "vLLM schedules requests in its own way": "WAITING_SERVED_RATIO MAX_WAITING_TOKENS",
    "vLLM chooses its addresses": "MASTER_ADDR MASTER_PORT",
    "`top_n_tokens` is at most 5, TGI's default": "MAX_TOP_N_TOKENS",
    "vLLM fills its KV cache; see OPTION_GPU_MEMORY_UTILIZATION": "MAX_BATCH_TOTAL_TOKENS",
    "set OPTION_MAX_ROLLING_BATCH_PREFILL_TOKENS; unlike TEI, vLLM does not cut longer texts": "MAX_BATCH_TOKENS",
    "set OPTION_ENABLE_CHUNKED_PREFILL": "PREFILL_CHUNKING",
    "set OPTION_ATTENTION_BACKEND": "ATTENTION USE_FLASH_ATTENTION",
    "set OPTION_ENFORCE_EAGER, or OPTION_CUDAGRAPH_CAPTURE_SIZES": "CUDA_GRAPHS",
    "set OPTION_SPECULATIVE_CONFIG": "SPECULATE",
    "set OPTION_TOKENIZER or OPTION_CHAT_TEMPLATE": "TOKENIZER_CONFIG_PATH",
    # vLLM replaces `rope_parameters` entirely, so the model's own `rope_theta` would be lost.
    "set OPTION_HF_OVERRIDES to all `rope_parameters`, with the model's `rope_theta`": "ROPE_SCALING ROPE_FACTOR",
    "constraints cannot be switched off": "DISABLE_GRAMMAR_SUPPORT",
    "log probabilities of the prompt are always served": "ENABLE_PREFILL_LOGPROBS REQUEST_LOGPROBS",
    "`watermark` is refused; vLLM has another one (OPTION_WATERMARK)": "WATERMARK_GAMMA WATERMARK_DELTA",
    "many platforms set it for other purposes; set SERVING_PORT": "PORT",
    "metrics are at /metrics of the same port": "PROMETHEUS_PORT",
    "set OTEL_SERVICE_NAME": "OTLP_SERVICE_NAME",
    "set SERVING_LOG_LEVEL": "LOG_LEVEL",
    "set HF_HUB_CACHE": "WEIGHTS_CACHE_OVERRIDE",
    "a tunnel needs a program of its own": "NGROK NGROK_AUTHTOKEN NGROK_EDGE",
    "the images send no usage statistics": "USAGE_STATS",
    "the model's `modules.json` names its modules": "DENSE_PATH",
    "the model directory is --model-dir, or SERVING_MODEL_STORE": "SAGEMAKER_BASE_DIR",
    "a script gets one request at a time": "SAGEMAKER_TS_BATCH_SIZE SAGEMAKER_TS_MAX_BATCH_DELAY",
}
# Variables of other containers that have no effect, with the reason. TGI's variables HOSTNAME and
# HUGGINGFACE_HUB_CACHE are not in this list. Every container has HOSTNAME, and the hub's library reads
# HUGGINGFACE_HUB_CACHE.
IGNORED_VARIABLES: Mapping[str, str] = {name: reason for reason, names in _IGNORED.items() for name in names.split()}

# AWS's vLLM image has a variable for each argument of vLLM. The following arguments do not become engine options.
_VLLM_TARGETS = {"MODEL": "HF_MODEL_ID", "HOST": "SERVING_HOST", "PORT": "SERVING_PORT", "API_KEY": API_KEYS}
_NEGATION = "NO_"  # `--no-x` negates the flag `--x`. No argument of vLLM has a name that begins with this.

# Variables that protect the server. If such a variable is empty, for example because a secret is missing, the start
# fails.
_NEVER_EMPTY = (API_KEYS, API_KEYS_FILE, f"{VLLM_PREFIX}API_KEY")
# All variables that contain API keys or the path of a file with API keys.
KEY_VARIABLES = frozenset({*_NEVER_EMPTY, *(alias.variable for alias in ALIASES if alias.target == API_KEYS)})
_KNOWN = _VARIABLES | {alias.variable for alias in ALIASES}


def read_environment(environ: Mapping[str, str], gpus: int | None = None) -> Environment:
    """Read the server's variables, and add LMI's variables for aliases.

    An empty variable counts as unset, but an empty SM_VLLM_* counts as true. If an alias and its target are both set
    and differ, the target counts, and the result contains a warning.

    Args:
        environ: The environment variables.
        gpus: The number of GPUs. If it is None, the GPUs that this process sees are counted.
    """
    variables: dict[str, Value] = {}
    problems, warnings = [], []
    for name, text in environ.items():
        flag = name.startswith(VLLM_PREFIX)
        if not text and name in _NEVER_EMPTY:
            problems.append(f"{name} is empty; expected API keys; for a server without API keys, unset the variable")
            continue
        if text and name in IGNORED_VARIABLES:
            warnings.append(f"{name} (environment: {name}) is ignored: {IGNORED_VARIABLES[name]}")
        elif text and name not in _KNOWN and _lacks_prefix(name):
            hint = f"there is no such setting; did you mean OPTION_{name}?"
            warnings.append(f"{name} (environment: {name}) is ignored: {hint}")
        if not (text or flag) or not (name in _KNOWN or name.startswith(_PREFIXES)):
            continue
        if NOT_TEXT.search(text) or not name.isprintable():
            problems.append(f"environment: {ascii(name)[1:-1]} is not UTF-8 text")
            continue
        variables[name] = Value(text or "true", f"environment: {name}")
    applied = []
    for alias in (*ALIASES, *_vllm_aliases(variables)):
        given = variables.get(alias.variable)
        if given is None:
            continue
        value = Value(alias.convert(given.text), given.source)
        counts = variables.setdefault(alias.target, value)
        if counts is value:
            applied.append(alias)
        elif counts.word != value.word:
            warnings.append(
                f"{alias.variable} ({given.source}) is ignored: it stands for {alias.target}, which "
                f"{counts.source.removeprefix('environment: ')} sets to another value"
            )
    count = gpu_count() if gpus is None else gpus
    return Environment(variables, tuple(applied), tuple(problems), tuple(warnings), download_dir(environ), count)


def _lacks_prefix(name: str) -> bool:
    """Return True for the name of a model's setting that lacks the prefix OPTION_.

    Return False for a name of one word, such as SEED, because the variable may belong to another program.
    """
    return "_" in name and name == name.upper() and f"{PREFIX}{name.lower()}" in SUGGESTED


def _vllm_aliases(variables: Iterable[str]) -> Iterator[Alias]:
    for variable in sorted(variables):
        name = variable.removeprefix(VLLM_PREFIX)
        if name and name != variable:
            target = _VLLM_TARGETS.get(name, f"OPTION_{name.removeprefix(_NEGATION)}")
            convert = _one_key if target == API_KEYS else _negated if name.startswith(_NEGATION) else str
            yield Alias(variable, target, _AWS, convert)


# The variables that concern all models of a server: its API keys, and the choice and the names of its models.
_OF_ALL_MODELS = frozenset(
    {"SERVING_MODEL_NAME", "OPTION_SERVED_MODEL_NAME", "SERVING_MODEL_STORE", "SERVING_LOAD_MODELS"}
    | {API_KEYS, API_KEYS_FILE}
)


def for_each_model(environment: Environment) -> Environment:
    """Return the variables that count for each model of a server with several models.

    Variables that select or name models are left out, and so are the variables for the server's API keys.
    """
    return _without(environment, _OF_ALL_MODELS | {"HF_MODEL_ID", "HF_REVISION"})


def for_hub_model(environment: Environment) -> Environment:
    """Return the variables that count for a hub model if the server has several models."""
    return _without(environment, _OF_ALL_MODELS)


def for_given_model(environment: Environment, model: Value, others: Collection[str]) -> Environment:
    """Return the variables with HF_MODEL_ID set to `model`.

    The result omits `others`, which are other variables that name models.
    """
    rest = _without(environment, {"HF_MODEL_ID", *others})
    return replace(rest, variables={**rest.variables, "HF_MODEL_ID": model})


def _without(environment: Environment, names: Collection[str]) -> Environment:
    """Remove variables and their aliases."""
    aliases = [alias for alias in environment.aliases if alias.target in names]
    left_out = {*names, *(alias.variable for alias in aliases)}
    return replace(
        environment,
        variables={name: value for name, value in environment.variables.items() if name not in left_out},
        aliases=tuple(alias for alias in environment.aliases if alias not in aliases),
    )


def option_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Return the model keys that OPTION_* and ARGS_* set."""
    layer: dict[str, Value] = {}
    for name, value in variables.items():
        if name.startswith("OPTION_") and (rest := name.removeprefix("OPTION_")):
            _put(layer, _OPTION_KEYS.get(rest) or f"option.{_key(rest)}", value, problems)
        elif name.startswith("ARGS_") and (rest := name.removeprefix("ARGS_")):
            _put(layer, _key(rest), value, problems)
    return layer


def serving_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Return the server keys that SERVING_* set."""
    layer: dict[str, Value] = {}
    for name, value in variables.items():
        if name.startswith("SERVING_") and (rest := name.removeprefix("SERVING_")):
            _put(layer, rest.lower(), value, problems)
    return layer


def _key(name: str) -> str:
    return name.lower() if _UPPER_CASE_NAME.fullmatch(name) else name


def _put(layer: dict[str, Value], key: str, value: Value, problems: list[str]) -> None:
    earlier = layer.setdefault(key, value)
    if earlier.text != value.text:
        problems.append(f"{key} is set twice, to different values ({earlier.source}; {value.source}); give it once")


def sagemaker_server_layer(variables: Mapping[str, Value], problems: list[str]) -> dict[str, Value]:
    """Return the server keys that SageMaker's variables override."""
    layer = {key: variables[name] for name, key in _SAGEMAKER_SERVER_KEYS if name in variables}
    megabytes = variables.get("SAGEMAKER_MAX_PAYLOAD_IN_MB")
    if megabytes is None or "max_request_size" in layer:
        return layer
    if re.fullmatch("0*[0-9]{1,7}", megabytes.text.strip(), re.ASCII):
        size = int(megabytes.text) * _MEBIBYTE or _MOST_BYTES  # In batch transform, 0 means no limit.
        layer["max_request_size"] = Value(str(size), megabytes.source)
    else:
        problems.append(f"{megabytes.describe('max_request_size')}; allowed: an integer, in MiB; 0 for no limit")
    return layer
