"""Decorators for the functions of a customer's `model.py`.

They mark the function; `djl_python.service_loader` finds it by the mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

SAGEMAKER_ADAPTER_IDENTIFIER_HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
"""The request header that names a LoRA adapter."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def input_formatter(function: _Function) -> _Function:
    """Marks the function that makes a request of an `Input`."""
    return _marked(function, "is_input_formatter")


def prediction_handler(function: _Function) -> _Function:
    """Marks the function that runs the model."""
    return _marked(function, "is_prediction_handler")


def init_handler(function: _Function) -> _Function:
    """Marks the function that loads the model."""
    return _marked(function, "is_init_handler")


def _marked(function: _Function, mark: str) -> _Function:
    setattr(function, mark, True)
    return function
