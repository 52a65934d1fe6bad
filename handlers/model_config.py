"""The settings of one model, with defaults filled in. `container.settings.load` makes them from their sources."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from engines.engine_choice import is_vllm
from engines.settings.declaration import setting
from engines.settings.engine_config import EngineConfig
from engines.settings.parsers import BOOLEAN
from handlers.custom.settings import HandlerConfig, PackageConfig
from handlers.deadline import NO_DEADLINES, DeadlineConfig
from handlers.lmi.settings import LmiConfig
from handlers.openai.media.settings import MediaConfig
from handlers.tei.settings import TeiConfig
from handlers.tgi.settings import TgiConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(EngineConfig):
    """One model and how to serve it: the settings of its engine, and the settings of each contract."""

    # Whether sampling parameters turn on sampling (LMI 0.32 and later). In LMI's contracts, `do_sample` takes
    # precedence.
    do_sample_inferred: bool = setting(
        "option.do_sample_inferred", BOOLEAN, "true", doc="Sampling parameters imply `do_sample`"
    )
    # Whether unknown generation parameters are refused instead of ignored.
    strict_parameters: bool = setting(
        "option.strict_parameters", BOOLEAN, "false", doc="Refuse unknown generation parameters"
    )
    deadlines: DeadlineConfig = NO_DEADLINES
    lmi: LmiConfig = field(default_factory=LmiConfig)
    tgi: TgiConfig = field(default_factory=TgiConfig)
    tei: TeiConfig = field(default_factory=TeiConfig)
    media: MediaConfig = field(default_factory=MediaConfig)
    handler: HandlerConfig | None = None  # A customer's handler instead of an engine.
    # A customer's `handle` that gets every call of `/invocations` first, and may pass it on to the engine.
    handler_before_engine: HandlerConfig | None = None
    formatters: Path | None = None  # A `model.py` that may have input and output formatters for the engine.
    packages: PackageConfig = field(default_factory=PackageConfig)  # The packages that `formatters` needs.

    @property
    def runs_on_vllm(self) -> bool:
        """True if vLLM runs the model, False if transformers or a customer's handler runs it.

        Read it after `choose_engine`.
        """
        return self.handler is None and is_vllm(self)


# The class of each group of settings, keyed by the group's field of `ModelConfig`.
GROUPS = {"deadlines": DeadlineConfig, "lmi": LmiConfig, "tgi": TgiConfig, "tei": TeiConfig, "media": MediaConfig}
