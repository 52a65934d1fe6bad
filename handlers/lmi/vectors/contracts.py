"""LMI's contracts for vectors, scores of pairs, and classes.

Vectors have two forms. DJL's engines (Rust, OnnxRuntime, PyTorch) answer one text with one flat vector and cut long
texts. LMI's vLLM handler always answers with a list of vectors and refuses long texts. Source: DJL Serving 0.36
(`TextEmbeddingTranslator`, `CrossEncoderTranslator`, `TextClassificationTranslator` of DJL, `lmi_vllm`), transformers'
pipelines.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from engines.errors import DeadlineExceeded, InvalidRequest, Overloaded, RequestError, UnknownAdapter
from engines.pooling import Pooling, PoolingModel
from engines.request import GenerationRequest, pooling_request
from handlers.answers.pooled_answer import PooledAnswer, encode, json_fragment, sigmoid, softmax
from handlers.contract import JSON, Answer, Call, Contract, ContractError, Exchange, Reply
from handlers.djl_errors import FAILED_DEPENDENCY, front_end_reply, overloaded, payload_error, unknown_adapter
from handlers.lmi.adapter_choice import adapters_of
from handlers.lmi.body import decode, notes_of, request_ids
from handlers.lmi.vectors.options import FIELDS, VectorDefaults, VectorOptions
from handlers.model_config import ModelConfig
from handlers.parsing.json_fields import json_kind, shown

_MOST_CLASSES = 5  # The maximum number of classes in DJL's answer for a text.
_FUNCTIONS = ("sigmoid", "softmax", "none")
_FIELDS = frozenset(
    {"inputs", "parameters", "adapters", "stream", "text", "text_pair", "key", "value", "query", "texts"}
)
_VECTOR_FIELDS = frozenset({"inputs", "parameters", "adapters", "stream"}) | FIELDS


def pooling_contract(config: ModelConfig, model: PoolingModel) -> Contract:
    """Return the contract of `/invocations` for LMI's bodies."""
    match model.kind:
        case "embedding":
            if config.lmi.vector_format == "vllm":
                return HandlerVectorContract(config, model)
            return DjlVectorContract(config, model)
        case "reranker":
            return PairContract(config)
        case "classifier":
            return DjlClassContract(config, model) if config.djl_engine else PipelineContract(config, model)
        case _:
            return NoContract(model)


class Refusals:
    """The errors of DJL's engines."""

    def reply(self, error: RequestError) -> Reply:
        if isinstance(error, Overloaded):
            return overloaded(error)
        if isinstance(error, UnknownAdapter):
            return unknown_adapter(error)
        return self._reply(error)

    def unreadable(self, error: InvalidRequest) -> InvalidRequest:
        """Return the error of a body that cannot be decoded."""
        return InvalidRequest("Input is not a valid json.")

    def _reply(self, error: RequestError) -> Reply:
        if isinstance(error, InvalidRequest):
            return front_end_reply(400, "TranslateException", error.message)
        if isinstance(error, DeadlineExceeded):  # like LMI's `predict_timeout`
            return front_end_reply(503, "WlmException", error.message)
        return front_end_reply(500, "InternalServerException", error.message)


class HandlerRefusals(Refusals):
    """The errors of LMI's handlers."""

    def unreadable(self, error: InvalidRequest) -> InvalidRequest:
        return InvalidRequest(f"Input parsing failed: {error.message}")

    def _reply(self, error: RequestError) -> Reply:
        status = FAILED_DEPENDENCY if isinstance(error, InvalidRequest) else 500
        if isinstance(error, DeadlineExceeded):
            status = 503
        return Reply(status, JSON, payload_error(error.message, status))


_DJL, _HANDLER = Refusals(), HandlerRefusals()


class LmiPooledAnswer(PooledAnswer):
    """An answer whose error replies come from `refusals`."""

    refusals: ClassVar[Refusals] = _DJL

    def fail(self, error: RequestError) -> Reply:
        return self.refusals.reply(error)


