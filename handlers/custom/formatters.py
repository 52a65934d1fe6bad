"""Loads a customer's input and output formatters from `model.py` into the server's process."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from djl_python.output_formatter import takes_request_output
from djl_python.service_loader import find_decorated_function, load_model_service
from engines.interface import EngineStartError
from engines.model_settings import ModelSettings
from handlers.custom.model_imports import ModelImports
from handlers.custom.worker_process.load_error import describe_error

logger = logging.getLogger(__name__)

Formatter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Formatters:
    """The formatters of a model or of an adapter."""

    input: Formatter | None
    output: Formatter | None

    @property
    def output_takes_tokens(self) -> bool:
        """True if the output formatter has the older form of LMI, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)


def formatters_of(module: ModuleType) -> Formatters:
    """Return the decorated formatters of a module."""
    return Formatters(
        find_decorated_function(module, "is_input_formatter"), find_decorated_function(module, "is_output_formatter")
    )


# The signatures that LMI calls, by the kind of formatter and option.async_mode.
_SIGNATURES = {
    ("input", True): "f(decoded_payload: dict, tokenizer=None, **kwargs) -> dict",
    ("output", True): "f(response) -> dict | str | object",
    ("input", False): "f(input_item: Input, **kwargs) -> RequestInput",
    ("output", False): "f(request_output: RequestOutput) -> str",
}
# Types in annotations that show for which value of option.async_mode a formatter was written.
_TYPES = {
    True: frozenset({"dict", "Dict", "Mapping", "MutableMapping"}),
    False: frozenset({"Input", "RequestInput", "TextInput", "RequestOutput", "TextGenerationOutput"}),
}


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_fault(formatters: Formatters, *, async_mode: bool) -> str:
    """Return the reason why the model's mode cannot call the formatters, or an empty string.

    The reason includes the right signature. Parameters and annotations decide. A function without annotations fits both
    modes.
    """
    for kind, function in (("input", formatters.input), ("output", formatters.output)):
        if function is None or not (fault := _function_fault(function, kind, async_mode)):
            continue
        mode = f"with option.async_mode={str(async_mode).lower()}"
        wanted = f"{mode} the {kind} formatter has the signature {_SIGNATURES[kind, async_mode]}"
        return f"{getattr(function, '__name__', function)}{_signature(function) or ''} {fault}; {wanted}"
    return ""


def _function_fault(function: Formatter, kind: str, async_mode: bool) -> str:
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
    """Return the signature, with annotations evaluated if possible. Return None for a compiled callable."""
    for evaluated in (True, False):
        with contextlib.suppress(Exception):
            return inspect.signature(function, eval_str=evaluated)
    return None


def _type_names(annotation: Any) -> set[str]:
    """Return the names in an annotation, which may be text, or the names of a class and its bases."""
    if annotation is inspect.Parameter.empty:
        return set()
    if isinstance(annotation, type):
        return {base.__name__ for base in annotation.__mro__}
    return set(re.findall(r"\w+", str(annotation)))


def load_formatters(settings: ModelSettings, imports: ModelImports) -> Formatters | None:
    """Import the model's `model.py` and return its formatters, or None if it has none.

    The formatters work until `imports` is removed.

    Raises:
        EngineStartError: The file cannot be imported; the message has the file and the line. Or the file does not have
            the function that `option.output_formatter` names. Or the model's mode cannot call a formatter.
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
    elif settings.output_formatter is not None:  # The settings choose a built-in formatter.
        found = Formatters(found.input, None)
    if found.input is None and found.output is None:
        logger.warning("%s has neither a handler nor formatters; the engine serves the model without it", path.name)
        return None
    if fault := signature_fault(found, async_mode=settings.async_mode):
        raise EngineStartError(f"{path.name}: {fault}")
    return found


def _import(path: Path, model: str) -> ModuleType:
    directory = str(path.parent)
    try:
        return load_model_service(directory, path.name, namespace=model).module
    except BaseException as error:
        logger.exception("%s cannot be imported", path.name)
        raise EngineStartError(f"{path.name} cannot be imported: {describe_error(error, directory)}") from error
