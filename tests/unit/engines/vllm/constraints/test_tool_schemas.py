"""The schemas of real tools are taken. What is held of them admits no invalid instance, and each valid one."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest

from engines.vllm.constraints.trial_process import trial
from tests.tool_schemas import NOT_HELD, ToolSchema, tool_schemas
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = byte_tokens()
TOOLS = tool_schemas()


def allows(schema: str, instance: Any) -> bool:
    """Return True if the back end lets a model write an instance, as compact JSON."""
    matcher = llguidance.LLMatcher(TOKENS, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_taken_and_its_instances_are_told_apart(name: str) -> None:
    tool: ToolSchema = TOOLS[name]
    found = trial(TOKENS, "json", json.dumps(tool.schema))
    assert found.error == ""
    assert found.not_held == NOT_HELD.get(name, ())
    refused = [instance for instance in tool.valid if not allows(found.text, instance)]
    assert refused == []
    if not found.not_held:
        admitted = [instance for instance in tool.invalid if allows(found.text, instance)]
        assert admitted == []
