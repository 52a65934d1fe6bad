"""A scripted engine of a pooling model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engines.errors import ContextExceeded, InvalidRequest
from engines.interface import ExplainedRequest, Generation, Sink
from engines.loaded_model import ModelTexts
from engines.pooling import Pooling, PoolingModel
from engines.request import GenerationRequest, TokenDelta
from engines.tokenization import PromptTokenizer
from tests.stand_ins.scripted_engine import ScriptedEngine, ScriptedGeneration
from tests.stand_ins.wrapped_tokenizer import WrappedTokenizer

Kind = Literal["embedding", "sparse", "reranker", "classifier", "generating"]

CONTEXT = 8
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("deep", "learning", "is", "fun", "schön", "query", ":", "日本", "a", "b")
_VOCABULARY = {word: number for number, word in enumerate((*_SPECIAL, *WORDS))}
_EMBEDDING = PoolingModel(
    kind="embedding",
    task="embed",
    tasks=frozenset({"embed", "token_embed"}),
    vector_size=4,
    pooling="MEAN",
    dtype="float32",
    pairs_refusal="the model scores no pairs",
    prompts={"query": "query : ", "document": ""},
)
_SCORES = PoolingModel(
    kind="reranker",
    task="classify",
    tasks=frozenset({"classify"}),
    vector_size=0,
    labels={0: "LABEL_0"},
    pooling="CLS",
    dtype="float16",
)
POOLING: dict[Kind, PoolingModel | None] = {
    "embedding": _EMBEDDING,
    "sparse": replace(_EMBEDDING, pooling="SPLADE"),
    "reranker": _SCORES,
    "classifier": replace(_SCORES, kind="classifier", labels={0: "sad", 1: "so-so", 2: "joy"}),
    "generating": None,
}


class FakeTokenizer(WrappedTokenizer):
    """A real tokenizer of a few words."""

    all_special_tokens = _SPECIAL
    all_special_ids = (0, 1, 2, 3)

    def __init__(self) -> None:
        fast = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="[UNK]"))
        fast.add_special_tokens(list(_SPECIAL))
        fast.normalizer = normalizers.NFC()
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        fast.decoder = decoders.WordPiece()
        fast.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
        super().__init__(fast)


@dataclass
class PoolingEngine(ScriptedEngine):
    """Answers each request at once with the next item of `numbers`. The last item is repeated."""

    kind: Kind = "embedding"
    numbers: Sequence[Any] = ((0.5, 0.5, 0.5, 0.5),)
    seen: list[GenerationRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.max_model_len = CONTEXT
        self.pooling = POOLING[self.kind]

    @cached_property
    def texts(self) -> ModelTexts:
        return ModelTexts(FakeTokenizer())

    async def prompt_token_ids(self, request: GenerationRequest) -> list[int]:
        if request.pooling is None:
            return await PromptTokenizer(self.texts, self.max_model_len).token_ids(request)
        return self._ids(request, request.pooling)

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        if request.pooling is None:
            raise InvalidRequest(f"the model is of the kind {self.kind}; it generates no text")
        ids = self._ids(request, request.pooling)
        numbers = np.array(self.numbers[min(len(self.seen), len(self.numbers) - 1)], np.float32)
        self.seen.append(request)
        now = time.monotonic()
        sink.on_delta(TokenDelta("", prompt_token_count=len(ids), last=True, numbers=numbers, submitted_at=now))
        return ScriptedGeneration(request, sink, self)

    async def explain(self, request: GenerationRequest) -> ExplainedRequest:
        if request.pooling is None:
            return await super().explain(request)
        parameters = {"task": request.pooling.task, "use_activation": request.pooling.activation}
        return ExplainedRequest(token_ids=self._ids(request, request.pooling), parameters=parameters, copy=1)

    def _ids(self, request: GenerationRequest, pooling: Pooling) -> list[int]:
        most, cut = CONTEXT if pooling.cut is not None else 1000, pooling.cut or "right"
        if isinstance(request.prompt, str):
            special = request.add_special_tokens
            ids, _ = self.texts.encode_cut(request.prompt, pooling.second, most, cut, special=special)
        else:
            ids = list(request.prompt)
        if len(ids) > CONTEXT:
            raise ContextExceeded(len(ids), 0, CONTEXT)
        return ids
