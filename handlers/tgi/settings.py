"""The settings of TGI's routes."""

from __future__ import annotations

from dataclasses import dataclass

from engines.settings.declaration import setting
from engines.settings.parsers import integer


@dataclass(frozen=True, slots=True, kw_only=True)
class TgiConfig:
    """Limits on a request. The defaults are TGI's."""

    max_stop_sequences: int = setting(
        "option.max_stop_sequences",
        integer(0, 1024),
        "4",
        doc="Maximum number of stop sequences in a request to TGI's routes",
    )
    max_best_of: int = setting("option.max_best_of", integer(1, 64), "2", doc="Largest `best_of` on TGI's routes")
