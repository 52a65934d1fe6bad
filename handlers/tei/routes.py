"""The contract and the routes of TEI, Hugging Face's Text Embeddings Inference.

Source: TEI's router 1.9, `src/http/server.rs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from engines.loaded_model import LoadedModel
from handlers.contract import JSON, Contract, Reply
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import OBJECT, STRING, Schema, an_answer, an_array, either, struct
from handlers.route_declarations import ContractRoutes, GenerationRoute, InfoRoute, Operation
from handlers.tei.body import (
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    PredictBody,
    RerankBody,
    SimilarityBody,
    TokenizeBody,
)
from handlers.tei.contracts import (
    EmbedAllContract,
    EmbedContract,
    EmbedSparseContract,
    PredictContract,
    RerankContract,
    RootContract,
    SimilarityContract,
)
from handlers.tei.errors import refuse
from handlers.tei.info import health, info
from handlers.tei.tokens import decode, tokenize

_NUMBER: Schema = {"type": "number"}
_VECTORS = an_array(an_array(_NUMBER))
_SPARSE = an_array(
    an_array(an_answer("TeiSparseValue", "A non-zero component of a vector, and its index.", "index", "value"))
)
_RANKS = an_array(
    an_answer(
        "TeiRank", "The score of a text, and its index in `texts`. The best text is first.", "index", "text", "score"
    )
)
_LABELS = an_array(an_answer("TeiPrediction", "A label and its score. The best label is first.", "score", "label"))
_PREDICTIONS = either([_LABELS, an_array(_LABELS)])
_TOKENS = an_array(
    an_array(
        an_answer(
            "TeiToken",
            "A token, and its position in the bytes of the text.",
            *("id", "text", "special", "start", "stop"),
        )
    )
)
# The descriptions of fields that mean something else in other contracts.
_MEANINGS = {
    "add_special_tokens": "Add the model's special tokens to each text.",
    "inputs": "The text, or several texts.",
    "parameters": "How texts are cut, and which prompt is put in front of them.",
    "truncate": "Cut texts that are too long; false: refuse them.",
}


def _body(shape: type[msgspec.Struct], name: str) -> Schema:
    schema = struct(shape, name)
    described = {
        key: {**field, "description": _MEANINGS[key]} for key, field in schema["properties"].items() if key in _MEANINGS
    }
    return {**schema, "properties": {**schema["properties"], **described}}


_EMBED, _EMBED_ALL = _body(EmbedBody, "TeiEmbedRequest"), _body(EmbedAllBody, "TeiEmbedAllRequest")
_RERANK, _PREDICT = _body(RerankBody, "TeiRerankRequest"), _body(PredictBody, "TeiPredictRequest")
_SIMILARITY = _body(SimilarityBody, "TeiSimilarityRequest")
_ERROR = an_answer("TeiError", "A message, and the kind of the error.", "error", "error_type")
# The replies to bodies that cannot be read, in addition to the replies of `refuse`. 422 may be plain text (declared
# here) or JSON (from `refuse`).
_UNREADABLE: Mapping[str, tuple[str, Mapping[str, Schema]]] = {
    "400": ("The body is not JSON, or a text is empty", {"text/plain": STRING, JSON: _ERROR}),
    "415": ("The content type is not application/json", {"text/plain": STRING}),
    "422": ("A field is wrong, or a text is too long", {"text/plain": STRING}),
    "424": ("The route does not support this kind of model, or the model has failed", {JSON: _ERROR}),
}


def _about(summary: str, answer: Schema, request: Schema | None = None) -> Operation:
    answers: dict[str, tuple[str, Mapping[str, Schema]]] = {"200": (summary, {JSON: answer})}
    if request is not None:
        answers |= _UNREADABLE
    return Operation(summary=f"{summary} (TEI)", request=request, answers=answers)


def _route(
    path: str,
    contract: Callable[[ModelConfig, LoadedModel], Contract],
    about: Operation,
    *,
    with_field: str | None = None,
) -> GenerationRoute:
    return GenerationRoute(path=path, contract=contract, with_field=with_field, about=about)


_HEALTH = Operation(
    summary="Health (TEI)", answers={"200": ("Health", {}), "503": ("A model is not ready", {JSON: _ERROR})}
)

TEI = ContractRoutes(
    name="tei",
    routes=(
        _route("/embed", EmbedContract, _about("Vectors of texts", _VECTORS, _EMBED)),
        _route("/embed_all", EmbedAllContract, _about("Vectors of all tokens", an_array(_VECTORS), _EMBED_ALL)),
        _route("/embed_sparse", EmbedSparseContract, _about("Sparse vectors of texts", _SPARSE, _EMBED_ALL)),
        _route(
            "/rerank", RerankContract, _about("Texts in the order of their scores", _RANKS, _RERANK), with_field="texts"
        ),
        _route("/predict", PredictContract, _about("Labels of texts", _PREDICTIONS, _PREDICT)),
        _route(
            "/similarity", SimilarityContract, _about("Cosine similarities of texts", an_array(_NUMBER), _SIMILARITY)
        ),
        GenerationRoute(
            path="/",
            contract=RootContract,
            models="pooling",
            about=_about(
                "The same as /embed, /embed_sparse, /rerank, /predict or /similarity, by model and body",
                either([_VECTORS, _RANKS, _PREDICTIONS]),
                either([_EMBED, _RERANK, _PREDICT, _SIMILARITY]),
            ),
        ),
        InfoRoute(
            path="/tokenize",
            answer=tokenize,
            methods=("POST",),
            models="pooling",
            with_field="inputs",
            by_attribute=True,
            about=_about("Tokens of texts", _TOKENS, _body(TokenizeBody, "TeiTokenizeRequest")),
        ),
        InfoRoute(
            path="/decode",
            answer=decode,
            methods=("POST",),
            by_attribute=True,
            about=_about("Texts of token ids", an_array(STRING), _body(DecodeBody, "TeiDecodeRequest")),
        ),
        InfoRoute.of_all("/", health, methods=("GET", "HEAD"), about=_HEALTH, models="pooling"),
        InfoRoute.of_all("/health", health, methods=("GET", "HEAD"), about=_HEALTH, models="pooling"),
        InfoRoute(path="/info", answer=info, models="pooling", about=_about("The model and its limits", OBJECT)),
    ),
    refuse=refuse,
    error=_ERROR,
    wrong_method=lambda _: Reply(405, "", b""),  # axum, the web framework of TEI, sends the same reply.
    body_names_model=True,
)
