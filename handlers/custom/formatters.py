"""A customer's input and output formatters, imported from `model.py` into this process."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from djl_python.output_formatter import takes_request_output
from djl_python.service_loader import find_decorated_function, load_model_service
from engines.interface import EngineStartError
from engines.model_settings import HandlerSettings, ModelSettings
from handlers.custom.packages import needs_packages, prepare_interpreter
from handlers.custom.runtime.main import described

logger = logging.getLogger(__name__)

Formatter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Formatters:
    """The formatters of a model or of an adapter."""

    input: Formatter | None
    output: Formatter | None

    @property
    def output_takes_tokens(self) -> bool:
        """Whether the output formatter is of the older kind, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)


def formatters_of(module: ModuleType) -> Formatters:
    """The decorated formatters of a module."""
    return Formatters(
        find_decorated_function(module, "is_input_formatter"), find_decorated_function(module, "is_output_formatter")
    )


# What LMI calls, with option.async_mode and without it.
_SIGNATURES = {
    ("input", True): "f(decoded_payload: dict, tokenizer=None, **kwargs) -> dict",
    ("output", True): "f(response) -> dict | str | object",
    ("input", False): "f(input_item: Input, **kwargs) -> RequestInput",
    ("output", False): "f(request_output: RequestOutput) -> str",
}
# Types in annotations that show for which of the two a formatter was written.
_TYPES = {
    True: frozenset({"dict", "Dict", "Mapping", "MutableMapping"}),
    False: frozenset({"Input", "RequestInput", "TextInput", "RequestOutput", "TextGenerationOutput"}),
}


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def kind_fault(formatters: Formatters, *, async_mode: bool) -> str:
    """What is wrong with formatters that the model's mode cannot call, and what they should be; empty if nothing is.
    Parameters and annotations tell; a function without annotations may be of either kind."""
    for kind, function in (("input", formatters.input), ("output", formatters.output)):
        if function is None or not (fault := _fault(function, kind, async_mode)):
            continue
        mode = f"with option.async_mode={str(async_mode).lower()}"
        wanted = f"{mode} the {kind} formatter has the signature {_SIGNATURES[kind, async_mode]}"
        return f"{getattr(function, '__name__', function)}{_signature(function) or ''} {fault}; {wanted}"
    return ""


def _fault(function: Formatter, kind: str, async_mode: bool) -> str:
    if inspect.iscoroutinefunction(function):
        return "is a coroutine function, which nobody awaits"
    signature = _signature(function)
    if signature is None:
        return ""
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
        return "takes no argument"
    first, *others = parameters
    offered = {"tokenizer"} if kind == "input" else set[str]()
    needed = {each.name for each in others if each.default is each.empty and each.kind not in _VARIABLE}
    if async_mode and needed - offered:
        return "needs more arguments than it gets"
    other = _TYPES[not async_mode]
    for annotation in (first.annotation, signature.return_annotation):
        names = _type_names(annotation)
        if names & other and not names & _TYPES[async_mode]:
            return f"is written for option.async_mode={str(not async_mode).lower()}"
    return ""


def _signature(function: Formatter) -> inspect.Signature | None:
    """The signature, with annotations as types where they can be evaluated; None of a compiled callable."""
    for evaluated in (True, False):
        with contextlib.suppress(Exception):
            return inspect.signature(function, eval_str=evaluated)
    return None


def _type_names(annotation: Any) -> set[str]:
    """The names in an annotation, which may be text, with those of a class's bases."""
    if annotation is inspect.Parameter.empty:
        return set()
    if isinstance(annotation, type):
        return {base.__name__ for base in annotation.__mro__}
    return set(re.findall(r"\w+", str(annotation)))


async def add_packages(settings: ModelSettings, imports: ModelImports) -> None:
    """Install the model's `requirements.txt`, and make the packages importable that this process does not have itself.
    Raises EngineStartError: the environment for them cannot be made, or pip fails."""
    handler = HandlerSettings(
        entry_point=str(settings.formatters or ""),
        offline=settings.offline,
        install_requirements=settings.install_requirements,
        pip_arguments=settings.pip_arguments,
    )
    if not needs_packages(settings.model_dir, handler):
        return
    python = Path(await prepare_interpreter(settings.model_dir, handler))
    for directory in (python.parents[1] / "lib").glob("python*/site-packages"):
        imports.add_packages(directory)


