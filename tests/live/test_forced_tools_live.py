"""A model calls a tool that a request names or requires, even if other models of the server have other grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest

from tests.live.server import Server, hosted, write_model
from tests.live.tool_calls import CONTRACTS, REQUIRED

pytestmark = pytest.mark.slow

PLUGIN = """
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser


@ToolParserManager.register_module("own")
class OwnToolParser(Hermes2ProToolParser):
    structural_tag_model = "hermes"
"""
TAGS: dict[str, object] = {"structured_outputs_config": '{"backend": "xgrammar"}', "tool_call_parser": "hermes"}
MODELS: dict[str, dict[str, object]] = {
    "tags": TAGS,
    "a plugin": {"tool_parser_plugin": "plugin.py", "tool_call_parser": "own"},
    "with reasoning": {"tool_call_parser": "hermes", "reasoning_parser": "granite"},
    "tags, with reasoning": {**TAGS, "reasoning_parser": "granite"},
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def first(
    host: Server, tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]
) -> Iterator[Server]:
    """Return the first model of a server. This model writes tool calls in its own syntax."""
    directory = write_model(tmp_path_factory.mktemp("tools") / "model", **engine_options, **_options("tags"))
    with hosted(host, directory) as running:
        yield running


def _options(name: str) -> dict[str, object]:
    return {"rolling_batch": "vllm", "enable_auto_tool_choice": "true", **MODELS[name]}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "tags" else pytest.mark.long) for name in MODELS],
)
def model(
    request: pytest.FixtureRequest,
    host: Server,
    first: Server,
    tmp_path_factory: pytest.TempPathFactory,
    engine_options: dict[str, object],
) -> Iterator[Server]:
    """A model on a server that has several models."""
    if request.param == "tags":
        yield first
        return
    directory = write_model(tmp_path_factory.mktemp("more") / "model", **engine_options, **_options(request.param))
    (directory / "plugin.py").write_text(PLUGIN)
    with hosted(host, directory) as running:
        yield running


def test_the_tool_is_called(model: Server) -> None:
    """All requests run at the same time. A batch takes little longer than one request."""
    asked = list(product(CONTRACTS, (REQUIRED, "weather"), (False, True)))

    def calls(contract: str, choice: str, stream: bool) -> list[tuple[str, str]]:
        return CONTRACTS[contract](model, {"weather": PARAMETERS}, choice, stream=stream, max_tokens=100)

    with ThreadPoolExecutor(len(asked)) as clients:
        answers = list(clients.map(calls, *zip(*asked, strict=True)))
    for request, called in zip(asked, answers, strict=True):
        assert called, request
        for name, text in called:
            assert name == "weather", request
            assert json.loads(text) in ({"city": "Paris"}, {"city": "Rome"}), request
