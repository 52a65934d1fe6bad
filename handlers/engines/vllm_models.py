"""Whether vLLM has an implementation for a model, asked of vLLM before anything is loaded."""

from __future__ import annotations

import re

from vllm.engine.arg_utils import AsyncEngineArgs

from handlers.model_settings import ModelSettings

_NO_SUCH_MODEL = re.compile(r"Model architectures? .*?not supported[^.\n]*")


def unsupported(settings: ModelSettings) -> str | None:
    """Why vLLM cannot generate text with the model; None where it can, and where something else is wrong with it.

    What else is wrong is better said by the engine itself when it loads the model: a model that vLLM has and fails to
    inspect shall not be served by another engine without a word.
    """
    arguments = AsyncEngineArgs(
        model=settings.model_id, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    try:
        config = arguments.create_model_config()
    except ValueError as error:
        found = _NO_SUCH_MODEL.search(str(error))
        return f"vLLM: {found.group()}" if found else None
    except Exception:
        return None
    if config.is_encoder_decoder:
        return f"vLLM: {config.architecture} is an encoder-decoder model"
    if config.runner_type != "generate":
        return f"vLLM: {config.architecture} does not generate text"
    return None
