"""The environment variables that count, and what those of other containers stand for.

A variable of TGI, of AWS's vLLM image, or an older one of LMI stands for one of LMI's, unless that one is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from container.settings.parsers import TRUE
from container.settings.properties import NOT_TEXT, SAGEMAKER_MODEL_KEYS, Value

VLLM_PREFIX = "SM_VLLM_"
PREFIXES = ("OPTION_", "ARGS_", "SERVING_", VLLM_PREFIX)
"""Of variables that may have any name behind."""
VARIABLES = frozenset(
    {
        *(name for name, _ in SAGEMAKER_MODEL_KEYS),
        *("HF_MODEL_ID", "HF_REVISION", "HF_TASK", "HF_TOKEN", "DJL_ENTRY_POINT", "DJL_OFFLINE"),
        *("PYTHON_EXECUTABLE", "STANDARD_AUTO_INSTALL_REQ", "STANDARD_PIP_ARGS", "HF_HUB_OFFLINE"),
        *("TENSOR_PARALLEL_DEGREE", "PIPELINE_PARALLEL_DEGREE", "PREDICT_TIMEOUT", "MODEL_LOADING_TIMEOUT"),
        *("SAGEMAKER_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_PAYLOAD_IN_MB", "SAGEMAKER_BIND_TO_PORT"),
        *("SAGEMAKER_MULTI_MODEL", "SAGEMAKER_HEALTH_CHECK_OVERRIDE"),
        *("SAGEMAKER_SECURE_MODE", "SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS"),
    }
)
"""LMI's variables without a prefix."""
_LMI, _TGI, _AWS, _HUB = "LMI", "TGI", "AWS's vLLM image", "Hugging Face"


@dataclass(frozen=True, slots=True)
class Alias:
    """A variable, and the one that it stands for."""

    variable: str
    target: str
    of: str
    """The container whose variable it is."""
    convert: Callable[[str], str] = str

    @property
    def key(self) -> str:
        """The setting that it sets, as reports name it."""
        return _KEYS.get(self.target) or self.target.replace("OPTION_", "option.").replace("SERVING_", "").lower()


_KEYS = {
    "HF_MODEL_ID": "option.model_id",
    "HF_REVISION": "option.revision",
    "HF_TOKEN": "HF_TOKEN",
    "TENSOR_PARALLEL_DEGREE": "option.tensor_parallel_degree",
}


def _inverted(text: str) -> str:
    return "false" if text.strip().lower() == "true" else "true"


def _chat_format(text: str) -> str:
    return "openai" if text.strip().lower() in TRUE else "lmi"


def _quantization(text: str) -> str:
    return "bitsandbytes" if text.strip().lower() in ("bitsandbytes-nf4", "bitsandbytes-fp4") else text


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
    Alias("KV_CACHE_DTYPE", "OPTION_KV_CACHE_DTYPE", _TGI),
    Alias("CORS_ALLOW_ORIGIN", "SERVING_CORS_ALLOWED_ORIGIN", _TGI),
    Alias("PAYLOAD_LIMIT", "SERVING_MAX_REQUEST_SIZE", _TGI),
    Alias("HUGGING_FACE_HUB_TOKEN", "HF_TOKEN", _HUB),
    Alias("HF_API_TOKEN", "HF_TOKEN", _TGI),
)
"""Of two that stand for the same variable, the one that comes first counts."""

# AWS's vLLM image has a variable for each argument of vLLM; these are no options of an engine:
_VLLM_TARGETS = {"MODEL": "HF_MODEL_ID", "HOST": "SERVING_HOST", "PORT": "SERVING_PORT"}

