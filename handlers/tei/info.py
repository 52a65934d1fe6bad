"""TEI's routes /info and /health. Source: TEI's router 1.9, `src/lib.rs` and `src/http/server.rs`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engines.errors import NotServed
from engines.pooling import PoolingModel
from handlers.contract import JSON, Call, Reply
from handlers.route_declarations import ModelView
from handlers.tei.errors import error_reply

TEI_VERSION = "1.9.3"  # The release whose contract this package implements.
# TEI's defaults. They are only reported: vLLM has its own limits.
_MAX_BATCH_TOKENS, _TOKENIZATION_WORKERS = 16384, 1
# TEI's names of poolings, keyed by vLLM's names. For other poolings, TEI has vLLM's name in lower case.
_POOLING = {"LAST": "last_token"}


def health(_: Call, views: Sequence[ModelView]) -> Reply:
    """Return 200 without a body if all models are ready, otherwise 503."""
    if all(view.state == "ready" for view in views):
        return Reply(200, "", b"")
    return error_reply("Unhealthy", "unhealthy")


def info(_: Call, view: ModelView) -> Reply:
    """Return the model's name, its kind, and its limits."""
    loaded, config = view.text(), view.config
    model = loaded.pooling
    if model is None:
        raise NotServed("the model generates text")
    most = loaded.max_model_len
    info: dict[str, Any] = {
        "model_id": config.model_id,
        "model_sha": config.revision,
        "model_dtype": model.dtype,
        "served_model_name": config.public_names[0],
        "model_type": _model_type(model),
        "max_concurrent_requests": view.max_requests,
        "max_input_length": min(most, config.max_prompt_tokens or most),
        "max_batch_tokens": _MAX_BATCH_TOKENS,
        "max_batch_requests": None,
        "max_client_batch_size": config.tei.max_client_batch_size,
        "auto_truncate": config.tei.auto_truncate,
        "tokenization_workers": _TOKENIZATION_WORKERS,
        "version": TEI_VERSION,
        "sha": None,
        "docker_label": None,
    }
    return Reply(200, JSON, msgspec.json.encode(info))


def _model_type(model: PoolingModel) -> dict[str, Any]:
    if model.task in ("embed", "token_embed"):
        return {"embedding": {"pooling": _POOLING.get(model.pooling, model.pooling.lower())}}
    labels = {
        "id2label": {str(number): name for number, name in model.labels.items()},
        "label2id": {name: number for number, name in model.labels.items()},
    }
    return {"reranker" if model.kind == "reranker" else "classifier": labels}
