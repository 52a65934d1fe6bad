"""The schemas of real tools are accepted. Valid instances are allowed.

If a whole schema is enforced, invalid instances are not allowed.
"""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")


from engines.vllm.constraints.trial_process import trial
from tests.tool_schemas import NOT_HELD, ToolSchema, tool_schemas
from tests.unit.engines.vllm.constraints.byte_tokens import allows, byte_tokens

TOKENS = byte_tokens()
TOOLS = tool_schemas()


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_is_taken_and_its_instances_are_told_apart(name: str) -> None:
    tool: ToolSchema = TOOLS[name]
    found = trial(TOKENS, "json", json.dumps(tool.schema))
    assert found.error == ""
    assert found.not_held == NOT_HELD.get(name, ())
    refused = [instance for instance in tool.valid if not allows(TOKENS, found.text, instance)]
    assert refused == []
    if not found.not_held:
        admitted = [instance for instance in tool.invalid if allows(TOKENS, found.text, instance)]
        assert admitted == []
