"""A customer's input and output formatters: found in `model.py`, and imported into this process.

Source: contracts/lmi.md sections 8.1 and 8.2.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from djl_python.output_formatter import takes_request_output
from djl_python.service_loader import find_decorated_function
from handlers.engines.protocol import EngineStartError
from handlers.model_imports import ModelImports
from handlers.model_settings import HandlerSettings, ModelSettings
from handlers.workers.requirements import needs_packages, prepare_interpreter

logger = logging.getLogger(__name__)

Formatter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Formatters:
    """What was found; at least one of both."""

    input: Formatter | None
    output: Formatter | None

    @property
    def output_takes_tokens(self) -> bool:
        """Whether the output formatter is of the older kind, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)


async def add_packages(settings: ModelSettings, imports: ModelImports) -> None:
    """Install the model's `requirements.txt`, and let this process import from there what it does not have itself.

    Raises:
        EngineStartError: no environment for them can be made, or pip fails.
    """
    own = HandlerSettings(
        entry_point=str(settings.formatters or ""),
        offline=settings.offline,
        install_requirements=settings.install_requirements,
        pip_arguments=settings.pip_arguments,
    )
    if not needs_packages(settings.model_dir, own):
        return
    python = Path(await prepare_interpreter(settings.model_dir, own))
    for directory in (python.parents[1] / "lib").glob("python*/site-packages"):
        imports.add_packages(directory)


def load_formatters(settings: ModelSettings, imports: ModelImports) -> Formatters | None:
    """Import the model's `model.py`; None where it has no formatters.

    They can be used until `imports` are removed.

    Raises:
        EngineStartError: it cannot be imported, with file and line; or `option.output_formatter` names no function
            of it.
    """
    path = settings.formatters
    if path is None:
        return None
    imports.add_own(path.parent)
    module = _import(path, settings.name)
    output = find_decorated_function(module, "is_output_formatter")
    if settings.formatter_function is not None:
        output = getattr(module, settings.formatter_function, None)
        if not callable(output):
            raise EngineStartError(
                f"option.output_formatter is {settings.formatter_function}: {path.name} has no such function"
            )
    elif settings.output_formatter is not None:  # a built-in one was asked for
        output = None
    found = Formatters(find_decorated_function(module, "is_input_formatter"), output)
    if found.input is None and found.output is None:
        logger.info("%s has neither a handler nor formatters; the engine serves the model without it", path.name)
        return None
    for kind, formatter in (("input", found.input), ("output", found.output)):
        if formatter is not None:
            logger.info("%s formatter: %s of %s", kind, getattr(formatter, "__name__", formatter), path.name)
    return found


def _import(path: Path, model: str) -> ModuleType:
    """The module, under a name of the model's own."""
    name = f"slipway_model_{model}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise EngineStartError(f"{path.name} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # the model's directory is not ours to write to
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(name, None)
        logger.exception("%s cannot be imported", path.name)
        raise EngineStartError(f"{path.name} cannot be imported: {described(error, path.parent)}") from error
    finally:
        sys.dont_write_bytecode = writes
    return module


def described(error: BaseException, directory: Path) -> str:
    """The error with the file and line below `directory` where it was raised."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return text  # says where it is
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(str(directory))]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
