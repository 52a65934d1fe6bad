"""The names of adapters in each contract's requests, and the refusals if the model has no adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from djl_python.request_io import TextInput
from engines.adapters import Adapter
from engines.errors import UnknownModel
from handlers.contract import Call
from handlers.openai.routes import model, models, refuse
from tests.contracts import (
    exchange,
    test_lmi_formatters,
)
from tests.stand_ins.request_headers import request_headers

HEADER = request_headers(("X-Amzn-SageMaker-Adapter-Identifier", "h"))


def test_formatters_pass_on_what_the_request_says() -> None:
    def read(*_: Any, **__: Any) -> TextInput:
        return TextInput(input_text="x", adapters="f")

    document = {"inputs": "x", "adapters": "a"}
    by_body = test_lmi_formatters.contract(write=test_lmi_formatters.whole_answer, enable_lora=True)
    assert by_body.parse(exchange.call(document)).requests[0].adapter == "a"
    by_formatter = test_lmi_formatters.contract(read=read, enable_lora=True)
    assert by_formatter.parse(exchange.call(document)).requests[0].adapter == "f"
    assert by_formatter.parse(replace(exchange.call(document), headers=HEADER)).requests[0].adapter == "h"


def test_the_list_of_models_has_the_adapters_with_their_parent() -> None:
    adapter = Adapter(name="a", src="/x", path=Path("/x"), id=1)
    view = replace(exchange.view(served_model_names=("base", "other")), adapters=(adapter,))
    cards = msgspec.json.decode(models(Call(body=b"", request_id="r"), (view,)).body)["data"]
    shown = [(card["id"], card["root"], card["parent"]) for card in cards]
    model = view.config.model_id
    assert shown == [("base", model, None), ("other", model, None), ("a", "/x", "base")]


@pytest.mark.parametrize("name", ["base", "org/other", "a"])
def test_one_of_the_models_is_what_the_list_has_of_it(name: str) -> None:
    adapter = Adapter(name="a", src="s3://b/x", path=Path("/x"), id=1)
    views = (replace(exchange.view(served_model_names=("base", "org/other")), adapters=(adapter,)),)
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
        model(call, (exchange.view(),))
    reply = refuse(caught.value)
    assert (reply.status, reply.body) == (
        404,
        b'{"error":{"message":"The model `org/nope` does not exist.","type":"NotFoundError","param":"model",'
        b'"code":404}}',
    )
