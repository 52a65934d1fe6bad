"""The interpreter and the variables that a model's workers run with. Source: contracts/lmi.md section 2.15."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from handlers.model_settings import HandlerSettings

# What would lead another interpreter to our packages, or away from its own.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")


def interpreter_of(settings: HandlerSettings) -> str:
    """The interpreter that the settings ask for, before any environment of the model's own."""
    return settings.python_executable or sys.executable


def variables_of(settings: HandlerSettings) -> Mapping[str, str]:
    """Our variables and those of `option.env`; another interpreter gets none that concern our packages."""
    inherited = dict(os.environ)
    if settings.python_executable is not None:
        for name in _OURS:
            inherited.pop(name, None)
    return inherited | dict(settings.environment)
