"""The schemas of real tools constrain texts and tool calls, both whole and streamed.

Tool calls are tested in every contract that has tools. Many answers are complete: valid JSON under the schema. Other
answers fill an unbounded text or number up to their limit of tokens: they are the beginning of valid JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import pytest
from jsonschema import validators

from engines.vllm.constraints.trial_process import trial
from tests.constrained import ROUTES, Fields, typed
from tests.live.constrained import AT_A_TIME, answer
from tests.live.server import Server, hosted, write_model
from tests.live.tool_calls import CONTRACTS, REQUIRED
from tests.tool_schemas import NOT_HELD, tool_schemas
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = 80
SOME = (
    "dotnet: AIFunction: enum, default",
    "dotnet: polymorphism",
    "frameworks: OpenAI: a strict model",
    "mcp: everything: get-structured-content",
    "mcp: memory: create_entities",
    "mcp: sequential-thinking: sequentialthinking",
    "openapi: allOf of a base schema",
    "openapi: formats of OpenAPI 3.0",
    "pydantic: Enum, IntEnum, Literal",
    "pydantic: dict of an enum, of literals",
    "pydantic: discriminated unions",
    "schemars: HashMap",
    "schemars: adjacently tagged enum",
    "zod: discriminated union",
    "zod: formats: ipv4, ipv6, cidrv4, cidrv6",
    "zod: literals",
    "zod: records of an enum",
)
"""Tools of each generator. The small model completes the answers to most of them."""

UNREADABLE = "zod: format: emoji"
"""A tool with character classes in its patterns that Python's `re` does not know. The test's validator uses `re`."""
SCHEMAS = {name: tool.schema for name, tool in tool_schemas().items() if name not in (UNREADABLE, *NOT_HELD)}
OBJECTS = {name: schema for name, schema in SCHEMAS.items() if schema.get("type") == "object"}
BYTES = byte_tokens()


def faults(name: str, text: str) -> Iterator[str]:
    """Yield the faults of an answer under a tool's schema.

    If an answer is cut off, it has to be the beginning of a valid one.
    """
    schema = SCHEMAS[name]
    try:
        document = json.loads(text)
    except ValueError:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(trial(BYTES, "json", json.dumps(schema)).text)
        matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
        if not text or not matcher.consume_tokens(list(text.rstrip("\ufffd").encode())):
            yield f"{name}: {text!r}"
        return
    kind: Any = validators.validator_for(schema)
    for error in kind(schema).iter_errors(document):
        yield f"{name}: {error.message} in {text!r}"


def is_complete(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


FIELDS: dict[str, Callable[[Any], Fields]] = {
    "chat": lambda schema: {
        "response_format": typed("json_schema", json_schema={"name": "x", "schema": schema}),
        "max_tokens": TOKENS,
    },
    "LMI": lambda schema: {"guided_json": schema, "max_new_tokens": TOKENS},
}
"""The fields that constrain an answer. tests/contracts/test_constraint_matrix.py has the other routes."""


def once_and_all(names: Iterable[str]) -> list[Any]:
    """Return some tools for each name, and all tools for `make long`."""
    some = [pytest.param(n, SOME, id=n, marks=[] if n in FIELDS else pytest.mark.slow) for n in names]
    return [*some, *(pytest.param(n, tuple(SCHEMAS), id=f"{n}, all", marks=pytest.mark.long) for n in names)]


@pytest.mark.parametrize(("route", "tools"), once_and_all(FIELDS))
def test_an_answer_follows_the_schema(server: Server, route: str, tools: tuple[str, ...]) -> None:
    with ThreadPoolExecutor(AT_A_TIME) as clients:
        answers = list(clients.map(lambda name: answer(server, ROUTES[route], FIELDS[route](SCHEMAS[name])), tools))
    wrong = [
        fault if response.status_code == 200 else f"{name}: {response.text[:300]}"
        for name, (response, text) in zip(tools, answers, strict=True)
        for fault in faults(name, text)
    ]
    assert not wrong, "\n".join(wrong)
    assert sum(is_complete(text) for _, text in answers) >= len(tools) / 4


@pytest.fixture(scope="module")
def caller(
    host: Server, tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]
) -> Iterator[Server]:
    """A model that calls tools."""
    options = small_options | {"tool_call_parser": "hermes", "enable_auto_tool_choice": "true"}
    with hosted(host, write_model(tmp_path_factory.mktemp("caller") / "model", **options)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("contract", "tools"), once_and_all(CONTRACTS))
def test_a_call_of_a_named_tool_follows_its_schema(
    caller: Server, contract: str, tools: tuple[str, ...], stream: bool
) -> None:
    called = [name for name in tools if name in OBJECTS]
    ask = CONTRACTS[contract]

    def call(name: str) -> list[tuple[str, str]]:
        return ask(caller, {"tool": OBJECTS[name]}, "tool", stream=stream, max_tokens=TOKENS)

    with ThreadPoolExecutor(AT_A_TIME) as clients:
        answers = dict(zip(called, clients.map(call, called), strict=True))
    wrong = [fault for name, calls in answers.items() for _, text in calls for fault in faults(name, text)]
    assert not wrong, "\n".join(wrong)
    assert sum(bool(calls) and is_complete(calls[0][1]) for calls in answers.values()) >= len(called) / 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("contract", "tools"), once_and_all(CONTRACTS))
def test_a_required_call_follows_the_schema_of_the_tool_that_the_model_calls(
    caller: Server, contract: str, tools: tuple[str, ...], stream: bool
) -> None:
    called = [name for name in tools if name in OBJECTS]
    # In each request, the model calls the tool with the same number. The requests give this number to different tools.
    requests = [
        {f"tool_{index}": name for index, name in enumerate(called[first:][:10])} for first in range(len(called))
    ]
    ask = CONTRACTS[contract]

    def call(names: dict[str, str]) -> list[tuple[str, str]]:
        offered = {tool: OBJECTS[name] for tool, name in names.items()}
        return ask(caller, offered, REQUIRED, stream=stream, max_tokens=TOKENS)

    with ThreadPoolExecutor(AT_A_TIME) as clients:
        answers = list(clients.map(call, requests))
    wrong = [
        fault
        for names, calls in zip(requests, answers, strict=True)
        for tool, text in calls
        if is_complete(text)
        for fault in faults(names[tool], text)
    ]
    assert not wrong, "\n".join(wrong)
    assert any(is_complete(text) for calls in answers for _, text in calls)
