"""The names of adapters in each contract's requests, and the refusals if the model has no adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djl_python.request_io import TextInput
from engines.adapters import Adapter
from engines.errors import RequestError, UnknownAdapter, UnknownModel
from engines.request import GenerationRequest
from handlers.contract import Call, Contract, ContractError
from handlers.happy_vllm.routes import HAPPY_VLLM
from handlers.openai.routes import model, models, refuse
from handlers.route_declarations import ContractRoutes, ContractSetting
from handlers.tgi.routes import TGI
from handlers.triton.routes import TRITON, TritonContract
from tests.contracts import (
    exchange,
    happy_vllm_exchange,
    test_lmi_async,
    test_lmi_formatters,
    tgi_exchange,
    triton_exchange,
)
from tests.settings import configured
from tests.stand_ins.request_headers import request_headers

HEADER = request_headers(("X-Amzn-SageMaker-Adapter-Identifier", "h"))


@pytest.mark.parametrize("value", ["a", ["a"]])
def test_the_asynchronous_schema_takes_a_name_or_an_array_of_one(value: Any) -> None:
    parsed = test_lmi_async.parse({"inputs": "x", "adapters": value}, enable_lora=True)
    assert parsed.requests[0].adapter == "a"
    assert parsed.notes == ()
    reply = parsed.answer.fail(UnknownAdapter("a"))
    assert (reply.status, reply.body) == (424, b'{"error":"the adapter \\u0027a\\u0027 is not registered","code":424}')


def test_formatters_pass_on_what_the_request_says() -> None:
    def read(*_: Any, **__: Any) -> TextInput:
        return TextInput(input_text="x", adapters="f")

    document = {"inputs": "x", "adapters": "a"}
    by_body = test_lmi_formatters.contract(write=test_lmi_formatters.whole_answer, enable_lora=True)
    assert by_body.parse(exchange.call(document)).requests[0].adapter == "a"
    by_formatter = test_lmi_formatters.contract(read=read, enable_lora=True)
    assert by_formatter.parse(exchange.call(document)).requests[0].adapter == "f"
    assert by_formatter.parse(replace(exchange.call(document), headers=HEADER)).requests[0].adapter == "h"


def test_tgis_requests_of_several_candidates_all_have_the_adapter() -> None:
    parameters = {"adapter_id": "a", "best_of": 2, "do_sample": True}
    parsed = tgi_exchange.parse("/generate", {"inputs": "x", "parameters": parameters}, enable_lora=True)
    assert [request.adapter for request in parsed.requests] == ["a", "a"]


def by_header(contract: Contract, document: dict[str, Any], name: str = "h") -> GenerationRequest:
    headers = request_headers(("X-Amzn-SageMaker-Adapter-Identifier", name))
    path = {"model": exchange.MODEL.name}
    return contract.parse(replace(exchange.call(document), headers=headers, path_parameters=path)).requests[0]


def contracts(**settings: Any) -> dict[str, tuple[Contract, dict[str, Any], dict[str, Any], ContractRoutes]]:
    """Return each contract, a request, a request that names the adapter `a`, and the family."""
    setting = ContractSetting(config=configured(exchange.MODEL, **settings), model=tgi_exchange.FakeModel())
    prompt = {"inputs": "x"}
    named = {"inputs": "x", "parameters": {"adapter_id": "a"}}
    return {
        "TGI": (tgi_exchange.contract("/generate", **settings), prompt, named, TGI),
        "TGI, streamed": (tgi_exchange.contract("/generate_stream", **settings), prompt, named, TGI),
        "Triton": (
            TritonContract(setting, events=False),
            {"text_input": "x"},
            {"text_input": "x", "lora_name": "a"},
            TRITON,
        ),
        "happy_vllm": (happy_vllm_exchange.contract(**settings), {"prompt": "x"}, {"prompt": "x"}, HAPPY_VLLM),
    }


@pytest.mark.parametrize("name", contracts())
def test_the_header_names_an_adapter_in_every_contract_and_goes_before_the_body(name: str) -> None:
    contract, document, named, _ = contracts(enable_lora=True)[name]
    assert by_header(contract, document).adapter == "h"
    assert by_header(contract, named).adapter == "h"
    assert by_header(contract, named, "").adapter is None


@pytest.mark.parametrize("name", contracts())
def test_the_header_is_refused_by_a_server_without_adapters(name: str) -> None:
    contract, document, _, family = contracts()[name]
    assert by_header(contract, document, "").adapter is None
    try:
        by_header(contract, document)
    except ContractError as error:
        body = error.reply.body
    except RequestError as error:
        body = family.refuse(error).body
    assert b"`X-Amzn-SageMaker-Adapter-Identifier` cannot be used: this server has no adapters" in body


def test_the_list_of_models_has_the_adapters_with_their_parent() -> None:
    adapter = Adapter(name="a", src="/x", path=Path("/x"), id=1)
    view = replace(triton_exchange.view(served_model_names=("base", "other")), adapters=(adapter,))
    cards = msgspec.json.decode(models(Call(body=b"", request_id="r"), (view,)).body)["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    model = view.config.model_id
    assert shown == [("base", model, None), ("other", model, None), ("a", "/x", "base")]


@pytest.mark.parametrize("name", ["base", "org/other", "a"])
def test_one_of_the_models_is_what_the_list_has_of_it(name: str) -> None:
    adapter = Adapter(name="a", src="s3://b/x", path=Path("/x"), id=1)
    views = (replace(triton_exchange.view(served_model_names=("base", "org/other")), adapters=(adapter,)),)
    listed = msgspec.json.decode(models(Call(body=b"", request_id="r"), views).body)["data"]
    reply = model(Call(body=b"", request_id="r", path_parameters={"id": name}), views)
    assert (reply.status, reply.content_type) == (200, "application/json")
    card = msgspec.json.decode(reply.body)
    assert list(card) == list(listed[0])
    varying = {"created": 0, "permission": []}
    assert [one | varying for one in listed if one["id"] == name] == [card | varying]


def test_a_model_that_is_none_of_these_is_not_found_in_vllms_words() -> None:
    call = Call(body=b"", request_id="r", path_parameters={"id": "org/nope"})
    with pytest.raises(UnknownModel) as caught:
        model(call, (triton_exchange.view(),))
    reply = refuse(caught.value)
    assert (reply.status, reply.body) == (
        404,
        b'{"error":{"message":"The model `org/nope` does not exist.","type":"NotFoundError","param":"model",'
        b'"code":404}}',
    )
