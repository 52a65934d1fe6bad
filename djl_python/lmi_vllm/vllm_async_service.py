"""LMI's service for vLLM.

The customer's `handle` gets each call first. The model's engine answers the calls that `handle` does not answer.

The service runs in a worker process, but the engine runs in the server's process. The service calls the engine over the
worker's connection. So `service` has no vLLM objects. In contrast to LMI, it has only the members `initialized`,
`initialize`, `inference`, `check_health` and `tokenizer`.
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
    """The engine. The worker calls it over the worker's connection."""

    async def call(self, inputs: Input) -> Answer:
        """Return the answer to a request. An input without content only loads the engine."""


_engine: Engine | None = None
_model_properties: Mapping[str, Any] = {}


def connect(engine: Engine, properties: Mapping[str, Any]) -> None:
    """Set the engine that every `VLLMHandler` of this process calls. The worker calls this function.

    Args:
        engine: The engine.
        properties: The properties of the engine's model: the options without `option.`, and `model_dir`.
    """
    global _engine, _model_properties
    _engine, _model_properties = engine, properties


class VLLMHandler:
    """The model's engine, as seen by a customer's handler."""

    def __init__(self) -> None:
        self.initialized = False
        self._tokenizer: Any = None

    async def initialize(self, properties: Mapping[str, Any]) -> None:
        """Load the engine if it is not loaded yet.

        Args:
            properties: Ignored. A handler may pass the properties of a request, but a client must not choose the model.

        Raises:
            RuntimeError: The engine cannot be loaded, or the model has no engine.
        """
        answer = await self._call(Input())
        if isinstance(answer, Output) and answer.code != 200:
            raise RuntimeError(f"the engine cannot be used: {_text_of(answer)}")
        self.initialized = True

    async def inference(self, inputs: Input) -> Answer:
        """Return the engine's answer to a request.

        The answer has the same schema as the answer of a model without a `handle`.

        Returns:
            An Output, or an async generator of Outputs for a stream. If the request is refused, an Output whose `code`
            is the HTTP status.
        """
        return await self._call(inputs)

    async def check_health(self) -> None:
        """Do nothing, because the server checks the engine's health."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, or None before `initialize`.

        Raises:
            ImportError: Transformers is not installed.
        """
        if self._tokenizer is None and self.initialized:
            model = _model_properties
            trusted = str(model.get("trust_remote_code", "")).lower() == "true"
            revision = {"revision": model["revision"]} if model.get("revision") else {}
            auto = require("transformers", "the service's tokenizer").AutoTokenizer
            path = model.get("model_id") or model["model_dir"]
            self._tokenizer = auto.from_pretrained(path, trust_remote_code=trusted, **revision)
        return self._tokenizer

    async def _call(self, inputs: Input) -> Answer:
        if _engine is None:
            raise RuntimeError("the engine can be called from async handlers only (option.async_mode=true)")
        return await _engine.call(inputs)


service = VLLMHandler()
_model: ModelService | None = None  # The customer's `model.py`. None until the first call loads this file.


async def handle(inputs: Input) -> Any:
    """Answer a call with the customer's `handle`, or with the engine if `handle` returns None or does not exist.

    If `handle` raises an exception, the answer has the status 424.
    """
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