class PoolingContract:
    """The base class of the contracts. It reads the body, and makes a request for each text or pair."""

    refusals: ClassVar[Refusals] = _DJL
    fields: ClassVar[frozenset[str]] = _FIELDS  # The fields of a body that have an effect.

    def __init__(self, config: ModelConfig) -> None:
        self._lora = config.enable_lora

    def parse(self, call: Call) -> Exchange:
        try:
            try:
                document = decode(call.body, call.content_type)
            except InvalidRequest as error:
                raise self.refusals.unreadable(error) from None
            requests, answer = self._exchange(document)
            names: Sequence[str | None] = [None] * len(requests)
            if self._lora:
                given = document.get("adapters") if isinstance(document, dict) else None
                names = adapters_of(call, given, len(requests))
        except RequestError as error:
            raise ContractError(self.refusals.reply(error), error.message) from None
        ids = request_ids(call, len(requests))
        named = [
            msgspec.structs.replace(request, request_id=request_id, adapter=name, **call.steering)
            for request, request_id, name in zip(requests, ids, names, strict=True)
        ]
        notes = notes_of(document, self.fields, ()) if isinstance(document, dict) else ()
        return Exchange(tuple(named), answer, notes)

    @abstractmethod
    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        """Return the requests without their ids, and the answer.

        Raises:
            InvalidRequest: The document is not a request.
        """


def _djl_texts(document: Any) -> tuple[Sequence[str], bool]:
    """Return the texts of a body in the form of DJL's engines, and whether they came as a list.

    Raises:
        InvalidRequest: The body has no texts, or a value is not a text.
    """
    inputs = document
    if isinstance(document, dict):
        if document.get("inputs") is None:
            raise InvalidRequest('Missing "inputs" in json.')
        inputs = document["inputs"]
    if not isinstance(inputs, list):
        return [_djl_text("inputs", inputs)], False
    if not inputs:
        raise InvalidRequest('"inputs" is empty.')
    return [_djl_text("inputs", item) for item in inputs], True


def _djl_text(name: str, value: Any) -> str:
    """Return the text of a value. Gson, which DJL uses, also accepts numbers and booleans as texts."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise InvalidRequest(f'"{name}" must be a text or a list of texts, got {json_kind(value)} in place of a text.')


# Vectors


class DjlVectorContract(PoolingContract):
    """Vectors in the form of DJL's engines."""

    fields = _VECTOR_FIELDS

    def __init__(self, config: ModelConfig, model: PoolingModel) -> None:
        super().__init__(config)
        self._defaults = VectorDefaults(model, normalize=config.lmi.normalize, cut="right")

    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        texts, is_list = _djl_texts(document)
        options = self._defaults.read(document)
        return [options.request(text) for text in texts], _DjlVectors(len(texts), options, is_list)


class _DjlVectors(LmiPooledAnswer):
    def __init__(self, prompts: int, options: VectorOptions, is_list: bool) -> None:
        super().__init__(prompts)
        self._options, self._is_list = options, is_list

    def part(self, numbers: Any) -> Any:
        return json_fragment(self._options.vector(numbers))

    def document(self, parts: Sequence[Any]) -> bytes:
        return encode(parts if self._is_list else parts[0])


class HandlerVectorContract(PoolingContract):
    """Vectors in the form of LMI's vLLM handler."""

    refusals = _HANDLER
    fields = _VECTOR_FIELDS

    def __init__(self, config: ModelConfig, model: PoolingModel) -> None:
        super().__init__(config)
        self._defaults = VectorDefaults(model, normalize=config.lmi.normalize, cut=None)
        self._lower_case = model.lower_case

    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        if not isinstance(document, dict):
            raise InvalidRequest(f"Input parsing failed: the body must be an object, got {json_kind(document)}")
        prompts = _handler_prompts(document.get("inputs", ""))
        if self._lower_case:
            prompts = [prompt.lower() if isinstance(prompt, str) else prompt for prompt in prompts]
        options = self._defaults.read(document)
        return [options.request(prompt) for prompt in prompts], _HandlerVectors(len(prompts), options)


