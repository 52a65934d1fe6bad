"""Finding the customer's function. Source: contracts/lmi.md sections 2.7, 2.15 and 7.1."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from djl_python.service_loader import find_decorated_function

from .messages import LoadOrder

_MARKERS = {"input_formatter": "is_input_formatter", "output_formatter": "is_output_formatter"}


class LoadError(Exception):
    """The handler cannot be used; the message is for the one who wrote it."""


def load_module(order: LoadOrder) -> ModuleType:
    """Import the entry point, with the model's folder first on the import path.

    Raises:
        LoadError: it cannot be imported, or does not define the function.
    """
    sys.path.insert(0, order.model_dir)
    try:
        module = _import(order)
    except LoadError:
        raise
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        raise LoadError(f"cannot import the handler {describe(error, order)}") from error
    if not callable(getattr(module, order.function, None)):
        where = getattr(module, "__file__", None) or order.entry_point
        raise LoadError(f"{where} does not define the handler function `{order.function}`{_defined(module)}")
    return module


def find_formatters(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Decorated formatters, by the property under which every call sees them; the first by name counts."""
    found = {key: find_decorated_function(module, marker) for key, marker in _MARKERS.items()}
    return {key: formatter for key, formatter in found.items() if formatter is not None}


def describe(error: BaseException, order: LoadOrder) -> str:
    """What went wrong, with the customer's file and line."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    folder = os.path.realpath(order.model_dir) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.realpath(frame.filename).startswith(folder)]
    if not own:
        return f"{order.entry_point}: {text}"
    return f"{own[-1].filename}, line {own[-1].lineno}: {text}"


def _import(order: LoadOrder) -> ModuleType:
    if not order.entry_point.endswith(".py"):
        return importlib.import_module(order.entry_point)
    path = os.path.join(order.model_dir, order.entry_point)
    if not os.path.isfile(path):
        raise LoadError(f"the handler file {path} does not exist")
    name = _module_name(path, order.model_dir)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise LoadError(f"the handler file {path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _module_name(path: str, model_dir: str) -> str:
    """The name by which siblings and pickles find the module, unless that is taken or would find something else."""
    stem = os.path.basename(path)[: -len(".py")]
    if stem.isidentifier() and stem not in sys.modules and os.path.dirname(path) == model_dir:
        return stem
    return "model_" + hashlib.sha256(path.encode()).hexdigest()[:8]


def _defined(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    return f"; it defines {', '.join(f'`{name}`' for name in names)}" if names else ""
