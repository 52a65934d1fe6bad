"""The settings of TEI's routes."""

from __future__ import annotations

from dataclasses import dataclass

from engines.settings.declaration import setting
from engines.settings.parsers import BOOLEAN, integer


@dataclass(frozen=True, slots=True, kw_only=True)
class TeiConfig:
    """How TEI's routes treat texts. The defaults are TEI's."""

    auto_truncate: bool = setting(
        "option.auto_truncate",
        BOOLEAN,
        "true",
        shows_default=False,
        doc="TEI's routes cut texts that are too long. `truncate` of a request takes precedence",
    )
    max_client_batch_size: int = setting(
        "option.max_client_batch_size",
        integer(1),
        "32",
        shows_default=False,
        doc="Maximum number of texts in a request to TEI's routes",
    )
