"""Loads a customer's Python file and finds functions in it."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from djl_python.inputs import Input

MODEL_FILE = "model.py"
SAGEMAKER_FUNCTIONS: dict[str, tuple[tuple[str, ...], ...]] = {
    "model_fn": (("model_dir",),),
    "input_fn": (("request_body", "content_type"), ("request_body", "request_content_type")),
    "predict_fn": (("input_data", "model"),),
    "output_fn": (("prediction", "accept"), ("prediction", "response_content_type")),
}
"""The functions of SageMaker's script mode, and the parameter names that each must have."""
_SAGEMAKER_COUNTERPARTS = {
    "is_init_handler": "model_fn",
    "is_input_formatter": "input_fn",
    "is_prediction_handler": "predict_fn",
    "is_output_formatter": "output_fn",
}
_Stamp = tuple[int, int]
_formatter_modules: dict[str, tuple[_Stamp, ModuleType]] = {}


class ModelService:
    """A loaded module, and the directory of its model."""

    def __init__(self, module: ModuleType, model_dir: str | None) -> None:
        self.module = module
        self.model_dir = model_dir

    def invoke_handler(self, function_name: str, inputs: Input) -> Any:
        """Calls a handler. Raises AttributeError if there is none, and whatever it raises."""
        inputs.properties["model_dir"] = self.model_dir
        return getattr(self.module, function_name)(inputs)

    async def invoke_handler_async(self, function_name: str, inputs: Input) -> Any:
        """Calls a handler of async mode; what it returns may be an async generator."""
        called = self.invoke_handler(function_name, inputs)
        return await called if inspect.isawaitable(called) else called


def load_model_service(
    model_dir: str, entry_point: str, device_id: Any = "-1", namespace: str | None = None
) -> ModelService:
    """Runs the entry point: a file, or the name of an installed module. A file is run anew each time.

    `namespace` keeps apart the modules of adapters. A file can import from its own directory only if that directory is
    on `sys.path`, where the process that serves the model puts it.

    Raises:
        ValueError: there is no such file, or the model is a TorchServe archive.
        Exception: whatever the file raises while it is run.
    """
    if os.path.exists(os.path.join(model_dir, "MAR-INF", "MANIFEST.json")):
        raise ValueError(f"{model_dir} is a TorchServe archive, which is not supported")
    if not os.path.isabs(entry_point) and not entry_point.endswith(".py"):
        return ModelService(importlib.import_module(entry_point), model_dir)
    path = os.path.join(model_dir, entry_point)
    if not os.path.isfile(path):
        raise ValueError(f"entry-point file not found {path}.")
    return ModelService(_run_file(path, namespace), model_dir)


def has_function_in_module(module: Any, function_name: str) -> bool:
    """Whether a module has such a function."""
    return callable(getattr(module, function_name, None))


def find_decorated_function(module: Any, decorator_attribute: str) -> Callable[..., Any] | None:
    """The first callable of an imported module, in the order of names, that a decorator has marked.

    `decorator_attribute` is the mark, such as `is_output_formatter`. `get_annotated_function` also finds functions of
    SageMaker's script mode.
    """
    found = (getattr(module, name) for name in dir(module))
    return next((each for each in found if callable(each) and getattr(each, decorator_attribute, None) is True), None)


def find_sagemaker_function(module: Any, function_name: str) -> Callable[..., Any] | None:
    """A function of SageMaker's script mode; None if its parameters are not named as they must be."""
    function = getattr(module, function_name, None)
    if not callable(function):
        return None
    try:
        names = tuple(inspect.signature(function).parameters)
    except (ValueError, TypeError):  # a callable without a signature, such as some built-in ones
        return None
    return function if names in SAGEMAKER_FUNCTIONS.get(function_name, ()) else None


def is_sagemaker_function(function: Callable[..., Any]) -> bool:
    """Whether a function was found by its SageMaker name, and so takes a body and a content type."""
    marked = any(getattr(function, mark, None) is True for mark in _SAGEMAKER_COUNTERPARTS)
    return not marked and getattr(function, "__name__", "") in SAGEMAKER_FUNCTIONS


def get_annotated_function(
    model_dir: str, decorator_attribute: str, namespace: str | None = None
) -> Callable[..., Any] | None:
    """The function of `model.py` that a decorator has marked, else its SageMaker counterpart, else None.

    No `model.py` means no function. The file is run once for all its functions, and again when it has changed.

    Raises:
        Exception: whatever the file raises while it is run.
    """
    path = os.path.abspath(os.path.join(model_dir, MODEL_FILE))
    if not os.path.isfile(path):
        return None
    module = _formatter_module(path, namespace)
    decorated = find_decorated_function(module, decorator_attribute)
    counterpart = _SAGEMAKER_COUNTERPARTS.get(decorator_attribute)
    if decorated or not counterpart:
        return decorated
    return find_sagemaker_function(module, counterpart)


def _formatter_module(path: str, namespace: str | None) -> ModuleType:
    status = os.stat(path)
    stamp, name = (status.st_mtime_ns, status.st_size), _module_name(path, namespace)
    known = _formatter_modules.get(name)
    if known and known[0] == stamp and known[1].__file__ == path:
        return known[1]
    module = _run_file(path, namespace)
    _formatter_modules[name] = stamp, module
    return module


def _module_name(path: str, namespace: str | None) -> str:
    readable = "ns_" + re.sub(r"\W", "_", namespace) if namespace else "model"
    return f"{readable}_{hashlib.sha256(f'{namespace} {path}'.encode()).hexdigest()[:8]}"


def _run_file(path: str, namespace: str | None) -> ModuleType:
    name = _module_name(path, namespace)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickle look a module up by its name while it is being run.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
