"""Names that are nobody's, but look as if they were meant for us: what was probably meant instead."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from container.settings import options, server_options
from container.settings.aliases import ADVICE, ALIASES, VLLM_PREFIX, WITHOUT_EFFECT
from container.settings.properties import PREFIXES, VARIABLES, Value
from handlers.engines.vllm.option_names import vllm_option_names

_OURS = re.compile(r"(HF|SM|SAGEMAKER|DJL|TENSOR|PIPELINE|MAX|MODEL|PREDICT|STANDARD|MESSAGES)_[A-Z0-9_]{3,}", re.ASCII)
_VERY_CLOSE, _CLOSE = 0.88, 0.75
_STANDARD = frozenset({"SAGEMAKER_MODEL_SERVER_WORKERS", "SAGEMAKER_MODEL_PATH"})
"""Those that others set, and that are close to one of ours."""
_KNOWN = frozenset({*VARIABLES, *WITHOUT_EFFECT, *ADVICE, *(alias.variable for alias in ALIASES)})


def unknown_variables(environ: Iterable[str]) -> list[str]:
    """A warning for each variable that is close to one that is known, and is not."""
    return [
        f"environment: {name} is unknown and has no effect; did you mean {close}?"
        for name in sorted(environ)
        if name not in _KNOWN | _STANDARD and not name.startswith((*PREFIXES, VLLM_PREFIX)) and _OURS.fullmatch(name)
        if (close := _closest(name, _KNOWN, _VERY_CLOSE))
    ]


def unknown_options(arguments: Mapping[str, str], sources: Mapping[str, str]) -> list[str]:
    """A warning for each option that is neither ours nor vLLM's; none where vLLM is not installed."""
    known = vllm_option_names()
    if not known:
        return []
    ours = {key.removeprefix(options.PREFIX) for key in options.BY_KEY}
    warnings = []
    for name in arguments:
        if name in known or name in ours:
            continue
        close = _closest(name.lower(), known | ours, _CLOSE)
        hint = f"; did you mean option.{close}?" if close else ""
        warnings.append(f"option.{name} ({sources[name]}) is neither Slipway's nor vLLM's{hint}")
    return warnings


def server_hint(key: str, value: Value) -> str:
    """What to add where the server has no such setting."""
    known = [option.key for option in (*server_options.SERVER_OPTIONS, *server_options.FOR_MODEL)]
    close = _closest(key, known, _CLOSE)
    if not close:
        return ""
    prefix = "SERVING_" if value.source.startswith("environment") else ""
    return f"; did you mean {prefix}{close.upper() if prefix else close}?"


def _closest(name: str, known: Iterable[str], cutoff: float) -> str:
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