WITHOUT_EFFECT = frozenset(
    {
        *("WAITING_SERVED_RATIO", "MAX_WAITING_TOKENS", "MAX_BATCH_TOTAL_TOKENS", "MAX_CLIENT_BATCH_SIZE"),
        *("ROPE_SCALING", "ROPE_FACTOR", "SHARDED", "SPECULATE", "VALIDATION_WORKERS", "CUDA_GRAPHS"),
        *("WATERMARK_GAMMA", "WATERMARK_DELTA", "DISABLE_CUSTOM_KERNELS", "WEIGHTS_CACHE_OVERRIDE"),
        *("MAX_TOP_N_TOKENS", "ENABLE_PREFILL_LOGPROBS", "DISABLE_GRAMMAR_SUPPORT", "PREFILL_CHUNKING"),
    }
)
"""TGI's variables that have nothing to set here."""

ADVICE: Mapping[str, str] = {
    "API_KEY": "requests are served without a key; let a proxy ask for it",
    "JSON_OUTPUT": "SERVING_LOG_FORMAT=json sets the form of logs",
    "LORA_ADAPTERS": "give OPTION_ENABLE_LORA=true, and put adapters below adapters/ beside the model or register them",
    "OTLP_ENDPOINT": "no traces are sent; metrics are at /metrics",
    "TOKENIZER_CONFIG_PATH": "OPTION_CHAT_TEMPLATE sets the chat template",
}
"""TGI's variables for which there is something else: what to do."""

KNOWN_VARIABLES = VARIABLES | WITHOUT_EFFECT | ADVICE.keys() | {alias.variable for alias in ALIASES}


@dataclass(frozen=True, slots=True)
class AppliedAlias:
    """An alias that is in effect, and its value, whose source is the alias's variable."""

    alias: Alias
    value: Value


def read_variables(
    environ: Mapping[str, str], problems: list[str], warnings: list[str]
) -> tuple[dict[str, Value], tuple[AppliedAlias, ...]]:
    """The variables that count, with those that aliases stand for, and the aliases that are in effect.

    An empty variable counts as unset, but an empty SM_VLLM_* is true. There is a warning for each alias that says
    something else than the variable that it stands for.
    """
    variables: dict[str, Value] = {}
    for name, text in environ.items():
        flag = name.startswith(VLLM_PREFIX)
        if not (text or flag) or not (name in KNOWN_VARIABLES or name.startswith(PREFIXES)):
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
            applied.append(AppliedAlias(alias, value))
        elif counts.word != value.word:
            warnings.append(
                f"{alias.variable} ({given.source}) is ignored: it stands for {alias.target}, which "
                f"{counts.source.removeprefix('environment: ')} sets to another value"
            )
    if ignored := sorted(WITHOUT_EFFECT & variables.keys()):
        warnings.append(
            f"{', '.join(ignored)} (environment, of TGI) have no effect: the engine schedules and places by itself; "
            "OPTION_<NAME> sets any argument of vLLM"
        )
    warnings += [
        f"{name} (environment, of TGI) has no effect: {advice}" for name, advice in ADVICE.items() if name in variables
    ]
    return variables, tuple(applied)


def _vllm_aliases(variables: Mapping[str, Value]) -> list[Alias]:
    names = [name.removeprefix(VLLM_PREFIX) for name in sorted(variables) if name.startswith(VLLM_PREFIX)]
    return [Alias(VLLM_PREFIX + name, _VLLM_TARGETS.get(name, f"OPTION_{name}"), _AWS) for name in names if name]


def overruled(applied: AppliedAlias, sources: Mapping[str, str]) -> str | None:
    """A warning where a setting came from elsewhere than the alias; `sources` has the source of each setting."""
    key, value = applied.alias.key, applied.value
    source = sources.get(key)
    if source is None or source == value.source:
        return None
    return f"{applied.alias.variable} ({value.source}) is ignored: {key} is set by {source}"


def with_aliases(names: Iterable[str]) -> frozenset[str]:
    """These variables, and those that stand for one of them."""
    targets = frozenset(names)
    others = {alias.variable for alias in ALIASES if alias.target in targets}
    return targets | others | {VLLM_PREFIX + name for name, target in _VLLM_TARGETS.items() if target in targets}
