"""TEI's inference routes. The checks run in TEI's order. Source: TEI's router 1.9, `src/http/server.rs`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from engines.errors import InvalidRequest, RequestError
from engines.loaded_model import LoadedModel
from engines.pooling import ModelKind, Pooling, Side
from engines.request import GenerationRequest
from handlers.contract import Call, ContractError, Exchange
from handlers.model_config import ModelConfig
from handlers.parsing.axum import notes_of_unknown, read_request
from handlers.parsing.json_limits import JsonDecoder
from handlers.route_declarations import adapter_of
from handlers.tei.answer import Predictions, Ranks, Similarities, SparseVectors, TeiAnswer, Vectors
from handlers.tei.body import (
    EmbedAllBody,
    EmbedBody,
    PredictBody,
    RerankBody,
    SimilarityBody,
    check_batch,
    cut_of,
    pairs_of,
    prompts_of,
    request_for,
    request_for_pair,
    text_in_front,
)
from handlers.tei.errors import WrongKind, empty, refuse

SPLADE = "SPLADE"  # The pooling of sparse vectors.
NOT_EMBEDDING = "Model is not an embedding model"
_NOT_SPARSE = "Model is not an embedding model with SPLADE pooling"
_NOT_RERANKER = "model is not a re-ranker model"
_NOT_CLASSIFIER = "Model is not a classifier model"


class _Inputs(msgspec.Struct):
    inputs: msgspec.Raw = msgspec.Raw()


_decode_inputs = JsonDecoder[_Inputs](_Inputs).decode
Parsed = tuple[Sequence[GenerationRequest], TeiAnswer]


class TeiContract:
    """The base class of the routes' contracts. `shape` is the class of the bodies."""

    shape: type[msgspec.Struct]

    def __init__(self, config: ModelConfig, loaded: LoadedModel) -> None:
        self._config, self._loaded = config, loaded
        self._model = loaded.pooling  # None if the model generates text.

    def parse(self, call: Call) -> Exchange:
        body, document = read_request(call, self.shape)
        try:
            unknown = sorted(document.keys() - set(self.shape.__struct_fields__))
            notes = notes_of_unknown(unknown, strict=self._config.strict_parameters)
            requests, answer = self.requests_and_answer(body)
            adapter = adapter_of(call, self._config, None)
        except RequestError as error:
            # `/invocations` also uses this class. Its route would answer a RequestError in LMI's form.
            raise ContractError(refuse(error), error.message) from None
        named = [
            msgspec.structs.replace(request, request_id=f"{call.request_id}-{place}", adapter=adapter, **call.steering)
            for place, request in enumerate(requests)
        ]
        return Exchange(tuple(named), answer, notes)

    @abstractmethod
    def requests_and_answer(self, body: Any) -> Parsed:
        """Return the requests without their ids, and the answer.

        Raises:
            ContractError: The body has the wrong shape.
            RequestError: The body is invalid, or the route does not support this kind of model.
        """

    def _check_kind(self, refusal: str, *kinds: ModelKind) -> None:
        if self._model is None or self._model.kind not in kinds:
            raise WrongKind(refusal)

    def _for_texts(
        self, body: EmbedAllBody, task: str, refusal: str, pooling: Pooling
    ) -> tuple[Sequence[GenerationRequest], int]:
        """Return a request for each text of `inputs`, and the total length of the texts."""
        prompts, in_batch = prompts_of(body.inputs)
        if in_batch:
            check_batch(len(prompts), self._config)
        if self._model is None or task not in self._model.tasks:
            raise WrongKind(refusal)
        front = text_in_front(body.prompt_name, self._model)
        requests = [request_for(prompt, front, pooling, self._loaded) for prompt in prompts]
        return requests, sum(map(len, prompts))


class EmbedContract(TeiContract):
    """/embed: a vector for each text."""

    shape = EmbedBody

    def requests_and_answer(self, body: EmbedBody) -> Parsed:
        cut, dimensions = cut_of(body, self._config), body.dimensions
        # The engine scales vectors to the norm 1, unless they must first be cut.
        pooling = Pooling(task="embed", activation=body.normalize and dimensions is None, cut=cut)
        requests, characters = self._for_texts(body, "embed", NOT_EMBEDDING, pooling)
        size = self._model.vector_size if self._model is not None else 0
        if dimensions is not None and dimensions < 1:
            raise InvalidRequest("`dimensions` should be positive")
        if dimensions is not None and dimensions > size:
            raise InvalidRequest("`dimensions` should be smaller than the maximum embedding dimension.")
        if body.normalize and self._model is not None and self._model.pooling == SPLADE:
            raise WrongKind("`normalize` is not available for SPLADE models")
        normalize = body.normalize and dimensions is not None
        return requests, Vectors(len(requests), characters, dimensions, normalize)


