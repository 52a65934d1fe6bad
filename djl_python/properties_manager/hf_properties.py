"""The settings of the Hugging Face handler, as a pydantic class."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any, Literal

from pydantic import field_validator

from djl_python.lazy_import import require
from djl_python.properties_manager.properties import Properties

_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class HuggingFaceProperties(Properties):
    """The settings of `HuggingFaceService`."""

    rolling_batch: Any = "disable"  # The name of the rolling batch that the handler runs.
    device_id: int = -1
    task: str | None = None
    dtype: Literal["float32", "float16", "bfloat16", "auto"] | None = None
    device_map: Any = None
    quantize: Literal["bitsandbytes8", "bitsandbytes4"] | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    stop_sequence: tuple[str, ...] = ()

    @field_validator("dtype", mode="before")
    @classmethod
    def validate_dtype(cls, dtype: Any) -> Any:
        name = dtype.lower() if isinstance(dtype, str) else dtype
        return _DTYPES.get(name, name)

    @field_validator("stop_sequence", mode="before")
    @classmethod
    def validate_stop_sequence(cls, text: Any) -> Any:
        """Parse a list in JSON. As in LMI, the items may also have single quotes, or no quotes."""
        try:
            strings = json.loads(text)
        except ValueError:
            strings = [part.strip().strip("'\"") for part in text.strip("[] ").split(",")]
        return [each for each in strings if each] if isinstance(strings, list) else strings

    @property
    def device(self) -> str:
        has_gpu = self.device_id >= 0 and require("torch", "HuggingFaceService").cuda.is_available()
        return f"cuda:{self.device_id}" if has_gpu else "cpu"

    @property
    def source(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code, "revision": self.revision}

    @property
    def loading(self) -> dict[str, Any]:
        """Additional arguments for the model's `from_pretrained`.

        Raises:
            ValueError: The settings enable quantization without `device_map`.
        """
        loading = {"device_map": self.device_map, "dtype": self.dtype}
        eight, four = (getattr(self, f"load_in_{bits}bit") or self.quantize == f"bitsandbytes{bits}" for bits in (8, 4))
        if eight or four:
            if not self.device_map:
                raise ValueError("quantize needs device_map")
            configuration = require("transformers", "HuggingFaceService").BitsAndBytesConfig
            loading["quantization_config"] = configuration(load_in_8bit=eight, load_in_4bit=four and not eight)
        return {name: value for name, value in loading.items() if value}

    @cached_property
    def kwargs(self) -> dict[str, Any]:
        """The arguments for the model's pipeline. Subclasses of `HuggingFaceService` may change them."""
        return self.source | self.loading
