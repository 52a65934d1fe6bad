"""The choice of parsers from small templates, which have the marks of real ones."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.vllm.parsers.choice import (
    FAMILIES,
    NAMES,
    REASONING,
    TOOLS,
    choose,
    is_named,
    name_fault,
    parser_of,
    with_parsers,
)
from handlers.model_config import ModelConfig

JSON_CALLS = '<tool_call>{"name": x, "arguments": {}}</tool_call>'
XML_CALLS = "<tool_call><function=x><parameter=y>1</parameter></function></tool_call>"
KEYS = "<tool_call>x<arg_key>y</arg_key><arg_value>1</arg_value></tool_call>"
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>x<\uff5ctool\u2581sep\uff5c>"
# For each model: the architecture, the template's text for tool calls and reasoning, the parser of tool calls, and the
# parser of reasoning.
MODELS: dict[str, tuple[str, str, str, str]] = {
    "hermes 2": ("LlamaForCausalLM", JSON_CALLS, "hermes", ""),
    "quoted": ("LlamaForCausalLM", JSON_CALLS.replace('"', '\\"'), "hermes", ""),
    "qwen 2.5": ("Qwen2ForCausalLM", JSON_CALLS, "hermes", ""),
    "qwq": ("Qwen2ForCausalLM", f"{JSON_CALLS}<think>", "hermes", "deepseek_r1"),
    "qwen 3": ("Qwen3MoeForCausalLM", f"{JSON_CALLS}<think>", "hermes", "qwen3"),
    "qwen 3 coder": ("Qwen3MoeForCausalLM", XML_CALLS, "qwen3_xml", ""),
    "qwen 3.5": ("Qwen3_5ForConditionalGeneration", f"{XML_CALLS}<think>", "qwen3_xml", "qwen3"),
    "a coder": ("LlamaForCausalLM", XML_CALLS, "qwen3_xml", ""),
    "nemotron 3": ("NemotronHForCausalLM", f"{XML_CALLS}<think>", "qwen3_coder", "nemotron_v3"),
    "step 3.5": ("Step3p5ForCausalLM", f"{XML_CALLS}<think>", "step3p5", "step3p5"),
    "mimo": ("MiMoV2FlashForCausalLM", f"{XML_CALLS}<think>", "mimo", "mimo"),
    "step 3": ("Step3TextForCausalLM", '<steptml:invoke name="x">', "step3", ""),
    "glm 4.6": ("Glm4MoeForCausalLM", f"[gMASK]<sop>{KEYS}<think>", "glm45", "glm45"),
    "laguna": ("LagunaForCausalLM", f"{KEYS}<think>", "poolside_v1", "poolside_v1"),
    "ling 3": ("BailingMoeV3ForCausalLM", f"<role>ASSISTANT</role>{KEYS}<think>", "ling3", "ling3"),
    "granite 4": ("GraniteMoeHybridForCausalLM", JSON_CALLS, "granite4", ""),
    "granite 3.3": ("GraniteForCausalLM", "<|tool_call|>[]<think>", "granite", ""),
    "granite 20b": ("GPTBigCodeForCausalLM", "<function_call>", "granite-20b-fc", ""),
    "ernie": ("Ernie4_5_MoeForCausalLM", f"{JSON_CALLS}<think>", "ernie45", "ernie45"),
    "llama 3.1": (
        "LlamaForCausalLM",
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        "llama3_json",
        "",
    ),
    "llama 4": ("Llama4ForConditionalGeneration", "[func_name1(param1=value1)]", "llama4_pythonic", ""),
    "mistral": ("MistralForCausalLM", "[TOOL_CALLS][]", "mistral", ""),
    "magistral": ("MistralForCausalLM", "[THINK][TOOL_CALLS]x[ARGS]{}", "mistral", "mistral"),
    "deepseek r1": ("DeepseekV3ForCausalLM", f"{DEEPSEEK}\n```json\n{{}}<think>", "deepseek_v3", "deepseek_r1"),
    "deepseek v3.1": ("DeepseekV3ForCausalLM", f"{DEEPSEEK}{{}}<think>", "deepseek_v31", "deepseek_v3"),
    "deepseek v3.2": ("DeepseekV32ForCausalLM", "", "deepseek_v32", "deepseek_v3"),
    "deepseek v4": ("DeepseekV4ForCausalLM", DEEPSEEK, "deepseek_v4", "deepseek_v4"),
    "deepseek v4.1": ("DeepseekV41ForCausalLM", "", "deepseek_v41", "deepseek_v41"),
    "gpt-oss": ("GptOssForCausalLM", "<|channel|>", "openai", "openai_gptoss"),
    "kimi k2": ("DeepseekV3ForCausalLM", "<|tool_calls_section_begin|><think>", "kimi_k2", "kimi_k2"),
    "kimi k3": ("KimiK3ForConditionalGeneration", "", "kimi_k3", "kimi_k3"),
    "inkling": ("InklingForCausalLM", "", "inkling", "inkling"),
    "minimax m2": ("MiniMaxM2ForCausalLM", "<minimax:tool_call><think>", "minimax_m2", "minimax_m2"),
    "minimax m3": ("LlamaForCausalLM", "]<]minimax[>[<tool_call><mm:think>", "minimax_m3", "minimax_m3"),
    "gemma 4": ("Gemma4ForCausalLM", "<|tool_call>call:x{}<|channel>", "gemma4", "gemma4"),
    "functiongemma": ("Gemma3ForCausalLM", "<start_function_call>call:x{}", "functiongemma", ""),
    "command a": (
        "Cohere2ForCausalLM",
        "<|START_ACTION|><|START_RESPONSE|><|START_THINKING|>",
        "cohere_command3",
        "cohere_command3",
    ),
    "command 4": (
        "Cohere2MoeForCausalLM",
        "<|START_ACTION|><|START_TEXT|><|START_THINKING|>",
        "cohere_command4",
        "cohere_command4",
    ),
    "seed": ("SeedOssForCausalLM", "<seed:tool_call><function=x><seed:think>", "seed_oss", "seed_oss"),
    "hunyuan": ("HunYuanMoEV1ForCausalLM", "<tool_calls>[]</tool_calls><think>", "hunyuan_a13b", "hunyuan_a13b"),
    "hy3": ("HYV3ForCausalLM", "<tool_calls{}><think{}>", "hy_v3", "hy_v3"),
    "jamba": ("JambaForCausalLM", "<tool_calls>[]</tool_calls>", "jamba", ""),
    "olmo 3": ("Olmo3ForCausalLM", "<function_calls>x()</function_calls><think>", "olmo3", "olmo3"),
    "phi 4": ("Phi3ForCausalLM", "<|tool|>", "phi4_mini_json", ""),
    "internlm": ("InternLM2ForCausalLM", "<|action_start|><|plugin|>", "internlm", ""),
    "lfm 2": ("Lfm2ForCausalLM", "List of tools: []", "lfm2", ""),
    "longcat": ("LongcatFlashForCausalLM", "<longcat_tool_call>", "longcat", ""),
    "minicpm 5": ("LlamaForCausalLM", '<function name="x"><param name="y">', "minicpm5", ""),
    "apertus": ("ApertusForCausalLM", "<|tools_prefix|>", "apertus", ""),
    "gigachat": ("DeepseekV3ForCausalLM", "<|role_sep|><|message_sep|>", "gigachat3", ""),
    "plamo 3": ("Plamo3ForCausalLM", "<|plamo:begin_tool_requests:plamo|>", "plamo3", ""),
    "k2 horizon": ("K2HorizonForCausalLM", "<ifm|tool_calls><ifm|think>", "k2_horizon", "k2_horizon"),
    "muse": ("MuseGlimmerForCausalLM", "<atem:function_calls>to=self", "muse_glimmer", "muse_glimmer"),
    "dots": ("Dots3NoteForCausalLM", "<dots_function_call>", "dots", ""),
    "apriel": ("LlamaForCausalLM", f"{JSON_CALLS}<tool_calls>[]", "", ""),
}


def template(says: str) -> str:
    return "{%- if tools %}" + says + "{% for tool in tools %}{{ tool }}{% endfor %}{% endif %}{{ messages }}"


def settings(directory: Path, **arguments: str) -> ModelConfig:
    return ModelConfig(name="m", model_dir=directory, model_id=str(directory), engine_arguments=arguments)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model without a template."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return tmp_path


@pytest.mark.parametrize("name", MODELS)
def test_each_family_gets_its_parsers(name: str) -> None:
    architecture, says, tools, reasoning = MODELS[name]
    text = template(says) if says else None
    found = [choose(kind, text, [architecture]) for kind in (TOOLS, REASONING)]
    assert [choice.parser for choice in found] == [tools, reasoning]
    assert all(choice.reason for choice in found)


def test_each_family_has_parsers_of_vllm_and_a_model_above() -> None:
    assert {family.tools for family in FAMILIES} - {""} <= set(NAMES[TOOLS])
    assert {family.reasoning for family in FAMILIES} - {""} <= set(NAMES[REASONING])
    assert {family.tools for family in FAMILIES} == {tools for _, _, tools, _ in MODELS.values()}


def test_the_recorded_choices_are_those_of_known_families() -> None:
    path = Path(__file__).parents[5] / "docs" / "chat_templates.csv"
    names = {family.name: family for family in FAMILIES}
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row[TOOLS] != "none"]
    families = {row["template"]: names[row["reason for the first"].partition(":")[0]] for row in rows}
    assert {row["template"]: row[TOOLS] for row in rows} == {name: family.tools for name, family in families.items()}
    assert all(row[REASONING] in ("none", families[row["template"]].reasoning) for row in rows)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "no chat template"),
        ("{{ messages }}", "does not read `tools`"),
        (JSON_CALLS + "{{ messages }}", "does not read `tools`"),
        ("{% if message['tools'] %}" + JSON_CALLS + "{% endif %}", "does not read `tools`"),
        ("{% if xml_tools %}" + JSON_CALLS + "{% endif %}", "does not read `tools`"),
        (template("<tool_call>"), "no known family"),
        (template(JSON_CALLS + "[TOOL_CALLS]"), "Hermes or Mistral"),
        (template(JSON_CALLS + XML_CALLS), ""),  # neither has all marks of the other
    ],
)
def test_an_unknown_or_ambiguous_template_gets_no_parser_of_calls(text: str | None, reason: str) -> None:
    found = choose(TOOLS, text, ["LlamaForCausalLM"])
    assert found.parser == ""
    assert reason in found.reason


def test_of_two_families_the_one_with_all_marks_of_the_other_is_chosen() -> None:
    assert choose(TOOLS, template(DEEPSEEK + "```json"), []).parser == "deepseek_v3"


def test_reasoning_needs_no_tools() -> None:
    text = f"{{{{ messages }}}}<think>{DEEPSEEK}```json"
    assert choose(REASONING, text, ["Qwen2ForCausalLM"]).parser == "deepseek_r1"


NAMED = [
    {"name": "default", "template": template("[TOOL_CALLS]")},
    {"name": "tool_use", "template": template(JSON_CALLS)},
]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", template(JSON_CALLS)),
        ("tokenizer_config.json", json.dumps({"chat_template": template(JSON_CALLS)})),
        ("chat_template.json", json.dumps({"chat_template": template(JSON_CALLS)})),
        ("tokenizer_config.json", json.dumps({"chat_template": NAMED})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{**NAMED[1], "name": "default"}]})),
    ],
)
def test_a_template_is_found_where_transformers_finds_it(model: Path, name: str, content: str) -> None:
    (model / name).write_text(content)
    assert parser_of(TOOLS, settings(model)).parser == "hermes"


def test_a_file_for_tools_takes_precedence(model: Path) -> None:
    (model / "chat_template.jinja").write_text(template("[TOOL_CALLS]"))
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template("<|tools_prefix|>")}))
    assert parser_of(TOOLS, settings(model)).parser == "mistral"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(template(JSON_CALLS))
    assert parser_of(TOOLS, settings(model)).parser == "hermes"


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"chat_template": 1}', '{"chat_template": [{}, 2, {"name": [], "template": "x"}]}', "\xff"],
)
def test_a_broken_file_is_no_template(model: Path, content: str) -> None:
    (model / "config.json").write_text('{"architectures": [{}]}')
    (model / "tokenizer_config.json").write_text(content, encoding="latin-1")
    assert parser_of(TOOLS, settings(model)).parser == ""
    (model / "config.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert parser_of(TOOLS, settings(model)).parser == ""


def test_an_option_gives_another_template(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (model / "chat_template.jinja").write_text(template("[TOOL_CALLS]"))
    (model / "own.jinja").write_text(template(JSON_CALLS))
    assert parser_of(TOOLS, settings(model, chat_template="own.jinja")).parser == "hermes"
    assert parser_of(TOOLS, settings(model, chat_template=template(XML_CALLS))).parser == "qwen3_xml"
    assert parser_of(TOOLS, settings(model, chat_template="{{ messages }}")).parser == ""
    other = tmp_path_factory.mktemp("tokenizer")
    (other / "chat_template.jinja").write_text(template(JSON_CALLS))
    assert parser_of(TOOLS, settings(model, tokenizer=str(other))).parser == "hermes"


def test_a_tokenizer_of_mistral_needs_no_template(model: Path) -> None:
    (model / "tekken.json").write_text("{}")
    assert parser_of(TOOLS, settings(model)).parser == "mistral"
    assert parser_of(REASONING, settings(model, reasoning_parser="auto")).parser == ""


def test_a_model_on_the_hub_is_looked_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "chat_template.jinja").write_text(template(JSON_CALLS))
    asked = []

    def hub_file(repository: str, name: str, revision: str | None) -> Path | None:
        asked.append((repository, name, revision))
        path = model / name
        return path if repository == "a/model" and path.is_file() else None

    monkeypatch.setattr("engines.vllm.parsers.choice.hub_file", hub_file)
    here = ModelConfig(name="m", model_dir=model, model_id="a/model", revision="v1")
    assert parser_of(TOOLS, here).parser == "hermes"
    assert {(repository, revision) for repository, _, revision in asked} == {("a/model", "v1")}
    asked.clear()
    elsewhere = ModelConfig(name="m", model_dir=model, model_id="another/model")
    assert parser_of(TOOLS, elsewhere).parser == ""
    assert [name for _, name, _ in asked] == ["config.json"]  # without a network, each further request would take long


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"tool_call_parser": "hermes", "enable_auto_tool_choice": "true"}),
        ({"tool_call_parser": " Auto "}, {"tool_call_parser": "hermes", "enable_auto_tool_choice": "true"}),
        ({"tool_call_parser": "none"}, {}),
        ({"tool_call_parser": "mistral"}, {"tool_call_parser": "mistral", "enable_auto_tool_choice": "true"}),
        ({"enable_auto_tool_choice": "false"}, {"enable_auto_tool_choice": "false"}),
        (
            {"enable_auto_tool_choice": "false", "tool_call_parser": "mistral"},
            {"enable_auto_tool_choice": "false", "tool_call_parser": "mistral"},
        ),
        (
            {"tool_call_parser": "none", "reasoning_parser": "auto"},
            {"reasoning_parser": "qwen3"},
        ),
        ({"tool_call_parser": "none", "reasoning_parser": "granite"}, {"reasoning_parser": "granite"}),
        ({"tool_call_parser": "none", "reasoning_parser": "none", "seed": "1"}, {"seed": "1"}),
    ],
)
def test_a_name_overrides_the_choice_and_none_turns_it_off(
    model: Path, given: dict[str, str], expected: dict[str, str]
) -> None:
    (model / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    (model / "chat_template.jinja").write_text(template(f"{JSON_CALLS}<think>"))
    assert dict(with_parsers(settings(model, **given)).engine_arguments) == expected


def test_the_log_says_what_was_chosen_and_why(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    (model / "chat_template.jinja").write_text(template(JSON_CALLS))
    caplog.set_level("INFO", "engines.vllm.parsers.choice")
    with_parsers(settings(model))
    assert ["option.tool_call_parser" in text and "hermes" in text for text in caplog.messages] == [True]


@pytest.mark.parametrize("task", ["embed", "classify"])
def test_a_model_that_generates_no_text_is_not_looked_at(model: Path, task: str) -> None:
    (model / "chat_template.jinja").write_text(template(JSON_CALLS))
    given = replace(settings(model, tool_call_parser="auto"), task=task)
    assert dict(with_parsers(given).engine_arguments) == {}


@pytest.mark.parametrize(("value", "named"), [("", False), ("auto", False), ("none", True), ("hermes", True)])
def test_a_parser_is_named_by_the_option(model: Path, value: str, named: bool) -> None:
    assert is_named(settings(model, tool_call_parser=value)) is named
    assert not is_named(settings(model))


@pytest.mark.parametrize(
    ("kind", "arguments", "nearest"),
    [
        (TOOLS, {"tool_call_parser": "herms"}, "hermes"),
        (TOOLS, {"tool_call_parser": "llama3-json"}, "llama3_json"),
        (REASONING, {"reasoning_parser": "deepseek-r1"}, "deepseek_r1"),
    ],
)
def test_a_wrong_name_is_told_with_the_nearest_and_all_names(kind: str, arguments: Any, nearest: str) -> None:
    fault, _, allowed = name_fault(kind, arguments).partition("; allowed: ")
    assert nearest in fault
    assert set(allowed.split(", ")) == {"auto", "none", *NAMES[kind]}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"tool_call_parser": ""},
        {"tool_call_parser": "AUTO"},
        {"tool_call_parser": "none"},
        {"tool_call_parser": "granite-20b-fc"},
        {"tool_call_parser": "herms", "tool_parser_plugin": "/mine.py"},
        {"tool_call_parser": "house_style"},
    ],
)
def test_a_known_name_or_one_of_a_plugin_is_right(arguments: dict[str, str]) -> None:
    assert name_fault(TOOLS, arguments) == ""
