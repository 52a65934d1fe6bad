"""The built-in handler for Hugging Face models. Customers also subclass it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from djl_python import wire
from djl_python.encode_decode import encode
from djl_python.input_parser import ParsedInput, parse_input_with_formatter
from djl_python.inputs import Input
from djl_python.lazy_import import require
from djl_python.outputs import Output
from djl_python.request_io import TextInput
from djl_python.rolling_batch.rolling_batch import RollingBatch
from djl_python.streaming_utils import StreamingUtils
from djl_python.utils import get_input_details, rolling_batch_inference

if TYPE_CHECKING:
    from djl_python.properties_manager.hf_properties import HuggingFaceProperties

_PURPOSE = "HuggingFaceService"
_NO_ROLLING_BATCH = {"", "disable"}
TEXT_GENERATION = "text-generation"
TEXT_TO_TEXT = "text2text-generation"
_TASK_OF_SUFFIX = {
    "ForTokenClassification": "token-classification",
    "ForSequenceClassification": "text-classification",
    "ForMaskedLM": "fill-mask",
    "ForCausalLM": TEXT_GENERATION,
    "LMHeadModel": TEXT_GENERATION,
    "BloomModel": TEXT_GENERATION,
    "ForConditionalGeneration": TEXT_TO_TEXT,
    "MTModel": TEXT_TO_TEXT,
    "EncoderDecoderModel": TEXT_TO_TEXT,
    "T5WithLMHeadModel": TEXT_TO_TEXT,
}


def get_rolling_batch_class_from_str(rolling_batch_type: str) -> Callable[..., RollingBatch]:
    """Refuse a rolling batch, because rolling batches run in the server's engine.

    Tests replace this function with a function that returns a class. The class is called with the model and the model's
    properties.

    Raises:
        ValueError: Always.
    """
    raise ValueError(f"The rolling batch {rolling_batch_type!r} runs in the server's engine, not in a handler")


class HuggingFaceService:
    """A handler that runs a transformers model.

    It runs a pipeline for single requests and dynamic batches, or a stream for one request.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.hf_pipeline: Any = None
        self.model: Any = None
        self.model_config: Any = None  # Transformers' configuration of the model.
        self.tokenizer: Any = None
        self.rolling_batch: RollingBatch | None = None
        self.hf_configs: HuggingFaceProperties | None = None
        # Arguments of `parse_input_with_formatter` and of custom input formatters.
        self.input_format_args: dict[str, Any] = {}

    def initialize(self, properties: Mapping[str, Any]) -> None:
        """Load the model.

        Raises:
            ValueError: A property has an invalid value.
            ImportError: Transformers or torch is not installed.
            OSError: The model cannot be read.
        """
        from djl_python.properties_manager.hf_properties import HuggingFaceProperties

        settings = self.hf_configs = HuggingFaceProperties(**properties)
        model, rolling_batch = settings.model_id_or_path, str(settings.rolling_batch).lower()
        if rolling_batch not in _NO_ROLLING_BATCH:
            self.rolling_batch = get_rolling_batch_class_from_str(rolling_batch)(model, properties)
            self.tokenizer = self.rolling_batch.get_tokenizer()
        elif settings.enable_streaming != "false":
            transformers = require("transformers", _PURPOSE)
            is_causal = (settings.task or infer_task(settings)) == TEXT_GENERATION
            model_class = transformers.AutoModelForCausalLM if is_causal else transformers.AutoModelForSeq2SeqLM
            self.model, self.tokenizer = load(model_class, settings)
        else:
            self.hf_pipeline = self.get_pipeline(settings.task or infer_task(settings), model, settings.kwargs)
            self.model, self.tokenizer = self.hf_pipeline.model, self.hf_pipeline.tokenizer
        self.model_config = getattr(self.model, "config", None)
        self.input_format_args = self.get_input_format_args()
        self.initialized = True

    def get_input_format_args(self) -> dict[str, Any]:
        """Return the arguments for input formatters. A subclass may add arguments."""
        return {"configs": self.hf_configs, "tokenizer": self.tokenizer, "rolling_batch": self.rolling_batch}

    def get_pipeline(self, task: str, model_id_or_path: str, kwargs: Mapping[str, Any]) -> Any:
        """Return the pipeline for a task. A subclass may return another pipeline and use `kwargs` as its arguments."""
        if self.hf_configs is None:
            raise ValueError("get_pipeline belongs to initialize")
        return build_pipeline(task, self.hf_configs)

    def inference(self, inputs: Input) -> Output:
        """Answer a request or the requests of a batch.

        A request that cannot be parsed gets LMI's error body. If it is the only request, the output's status is 424.

        Raises:
            ValueError: The requests in a batch have different parameters, or the model refuses them.
        """
        parsed = parse_input_with_formatter(inputs, **(self.input_format_args or self.get_input_format_args()))
        if self.rolling_batch is not None:
            return rolling_batch_inference(parsed, inputs, Output(), self.rolling_batch)
        batch, errors = parsed.batch, parsed.errors
        requests = self._checked(parsed)
        if len(batch) == 1 and errors:
            return Output().error(errors[0])
        if self.hf_pipeline is None:
            return self._stream(requests)
        answers = self._predict(parsed, requests)
        output = Output()
        for index, item in enumerate(batch):
            key = f"batch_{index}.data" if inputs.is_batch() else "data"
            if index in errors:
                output.add_as_json({"code": 424, "message": "invoke handler failure", "error": errors[index]}, key)
            else:
                encode(output, answers[index], _accepted(item), key=key)
        return output

    def _checked(self, parsed: ParsedInput) -> dict[int, TextInput]:
        """Return the valid requests by their index in the batch, and add errors for the other requests.

        The `input_text` of each valid request becomes a list.
        """
        generates = self.hf_pipeline is None or isinstance(self.hf_pipeline, GenerationPipeline)
        places = [index for index in range(len(parsed.batch)) if index not in parsed.errors]
        requests = {}
        for index, request in zip(places, tuple(parsed.requests), strict=True):
            text = request.request_input
            if not isinstance(text.input_text, list):
                text.input_text = [text.input_text]
            if generates and not all(isinstance(prompt, str) for prompt in text.input_text):
                parsed.requests.remove(request)
                parsed.errors[index] = "Input Parsing failed. The 'inputs' field must be a string or a list of strings"
            else:
                requests[index] = text
        return requests

    def _predict(self, parsed: ParsedInput, requests: Mapping[int, TextInput]) -> dict[int, Any]:
        if not requests:
            return {}
        if isinstance(self.hf_pipeline, GenerationPipeline):
            # The prompts of all requests run in one batch.
            prompts, sizes, parameters, _ = get_input_details(parsed.requests, parsed.errors, parsed.batch)
            texts = iter(self.hf_pipeline(prompts, **parameters))
            return {index: [next(texts) for _ in range(sizes[index])] for index in requests}
        answers: dict[int, Any] = {}
        for index, request in requests.items():
            try:
                answers[index] = self.hf_pipeline(request.input_text, **request.server_parameters)
            except (ValueError, TypeError) as error:
                if len(requests) == 1:
                    raise
                parsed.errors[index] = wire.sendable(str(error))
        return answers

    def _stream(self, requests: Mapping[int, TextInput]) -> Output:
        if len(requests) != 1:
            raise NotImplementedError("Dynamic batch not supported for generic streaming")
        request = requests[0]
        if self.hf_configs is not None and self.hf_configs.enable_streaming == "huggingface":
            stream = StreamingUtils.use_hf_default_streamer
        else:
            stream = StreamingUtils.get_stream_generator("Accelerate")
        texts = stream(self.model, self.tokenizer, request.input_text, None, **request.server_parameters)
        return Output().add_property("content-type", "application/jsonlines").add_stream_content(texts)


