"""A customer's input and output formatters, which the server's process loads from `model.py`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

from djl_python.output_formatter import takes_request_output
from djl_python.service_loader import MODEL_FILE, find_decorated_function, load_model_service
from engines.adapters import Adapter
from engines.daemon_thread import in_daemon_thread
from engines.errors import SHOWN, AdapterFailed
from engines.interface import EngineStartError
from handlers.custom.model_imports import ModelImports
from handlers.custom.worker_process.load_error import describe_error
from handlers.formatter_thread import FormatterThread
from handlers.model_config import ModelConfig

logger = logging.getLogger(__name__)

Formatter = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Formatters:
    """The formatters of a model or of an adapter, and the thread that runs them."""

    thread: FormatterThread
    input: Formatter | None = None
    output: Formatter | None = None
    module: str = ""  # The module's name in `sys.modules`.

    @property
    def output_takes_tokens(self) -> bool:
        """True if the output formatter has LMI's older form, which is called with each token."""
        return self.output is not None and not takes_request_output(self.output)

    def offering(self, **keywords: Any) -> Formatters:
        """Return the formatters with these keyword arguments for the input formatter.

        Arguments that the input formatter does not accept are left out.
        """
        if self.input is None:
            return self
        parameters = inspect.signature(self.input).parameters.values()
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            names = {parameter.name for parameter in list(parameters)[1:]}
            keywords = {name: value for name, value in keywords.items() if name in names}
        return replace(self, input=partial(self.input, **keywords))

    def forget(self) -> None:
        """Remove an adapter's module from `sys.modules`."""
        sys.modules.pop(self.module, None)


# The signatures of formatters in LMI, keyed by the kind of formatter and by option.async_mode.
_SIGNATURES = {
    ("input", True): "f(decoded_payload: dict, tokenizer=None, **kwargs) -> dict",
    ("output", True): "f(response) -> dict | str | object",
    ("input", False): "f(input_item: Input, **kwargs) -> RequestInput",
    ("output", False): "f(request_output: RequestOutput) -> str",
}
# Types in annotations that show for which value of option.async_mode a formatter was written, keyed by that value.
_TYPES = {
    True: frozenset({"dict", "Dict", "Mapping", "MutableMapping"}),
    False: frozenset({"Input", "RequestInput", "TextInput", "RequestOutput", "TextGenerationOutput"}),
}


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_fault(formatters: Formatters, *, async_mode: bool) -> str:
    """Return the reason why a formatter does not fit the model's mode, or an empty string.

    The reason includes the right signature. The check uses parameters and annotations. A function without annotations
    fits both modes.
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
    """Return the names in an annotation. For a class, return the names of the class and its bases."""
    if annotation is inspect.Parameter.empty:
        return set()
    if isinstance(annotation, type):
        return {base.__name__ for base in annotation.__mro__}
    return set(re.findall(r"\w+", str(annotation)))


def load_formatters(config: ModelConfig, imports: ModelImports) -> Formatters:
    """Import the model's `model.py` and return its formatters.

    The formatters work until `imports.remove` is called.

    Raises:
        EngineStartError: The file cannot be imported, it lacks the function that `option.output_formatter` names, or a
            formatter does not fit the model's mode. If the import failed, the message has the file and the line.
    """
    thread, path = FormatterThread(config.predict_timeout), config.formatters
    if path is None:
        return Formatters(thread)
    imports.add_own(path.parent)
    try:
        module = load_model_service(str(path.parent), path.name, namespace=config.name).module
    except BaseException as error:
        logger.exception("%s cannot be imported", path.name)
        raise EngineStartError(f"{path.name} cannot be imported: {describe_error(error, str(path.parent))}") from error
    found = _found(module, thread)
    if config.lmi.formatter_function is not None:
        output = getattr(module, config.lmi.formatter_function, None)
        if not callable(output):
            raise EngineStartError(
                f"option.output_formatter is {config.lmi.formatter_function}: {path.name} has no such function"
            )
        found = replace(found, output=output)
    elif config.lmi.output_formatter is not None:  # The settings choose a built-in formatter.
        found = replace(found, output=None)
    if found.input is None and found.output is None:
        logger.warning("%s has neither a handler nor formatters; the engine serves the model without it", path.name)
    if fault := signature_fault(found, async_mode=config.lmi.async_mode):
        raise EngineStartError(f"{path.name}: {fault}")
    return found


async def load_adapter_formatters(adapter: Adapter, base: Formatters, *, async_mode: bool) -> Formatters | None:
    """Run an adapter's `model.py` and return its formatters, or None if it has none.

    Args:
        adapter: The adapter. Its `model.py` becomes a module with a unique name.
        base: The model's formatters. If the adapter has no input or no output formatter, the model's is used instead.
        async_mode: The value of option.async_mode, which decides the formatters' signatures.

    Raises:
        AdapterFailed: The file cannot be run, it takes too long, or a formatter does not fit the model's mode. If the
            file raised an error, the message has the file and the line.
    """
    limit = base.thread.time_limit
    loading = asyncio.ensure_future(in_daemon_thread(partial(_of_adapter, adapter, base.thread, async_mode)))
    try:
        async with asyncio.timeout(limit):
            own = await asyncio.shield(loading)
    except TimeoutError:
        raise AdapterFailed(f"{MODEL_FILE} of the adapter took longer than {limit:g} s") from None
    finally:
        if not loading.done():
            loading.add_done_callback(_forget)
    if own is None:
        return None
    return replace(own, input=own.input or base.input, output=own.output or base.output)


def _of_adapter(adapter: Adapter, thread: FormatterThread, async_mode: bool) -> Formatters | None:
    directory = str(adapter.path)
    try:
        if not (adapter.path / MODEL_FILE).is_file():
            return None
    except OSError as error:  # For example, the name is too long.
        raise AdapterFailed(f"src: {directory[:SHOWN]!r} cannot be read: {error.strerror}") from None
    try:
        module = load_model_service(directory, MODEL_FILE, namespace=f"{adapter.name}_{adapter.id}").module
    except BaseException as error:
        logger.exception("%s of the adapter %s cannot be run", MODEL_FILE, adapter.name)
        raise AdapterFailed(f"{MODEL_FILE} of the adapter cannot be run: {describe_error(error, directory)}") from error
    own = _found(module, thread)
    if fault := signature_fault(own, async_mode=async_mode):
        own.forget()
        raise AdapterFailed(f"{MODEL_FILE} of the adapter: {fault}")
    if own.input is own.output is None:
        own.forget()
        return None
    return own


def _forget(late: asyncio.Future[Formatters | None]) -> None:
    """Unload a `model.py` if its import finished after the load had been given up."""
    if not late.cancelled() and late.exception() is None and (formatters := late.result()) is not None:
        formatters.forget()


def _found(module: ModuleType, thread: FormatterThread) -> Formatters:
    """Return the decorated functions of a module."""
    read, write = (find_decorated_function(module, f"is_{kind}_formatter") for kind in ("input", "output"))
    return Formatters(thread, read, write, module.__name__)