class EmbedAllContract(TeiContract):
    """/embed_all: a vector for each token of each text."""

    shape = EmbedAllBody

    def requests_and_answer(self, body: EmbedAllBody) -> Parsed:
        if self._model is not None and self._model.pooling == SPLADE:
            raise WrongKind("`embed_all` is not available for SPLADE models")
        pooling = Pooling(task="token_embed", activation=False, cut=cut_of(body, self._config))
        requests, characters = self._for_texts(body, "token_embed", NOT_EMBEDDING, pooling)
        return requests, Vectors(len(requests), characters)


class EmbedSparseContract(TeiContract):
    """/embed_sparse: the nonzero entries of each vector."""

    shape = EmbedAllBody

    def requests_and_answer(self, body: EmbedAllBody) -> Parsed:
        if self._model is None or self._model.pooling != SPLADE:
            raise WrongKind(_NOT_SPARSE)
        pooling = Pooling(task="embed", activation=False, cut=cut_of(body, self._config))
        requests, characters = self._for_texts(body, "embed", _NOT_SPARSE, pooling)
        return requests, SparseVectors(len(requests), characters)


class SimilarityContract(TeiContract):
    """/similarity: the cosine similarities of a text to other texts."""

    shape = SimilarityBody

    def requests_and_answer(self, body: SimilarityBody) -> Parsed:
        inputs, parameters = body.inputs, body.parameters
        if not inputs.sentences:
            raise empty("inputs.sentences", prefixed=False)
        texts = [inputs.source_sentence, *inputs.sentences]
        options = msgspec.structs.asdict(parameters) if parameters is not None else {}
        embed = EmbedAllBody(inputs=list(texts), **options)
        pooling = Pooling(task="embed", activation=False, cut=cut_of(embed, self._config))
        requests, characters = self._for_texts(embed, "embed", NOT_EMBEDDING, pooling)
        return requests, Similarities(len(requests), characters)


class RerankContract(TeiContract):
    """/rerank with `texts`: the texts, ordered by their scores."""

    shape = RerankBody

    def requests_and_answer(self, body: RerankBody) -> Parsed:
        if not body.texts:
            raise empty("texts", prefixed=False)
        self._check_kind(_NOT_RERANKER, "reranker")
        check_batch(len(body.texts), self._config)
        front, pooling = text_in_front(None, self._model), _scores(cut_of(body, self._config))
        requests = [request_for_pair((body.query, text), front, pooling, self._loaded) for text in body.texts]
        characters = len(body.query) * len(body.texts) + sum(map(len, body.texts))
        return requests, Ranks(body.texts, characters, raw=body.raw_scores, with_text=body.return_text)


class PredictContract(TeiContract):
    """/predict: the scores of all labels."""

    shape = PredictBody

    def requests_and_answer(self, body: PredictBody) -> Parsed:
        pairs, in_batch = pairs_of(body.inputs)
        if in_batch:
            check_batch(len(pairs), self._config)
        self._check_kind(_NOT_CLASSIFIER, "reranker", "classifier")
        labels = self._model.labels if self._model is not None else {}
        front, pooling = text_in_front(None, self._model), _scores(cut_of(body, self._config))
        requests = [request_for_pair(pair, front, pooling, self._loaded) for pair in pairs]
        characters = sum([len(first) + len(second or "") for first, second in pairs])
        return requests, Predictions(len(pairs), characters, labels, raw=body.raw_scores, in_batch=in_batch)


def _scores(cut: Side | None) -> Pooling:
    """Return the pooling for raw scores. TEI ignores an activation function that the model's files name."""
    return Pooling(task="classify", activation=False, cut=cut)


class RootContract:
    """`POST /`: the answers of the route for the model's kind, such as /rerank for a reranker."""

    def __init__(self, config: ModelConfig, loaded: LoadedModel) -> None:
        route: type[TeiContract] = EmbedContract
        if (model := loaded.pooling) is not None:
            if model.kind == "reranker":
                route = RerankContract
            elif model.kind == "classifier":
                route = PredictContract
            elif model.pooling == SPLADE:
                route = EmbedSparseContract
        self._route, self._similarity = route(config, loaded), SimilarityContract(config, loaded)

    def parse(self, call: Call) -> Exchange:
        # TEI accepts bodies of /similarity here only if its environment variable TASK is `sentence-similarity`.
        return (self._similarity if _has_source(call.body) else self._route).parse(call)


def _has_source(body: bytes) -> bool:
    """Return True if `inputs` is an object, as in a body of /similarity."""
    if b'"source_sentence"' not in body:
        return False
    try:
        return bytes(_decode_inputs(body).inputs).startswith(b"{")
    except msgspec.DecodeError:
        return False  # The route reports the error.
