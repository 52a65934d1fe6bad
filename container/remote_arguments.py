"""Arguments of the engine that name a further model on S3: its draft model, or a tokenizer from elsewhere."""

from __future__ import annotations

import json
from typing import Any

from container.masking import quoted
from container.remote_models import RemoteModels, SourceError, is_s3
from container.resolution import Resolution

_PATHS = ("tokenizer", "hf_config_path")
_SPECULATIVE = "speculative_config"


def set_local_paths(fields: dict[str, Any], remote: RemoteModels, found: Resolution) -> None:
    """Put directories of this machine in the place of `s3://`; what cannot be had is added to `found.problems`."""
    arguments: dict[str, str] = fields["engine_arguments"]
    for name, text in list(arguments.items()):
        try:
            if name in _PATHS and is_s3(text):
                arguments[name] = str(remote.open(text))
            elif name == _SPECULATIVE:
                arguments[name] = _with_local_model(text, remote)
        except SourceError as error:
            source = fields["engine_argument_sources"][name]
            found.problems.append(f"option.{name} is {quoted(name, text)} ({source}): {error}")


def _with_local_model(text: str, remote: RemoteModels) -> str:
    """The engine says what is wrong with text that is no JSON object."""
    try:
        config = json.loads(text)
    except ValueError:
        return text
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, str) or not is_s3(model):
        return text
    return json.dumps(config | {"model": str(remote.open(model))})