def load_formatters(settings: ModelSettings, imports: ModelImports) -> Formatters | None:
    """Import the model's `model.py`; None where it has no formatters. They can be used until `imports` are removed.

    Raises EngineStartError: it cannot be imported, with file and line; it has no function of the name in
    `option.output_formatter`; or a formatter is not of the kind that the model's mode calls.
    """
    path = settings.formatters
    if path is None:
        return None
    imports.add_own(path.parent)
    module = _import(path, settings.name)
    found = formatters_of(module)
    if settings.formatter_function is not None:
        output = getattr(module, settings.formatter_function, None)
        if not callable(output):
            raise EngineStartError(
                f"option.output_formatter is {settings.formatter_function}: {path.name} has no such function"
            )
        found = Formatters(found.input, output)
    elif settings.output_formatter is not None:  # a built-in one was asked for
        found = Formatters(found.input, None)
    if found.input is None and found.output is None:
        logger.warning("%s has neither a handler nor formatters; the engine serves the model without it", path.name)
        return None
    if fault := kind_fault(found, async_mode=settings.async_mode):
        raise EngineStartError(f"{path.name}: {fault}")
    return found


def _import(path: Path, model: str) -> ModuleType:
    directory = str(path.parent)
    try:
        return load_model_service(directory, path.name, namespace=model).module
    except BaseException as error:
        logger.exception("%s cannot be imported", path.name)
        raise EngineStartError(f"{path.name} cannot be imported: {described(error, directory)}") from error


_own_directories: list[str] = []  # The directories of all loaded models, each once for each model that has it.


class ModelImports:
    """The entries of `sys.path` that one model adds, and the modules that come from its own directory. A directory of
    several models is on `sys.path` once for each, so that it stays until the last of them is unloaded."""

    def __init__(self) -> None:
        self._places: list[str] = []
        self._own: str | None = None

    def add_own(self, directory: Path) -> None:
        """Import from the model's directory before anything else.

        Modules beside `model.py` may have the same names in several models. Those of other models are removed from
        `sys.modules`, so that this model imports its own; whoever has imported them keeps them.
        """
        self._own = str(directory)
        for name, module in list(sys.modules.items()):
            if _own_directory_of(module) not in (None, self._own) and _is_there(name, directory):
                sys.modules.pop(name, None)
        sys.path.insert(0, self._own)
        _own_directories.append(self._own)
        self._places.append(self._own)

    def add_packages(self, directory: Path) -> None:
        """Import from there what is nowhere else; packages of the server keep their versions."""
        sys.path.append(str(directory))
        self._places.append(str(directory))

    def remove(self) -> None:
        """Undo the additions, and remove the modules of the model's own directory from `sys.modules`. Packages stay
        imported, because many cannot be imported a second time."""
        for place in self._places:
            with contextlib.suppress(ValueError):  # the model's code has removed it
                sys.path.remove(place)
        if self._own is not None:
            if _own_directories.count(self._own) == 1:
                sys.path_importer_cache.pop(self._own, None)
                for name, module in list(sys.modules.items()):
                    if _own_directory_of(module) == self._own:
                        sys.modules.pop(name, None)
            _own_directories.remove(self._own)
        self._places, self._own = [], None


def _own_directory_of(module: ModuleType | None) -> str | None:
    """The loaded model's directory that a module is from; None for all others."""
    file = getattr(module, "__file__", None)
    if not isinstance(file, str):
        return None
    places = (place for place in _own_directories if file.startswith(place + os.sep) and not __file__.startswith(place))
    return max(places, key=len, default=None)  # the innermost


def _is_there(name: str, directory: Path) -> bool:
    top = name.partition(".")[0]
    return (directory / f"{top}.py").is_file() or (directory / top).is_dir()
