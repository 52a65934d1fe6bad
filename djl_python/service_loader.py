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
# For each decorator's mark: the name of the function with this purpose in SageMaker's script mode, and the parameter
# lists with which `get_annotated_function` returns it.
_SAGEMAKER_FUNCTIONS = {
    "is_init_handler": ("model_fn", [["model_dir"]]),
    "is_input_formatter": (
        "input_fn",
        [["request_body", "content_type"], ["request_body", "request_content_type"]],
    ),
    "is_prediction_handler": ("predict_fn", [["input_data", "model"]]),
    "is_output_formatter": ("output_fn", [["prediction", "accept"], ["prediction", "response_content_type"]]),
}


class ModelService:
    """A loaded module and the directory of its model."""

    def __init__(self, module: ModuleType, model_dir: str | None) -> None:
        self.module = module
        self.model_dir = model_dir

    def invoke_handler(self, function_name: str, inputs: Input) -> Any:
        """Call a handler function. Its exceptions propagate.

        Raises:
            AttributeError: The module does not have this function.
        """
        inputs.properties["model_dir"] = self.model_dir
        return getattr(self.module, function_name)(inputs)

    async def invoke_handler_async(self, function_name: str, inputs: Input) -> Any:
        """Call a handler function in async mode. The result may be an async generator."""
        called = self.invoke_handler(function_name, inputs)
        return await called if inspect.isawaitable(called) else called


def load_model_service(
    model_dir: str, entry_point: str, device_id: Any = "-1", namespace: str | None = None
) -> ModelService:
    """Load the entry point. If the entry point is a file, each call runs the file again.

    A file can import modules from its directory only if the directory is on `sys.path`. The process that serves the
    model adds this directory to `sys.path`.

    Args:
        model_dir: The model's directory.
        entry_point: A file in that directory, or the name of an installed module.
        device_id: Ignored.
        namespace: A name that keeps the modules of several adapters apart.

    Raises:
        ValueError: The file does not exist, or the model is a TorchServe archive.
        Exception: The file raised this exception.
    """
    if os.path.exists(os.path.join(model_dir, "MAR-INF", "MANIFEST.json")):
        raise ValueError(f"{model_dir} is a TorchServe archive, which is not supported")
    if not os.path.isabs(entry_point) and not entry_point.endswith(".py"):
        return ModelService(importlib.import_module(entry_point), model_dir)
    path = os.path.join(model_dir, entry_point)
    if not os.path.isfile(path):
        raise ValueError(f"entry-point file not found {path}.")
    return ModelService(run_file(path, _name_of(path, namespace)), model_dir)


def has_function_in_module(module: Any, function_name: str) -> bool:
    """Return True if a module has a function with this name."""
    return callable(getattr(module, function_name, None))


def find_decorated_function(module: Any, decorator_attribute: str) -> Callable[..., Any] | None:
    """Return the callable in a module that a decorator has marked, or None.

    If there are several, return the first in the order of names.

    Args:
        decorator_attribute: The decorator's mark, such as `is_output_formatter`.
    """
    found = (getattr(module, name) for name in dir(module))
    return next((each for each in found if callable(each) and getattr(each, decorator_attribute, None) is True), None)


def get_annotated_function(
    model_dir: str, decorator_attribute: str, namespace: str | None = None
) -> Callable[..., Any] | None:
    """Return the function in `model.py` that a decorator has marked, or else SageMaker's script-mode function.

    Returns:
        The function. The result is None in three cases: there is no `model.py`; there is no such function; the
        script-mode function does not have one of the parameter lists in `_SAGEMAKER_FUNCTIONS`.

    Raises:
        Exception: The file raised this exception.
    """
    path = os.path.abspath(os.path.join(model_dir, MODEL_FILE))
    if not os.path.isfile(path):
        return None
    module = run_file(path, _name_of(path, namespace))
    decorated = find_decorated_function(module, decorator_attribute)
    name, signatures = _SAGEMAKER_FUNCTIONS.get(decorator_attribute, ("", []))
    if decorated or not has_function_in_module(module, name):
        return decorated
    function: Callable[..., Any] = getattr(module, name)
    return function if list(inspect.signature(function).parameters) in signatures else None


def run_file(path: str, name: str) -> ModuleType:
    """Run a file as the module `name`. Exceptions from the file propagate.

    Raises:
        ValueError: The file is not a Python file.
    """
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # While the module runs, dataclasses and pickle look it up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _name_of(path: str, namespace: str | None) -> str:
    readable = "ns_" + re.sub(r"\W", "_", namespace) if namespace else "model"
    return f"{readable}_{hashlib.sha256(f'{namespace} {path}'.encode()).hexdigest()[:8]}"
