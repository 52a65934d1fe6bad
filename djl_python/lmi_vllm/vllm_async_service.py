"""LMI's service for vLLM: the customer's `handle` comes first, the model's engine does what that leaves to it.

It runs in a worker process. The engine runs in the server's process and is called over the worker's connection, so
`service` has the methods of LMI's that load it and generate, but none of vLLM's own objects.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from djl_python.async_utils import create_non_stream_output
from djl_python.inputs import Input
from djl_python.lazy_import import require
from djl_python.outputs import Output
from djl_python.service_loader import MODEL_FILE, ModelService, has_function_in_module, load_model_service

logger = logging.getLogger(__name__)

Answer = Output | AsyncGenerator[Output, None]


class Engine(Protocol):
    """The engine, as the worker's connection reaches it."""

    async def call(self, inputs: Input) -> Answer:
        """The answer to a request; an input without content loads the engine."""


_engine: Engine | None = None


def connect(engine: Engine | None) -> None:
    """Sets the engine that every `VLLMHandler` of this process stands for; the worker calls this."""
    global _engine
    _engine = engine


class VLLMHandler:
    """The model's engine."""

    def __init__(self) -> None:
        self.initialized = False
        self._model: dict[str, Any] = {}
        self._tokenizer: Any = None

    async def initialize(self, properties: Mapping[str, Any]) -> None:
        """Loads the engine, unless it is loaded. Raises RuntimeError: that failed, or the model has no engine."""
        self._model = {"path": properties.get("model_id") or properties.get("model_dir")}
        for name in ("revision", "trust_remote_code"):
            if properties.get(name):
                self._model[name] = properties[name]
        answer = await self._call(Input())
        if isinstance(answer, Output) and answer.code != 200:
            raise RuntimeError(f"the engine cannot be used: {_text_of(answer)}")
        self.initialized = True

    async def inference(self, inputs: Input) -> Answer:
        """The engine's answer to a request: an Output, or for a stream an async generator of them. The schema is that
        of a model without a `handle`. A refused request is an Output with its status as code."""
        return await self._call(inputs)

    async def check_health(self) -> None:
        """Nothing: the server watches the engine."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer; None before `initialize`. Raises ImportError without transformers."""
        if self._tokenizer is None and self._model:
            model = dict(self._model)
            trusted = str(model.pop("trust_remote_code", "false")).lower() == "true"
            auto = require("transformers", "the service's tokenizer").AutoTokenizer
            self._tokenizer = auto.from_pretrained(model.pop("path"), trust_remote_code=trusted, **model)
        return self._tokenizer

    async def _call(self, inputs: Input) -> Answer:
        if _engine is None:
            raise RuntimeError("the engine can be called from async handlers only (option.async_mode=true)")
        return await _engine.call(inputs)


service = VLLMHandler()
_model: ModelService | None = None  # The customer's `model.py`, once it is loaded.


async def handle(inputs: Input) -> Any:
    """The answer of the customer's `handle`, with status 424 where that raises; of the engine where it returns None."""
    global _model
    if _model is None:
        _model = load_model_service(inputs.get_properties().get("model_dir", "."), MODEL_FILE)
    if has_function_in_module(_model.module, "handle"):
        try:
            result = await _model.invoke_handler_async("handle", inputs)
        except Exception as error:
            logger.exception("Custom handler failed")
            return create_non_stream_output("", error=f"Custom handler failed: {error}", code=424)
        if result is not None:
            return result
    if not service.initialized:
        await service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else await service.inference(inputs)


def _text_of(answer: Output) -> str:
    return b"".join(map(answer.encode_value, answer.content.get_values())).decode("utf-8", "replace")
