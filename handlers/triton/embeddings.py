"""Vectors from embedding models, through Triton's generate extension and KServe's inference with tensors.

Source: Triton's vLLM backend, `EmbedRequest` in `src/utils/request.py`; KServe, "Open Inference Protocol (V2 Inference
Protocol)", "Inference"; LiteLLM's provider `triton`, which sends such requests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import orjson

from engines.errors import SHOWN, InvalidParameter, InvalidRequest, RequestError
from engines.loaded_model import LoadedModel
from engines.pooling import Pooling
from engines.request import TokenDelta, pooling_request
from handlers.answers.pooled_answer import PooledAnswer, encode
from handlers.contract import JSON, Answer, Call, Exchange, Reply
from handlers.model_config import ModelConfig
from handlers.parsing.json_fields import JsonError, decode_json
from handlers.route_declarations import adapter_of
from handlers.triton.answer import EVENTS
from handlers.triton.errors import VERSION, TritonRefusal, refusal
from handlers.triton.request import read_inputs, switch

TEXTS = "input_text"  # LiteLLM's name for the input.
_VECTORS = "embedding"  # LiteLLM reads outputs of any name.
_POOLING = Pooling(task="embed")
_BINARY = "Inference-Header-Content-Length"
_UNIT = 1e-2  # If the model scales vectors to the norm 1 in float16, their norms may differ from 1 by this much.
_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class _Parameters(msgspec.Struct, frozen=True):
    dimensions: Annotated[list[Annotated[int, msgspec.Meta(ge=1)]], msgspec.Meta(min_length=1)] | None = None


class _Embedding(msgspec.Struct, frozen=True):
    """The JSON text in `embedding_request`."""

    input: str | Annotated[list[_TokenId], msgspec.Meta(min_length=1)]
    pooling_params: _Parameters | None = None


class GeneratedEmbeddingContract:
    """`/generate` or `/generate_stream` of a model that makes vectors. The answer's text is a vector as JSON."""

    def __init__(self, config: ModelConfig, loaded: LoadedModel, *, events: bool) -> None:
        """Create the contract. If `events` is True, the answer is a server-sent event."""
        self._config, self._loaded, self._events = config, loaded, events

    def parse(self, call: Call) -> Exchange:
        request_id, inputs, _ = read_inputs(call.body, self._config.name)
        name = self._config.name
        if inputs.get("embedding_request") is None:
            raise InvalidRequest(f"Model {name} does not support 'generate' request")
        size = check_embeds(self._config, self._loaded)
        embedding = _read(inputs["embedding_request"])
        dimensions = None
        if embedding.pooling_params is not None and embedding.pooling_params.dimensions is not None:
            dimensions = embedding.pooling_params.dimensions[0]
            if dimensions > size:
                raise InvalidParameter("dimensions", f"must be at most {size}, got {dimensions}")
        prompt = embedding.input if isinstance(embedding.input, str) else tuple(embedding.input)
        counts = [name for name in ("input", "output") if switch(inputs, f"return_num_{name}_tokens")]
        adapter = adapter_of(call, self._config, None)
        request = pooling_request(prompt, _POOLING, request_id=call.request_id, adapter=adapter, **call.steering)
        return Exchange((request,), _TextAnswer(name, request_id, dimensions, counts, events=self._events))


def check_embeds(config: ModelConfig, loaded: LoadedModel) -> int:
    """Return the number of dimensions of the model's vectors.

    Raises:
        InvalidRequest: The model makes no vectors.
    """
    model = loaded.pooling
    if model is None or "embed" not in model.tasks:
        raise InvalidRequest(f"Model {config.name} does not support 'embed' request")
    return model.vector_size


def _read(text: str) -> _Embedding:
    try:
        return msgspec.convert(decode_json(text), _Embedding)
    except (JsonError, msgspec.ValidationError) as error:
        raise InvalidParameter("embedding_request", f"must be a JSON object in a string: {error}") from None


