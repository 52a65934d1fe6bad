"""Calls TGI's contracts without an engine, for tests: documents and deltas go in, bytes come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from engines.errors import RequestError
from engines.loaded_model import ModelTexts
from engines.request import GenerationRequest, Token
from engines.statistics import EngineStatistics
from handlers.contract import Contract, ContractError, Exchange, Reply
from handlers.route_declarations import GenerationRoute, InfoRoute, ModelView, RenderedChat
from handlers.tgi.routes import TGI
from tests.contracts.exchange import MODEL, call, outcome, told, view
from tests.settings import configured
from tests.stand_ins.wrapped_tokenizer import WrappedTokenizer

CONTEXT = 2048
END, TURN = 2, 3  # The model's end token, and a special token that does not end a generation.
_VOCABULARY = {"<unk>": 0, "<s>": 1, "</s>": END, "<|turn|>": TURN, "Tell": 4, "me": 5, "日本": 6, "user": 7, ":": 8}


class FakeTokenizer(WrappedTokenizer):
    """A real tokenizer of a few words."""

    all_special_tokens = ("<s>", "</s>", "<|turn|>")
    all_special_ids = (1, END, TURN)

    def __init__(self) -> None:
        fast = Tokenizer(models.WordLevel(_VOCABULARY, unk_token="<unk>"))
        fast.normalizer = normalizers.NFC()
        fast.pre_tokenizer = pre_tokenizers.Whitespace()
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        super().__init__(fast)


class FakeModel:
    """A loaded model, as contracts see it."""

    max_model_len = CONTEXT
    max_top_tokens = 20
    eos_token_ids = frozenset({END})

    def __init__(self, image_mark: Callable[[int], str] | None = None) -> None:
        self.statistics, self._image_mark = EngineStatistics(), image_mark

    @cached_property
    def texts(self) -> ModelTexts:
        return ModelTexts(FakeTokenizer(), self._image_mark)

    def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, prompt_ids: Sequence[int] = ()
    ) -> list[Token]:
        return [Token(i, str(i)) for i in token_ids]

    def status(self) -> Any:
        return SimpleNamespace(running_requests=0, waiting_requests=0, kv_cache_usage=0.0)


def contract(path: str, image_mark: Callable[[int], str] | None = None, **settings: Any) -> Contract:
    """Return the contract of a route. `image_mark`: returns the mark of an image, if the model takes images."""
    route = next(route for route in TGI.routes if isinstance(route, GenerationRoute) and route.path == path)
    assert route.contract is not None
    return route.contract(configured(MODEL, rolling_batch="lmi-dist", **settings), FakeModel(image_mark))


def parse(path: str, document: Any, **settings: Any) -> Exchange:
    return contract(path, **settings).parse(call(document))


def requests_of(parameters: dict[str, Any] | None, path: str = "/generate", **settings: Any) -> GenerationRequest:
    document = {"inputs": "Tell me"} | ({} if parameters is None else {"parameters": parameters})
    return parse(path, document, **settings).requests[0]


def attempt(path: str, document: Any, content_type: str = "application/json", **settings: Any) -> Exchange | Reply:
    return outcome(contract(path, **settings), call(document, content_type), TGI.refuse)


def info_reply(
    method: str,
    path: str,
    document: Any = b"",
    model: ModelView | None = None,
    rendered: RenderedChat | RequestError | None = None,
) -> Reply:
    """Return the reply of a route that generates nothing. `rendered`: the prompt of the call's chat."""
    route = next(r for r in TGI.routes if isinstance(r, InfoRoute) and r.path == path and method in r.methods)
    try:
        return told(route, call(document), model or view(loaded=FakeModel()), rendered)
    except ContractError as error:  # The server sends this reply.
        return error.reply
