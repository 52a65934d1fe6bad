"""happy_vllm's routes on texts and tokens; they generate nothing, and work with every engine.

Source: contracts/happy_vllm.md sections 6 and 7.
"""

from __future__ import annotations

from typing import Any

import msgspec

from handlers.contracts.family import LoadedModel, ModelView
from handlers.contracts.happy_vllm.body import document, required_ids, required_string
from handlers.contracts.happy_vllm.chat import chat_prompt
from handlers.contracts.happy_vllm.errors import JSON, vllm_error
from handlers.contracts.happy_vllm.lax import lax
from handlers.contracts.happy_vllm.text import dropped_by_truncation, ids_inside, split_text, texts_inside
from handlers.contracts.parameter_reader import ParameterReader
from handlers.contracts.protocol import Call, ContractError, Reply
from handlers.contracts.text_limits import check_body, check_count, check_text
from handlers.errors import InvalidParameter, RequestError, UnknownModel

DEFAULT_SEPARATORS = (".", "!", "?", "|", " .", " !", " ?", " |")
DEFAULT_CHUNK = 200
_SIDES = ("left", "right")


def tokenizer(call: Call, view: ModelView) -> Reply:
    """`POST /v1/tokenizer`."""
    values, model = _document(call), view.text()
    read = ParameterReader(lax(values))
    text = check_text("text", required_string(values, "text"))
    vanilla, with_texts = read.boolean("vanilla", True), _with_texts(read)
    ids = model.texts.encode(text) if vanilla else ids_inside(model, text)
    answer = {"tokens_ids": ids, "tokens_nb": len(ids)}
    return _reply(answer | _texts(model, ids, vanilla) if with_texts else answer)


def decode(call: Call, view: ModelView) -> Reply:
    """`POST /v1/decode`."""
    values, model = _document(call), view.text()
    read = ParameterReader(lax(values))
    ids = _ids(values, "token_ids", model)
    vanilla, with_texts = read.boolean("vanilla", True), _with_texts(read)
    if vanilla:
        answer = {"decoded_string": model.texts.decode(ids)}
        return _reply(answer | _texts(model, ids, vanilla) if with_texts else answer)
    texts = texts_inside(model, ids)
    answer = {"decoded_string": "".join(texts)}
    return _reply(answer | {"tokens_str": texts} if with_texts else answer)


def _with_texts(read: ParameterReader) -> bool:
    """The original's request schema says `with_token_str`, and its code reads `with_tokens_str`."""
    return read.boolean("with_tokens_str", read.boolean("with_token_str", False))


def _texts(model: LoadedModel, ids: list[int], vanilla: bool) -> dict[str, Any]:
    return {"tokens_str": model.texts.pieces(ids) if vanilla else texts_inside(model, ids)}


def split(call: Call, view: ModelView) -> Reply:
    """`POST /v1/split_text`."""
    values, model = _document(call), view.text()
    read = ParameterReader(lax(values))
    text = check_text("text", required_string(values, "text"))
    minimum = read.integer("num_tokens_in_chunk", DEFAULT_CHUNK, minimum=0)
    separators = read.strings("separators", longest=64) if read.has("separators") else DEFAULT_SEPARATORS
    return _reply({"split_text": split_text(model, text, minimum, separators)})


def metadata(call: Call, view: ModelView) -> Reply:
    """`POST /v1/metadata_text`."""
    values, model = _document(call), view.text()
    read = ParameterReader(lax(values))
    text = check_text("text", required_string(values, "text"))
    side = read.optional_string("truncation_side") or model.texts.truncation_side
    if side not in _SIDES:
        raise InvalidParameter("truncation_side", 'must be "left" or "right"')
    max_length = read.integer("max_length", model.max_model_len, minimum=0)
    dropped = dropped_by_truncation(model, text, max_length, side)
    return _reply({"tokens_nb": len(ids_inside(model, text)), "truncated_text": dropped})


def tokenizer_v2(call: Call, view: ModelView) -> Reply:
    """`POST /v2/tokenizer`, which is vLLM's `/tokenize`, with vLLM's errors."""
    try:
        return _tokenize(call, view)
    except (RequestError, ContractError) as error:
        return vllm_error(error)


def _tokenize(call: Call, view: ModelView) -> Reply:
    values, model = _document(call), view.text()
    _check_model(values, view)
    read = ParameterReader(lax(values))
    if read.has("messages"):
        if read.has("chat_template"):
            raise InvalidParameter("chat_template", "cannot be set by a request; the model has its own")
        add_generation_prompt = read.boolean("add_generation_prompt", True)
        text = check_text("messages", chat_prompt(model.texts, values["messages"], add_generation_prompt))
    else:
        text = check_text("prompt", required_string(values, "prompt"))
    special = read.boolean("add_special_tokens", not read.has("messages"))
    ids = model.texts.encode(text, special=special)
    return _reply({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids})


def decode_v2(call: Call, view: ModelView) -> Reply:
    """`POST /v2/decode`, which is vLLM's `/detokenize`, with vLLM's errors."""
    try:
        values, model = _document(call), view.text()
        _check_model(values, view)
        ids = _ids(values, "tokens", model)
        return _reply({"prompt": model.texts.decode(ids)})
    except (RequestError, ContractError) as error:
        return vllm_error(error)


def _document(call: Call) -> dict[str, Any]:
    check_body(call)
    return document(call)


def _ids(values: dict[str, Any], name: str, model: LoadedModel) -> list[int]:
    check_count(name, values.get(name))
    return required_ids(values, name, model.texts.vocabulary_size)


def _check_model(values: dict[str, Any], view: ModelView) -> None:
    """The model that is served, or none."""
    name = ParameterReader(values).optional_string("model")
    settings = view.settings
    if name and name not in (*settings.public_names, settings.name, settings.model_id, *view.model_aliases):
        raise UnknownModel(name[:200], f"The model `{name[:200]}` does not exist.")


def _reply(answer: dict[str, Any]) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(answer))