class _TextAnswer(Answer):
    def __init__(
        self, model: str, request_id: str, dimensions: int | None, counts: Sequence[str], *, events: bool
    ) -> None:
        """Create the answer.

        Args:
            model: The name of the model.
            request_id: The client's id. It may be empty.
            dimensions: The vector is cut to this number of entries. None keeps all entries.
            counts: The token counts in the answer: "input", "output".
            events: True if the answer is a server-sent event.
        """
        self.content_type = EVENTS if events else JSON
        self._model, self._id, self._dimensions, self._events = model, request_id, dimensions, events
        self._counts = counts

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        tokens = {"input": delta.prompt_token_count, "output": 0}
        document = encode(
            {
                **({"id": self._id} if self._id else {}),
                "model_name": self._model,
                "model_version": VERSION,
                **{f"num_{name}_tokens": tokens[name] for name in self._counts},
                # As in Triton's backend, Python's `json` writes the vector.
                "text_output": json.dumps(_cut(delta.numbers, self._dimensions).tolist()),
            }
        )
        return b"data: %b\n\n" % document if self._events else document

    def fail(self, error: RequestError) -> Reply:
        return refusal(error)


def _cut(vector: Any, dimensions: int | None) -> Any:
    """Return the first `dimensions` entries of a vector, scaled to the norm 1 if the vector has the norm 1."""
    if dimensions is None:
        return vector
    kept = vector[:dimensions]
    scaled = abs(float(np.linalg.norm(vector)) - 1.0) < _UNIT
    length = float(np.linalg.norm(kept))
    return kept / np.float32(length) if scaled and length else kept


class _Tensor(msgspec.Struct, frozen=True):
    name: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    datatype: str
    data: list[Any]


class _Infer(msgspec.Struct, frozen=True):
    inputs: list[_Tensor]
    id: str = ""


class InferContract:
    """`/infer` of an embedding model. The input is a tensor of texts, and the output has a row for each text."""

    def __init__(self, config: ModelConfig, loaded: LoadedModel) -> None:
        self._config, self._loaded = config, loaded

    def parse(self, call: Call) -> Exchange:
        if call.header(_BINARY) is not None:
            raise TritonRefusal("tensors in binary form are not served: send `data` as JSON")
        size = check_embeds(self._config, self._loaded)
        try:
            body = msgspec.convert(decode_json(call.body), _Infer)
        except (JsonError, msgspec.ValidationError) as error:
            raise TritonRefusal(f"failed to parse the request JSON buffer: {error}") from None
        texts = _texts(body.inputs)
        adapter = adapter_of(call, self._config, None)
        requests = [
            pooling_request(text, _POOLING, request_id=f"{call.request_id}-{place}", adapter=adapter, **call.steering)
            for place, text in enumerate(texts)
        ]
        return Exchange(tuple(requests), _TensorAnswer(len(texts), self._config.name, body.id, size))


def _texts(inputs: Sequence[_Tensor]) -> Sequence[str]:
    if [tensor.name for tensor in inputs] != [TEXTS]:
        given = ", ".join(f"'{tensor.name[:SHOWN]}'" for tensor in inputs)
        raise TritonRefusal(f"expected the input ['{TEXTS}'], got [{given}]")
    (tensor,) = inputs
    if tensor.datatype != "BYTES":
        raise TritonRefusal(f"input '{TEXTS}' must have the datatype BYTES, got {tensor.datatype[:SHOWN]}")
    # The data may be nested once, as for the shape [n, 1].
    texts = [text for item in tensor.data for text in (item if isinstance(item, list) else [item])]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise TritonRefusal(f"input '{TEXTS}' must hold at least one text, and texts only")
    if int(np.prod(tensor.shape, dtype=object)) != len(texts):
        raise TritonRefusal(f"input '{TEXTS}' has {len(texts)} texts, and the shape {tensor.shape}")
    return texts


class _TensorAnswer(PooledAnswer):
    def __init__(self, prompts: int, model: str, request_id: str, size: int) -> None:
        super().__init__(prompts)
        self._model, self._id, self._size = model, request_id, size

    def part(self, numbers: Any) -> Any:
        # Triton writes the nearest 32-bit values with the digits of a double.
        return encode(numbers.astype(np.float64)).strip(b"[]")

    def document(self, parts: Sequence[Any]) -> bytes:
        shape = [len(parts), self._size]
        data = orjson.Fragment(b"[%b]" % b",".join(parts))
        output = {"name": _VECTORS, "datatype": "FP32", "shape": shape, "data": data}
        head = {"id": self._id} if self._id else {}
        return encode({**head, "model_name": self._model, "model_version": VERSION, "outputs": [output]})

    def fail(self, error: RequestError) -> Reply:
        return refusal(error)
