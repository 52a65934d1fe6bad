"""Triton's contract without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from engines.errors import RequestError
from engines.pooling import PoolingModel
from engines.request import Token
from engines.statistics import EngineStatistics
from handlers.contract import Call, ContractError, Exchange, Reply
from handlers.route_declarations import GenerationRoute, InfoRoute, ModelView
from handlers.triton.routes import TRITON
from tests.contracts.exchange import MODEL, view
from tests.settings import configured

PROMPT = {"text_input": "hello"}
NAMED = {"model": "model"}


class LoadedText:
    """The part of a loaded model that a contract may use."""

    max_model_len, max_top_tokens, eos_token_ids = 1024, 20, frozenset({2})
    tokenizer: Any = None
    pooling: PoolingModel | None = None

    def __init__(self, image_mark: Callable[[int], str] | None = None) -> None:
        self.statistics, self.texts = EngineStatistics(), SimpleNamespace(image_mark=image_mark)

    def tokenize(self, text: str) -> Sequence[int]:
        return list(text.encode())

    def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Any = ()) -> list[Token]:
        return [Token(token_id, chr(token_id)) for token_id in token_ids]

    def status(self) -> Any:
        return None


def body_of(document: Any) -> bytes:
    return document if isinstance(document, bytes) else json.dumps(document).encode()


def parse(
    document: Any,
    route: str = "generate",
    names: dict[str, str] = NAMED,
    headers: Mapping[bytes, bytes] | None = None,
    image_mark: Callable[[int], str] | None = None,
    **settings: Any,
) -> Exchange:
    path = "/v2/models/{model}" + ("/versions/{version:int}" if "version" in names else "") + f"/{route}"
    found = next(one for one in TRITON.routes if isinstance(one, GenerationRoute) and one.path == path)
    config = configured(MODEL, **settings)
    if found.refuse_path is not None and (refusal := found.refuse_path(names, config)) is not None:
        raise ContractError(refusal, "the path is wrong")
    assert found.contract is not None
    contract = found.contract(config, LoadedText(image_mark))
    call = Call(body=body_of(document), request_id="r", headers=headers or {}, path_parameters=names)
    return contract.parse(call)


def attempt(document: Any, route: str = "generate", **more: Any) -> Exchange | Reply:
    try:
        return parse(document, route, **more)
    except ContractError as error:
        return error.reply
    except RequestError as error:
        return TRITON.refuse(error)


def refused(document: Any, route: str = "generate", **more: Any) -> Reply:
    reply = attempt(document, route, **more)
    assert isinstance(reply, Reply), "the call was not refused"
    return reply


def told(
    path: str,
    names: dict[str, str] | None = None,
    *,
    method: str = "GET",
    body: bytes = b"",
    of: ModelView | None = None,
) -> Reply:
    """Return the answer of a route that generates nothing. `path`: the path in the route's declaration."""
    found = next(
        one for one in TRITON.routes if isinstance(one, InfoRoute) and one.path == path and method in one.methods
    )
    call = Call(body=body, request_id="r", method=method, path=path, path_parameters=names or {})
    return found.answer(call, of or view())