class StopWord:
    """A stopping criterion for transformers: stop when the regular expression `stop_seq` matches in the last tokens.

    Only the first sequence is checked. If `stop_seq` has N characters, the last N tokens are checked.
    """

    def __init__(self, tokenizer: Any, stop_seq: str) -> None:
        self.tokenizer = tokenizer
        self.stop_seq = stop_seq

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> bool:
        return re.search(self.stop_seq, self.tokenizer.decode(input_ids[0][-len(self.stop_seq) :])) is not None


def _accepted(item: Input) -> str:
    accept, content_type = item.get_property("Accept"), item.get_property("Content-Type") or ""
    if not accept:
        return content_type if content_type.startswith("tensor/") else "application/json"
    return "application/json" if "*/*" in accept else str(accept)


def infer_task(settings: HuggingFaceProperties) -> str:
    """Return the task that fits the model's architecture.

    Raises:
        ValueError: The architecture is unknown.
    """
    auto = require("transformers", _PURPOSE).AutoConfig
    config = auto.from_pretrained(settings.model_id_or_path, **settings.source)
    architecture = next(iter(config.architectures or ()), "")
    for suffix, task in _TASK_OF_SUFFIX.items():
        if architecture.endswith(suffix):
            return task
    raise ValueError(f"The task of the architecture {architecture!r} is not known; option.task must be given")


