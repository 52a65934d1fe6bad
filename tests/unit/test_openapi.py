from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from container.docs_page import plain_page
from container.openapi import openapi_document
from handlers.model_settings import HandlerSettings, ModelSettings
from tests.contracts.exchange import MODEL

MODES = {
    "rolling": MODEL,
    "tgi": replace(MODEL, tgi_compat=True),
    "dynamic": replace(MODEL, rolling_batch="disable"),
    "custom": replace(MODEL, handler=HandlerSettings(entry_point="/x/model.py")),
}


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rpartition("/")[2]} if "$ref" in value else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()


@pytest.mark.parametrize("model", MODES.values(), ids=MODES)
def test_every_schema_that_is_named_is_there_and_no_other(model: ModelSettings) -> None:
    document = json.loads(openapi_document(model).json)
    assert references(document) == document["components"]["schemas"].keys()


@pytest.mark.parametrize(
    ("mode", "schema"), [("rolling", "Answer"), ("dynamic", "StepRecord"), ("custom", "HandlerError")]
)
def test_the_document_shows_the_mode_that_is_served(mode: str, schema: str) -> None:
    document = openapi_document(MODES[mode])
    assert schema in document.content["components"]["schemas"]
    assert schema in plain_page(document)
    others = {"Answer", "StepRecord"} - {schema}
    assert not others & document.content["components"]["schemas"].keys()
