"""TEI's routes /tokenize and /decode. Source: TEI's router 1.9, `src/http/server.rs`; `core/src/tokenization.rs`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring as quote
from typing import Any

from engines.errors import InvalidParameter
from engines.loaded_model import LoadedModel, ModelTexts
from handlers.answers.pooled_answer import encode
from handlers.answers.token_rows import byte_positions, joined
from handlers.contract import JSON, Call, Reply
from handlers.parsing.axum import read_request, wrong_shape
from handlers.route_declarations import MOST_IDS, PLACED_BYTES, ModelView, check_text
from handlers.tei.body import DecodeBody, TokenizeBody, check_batch, check_length, decoded, text_in_front
from handlers.tei.errors import TeiRefusal, empty


def tokenize(call: Call, view: ModelView) -> Reply:
    """Return the tokens of each text, with their positions in the text."""
    model = view.text()
    body, _ = read_request(call, TokenizeBody)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    if not texts:
        raise empty("inputs", prefixed=False)
    if not isinstance(body.inputs, str):
        check_batch(len(texts), view.config)
    front = text_in_front(body.prompt_name, model.pooling) or ""
    for text in texts:
        _check(text, model)
    check_text("inputs", "".join(texts), PLACED_BYTES)
    rows = [_tokens(front + text, model.texts, special=body.add_special_tokens) for text in texts]
    return Reply(200, JSON, b"[%b]" % b",".join(b"[%b]" % row for row in rows))


def _check(text: str, model: LoadedModel) -> None:
    if not text:
        raise empty("inputs")
    check_length(len(text), model)


def _tokens(text: str, texts: ModelTexts, *, special: bool) -> bytes:
    """Return the tokens as JSON objects. Special tokens that the tokenizer adds have no position."""
    try:
        ids, places = texts.places(text, special=special)
    except Exception as error:  # A tokenizer may raise any exception.
        raise TeiRefusal("Tokenizer", f"tokenizer error {error}") from error
    return joined(_rows(text, ids, places or [(0, 0)] * len(ids), texts))


def _rows(text: str, ids: Sequence[int], places: Sequence[tuple[int, int]], texts: ModelTexts) -> Iterator[str]:
    names = {token_id: name for name, token_id in texts.special_tokens.items()}
    byte = byte_positions(text)
    for token_id, (start, stop) in zip(ids, places, strict=True):
        if start == stop and token_id in names:
            yield f'{{"id":{token_id},"text":{quote(names[token_id])},"special":true,"start":null,"stop":null}}'
        else:
            yield (
                f'{{"id":{token_id},"text":{quote(text[start:stop])},"special":false,"start":{byte[start]},'
                f'"stop":{byte[stop]}}}'
            )


def decode(call: Call, view: ModelView) -> Reply:
    """Return the text of each list of token ids."""
    texts = view.text().texts
    body, _ = read_request(call, DecodeBody)
    lists, in_batch = _lists(body.ids)
    if in_batch:
        check_batch(len(lists), view.config)
    if not all(lists):
        raise empty("input_ids")
    if (count := sum(map(len, lists))) > MOST_IDS:
        raise InvalidParameter("ids", f"must hold at most {MOST_IDS} token ids, got {count}")
    return Reply(200, JSON, encode([decoded(ids, texts, skip_special=body.skip_special_tokens) for ids in lists]))


def _lists(ids: Sequence[Any]) -> tuple[Sequence[Sequence[int]], bool]:
    """Return the lists of token ids, and whether they are a batch.

    Raises:
        ContractError: Some items are ids, and others are lists.
    """
    if all(isinstance(item, int) for item in ids):
        return [ids], False
    if any(isinstance(item, int) for item in ids):
        raise wrong_shape("ids: expected token ids, or lists of token ids")
    return ids, True
