"""A model's properties as the built-in Hugging Face handler reads them (contracts/lmi.md sections 2.11 and 2.13)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from djl_python.lazy_import import require

_PURPOSE = "HuggingFaceService"
_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off", ""}
_DTYPES = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "auto": "auto",
}
_BITS = {"bitsandbytes8": 8, "bitsandbytes4": 4}
_NO_ROLLING_BATCH = {"", "disable"}


@dataclass(frozen=True, slots=True)
class HuggingFaceSettings:
    """What is loaded, and how."""

    model: str
    """A directory, or a name on the hub."""
    task: str | None = None
    device: str = "cpu"
    streaming: str = "false"
    """`false`, `true`, or `huggingface` for the library's own streamer."""
    stop_strings: tuple[str, ...] = ()
    rolling_batch: str = ""
    """Empty: there is none."""
    trust_remote_code: bool = False
    revision: str | None = None
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `from_pretrained` for the model."""


def read_settings(properties: Mapping[str, Any]) -> HuggingFaceSettings:
    """The settings in a model's properties.

    Raises:
        ValueError: a value is not one of those that are allowed, or the model is not named.
    """
    model = properties.get("model_id") or properties.get("model_dir")
    if not model:
        raise ValueError("model_id or model_dir must be given")
    streaming = str(properties.get("enable_streaming", "false")).lower()
    streaming = streaming if streaming == "huggingface" else str(_flag("enable_streaming", streaming)).lower()
    if streaming != "false" and int(properties.get("batch_size", 1)) > 1:
        raise ValueError("We cannot enable streaming for dynamic batching")
    rolling_batch = str(properties.get("rolling_batch", "")).lower()
    return HuggingFaceSettings(
        model=str(model),
        task=properties.get("task") or None,
        device=_device(properties),
        streaming=streaming,
        stop_strings=_stop_strings(str(properties.get("stop_sequence", "[]"))),
        rolling_batch="" if rolling_batch in _NO_ROLLING_BATCH else rolling_batch,
        trust_remote_code=_flag("trust_remote_code", properties.get("trust_remote_code", "")),
        revision=properties.get("revision") or None,
        loading=_loading(properties),
    )


def _flag(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{name} must be true or false, not {value!r}")
    return text in _TRUE


def _device(properties: Mapping[str, Any]) -> str:
    device_id = str(properties.get("device_id", "-1"))
    if device_id == "-1" or not require("torch", _PURPOSE).cuda.is_available():
        return "cpu"
    return f"cuda:{int(device_id)}"


def _stop_strings(text: str) -> tuple[str, ...]:
    try:
        strings = json.loads(text)
    except ValueError:
        # Written without quotation marks, or with single ones, as LMI takes it.
        strings = [part.strip().strip("'\"") for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
    if not isinstance(strings, list) or not all(isinstance(each, str) for each in strings):
        raise ValueError(f"stop_sequence must be a list of strings, not {text}")
    return tuple(each for each in strings if each)


def _loading(properties: Mapping[str, Any]) -> dict[str, Any]:
    loading: dict[str, Any] = {}
    if properties.get("device_map"):
        loading["device_map"] = properties["device_map"]
    dtype = properties.get("dtype") or properties.get("data_type")
    if dtype:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, not {dtype!r}")
        loading["dtype"] = _DTYPES[dtype]
    bits = _bits(properties)
    if bits:
        if "device_map" not in loading:
            raise ValueError("quantize needs device_map")
        configuration = require("transformers", _PURPOSE).BitsAndBytesConfig
        loading["quantization_config"] = configuration(load_in_8bit=bits == 8, load_in_4bit=bits == 4)
    return loading


def _bits(properties: Mapping[str, Any]) -> int:
    quantize = properties.get("quantize")
    if quantize and quantize not in _BITS:
        raise ValueError(f"quantize must be one of {', '.join(_BITS)}, not {quantize!r}")
    if quantize:
        return _BITS[quantize]
    for bits in (8, 4):
        if _flag(f"load_in_{bits}bit", properties.get(f"load_in_{bits}bit", "")):
            return bits
    return 0
