"""Whether vLLM has an implementation for a model, asked of vLLM before anything is loaded."""

from __future__ import annotations

import re

from vllm.engine.arg_utils import AsyncEngineArgs

from handlers.model_settings import ModelSettings

_NO_SUCH_MODEL = re.compile(r"Model architectures? .*?(not supported|failed to be inspected)[^.\n]*")


def unsupported(settings: ModelSettings) -> str | None:
    """Why vLLM cannot run the model; None where it can, and where something else is wrong with it.

    What else is wrong is better said by the engine itself when it loads the model.
    """
    arguments = AsyncEngineArgs(
        model=settings.model_id, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )
    try:
        arguments.create_model_config()
    except ValueError as error:
        found = _NO_SUCH_MODEL.search(str(error))
        return f"vLLM: {found.group()}" if found else None
    except Exception:
        return None
    return None
