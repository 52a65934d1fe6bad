"""The settings of one model, as the handlers see them: typed, validated, defaults filled in.

`container.settings` makes them from serving.properties and the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

RollingBatch = Literal["auto", "vllm", "lmi-dist", "scheduler", "trtllm", "disable"]
OutputFormatter = Literal["json", "jsonlines", "sse"]


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
    max_rolling_batch_size: int = 256
    output_formatter: OutputFormatter | None = None
    tgi_compat: bool = False
    do_sample_inferred: bool = True
    """Sampling parameters switch sampling on unless `do_sample` says otherwise (LMI 0.32 and later)."""
    token_logprobs: bool = True
    """Tokens carry their log probability; computing them costs the engine time, and `log_prob` may be null."""
    strict_parameters: bool = False
    """Refuse unknown generation parameters instead of ignoring them."""
    dtype: str = "auto"
    tensor_parallel_degree: int | None = None
    """None: one device, or with `tensor_parallel_max` as many GPUs as there are."""
    tensor_parallel_max: bool = False
    """"max" was asked for; only the engine can count the GPUs."""
    pipeline_parallel_degree: int = 1
    predict_timeout: float = 240.0
    """Seconds without any new token after which a request fails."""
    model_loading_timeout: float = 1800.0
    """Seconds that loading may take."""
    engine_arguments: Mapping[str, str] = field(default_factory=dict)
    """Further `option.<name>` values, for the engine to interpret."""
    engine_argument_sources: Mapping[str, str] = field(default_factory=dict)
    """Where each engine argument came from, for error messages."""
