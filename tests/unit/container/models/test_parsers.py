"""The parsers of models as `slipway config` shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from container.models.shown_parsers import with_parsers_shown
from container.settings.load import load_startup
from container.settings.lookup import SettingEntry
from container.settings.settings import SettingsError

TEMPLATE = '{% if tools %}<tool_call>{"name": x, "arguments": {}}</tool_call>{% endif %}<think>{{ messages }}'


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return tmp_path


def shown(model_dir: Path, **environ: str) -> dict[str, SettingEntry]:
    startup = with_parsers_shown(load_startup(str(model_dir), environ, {}))
    return {entry.name: entry for entry in startup.models[0].settings.entries}


def test_the_choice_is_shown_with_its_reason(model_dir: Path) -> None:
    entries = shown(model_dir)
    tools, reasoning = entries["option.tool_call_parser"], entries["option.reasoning_parser"]
    assert (tools.value, tools.source) == ("hermes", "default")
    assert "<tool_call>" in tools.note
    assert (reasoning.value, reasoning.source) == ("none", "default")


def test_a_setting_is_shown_with_its_source(model_dir: Path) -> None:
    entries = shown(model_dir, OPTION_TOOL_CALL_PARSER="mistral", OPTION_REASONING_PARSER="auto")
    tools, reasoning = entries["option.tool_call_parser"], entries["option.reasoning_parser"]
    assert (tools.value, tools.source) == ("mistral", "environment: OPTION_TOOL_CALL_PARSER")
    assert (reasoning.value, reasoning.source) == ("qwen3", "environment: OPTION_REASONING_PARSER")
    assert shown(model_dir, OPTION_TOOL_CALL_PARSER="none")["option.tool_call_parser"].value == "none"


@pytest.mark.parametrize("environ", [{"OPTION_ROLLING_BATCH": "disable"}, {"OPTION_TASK": "embed"}])
def test_a_model_that_calls_no_tools_has_no_parser(model_dir: Path, environ: dict[str, str]) -> None:
    assert "option.tool_call_parser" not in shown(model_dir, **environ)


def test_a_wrong_name_is_a_fault_of_the_settings(model_dir: Path) -> None:
    environ = {"OPTION_TOOL_CALL_PARSER": "herms", "OPTION_REASONING_PARSER": "qwen33"}
    with pytest.raises(SettingsError) as error:
        load_startup(str(model_dir), environ, {})
    tools, reasoning = error.value.problems
    assert "environment: OPTION_TOOL_CALL_PARSER" in tools
    assert "hermes" in tools
    assert "qwen3" in reasoning
    load_startup(str(model_dir), environ | {"OPTION_ROLLING_BATCH": "disable"}, {})


def test_the_choice_needs_no_vllm() -> None:
    code = "import sys, container.models.shown_parsers; sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