def _handler_prompts(inputs: Any) -> Sequence[str | tuple[int, ...]]:
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list) and inputs:
        if all(isinstance(item, str) for item in inputs):
            return inputs
        if all(type(item) is int and 0 <= item < 1 << 31 for item in inputs):
            return [tuple(inputs)]
    if isinstance(inputs, list):
        raise InvalidRequest(
            "Input parsing failed: 'inputs' must hold at least one string, and strings only or token ids only"
        )
    raise InvalidRequest(
        f"Input parsing failed: 'inputs' must be a string or list of strings, got {type(inputs).__name__}"
    )


class _HandlerVectors(LmiPooledAnswer):
    refusals = _HANDLER

    def __init__(self, prompts: int, options: VectorOptions) -> None:
        super().__init__(prompts)
        self._options = options

    def part(self, numbers: Any) -> Any:
        return json.dumps(self._options.vector(numbers).tolist()).encode()

    def document(self, parts: Sequence[Any]) -> bytes:
        return b"[" + b", ".join(parts) + b"]\n"


# Scores of pairs


class PairContract(PoolingContract):
    """Scores of pairs, in the order of the pairs, in the form of DJL's engines."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._sigmoid = config.lmi.sigmoid

    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        pairs, is_list = _pairs(document)
        requests = [
            pooling_request(text, Pooling(task="classify", activation=False, second=second, cut="right"))
            for text, second in pairs
        ]
        return requests, _PairScores(len(pairs), is_list, self._sigmoid)


def _pairs(document: Any) -> tuple[Sequence[tuple[str, str]], bool]:
    if isinstance(document, list):
        if not document:
            raise InvalidRequest("Missing text or text_pair in json.")
        return [_pair(item) for item in document], True
    if isinstance(document, dict) and "query" in document:
        query, texts = document["query"], document.get("texts")
        if not isinstance(query, str) or not isinstance(texts, list) or not texts:
            raise InvalidRequest('Missing "query" or "texts" in json.')
        return [(query, _djl_text("texts", text)) for text in texts], True
    if isinstance(document, dict) and "inputs" in document:
        return _pairs(document["inputs"])
    return [_pair(document)], False


def _pair(item: Any) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise InvalidRequest("Unexpected json type")
    for first, second in (("text", "text_pair"), ("key", "value")):
        if isinstance(item.get(first), str) and isinstance(item.get(second), str):
            return item[first], item[second]
    if "key" in item or "value" in item:
        raise InvalidRequest("Missing key or value in input.")
    raise InvalidRequest("Missing text or text_pair in json.")


class _PairScores(LmiPooledAnswer):
    def __init__(self, prompts: int, is_list: bool, with_sigmoid: bool) -> None:
        super().__init__(prompts)
        self._is_list, self._sigmoid = is_list, with_sigmoid

    def document(self, numbers: Sequence[Any]) -> bytes:
        scores = [sigmoid(one) if self._sigmoid else one for one in numbers]
        return encode(scores if self._is_list else scores[0])


# Classes


class DjlClassContract(PoolingContract):
    """The most probable classes of each text, in the form of DJL's engines."""

    def __init__(self, config: ModelConfig, model: PoolingModel) -> None:
        super().__init__(config)
        self._labels = model.labels
        self._pooling = Pooling(task="classify", cut="right")

    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        texts, is_list = _djl_texts(document)
        requests = [pooling_request(text, self._pooling) for text in texts]
        return requests, _DjlClasses(len(texts), is_list, self._labels)


class _DjlClasses(LmiPooledAnswer):
    def __init__(self, prompts: int, is_list: bool, labels: Mapping[int, str]) -> None:
        super().__init__(prompts)
        self._is_list, self._labels = is_list, labels

    def document(self, numbers: Sequence[Any]) -> bytes:
        texts = [
            [
                {"className": self._labels.get(number, str(number)), "probability": scores[number]}
                for number in best_first(scores)[:_MOST_CLASSES]
            ]
            for scores in numbers
        ]
        return encode(texts if self._is_list else texts[0])


