"""Slipway's contract for `/v1/embeddings`. It turns texts or token ids into vectors.

Requests that do not fit `_Body`, and all requests that must be refused, go to vLLM's serving classes. Source: vLLM,
`entrypoints/pooling/embed/protocol.py` and `serving.py`.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from engines.errors import RequestError
from engines.pooling import Pooling
from engines.request import pooling_request
from handlers.answers.pooled_answer import PooledAnswer, encode, json_fragment
from handlers.contract import Call, Exchange, Reply
from handlers.openai.answer import VLLM_FORM, AnswerForm
from handlers.openai.body import Body, LeftToVllm
from handlers.openai.contract import is_common, named_adapter
from handlers.openai.routes import EMBEDDINGS, refuse
from handlers.parsing.json_limits import JsonDecoder

_TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]


class _Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    input: str | list[str | _TokenId | list[_TokenId]]
    model: str | None = None
    user: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: None = None
    use_activation: bool | None = None


_decode = JsonDecoder(_Body).decode


@dataclass(frozen=True, slots=True)
class EmbeddingsContract:
    """Parses the calls of one embedding model."""

    model: str  # The model's name in answers.
    accepts: Callable[[str], bool]  # Returns True if a name is the model's.
    adapters: Collection[str]  # The names of the adapters.

    def parse(
        self,
        call: Call,
        path: str,
        *,
        any_model: bool = False,
        adapter: str | None = None,
        form: AnswerForm = VLLM_FORM,
        body: Body | None = None,
    ) -> Exchange | None:
        """See `OpenAIContract.parse`. `form` and `body` are for generated texts, and have no effect here."""
        if path != EMBEDDINGS or not is_common(call):
            return None
        try:
            asked = _decode(call.body)
            prompts = _prompts(asked.input)
            name = asked.model if adapter is None else adapter
            chosen = named_adapter(name, self.adapters, self.accepts, any_model=any_model)
        except (msgspec.DecodeError, LeftToVllm):
            return None
        pooling = Pooling(task="embed", activation=asked.use_activation)
        answer_id = f"embd-{call.request_id}"
        requests = [
            pooling_request(prompt, pooling, request_id=f"{answer_id}-{place}", adapter=chosen, **call.steering)
            for place, prompt in enumerate(prompts)
        ]
        answer = _Embeddings(answer_id, chosen or self.model, len(requests), asked.encoding_format == "base64")
        return Exchange(tuple(requests), answer)


def _prompts(given: Any) -> Sequence[str | tuple[int, ...]]:
    if isinstance(given, str):
        return [given]
    if not given:
        raise LeftToVllm("input")
    if all(isinstance(item, str) for item in given):
        return list(given)
    if all(isinstance(item, int) for item in given):
        return [tuple(given)]
    if not all(isinstance(item, list) and item for item in given):
        raise LeftToVllm("input")
    return [tuple(item) for item in given]


class _Embeddings(PooledAnswer):
    def __init__(self, answer_id: str, model: str, prompts: int, base64_wanted: bool) -> None:
        super().__init__(prompts)
        self._id, self._model, self._base64 = answer_id, model, base64_wanted
        self._created = int(time.time())

    def part(self, numbers: Any) -> Any:
        if not self._base64:
            return json_fragment(numbers)
        # OpenAI's clients read float32 in little-endian order.
        return base64.b64encode(numbers.astype("<f4", copy=False).tobytes()).decode()

    def document(self, parts: Sequence[Any]) -> bytes:
        data = [{"index": i, "object": "embedding", "embedding": vector} for i, vector in enumerate(parts)]
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        }
        head = {"id": self._id, "object": "list", "created": self._created, "model": self._model}
        return encode({**head, "data": data, "usage": usage})

    def fail(self, error: RequestError) -> Reply:
        return refuse(error)
