"""Requests that come from the same parameters share the engine's memo. Other requests do not."""

from __future__ import annotations

from typing import Any

import pytest

from engines.request import EngineMemo
from handlers.contract import Contract
from handlers.happy_vllm.routes import HappyVllmContract
from handlers.lmi.asynchronous import LmiAsyncContract
from handlers.lmi.dynamic_batch import LmiDynamicContract
from handlers.lmi.rolling_batch import LmiRollingContract
from handlers.openai.constraints import CHAT, COMPLETIONS
from handlers.openai.contract import OpenAIContract
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.tgi.routes import TgiContract
from handlers.triton.routes import TritonContract
from tests.contracts.exchange import MODEL, call
from tests.contracts.openai_exchange import FRONT_END
from tests.contracts.tgi_exchange import FakeModel
from tests.settings import configured

CONTRACTS: dict[str, Contract] = {
    "rolling batch": LmiRollingContract(MODEL),
    "dynamic batch": LmiDynamicContract(MODEL),
    "asynchronous": LmiAsyncContract(configured(MODEL, async_mode=True)),
    "TGI": TgiContract(MODEL, FakeModel(), streams=None),
    "Triton": TritonContract(MODEL, FakeModel(), events=True),
    "happy_vllm": HappyVllmContract(MODEL, stream=True),
}
LMI = {"inputs": "x", "parameters": {"temperature": 0.5, "stop": ["end"]}}
BODIES: dict[str, dict[str, Any]] = {
    "rolling batch": LMI,
    "dynamic batch": LMI,
    "asynchronous": LMI,
    "TGI": LMI,
    "Triton": {"text_input": "x", "parameters": {"temperature": 0.5}},
    "happy_vllm": {"prompt": "x", "temperature": 0.5, "stop": ["end"]},
}


def memo_of(contract: Contract, document: dict[str, Any]) -> EngineMemo | None:
    return contract.parse(call(document)).requests[0].memo


@pytest.mark.parametrize("name", CONTRACTS)
def test_prompts_with_the_same_parameters_share_what_the_engine_keeps(name: str) -> None:
    contract, body = CONTRACTS[name], BODIES[name]
    field = next(iter(body))
    first = memo_of(contract, body)
    assert isinstance(first, EngineMemo)
    assert memo_of(contract, body | {field: "another prompt"}) is first
    changed = body | ({"parameters": {"temperature": 0.7}} if "parameters" in body else {"temperature": 0.7})
    other = memo_of(contract, changed)
    assert isinstance(other, EngineMemo)
    assert other is not first


@pytest.mark.parametrize("name", ["rolling batch", "asynchronous", "TGI"])
def test_streams_share_nothing_with_whole_answers(name: str) -> None:
    contract, body = CONTRACTS[name], BODIES[name]
    assert memo_of(contract, body | {"stream": True}) is not memo_of(contract, body)


def test_wrong_parameters_are_refused_again_and_leave_nothing() -> None:
    contract = CONTRACTS["rolling batch"]
    for _ in range(2):
        with pytest.raises(Exception, match="top_p"):
            contract.parse(call({"inputs": "x", "parameters": {"top_p": 7}}))
    assert contract.parse(call({"inputs": "x", "parameters": {"top_p": 0.7}})).requests[0].sampling.top_p == 0.7


def test_an_empty_prompt_of_known_parameters_is_refused() -> None:
    contract = CONTRACTS["TGI"]
    assert memo_of(contract, LMI) is not None
    with pytest.raises(Exception, match="inputs"):
        contract.parse(call(LMI | {"inputs": ""}))


def test_each_sequence_with_a_random_seed_is_checked_alone() -> None:
    details = {"inputs": "x", "parameters": {"do_sample": True, "details": True, "best_of": 2}}
    for _ in range(2):
        requests = CONTRACTS["TGI"].parse(call(details)).requests
        assert [request.memo for request in requests] == [None, None]
        assert requests[0].sampling.seed != requests[1].sampling.seed


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x", "temperature": 0.5}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "temperature": 0.5}),
    ],
)
def test_openai_calls_share_it_for_any_prompt_user_and_adapter(path: str, body: dict[str, Any]) -> None:
    contract = OpenAIContract(FRONT_END)

    def request_of(**fields: Any) -> Any:
        exchange = contract.parse(call(body | fields), path)
        assert exchange is not None
        return exchange.requests[0]

    first = request_of()
    other = request_of(**{next(iter(body)): "y" if path == COMPLETIONS else [{"role": "user", "content": "y"}]})
    assert other.prompt != first.prompt
    adapted = request_of(model="a", user="u")
    assert (first.adapter, adapted.adapter) == (None, "a")
    assert other.memo is adapted.memo is first.memo is not None
    assert request_of(max_tokens=3).memo is not first.memo


def test_a_memo_is_bounded_in_entries_and_in_bytes_of_each() -> None:
    memo = ParameterMemo[str]()
    for number in range(3000):
        assert memo.keep(b"%d" % number, str(number)) == str(number)
        assert memo[b"%d" % number] == str(number)
    assert len(memo) <= 1000
    assert memo.keep(b"x" * 501, "long") == "long"
    assert b"x" * 501 not in memo
