"""The built-in Hugging Face handler, which customers also subclass (contracts/lmi.md sections 5 and 7.5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from djl_python import wire
from djl_python.encode_decode import decode, encode
from djl_python.huggingface_pipelines import GenerationPipeline, build_pipeline, infer_task, load
from djl_python.huggingface_settings import HuggingFaceSettings, read_settings
from djl_python.inputs import Input
from djl_python.lazy_import import require
from djl_python.outputs import Output
from djl_python.request_io import TextInput
from djl_python.rolling_batch.rolling_batch import RollingBatch
from djl_python.rolling_batch.step import parse_rolling_batch_request, rolling_batch_inference
from djl_python.streaming_utils import StreamingUtils

_NOT_FOR_THE_MODEL = ("details", "stream", "output_formatter")


def get_rolling_batch_class_from_str(rolling_batch_type: str) -> Callable[..., RollingBatch]:
    """The class of a rolling batch, called with the model and its properties; tests put their own function here.

    Raises:
        ValueError: always; rolling batches are what the server's own engine does.
    """
    raise ValueError(f"The rolling batch {rolling_batch_type!r} runs in the server's engine, not in a handler")


class HuggingFaceService:
    """A transformers pipeline as a handler: dynamic batches, or the stream of one request."""

    def __init__(self) -> None:
        self.initialized = False
        self.hf_pipeline: Any = None
        self.model: Any = None
        self.tokenizer: Any = None
        self.rolling_batch: RollingBatch | None = None
        self.hf_configs: HuggingFaceSettings | None = None
        self._properties: Mapping[str, Any] = {}

    def initialize(self, properties: Mapping[str, Any]) -> None:
        """Loads the model.

        Raises:
            ValueError: a property has a value that is not allowed.
            ImportError: transformers or torch is not installed.
            OSError: the model cannot be read.
        """
        settings = read_settings(properties)
        self.hf_configs, self._properties = settings, properties
        if settings.rolling_batch:
            self.rolling_batch = get_rolling_batch_class_from_str(settings.rolling_batch)(settings.model, properties)
            self.tokenizer = self.rolling_batch.get_tokenizer()
        elif settings.streaming != "false":
            self.model, self.tokenizer = load(_streaming_model_class(settings), settings)
        else:
            self.hf_pipeline = self.get_pipeline(settings.task or infer_task(settings), settings.model, {})
            self.model, self.tokenizer = self.hf_pipeline.model, self.hf_pipeline.tokenizer
        self.initialized = True

    def get_pipeline(self, task: str, model_id_or_path: str, kwargs: Mapping[str, Any]) -> Any:
        """The pipeline of a task; subclasses may bring another. `kwargs` is for them, and unused here."""
        if self.hf_configs is None:
            raise ValueError("get_pipeline belongs to initialize")
        return build_pipeline(task, self.hf_configs)

    def inference(self, inputs: Input) -> Output:
        """Answers a request, or several of one batch.

        A request that is wrong gets LMI's error body as its answer; a single one with status 424.

        Raises:
            ValueError: the requests of a batch have different parameters, or the model refuses them.
        """
        if self.rolling_batch is not None:
            return rolling_batch_inference(self.rolling_batch, inputs, self._parse_rolling_batch_request)
        batch = inputs.get_batches()
        requests, errors = self._parse_all(batch)
        if len(batch) == 1 and errors:
            return Output().error(errors[0])
        if self.hf_pipeline is None:
            return self._stream(requests)
        answers = self._predict(requests, errors)
        output = Output()
        for index, item in enumerate(batch):
            key = f"batch_{index}.data" if inputs.is_batch() else "data"
            if index in errors:
                output.add_as_json({"code": 424, "message": "invoke handler failure", "error": errors[index]}, key)
            else:
                encode(output, answers[index], _accepted(item), key=key)
        return output

    def _predict(self, requests: Mapping[int, TextInput], errors: dict[int, str]) -> dict[int, Any]:
        if not requests:
            return {}
        if isinstance(self.hf_pipeline, GenerationPipeline):
            return self._generate(requests)
        answers: dict[int, Any] = {}
        for index, request in requests.items():
            try:
                answers[index] = self.hf_pipeline(request.input_text, **request.server_parameters)
            except (ValueError, TypeError) as error:
                if len(requests) == 1:
                    raise
                errors[index] = wire.sendable(str(error))
        return answers

    def _generate(self, requests: Mapping[int, TextInput]) -> dict[int, Any]:
        """All prompts of all requests as one batch."""
        parameters = next(iter(requests.values())).server_parameters
        if any(request.server_parameters != parameters for request in requests.values()):
            raise ValueError("In order to enable dynamic batching, all input batches must have the same parameters")
        texts = iter(self.hf_pipeline([p for request in requests.values() for p in request.input_text], **parameters))
        return {index: [next(texts) for _ in request.input_text] for index, request in requests.items()}

    def _stream(self, requests: Mapping[int, TextInput]) -> Output:
        if len(requests) != 1:
            raise NotImplementedError("Dynamic batch not supported for generic streaming")
        request = requests[0]
        if self.hf_configs is not None and self.hf_configs.streaming == "huggingface":
            stream = StreamingUtils.use_hf_default_streamer
        else:
            stream = StreamingUtils.get_stream_generator("Accelerate")
        texts = stream(self.model, self.tokenizer, request.input_text, None, **request.server_parameters)
        return Output().add_property("content-type", "application/jsonlines").add_stream_content(texts)

    def _parse_all(self, batch: list[Input]) -> tuple[dict[int, TextInput], dict[int, str]]:
        requests: dict[int, TextInput] = {}
        errors: dict[int, str] = {}
        for index, item in enumerate(batch):
            try:
                requests[index] = self._parse(item)
            except Exception as error:  # also whatever a custom formatter raises
                logging.exception("Request %s cannot be parsed", item.get_property("requestId"))
                errors[index] = wire.sendable(f"Input Parsing failed. {error}")
        return requests, errors

    def _parse(self, item: Input) -> TextInput:
        custom = self._custom_formatter()
        request = custom(item) if custom else parse_dynamic_batch_request(item)
        request.server_parameters = {
            name: value for name, value in request.parameters.items() if name not in _NOT_FOR_THE_MODEL
        }
        if not isinstance(request.input_text, list):
            request.input_text = [request.input_text]
        generates = self.hf_pipeline is None or isinstance(self.hf_pipeline, GenerationPipeline)
        if generates and not all(isinstance(prompt, str) for prompt in request.input_text):
            raise ValueError("The 'inputs' field must be a string or a list of strings")
        return request

    def _parse_rolling_batch_request(self, item: Input) -> TextInput:
        custom = self._custom_formatter()
        request = custom(item) if custom else parse_rolling_batch_request(item, self._properties)
        formatter = self._properties.get("output_formatter")
        if request.output_formatter is None:
            request.output_formatter = formatter
        return request

    def _custom_formatter(self) -> Callable[[Input], TextInput] | None:
        """The function that `model.py` has marked; the server puts it among the properties (section 7.1)."""
        function = self._properties.get("input_formatter")
        if not callable(function):
            return None
        return partial(function, configs=self.hf_configs, tokenizer=self.tokenizer, rolling_batch=self.rolling_batch)


def parse_dynamic_batch_request(item: Input) -> TextInput:
    """`inputs` and `parameters`; a document without `inputs` is the input itself (section 3.6).

    Raises:
        ValueError: the body is broken, or `parameters` is not an object.
    """
    document = decode(item, item.get_property("Content-Type"))
    if not isinstance(document, dict):
        return TextInput(input_text=document)
    parameters = document.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise ValueError("'parameters' must be provided as an object of key-value pairs")
    has_inputs = "inputs" in document
    rest = {name: value for name, value in document.items() if name != "parameters"}
    return TextInput(input_text=document["inputs"] if has_inputs else rest, parameters=parameters)


def _streaming_model_class(settings: HuggingFaceSettings) -> Any:
    transformers = require("transformers", "HuggingFaceService")
    is_causal = (settings.task or infer_task(settings)) == "text-generation"
    return transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForSeq2SeqLM


def _accepted(item: Input) -> str:
    """The content type of the answer (section 5.3)."""
    accept, content_type = item.get_property("Accept"), item.get_property("Content-Type") or ""
    if not accept:
        return content_type if content_type.startswith("tensor/") else "application/json"
    return "application/json" if "*/*" in accept else str(accept)


_service = HuggingFaceService()


def handle(inputs: Input) -> Output | None:
    """The handler function: the first call loads the model."""
    if not _service.initialized:
        _service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else _service.inference(inputs)
