"""TGI's routes that generate nothing: /health, /info, /tokenize and /chat_tokenize.

Source: contracts/tgi.md sections 1, 7 and 8; TGI's router, `server.rs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from json.encoder import encode_basestring as quote
from typing import Any

import msgspec

from handlers.contracts.family import LoadedModel, ModelView
from handlers.contracts.protocol import Call, ContractError, Reply
from handlers.contracts.tgi.body import Body, read
from handlers.contracts.tgi.chat import Chat, templated
from handlers.contracts.tgi.errors import JSON, error_document
from handlers.contracts.tgi.parameters import MAX_BEST_OF, MAX_STOP_SEQUENCES
from handlers.errors import InvalidRequest

PIPELINE = "text-generation"
MAX_CLIENT_BATCH_SIZE, VALIDATION_WORKERS = 4, 2
"""TGI's defaults, which clients look for in /info; here the size of a batch has no limit of its own."""
ROUTER = "slipway"
TGI_VERSION = "3.3.6"
"""Of the router whose contract this is: clients look here for what they may ask for."""
_UNHEALTHY = Reply(503, JSON, error_document("unhealthy", "healthcheck").encode())


def tell_health(_: Call, view: ModelView) -> Reply:
    """200 without a body where the model can serve."""
    return Reply(200, "", b"") if view.state == "ready" else _UNHEALTHY


def tell_info(_: Call, view: ModelView) -> Reply:
    """The model and its limits.

    Raises:
        NotReady: it is not loaded.
        NotServed: a custom handler generates.
    """
    context = view.text().max_model_len
    info: dict[str, Any] = {
        "model_id": view.settings.model_id,
        "model_sha": view.settings.revision,
        "model_pipeline_tag": PIPELINE,
        "max_concurrent_requests": view.max_requests,
        "max_best_of": MAX_BEST_OF,
        "max_stop_sequences": MAX_STOP_SEQUENCES,
        "max_input_tokens": context - 1,
        "max_total_tokens": context,
        "validation_workers": VALIDATION_WORKERS,
        "max_client_batch_size": MAX_CLIENT_BATCH_SIZE,
        "router": ROUTER,
        "version": TGI_VERSION,
        "sha": None,
        "docker_label": None,
    }
    return Reply(200, JSON, msgspec.json.encode(info))


def tell_tokens(call: Call, view: ModelView) -> Reply:
    """The tokens of `inputs` with their places in it; only the last `truncate` of them.

    Raises:
        NotReady: the model is not loaded.
        NotServed: a custom handler generates.
        InvalidRequest: the tokenizer cannot take the text.
    """
    model = view.text()
    try:
        body, _ = read(call, Body)
    except ContractError as error:
        return error.reply
    tokens = _tokens(body.inputs, model, special=True)
    truncate = body.parameters.truncate if body.parameters is not None else None
    if truncate is not None:
        tokens = tokens[max(len(tokens) - truncate, 0) :]
    return Reply(200, JSON, f"[{','.join(tokens)}]".encode())


def tell_chat_tokens(call: Call, view: ModelView) -> Reply:
    """The prompt that a chat becomes, and its tokens.

    Raises:
        NotReady: the model is not loaded.
        NotServed: a custom handler generates.
        InvalidRequest: the tokenizer cannot take the text.
    """
    model = view.text()
    try:
        chat, _ = read(call, Chat)
        text = templated(chat, model)
    except ContractError as error:
        return error.reply
    tokens = ",".join(_tokens(text, model, special=False))
    return Reply(200, JSON, f'{{"tokenize_response":[{tokens}],"templated_text":{quote(text)}}}'.encode())


def _tokens(text: str, model: LoadedModel, *, special: bool) -> Sequence[str]:
    """JSON objects. `special`: with the special tokens that the model wants in front."""
    fast = getattr(model.tokenizer, "_tokenizer", None)
    try:
        if fast is None:  # no tokenizer of Python's own knows places; TGI shows none then
            ids = model.tokenizer.encode(text, add_special_tokens=special)
            return [f'{{"id":{token_id},"text":"","start":0,"stop":0}}' for token_id in ids]
        encoding = fast.encode(text, add_special_tokens=special)
    except Exception as error:  # of the tokenizer's own, which may be anything
        raise InvalidRequest(f"tokenizer error {error}") from error
    place = _byte_places(text)
    return [
        f'{{"id":{token_id},"text":{quote(text[start:stop])},"start":{place[start]},"stop":{place[stop]}}}'
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
    ]


def _byte_places(text: str) -> Sequence[int]:
    """Where each character begins in the text's UTF-8, and where the last one ends."""
    if text.isascii():
        return range(len(text) + 1)
    return [0, *accumulate(len(character.encode()) for character in text)]
