"""happy_vllm's routes that tokenize, decode, split and truncate texts.

They generate nothing, and work with every engine. Source: happy_vllm, "Tokenizer endpoints" and "Data manipulation
endpoints".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import msgspec

from engines.errors import SHOWN, InvalidParameter, RequestError, UnknownModel
from engines.loaded_model import LoadedModel
from handlers.contract import JSON, Call, ContractError, Reply
from handlers.happy_vllm.errors import json_reply, vllm_error
from handlers.happy_vllm.request import FieldReader, document
from handlers.parsing.vllm_parameters import number_of_text
from handlers.route_declarations import ModelView, check_text, is_address

DEFAULT_SEPARATORS = (".", "!", "?", "|", " .", " !", " ?", " |")
DEFAULT_CHUNK = 200

# happy_vllm puts this word before a text, to get the tokens that the text has inside a longer text. The word affects
# how the text's beginning is tokenized.
_WORD = "thisisareallybigwordisntit"
# Prefixes of the word are first tried in front of this many characters of the text. Later characters hardly ever
# change which prefix fits.
_HEAD = 256
# The maximum number of prefixes of the word that are tried in front of the whole text. The first prefix fits, unless
# the text is written to make it fail.
_TRIES = 3
_BLOCK = 32  # The number of tokens decoded together. A decoder may take quadratic time for bytes that are not text.
_CONTEXT = 16
# The maximum number of tokens that can make one character: four bytes of UTF-8, and some special tokens in between.
_LONGEST_CHARACTER = 8


def tokenizer(call: Call, view: ModelView) -> Reply:
    """`POST /v1/tokenizer`."""
    read, model = _read(call), view.text()
    text = check_text("text", read.required_string("text"))
    vanilla, with_texts = read.boolean("vanilla", True), _with_texts(read)
    ids = model.texts.encode(text) if vanilla else ids_inside(model, text)
    answer: dict[str, Any] = {"tokens_ids": ids, "tokens_nb": len(ids)}
    if with_texts:
        answer["tokens_str"] = model.texts.pieces(ids) if vanilla else texts_inside(model, ids)
    return json_reply(answer)


def decode(call: Call, view: ModelView) -> Reply:
    """`POST /v1/decode`."""
    read, model = _read(call), view.text()
    ids = read.required_ids("token_ids", model.texts.vocabulary_size)
    vanilla, with_texts = read.boolean("vanilla", True), _with_texts(read)
    texts = [] if vanilla else texts_inside(model, ids)
    answer: dict[str, Any] = {"decoded_string": model.texts.decode(ids) if vanilla else "".join(texts)}
    if with_texts:
        answer["tokens_str"] = model.texts.pieces(ids) if vanilla else texts
    return json_reply(answer)


def split(call: Call, view: ModelView) -> Reply:
    """`POST /v1/split_text`."""
    read, model = _read(call), view.text()
    text = check_text("text", read.required_string("text"))
    minimum = read.integer("num_tokens_in_chunk", DEFAULT_CHUNK, minimum=0)
    given = read.strings("separators", longest=64, empty=True)
    separators = given if read.has("separators") else DEFAULT_SEPARATORS
    return json_reply({"split_text": split_text(model, text, minimum, separators)})


def metadata(call: Call, view: ModelView) -> Reply:
    """`POST /v1/metadata_text`."""
    read, model = _read(call), view.text()
    text = check_text("text", read.required_string("text"))
    side = read.optional_string("truncation_side") or model.texts.truncation_side
    if side not in ("left", "right"):
        raise InvalidParameter("truncation_side", 'must be "left" or "right"')
    max_length = read.integer("max_length", model.max_model_len, minimum=0)
    ids = _encode(model, text)
    excess = max(len(ids) - max_length, 0)
    dropped = ids[:excess] if side == "left" else ids[len(ids) - excess :]
    truncated = model.texts.decode(dropped) if dropped else ""
    return json_reply({"tokens_nb": len(ids_inside(model, text)), "truncated_text": truncated})


def chat(call: Call, view: ModelView) -> Call | None:
    """Return the chat of `POST /v2/tokenizer`, or None if the body has no messages.

    Raises:
        ContractError: The body is invalid. The reply is vLLM's error object.
    """
    try:
        values, _ = document(call), view.text()
        read = FieldReader(values)
        _check_model(read, view)
        if not read.has("messages"):
            return None
    except RequestError as error:
        raise ContractError(vllm_error(error), error.message) from None
    given = {name: value for name, value in values.items() if value is not None}
    return replace(call, content_type=JSON, body=msgspec.json.encode(given), fields=None)


def tokenizer_v2(call: Call, view: ModelView) -> Reply:
    """`POST /v2/tokenizer`, which is vLLM's `/tokenize`, with vLLM's errors."""
    try:
        model = view.text()
        if view.rendered is None:
            read = FieldReader(document(call))
            text = check_text("prompt", read.required_string("prompt"))
            ids = model.texts.encode(text, special=read.boolean("add_special_tokens", True))
        else:
            ids = view.chat().token_ids
    except RequestError as error:
        return vllm_error(error)
    return json_reply({"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids})


def decode_v2(call: Call, view: ModelView) -> Reply:
    """`POST /v2/decode`, which is vLLM's `/detokenize`, with vLLM's errors."""
    try:
        values, model = document(call), view.text()
        if isinstance(given := values.get("tokens"), list):  # Pydantic converts "16" and 16.0 to 16.
            values["tokens"] = [_whole(token) for token in given]
        read = FieldReader(values)
        _check_model(read, view)
        ids = read.required_ids("tokens", model.texts.vocabulary_size)
        return json_reply({"prompt": model.texts.decode(ids)})
    except RequestError as error:
        return vllm_error(error)


def _whole(value: Any) -> Any:
    number = number_of_text(value) if isinstance(value, str) else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _read(call: Call) -> FieldReader:
    return FieldReader(document(call))


def _with_texts(read: FieldReader) -> bool:
    """Return True if the request wants the texts of tokens.

    happy_vllm's schema calls the field `with_token_str`, but its code reads `with_tokens_str`.
    """
    return read.boolean("with_tokens_str", read.boolean("with_token_str", False))


def _check_model(read: FieldReader, view: ModelView) -> None:
    name = read.optional_string("model")
    config = view.config
    names = ("", *config.public_names, config.name, config.model_id, *view.model_aliases)
    if name is not None and name not in names and not is_address(name):
        raise UnknownModel(name[:SHOWN], f"The model `{name[:SHOWN]}` does not exist.")


def ids_inside(model: LoadedModel, text: str) -> list[int]:
    """Return the token ids that the text has if other text is in front of it. No special tokens are added."""
    word, ids = _behind(model, _WORD, text[:_HEAD], len(_WORD))
    return ids if len(text) <= _HEAD else _behind(model, word, text, _TRIES)[1]


def _behind(model: LoadedModel, word: str, text: str, tries: int) -> tuple[str, list[int]]:
    """Return a prefix of the word, and the token ids that the text has behind this prefix.

    The prefix is the longest one whose tokens stay the same if the text follows. After `tries` failed attempts, the
    prefix is empty, and the text is tokenized alone.
    """
    while word and tries:
        before, together = _encode(model, word), _encode(model, word + text)
        if together[: len(before)] == before:
            return word, together[len(before) :]
        word, tries = word[:-1], tries - 1
    return "", _encode(model, text)


def _encode(model: LoadedModel, text: str) -> list[int]:
    return model.texts.encode(text, special=False) if text else []


def texts_inside(model: LoadedModel, token_ids: Sequence[int]) -> list[str]:
    """Return the text that each token has inside a longer text. Joined, these texts are the text of all tokens.

    If a character takes several tokens, the whole character is the text of the last of these tokens.
    """
    before = _encode(model, _WORD)[-1:]
    texts: list[str] = []
    while len(texts) < len(token_ids):
        start = len(texts)
        context = [*before, *token_ids[max(start - _CONTEXT, 0) : start]]
        block = token_ids[start : start + _BLOCK]
        part = [token.text for token in model.detokenize(block, False, context)]
        at_end = start + len(block) == len(token_ids)
        pending = _pending(part)
        if pending and not at_end:
            del part[-pending:]
        elif pending:  # The last character is incomplete.
            part[-1] = model.texts.decode(block[-pending:])
        texts += part
    return texts


def _pending(texts: Sequence[str]) -> int:
    """Count the tokens at the end that may be the beginning of an incomplete character."""
    last = islice(reversed(texts), min(_LONGEST_CHARACTER, len(texts) - 1))
    return next((count for count, text in enumerate(last) if text), min(_LONGEST_CHARACTER, len(texts) - 1))


def split_text(model: LoadedModel, text: str, minimum: int, separators: Sequence[str]) -> list[str]:
    """Return chunks of at least `minimum` tokens that end right after a separator. The last chunk has the rest.

    Separators are compared as tokens: "?" is not " ?". An empty separator matches after each token. The joined
    chunks are the text.
    """
    ids = ids_inside(model, text)
    texts = texts_inside(model, ids)
    by_last_id: dict[int, list[list[int]]] = {}
    for separator in separators:
        if separator_ids := ids_inside(model, separator):
            by_last_id.setdefault(separator_ids[-1], []).append(separator_ids)
    chunks, begin = [], 0
    for end in range(1, len(ids) + 1):
        candidates = by_last_id.get(ids[end - 1], ())
        if end - begin < minimum:
            continue
        if "" in separators or any(ids[max(end - len(one), 0) : end] == one for one in candidates):
            chunks.append("".join(texts[begin:end]))
            begin = end
    chunks.append("".join(texts[begin:]))
    return [chunk for chunk in chunks if chunk]
