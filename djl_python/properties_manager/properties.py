"""The settings of a served model, as a pydantic class.

A rolling batch receives an instance of this class, and customers write subclasses of it. In `djl_python`, only
`properties_manager` imports pydantic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator


class RollingBatchEnum(StrEnum):
    """The values of `option.rolling_batch`. LMI 0.36 lacks `lmi-dist` and `scheduler`, but models still use them."""

    vllm = "vllm"
    auto = "auto"
    disable = "disable"
    trtllm = "trtllm"
    lmidist = "lmi-dist"
    scheduler = "scheduler"


class StreamingEnum(StrEnum):
    """The values of `option.enable_streaming`."""

    true = "true"
    false = "false"
    huggingface = "huggingface"


def is_streaming_enabled(enable_streaming: StreamingEnum) -> bool:
    """Return True if answers of a model without a rolling batch are streamed."""
    return enable_streaming is not StreamingEnum.false


def is_rolling_batch_enabled(rolling_batch: RollingBatchEnum) -> bool:
    """Return True if the handler is called at each step with all requests."""
    return rolling_batch != RollingBatchEnum.disable


class Properties(BaseModel):
    """The settings that all handlers share.

    A handler creates them with `Properties(**inputs.get_properties())`. Unknown properties are ignored.

    Raises:
        ValidationError: A value is invalid. This pydantic error is a ValueError.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())

    model_id_or_path: str  # The value of `model_id`, or of `model_dir` if `model_id` is not given.
    model_dir: str | None = None
    rolling_batch: RollingBatchEnum = RollingBatchEnum.auto
    tensor_parallel_degree: int = 1
    cluster_size: int = 1
    trust_remote_code: bool = False
    enable_streaming: StreamingEnum = StreamingEnum.false
    batch_size: int = 1
    max_rolling_batch_size: int | None = 32
    dtype: str | None = None
    revision: str | None = None
    output_formatter: str | Callable[..., Any] | None = None
    input_formatter: Callable[..., Any] | None = None
    waiting_steps: int | None = None
    mpi_mode: bool = False
    tgi_compat: bool = False
    bedrock_compat: bool = False
    enable_lora: bool = False
    lmcache_auto_config: bool = False
    draft_model_id: str | None = None
    spec_length: int | None = 0

    @model_validator(mode="before")
    @classmethod
    def set_model_id_or_path(cls, properties: Mapping[str, Any]) -> dict[str, Any]:
        named = {"model_id_or_path": properties.get("model_id") or properties.get("model_dir")}
        return {"dtype": properties.get("data_type"), **properties, **named}

    @field_validator("enable_streaming", mode="before")
    @classmethod
    def validate_enable_streaming(cls, enable_streaming: str) -> str:
        logging.warning("enable_streaming is deprecated: a rolling batch streams if a request has `stream`")
        return enable_streaming.lower()

    @field_validator("batch_size")
    @classmethod
    def validate_batch_size(cls, batch_size: int, info: ValidationInfo) -> int:
        rolling_batch = info.data.get("rolling_batch", RollingBatchEnum.disable)
        streaming = info.data.get("enable_streaming", StreamingEnum.false)
        if batch_size > 1 and not is_rolling_batch_enabled(rolling_batch) and is_streaming_enabled(streaming):
            raise ValueError("We cannot enable streaming for dynamic batching")
        return batch_size