def best_first(scores: Any) -> list[int]:
    """Return the indices of the classes, the most probable class first."""
    return [int(number) for number in np.argsort(-scores, kind="stable")]


class PipelineContract(PoolingContract):
    """Classes of each text, in the form of LMI's Python handler with transformers' pipeline `text-classification`."""

    refusals = _HANDLER

    def __init__(self, config: ModelConfig, model: PoolingModel) -> None:
        super().__init__(config)
        self._model = model

    def _exchange(self, document: Any) -> tuple[Sequence[GenerationRequest], Answer]:
        inputs = document.get("inputs", document) if isinstance(document, dict) else document
        parameters = document.get("parameters") if isinstance(document, dict) else None
        if parameters is not None and not isinstance(parameters, dict):
            raise InvalidRequest(f"`parameters` must be an object, got {json_kind(parameters)}")
        options = _pipeline_options(parameters or {})
        texts = inputs if isinstance(inputs, list) else [inputs]
        if not texts:
            raise InvalidRequest("`inputs` must hold at least one text")
        requests = [self._text(text) for text in texts]
        return requests, _PipelineClasses(len(requests), self._model, *options)

    def _text(self, text: Any) -> GenerationRequest:
        second = None
        if isinstance(text, dict):
            text, second = text.get("text"), text.get("text_pair")
        if not isinstance(text, str) or not isinstance(second, str | None):
            raise InvalidRequest("`inputs` must be a text, an object with `text` and `text_pair`, or a list of these")
        return pooling_request(text, Pooling(task="classify", activation=False, second=second, cut="right"))


def _pipeline_options(parameters: Mapping[str, Any]) -> tuple[bool, int | None, str | None]:
    """Return the options of a call.

    Returns:
        Whether each text gets a list of classes instead of one class, the maximum number of classes (None: all), and
        the function that turns scores into probabilities (None: the model decides).
    """
    top = parameters.get("top_k", 1)
    if top is not None and (type(top) is not int or top < 1):
        raise InvalidRequest(f"`top_k` must be a positive integer or null, got {shown(top)}")
    function = parameters.get("function_to_apply")
    if function is not None and function not in _FUNCTIONS:
        raise InvalidRequest(f"`function_to_apply` must be one of {', '.join(_FUNCTIONS)}, got {shown(function)}")
    return "top_k" in parameters, top, function


class _PipelineClasses(LmiPooledAnswer):
    refusals = _HANDLER

    def __init__(self, prompts: int, model: PoolingModel, is_list: bool, top: int | None, function: str | None) -> None:
        super().__init__(prompts)
        self._model, self._is_list, self._top, self._function = model, is_list, top, function

    def document(self, numbers: Sequence[Any]) -> bytes:
        texts: list[Any] = [self._classes(scores) for scores in numbers]
        if not self._is_list:
            texts = [classes[0] for classes in texts]
        return json.dumps(texts, indent=2, separators=(",", ":"), ensure_ascii=False).encode()

    def _classes(self, raw: Any) -> list[dict[str, Any]]:
        function = self._function or _function_of(self._model.problem_type, len(raw))
        scores = raw if function == "none" else (sigmoid if function == "sigmoid" else softmax)(raw)
        numbers = best_first(scores)[: self._top]
        return [{"label": self._model.labels.get(n, f"LABEL_{n}"), "score": float(scores[n])} for n in numbers]


def _function_of(problem_type: str, classes: int) -> str:
    """Return the function that turns scores into probabilities if the call names none, as in transformers' pipeline."""
    if problem_type == "regression":
        return "none"
    return "sigmoid" if problem_type == "multi_label_classification" or classes == 1 else "softmax"


class NoContract:
    """The contract of models for which LMI has no form. It refuses every call."""

    def __init__(self, model: PoolingModel) -> None:
        self._kind = model.kind

    def parse(self, call: Call) -> Exchange:
        message = f"LMI has no form for a model of the kind {self._kind}; send `input` as to /pooling"
        raise ContractError(_HANDLER.reply(InvalidRequest(message)), message)
