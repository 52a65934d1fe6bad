"""Calls a contract without an engine: a document and deltas go in, bytes come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import strategies as st

from engines.errors import RequestError
from engines.request import FinishReason, Token, TokenDelta
from handlers.contract import Call, Contract, ContractError, Exchange, Reply
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.model_config import ModelConfig
from handlers.route_declarations import InfoRoute, ModelView, RenderedChat, State
from tests.settings import configured


def json_values(integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    return st.recursive(
        st.none() | st.booleans() | integers | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    )


JSON = json_values(st.integers())
ENCODABLE = json_values(st.integers(-(2**62), 2**62))  # msgspec cannot write longer integers.
MODEL = ModelConfig(name="model", model_dir=Path("."), model_id="model")


def call(document: Any, content_type: str = "application/json") -> Call:
    body = document if isinstance(document, bytes) else msgspec.json.encode(document)
    return Call(body=body, content_type=content_type, request_id="r")


def outcome(contract: Contract, asked: Call, refuse: Callable[[RequestError], Reply] | None = None) -> Exchange | Reply:
    """Return the parsed call, or the reply if it is refused. `refuse`: the contract's reply to an error."""
    try:
        return contract.parse(asked)
    except ContractError as error:
        return error.reply
    except RequestError as error:
        if refuse is None:
            raise
        return refuse(error)


def refusal_of(contract: Contract, asked: Call, refuse: Callable[[RequestError], Reply] | None = None) -> Reply:
    reply = outcome(contract, asked, refuse)
    assert isinstance(reply, Reply), "the call was not refused"
    return reply


def rolling(**settings: Any) -> LmiRollingContract:
    return LmiRollingContract(configured(MODEL, **settings))


def parse(document: Any, content_type: str = "application/json", **settings: Any) -> Exchange:
    return rolling(**settings).parse(call(document, content_type))


def view(state: State = "ready", reason: str = "", loaded: Any = None, **settings: Any) -> ModelView:
    """Return the view of the model for the routes that generate nothing."""
    return ModelView(
        config=configured(MODEL, **settings),
        state=state,
        reason=reason,
        started_at=0.0,
        loaded=loaded,
        engine="vllm",
        engine_version="1",
        max_requests=8,
        model_aliases=("", "dummy", "tgi"),
        abort=lambda request_id: None,
    )


def told(route: InfoRoute, call: Call, view: ModelView, rendered: RenderedChat | RequestError | None = None) -> Reply:
    """Return the reply of a route that generates nothing. `rendered`: the prompt of the call's chat, if it has one."""
    if route.chat is not None and route.chat(call, view) is not None:
        view = replace(view, rendered=rendered)
    return route.answer(call, view)


def a_joke(finish_reason: FinishReason = FinishReason.LENGTH) -> tuple[TokenDelta, TokenDelta]:
    """Return two engine steps: " a", " joke"."""
    return (
        TokenDelta(" a", [Token(7, " a", -0.5)], token_count=1),
        TokenDelta(" joke", [Token(9, " joke", -0.25)], finish_reason=finish_reason, token_count=2, last=True),
    )


def whole(text: str, *tokens: Token, sequence: int = 0, last: bool = True, **fields: Any) -> TokenDelta:
    """Return a whole sequence as one delta, which an engine sends if the answer is not streamed."""
    fields.setdefault("finish_reason", FinishReason.LENGTH)
    return TokenDelta(text, list(tokens), sequence=sequence, token_count=len(tokens), last=last, **fields)
