"""The headers that steer the engine reach the requests of every contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engines.pooling import PoolingModel
from engines.request import GenerationRequest
from handlers.all_contracts import CONTRACTS
from handlers.contract import Call, Contract, Exchange, read_steering
from handlers.custom.formatters import Formatters
from handlers.formatter_thread import FormatterThread
from handlers.happy_vllm.routes import HappyVllmContract
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.dynamic_batch import LmiDynamicContract
from handlers.lmi.formatters.formatter_contract import FormatterContract
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.contract import OpenAIContract
from handlers.openai.embeddings import EmbeddingsContract
from handlers.openai.routes import EMBEDDINGS
from handlers.route_declarations import ContractSetting, GenerationRoute
from handlers.tei.contracts import RootContract, TeiContract
from handlers.tgi.routes import TgiContract
from handlers.triton.embeddings import InferContract
from handlers.triton.routes import TritonContract
from tests.contracts.exchange import MODEL, call
from tests.contracts.openai_exchange import FRONT_END
from tests.contracts.pooling_exchange import ask
from tests.contracts.tgi_exchange import FakeModel
from tests.settings import configured
from tests.stand_ins.request_headers import request_headers

HEADERS = {"Traceparent": "00-1-2-01", "X-Cache-Salt": "own", "X-Vllm-Priority": "-3"}


class TextModel(FakeModel):
    pooling: PoolingModel | None = None


SETTING = ContractSetting(settings=MODEL, model=TextModel())
INPUTS = {"inputs": "x"}
ROLLING = LmiRollingContract(MODEL)
FORMATTERS = Formatters(FormatterThread(5), output=lambda *_: "")
FORMATTED = FormatterContract(ROLLING, MODEL, FORMATTERS, None)


def steered(document: Any) -> Call:
    steering, fault = read_steering(request_headers(*HEADERS.items()), "of the key")
    return replace(call(document), steering=steering, steering_fault=fault)


def check(requests: Any) -> None:
    seen: list[GenerationRequest] = list(requests)
    assert seen
    for request in seen:
        assert (request.cache_salt, request.priority) == ("own", -3)
        assert request.trace_context == {"traceparent": "00-1-2-01"}


@pytest.mark.parametrize(
    ("contract", "document"),
    [
        (ROLLING, {"inputs": ["a", "b"]}),
        (LmiDynamicContract(MODEL), INPUTS),
        (LmiAsyncContract(configured(MODEL, async_mode=True)), INPUTS),
        (FORMATTED, INPUTS),
        (TgiContract(SETTING, streams=False), INPUTS),
        (TritonContract(SETTING, events=False), {"text_input": "x"}),
        (HappyVllmContract(SETTING, stream=False), {"prompt": "x"}),
    ],
)
def test_a_text_contract_steers_its_requests(contract: Contract, document: object) -> None:
    check(contract.parse(steered(document)).requests)


@pytest.mark.parametrize(
    ("parse", "path", "document"),
    [
        (OpenAIContract(FRONT_END).parse, CHAT, {"messages": [{"role": "user", "content": "x"}]}),
        (OpenAIContract(FRONT_END).parse, COMPLETIONS, {"prompt": ["x", "y"]}),
        (EmbeddingsContract("m", FRONT_END.accepts, ()).parse, EMBEDDINGS, {"input": ["x", "y"]}),
    ],
)
def test_openais_contracts_steer_their_requests(
    parse: Callable[[Call, str], Exchange | None], path: str, document: object
) -> None:
    exchange = parse(steered(document), path)
    assert exchange is not None
    check(exchange.requests)


def test_every_contract_of_a_route_is_tested_here() -> None:
    routes = [route for family in CONTRACTS for route in family.routes if isinstance(route, GenerationRoute)]
    tested = (TgiContract, TritonContract, HappyVllmContract, TeiContract, RootContract, InferContract)
    parses = {type(route.contract(SETTING)).parse for route in routes if route.contract is not None}
    assert parses == {contract.parse for contract in tested}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/invocations", {"inputs": ["a", "b"]}),
        ("/embed", {"inputs": ["a", "b"]}),
        ("/", {"inputs": "a"}),
        ("/v2/models/model/generate", {"text_input": "", "embedding_request": '{"input": "a"}'}),
        (
            "/v2/models/model/infer",
            {"inputs": [{"name": "input_text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]},
        ),
    ],
)
async def test_a_pooling_contract_steers_its_requests(path: str, document: object) -> None:
    answer = await ask(path, document, headers=HEADERS)
    assert answer.status == 200, answer.body
    check(answer.seen)