def build_pipeline(task: str, settings: HuggingFaceProperties) -> Any:
    """Return a callable `f(list of inputs, **parameters)` with the attributes `model` and `tokenizer`.

    Raises:
        ValueError: Transformers does not support the task.
    """
    transformers = require("transformers", _PURPOSE)
    if task == TEXT_GENERATION:
        return GenerationPipeline(transformers.AutoModelForCausalLM, settings, padding_side="left")
    if task == TEXT_TO_TEXT:
        return GenerationPipeline(transformers.AutoModelForSeq2SeqLM, settings, padding_side="right")
    known = transformers.pipelines.PIPELINE_REGISTRY.get_supported_tasks()
    if task not in known:
        raise ValueError(f"Unknown task {task!r}; transformers {transformers.__version__} knows {', '.join(known)}")
    loading = settings.loading
    arguments: dict[str, Any] = {name: loading.pop(name) for name in ("dtype", "device_map") if name in loading}
    if "device_map" not in arguments:
        arguments["device"] = settings.device
    return transformers.pipeline(
        task, model=settings.model_id_or_path, model_kwargs=loading, **settings.source, **arguments
    )


def load(model_class: Any, settings: HuggingFaceProperties) -> tuple[Any, Any]:
    """Load the model onto its device. Load the tokenizer, and set its padding token if it has none."""
    transformers = require("transformers", _PURPOSE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model_id_or_path, **settings.source)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = model_class.from_pretrained(settings.model_id_or_path, **settings.source, **settings.loading)
    return (model if settings.device_map else model.to(settings.device)).eval(), tokenizer


class GenerationPipeline:
    """Generates text for all prompts in one padded batch. A causal model's text starts with the prompt."""

    def __init__(self, model_class: Any, settings: HuggingFaceProperties, padding_side: str) -> None:
        self.model, self.tokenizer = load(model_class, settings)
        self._padding_side = padding_side
        self._stop = {"stop_strings": list(settings.stop_sequence)} if settings.stop_sequence else {}

    def __call__(self, prompts: Sequence[str], **parameters: Any) -> list[dict[str, str]]:
        """Return `{"generated_text": ...}` for each prompt.

        Args:
            parameters: Arguments for transformers' `generate`.

        Raises:
            ValueError: `generate` refuses a parameter.
        """
        torch = require("torch", _PURPOSE)
        encoded = self.tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side=self._padding_side).to(
            self.model.device
        )
        encoded.pop("token_type_ids", None)
        arguments = {"pad_token_id": self.tokenizer.pad_token_id} | self._stop | parameters
        if "stop_strings" in arguments:
            arguments["tokenizer"] = self.tokenizer
        with torch.inference_mode():
            generated = self.model.generate(**encoded, **arguments)
        return [{"generated_text": text} for text in self.tokenizer.batch_decode(generated, skip_special_tokens=True)]


_service = HuggingFaceService()


def handle(inputs: Input) -> Output | None:
    """Answer a call of the server. The first call loads the model."""
    if not _service.initialized:
        _service.initialize(inputs.get_properties())
    return None if inputs.is_empty() else _service.inference(inputs)
