"""Chooses a model's tool-call parser and reasoning parser by its architecture and its chat template.

A chat template teaches a model the syntax of its calls. So markers in the template show which parser reads the calls.
vLLM's documentation names the parsers of most families. This module does not import vLLM, so that `slipway config` can
show the choice without vLLM.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engines.memory.weight_files import hub_file
from engines.settings.engine_config import EngineConfig
from engines.settings.parsers import FALSE

logger = logging.getLogger(__name__)

TOOLS, REASONING = "tool_call_parser", "reasoning_parser"
AUTO, NONE = "auto", "none"
_DEFAULTS = {TOOLS: AUTO, REASONING: NONE}
_FIELDS = {TOOLS: "tools", REASONING: "reasoning"}
_PLUGINS = {TOOLS: "tool_parser_plugin", REASONING: "reasoning_parser_plugin"}
_SWITCH = "enable_auto_tool_choice"
GENERATION = ("auto", "generate")  # The tasks of models that may generate text.
_READS_TOOLS = re.compile(r"\{%[^%]*(?<!['\"])\btools\b")
_TOOL_PARSERS = """
apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 deepseek_v41 dots ernie45
functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling
internlm jamba k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5
minimax_m2 minimax_m3 mistral muse_glimmer olmo3 openai phi4_mini_json plamo3 poolside_v1 pythonic qwen3_coder
qwen3_json qwen3_xml seed_oss step3 step3p5 xlam
"""
_REASONING_PARSERS = """
cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 gemma4 glm45 glm47 granite
granite_thinking_parser hf holo2 hunyuan_a13b hy_v3 hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv
minimax_m2 minimax_m2_append_think minimax_m3 mistral muse_glimmer nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1
qwen3 seed_oss step3 step3p5
"""
# The parsers in vLLM's registries.
NAMES: Mapping[str, tuple[str, ...]] = {
    TOOLS: tuple(_TOOL_PARSERS.split()),
    REASONING: tuple(_REASONING_PARSERS.split()),
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models, which have the same syntax for calls and the same syntax for reasoning."""

    name: str
    tools: str = ""  # The tool-call parser. "": vLLM has none.
    reasoning: str = ""  # The reasoning parser. "": no parser exists, or the markers do not tell which parser is right.
    markers: tuple[str, ...] = ()  # A template of the family has all of these texts.
    architectures: tuple[str, ...] = ()  # The model has one of these architectures in config.json. Empty: any.
    thinks: str = "<think>"  # If a template has this text, the model reasons.


_JSON, _XML, _KEYS = ("<tool_call>", '"arguments"'), ("<tool_call>", "<function=", "<parameter="), ("<arg_key>",)
_GRANITE = ("GraniteForCausalLM", "GraniteMoeForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM")
_QWEN3 = (
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration"),
    *("Qwen3VLMoeForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
)
_QWEN35 = (
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "Qwen3_5MoeForConditionalGeneration",
)
_COMMAND_THINKS = "<|START_THINKING|>"
_LFM2 = ("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Lfm2VlForConditionalGeneration")
_DEEPSEEK = ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>")
# For a family without markers, vLLM itself writes the prompts, and ignores the template.
FAMILIES: tuple[Family, ...] = (
    Family("Hermes", "hermes", "", _JSON),
    Family("Qwen 2.5 and QwQ", "hermes", "deepseek_r1", _JSON, ("Qwen2ForCausalLM",)),
    Family("Qwen 3", "hermes", "qwen3", _JSON, _QWEN3),
    Family("Qwen 3 Coder", "qwen3_xml", "", _XML),
    Family("Qwen 3 Coder and 3.5", "qwen3_xml", "qwen3", _XML, (*_QWEN3, *_QWEN35)),
    Family("Nemotron 3", "qwen3_coder", "nemotron_v3", _XML, ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM")),
    Family("Step 3.5", "step3p5", "step3p5", _XML, ("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")),
    Family("MiMo V2", "mimo", "mimo", _XML, ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM")),
    Family("Step 3", "step3", "step3", ("<steptml:invoke",)),
    Family("GLM 4.5 to 5", "glm45", "glm45", ("[gMASK]", *_KEYS)),
    Family("Laguna", "poolside_v1", "poolside_v1", _KEYS, ("LagunaForCausalLM",)),
    Family("Ling 3", "ling3", "ling3", ("<role>ASSISTANT</role>", *_KEYS)),
    Family("Granite 4", "granite4", "", _JSON, _GRANITE),
    Family("Granite 3", "granite", "", ("<|tool_call|>",), _GRANITE),
    Family("Granite 20B", "granite-20b-fc", "", ("<function_call>",), ("GPTBigCodeForCausalLM",)),
    Family("ERNIE 4.5", "ernie45", "ernie45", _JSON, ("Ernie4_5ForCausalLM", "Ernie4_5_MoeForCausalLM")),
    Family("Llama 3 and 4", "llama3_json", "", ('"parameters": dictionary of argument name and its value',)),
    Family(
        "Llama 4, in Python",
        "llama4_pythonic",
        "",
        ("[func_name1(param",),
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"),
    ),
    Family("Mistral", "mistral", "mistral", ("[TOOL_CALLS]",), thinks="[THINK]"),
    Family("DeepSeek V3 and R1", "deepseek_v3", "deepseek_r1", (*_DEEPSEEK, "```json")),
    Family("DeepSeek V3.1", "deepseek_v31", "deepseek_v3", _DEEPSEEK),
    Family("DeepSeek V3.2", "deepseek_v32", "deepseek_v3", (), ("DeepseekV32ForCausalLM",)),
    Family(
        "DeepSeek V4", "deepseek_v4", "deepseek_v4", (), ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration")
    ),
    Family("DeepSeek V4.1", "deepseek_v41", "deepseek_v41", (), ("DeepseekV41ForCausalLM",)),
    Family("gpt-oss", "openai", "openai_gptoss", (), ("GptOssForCausalLM",)),
    Family("Kimi K2", "kimi_k2", "kimi_k2", ("<|tool_calls_section_begin|>",)),
    Family("Kimi K3", "kimi_k3", "kimi_k3", (), ("KimiK3ForConditionalGeneration",)),
    Family("Inkling", "inkling", "inkling", (), ("InklingForCausalLM", "InklingForConditionalGeneration")),
    Family("MiniMax M2", "minimax_m2", "minimax_m2", ("<minimax:tool_call>",)),
    Family("MiniMax M3", "minimax_m3", "minimax_m3", ("]<]minimax[>[",), thinks="mm:think"),
    Family("Gemma 4", "gemma4", "gemma4", ("<|tool_call>",), thinks="<|channel>"),
    Family("FunctionGemma", "functiongemma", "", ("<start_function_call>",)),
    Family(
        "Command A and R7B",
        "cohere_command3",
        "cohere_command3",
        ("<|START_ACTION|>", "<|START_RESPONSE|>"),
        thinks=_COMMAND_THINKS,
    ),
    Family(
        "Command 4",
        "cohere_command4",
        "cohere_command4",
        ("<|START_ACTION|>", "<|START_TEXT|>"),
        thinks=_COMMAND_THINKS,
    ),
    Family("Seed OSS", "seed_oss", "seed_oss", ("<seed:tool_call>",), thinks="think>"),
    Family("Hunyuan", "hunyuan_a13b", "hunyuan_a13b", ("<tool_calls>[",), ("HunYuanMoEV1ForCausalLM",)),
    Family("Hy3", "hy_v3", "hy_v3", ("<tool_calls{}>",), ("HYV3ForCausalLM",), thinks="<think{}>"),
    Family("Jamba", "jamba", "", ("<tool_calls>",), ("JambaForCausalLM",)),
    Family("Olmo 3", "olmo3", "olmo3", ("<function_calls>",), ("Olmo3ForCausalLM", "OlmoHybridForCausalLM")),
    Family("Phi 4 mini", "phi4_mini_json", "", ("<|tool|>",), ("Phi3ForCausalLM", "Phi4MMForCausalLM")),
    Family("InternLM 2.5", "internlm", "", ("<|action_start|>", "<|plugin|>")),
    Family("LFM 2", "lfm2", "", ("List of tools: ",), _LFM2),
    Family("LongCat", "longcat", "", ("<longcat_tool_call>",)),
    Family("MiniCPM 5", "minicpm5", "", ("<function name=", "<param name=")),
    Family("Apertus", "apertus", "", ("<|tools_prefix|>",)),
    Family("GigaChat 3", "gigachat3", "", ("<|role_sep|>", "<|message_sep|>")),
    Family("PLaMo 3", "plamo3", "plamo3", ("<|plamo:begin_tool_request",), thinks="<|plamo:begin_think"),
    Family("K2 Horizon", "k2_horizon", "k2_horizon", ("<ifm|tool_call",), thinks="<ifm|think"),
    Family("Muse Glimmer", "muse_glimmer", "muse_glimmer", ("<atem:",), thinks="to=self"),
    Family("dots", "dots", "", ("<dots_function_call>",)),
    Family("Apriel 1.5", "", "", (*_JSON, "<tool_calls>")),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The parser of a model, and the reason for the choice."""

    parser: str  # "": no parser.
    reason: str = ""  # "" if an option or its default makes the choice.


def choose(kind: str, template: str | None, architectures: Collection[str]) -> Choice:
    """Choose the parser of a model.

    Args:
        kind: TOOLS or REASONING.
        template: The chat template for chats with tools. None: the model has no template.
        architectures: The architectures in config.json.
    """
    text = (template or "").replace('\\"', '"')  # In a template, quotation marks may be escaped.
    fitting = [family for family in FAMILIES if _fits(family, text, architectures)]
    rendered = [family for family in fitting if not family.markers]
    if kind == TOOLS and template and not rendered and not _READS_TOOLS.search(text):
        return Choice("", "the chat template does not read `tools`")
    found = rendered or _most_specific(fitting)
    if not found:
        return Choice("", "the chat template is that of no known family" if template else "there is no chat template")
    names = " or ".join([family.name for family in found])
    parsers = {getattr(family, _FIELDS[kind]) for family in found}
    if len(parsers) > 1:
        return Choice("", f"the chat template may be that of {names}")
    (family, *_), (parser,) = found, parsers
    if not parser:
        return Choice("", f"vLLM has none that is known to fit {names}")
    if rendered:
        return Choice(parser, f"{names}: by its architecture")
    if kind == REASONING and family.thinks not in text:
        return Choice("", f"the chat template has no {family.thinks}")
    return Choice(parser, f"{names}: the chat template has {' and '.join(family.markers)}")


def _fits(family: Family, template: str, architectures: Collection[str]) -> bool:
    named = not family.architectures or not set(family.architectures).isdisjoint(architectures)
    return named and all(marker in template for marker in family.markers)


def _most_specific(families: Sequence[Family]) -> list[Family]:
    """Drop a family if another family is more specific.

    The more specific family has all markers of the dropped family, and also has further markers or an architecture.
    """

    def marks(family: Family) -> set[str]:
        return {*family.markers, *(["an architecture"] if family.architectures else [])}

    return [one for one in families if not any(marks(one) < marks(other) for other in families)]


def parser_of(kind: str, config: EngineConfig) -> Choice:
    """Return the parser of a model. An option names it, or the model's files decide.

    If the files are not on this machine, they are read from the hub.
    """
    arguments = config.engine_arguments
    given = arguments.get(kind, "").strip() or _DEFAULTS[kind]
    if given.lower() == NONE:
        return Choice("")
    if given.lower() != AUTO:
        return Choice(given)
    if config.task not in GENERATION:
        return Choice("", "the model generates no text")
    if kind == TOOLS and arguments.get(_SWITCH, "").strip().lower() in FALSE:
        return Choice("", f"option.{_SWITCH} is off")
    files = _Files(config.model_id, config.revision)
    tokenizer = arguments.get("tokenizer", "").strip()
    of_tokenizer = _Files(tokenizer, arguments.get("tokenizer_revision")) if tokenizer else files
    if not (files.are_known and of_tokenizer.are_known):
        return Choice("", "the files of the model cannot be looked up")
    template = _given_template(config) or of_tokenizer.template()
    if template is None and kind == TOOLS and of_tokenizer.path("tekken.json") is not None:
        return Choice("mistral", "Mistral: there is a tekken.json and no chat template")
    architectures = files.json("config.json").get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    return choose(kind, template, [name for name in listed if isinstance(name, str)])


def is_named(config: EngineConfig) -> bool:
    """Return True if an option names the tool-call parser."""
    return config.engine_arguments.get(TOOLS, "").strip().lower() not in ("", AUTO)


def with_parsers(config: EngineConfig) -> EngineConfig:
    """Return the settings with the names of the parsers. A tool-call parser also enables automatic tool calls."""
    arguments = dict(config.engine_arguments)
    for kind in NAMES:
        given, choice = arguments.pop(kind, None), parser_of(kind, config)
        if choice.parser:
            arguments[kind] = choice.parser
        if given or (kind == TOOLS and config.task in GENERATION):
            reason = f": {choice.reason}" if choice.reason else ""
            logger.info("option.%s is %s%s", kind, choice.parser or NONE, reason)
    if TOOLS in arguments:
        arguments.setdefault(_SWITCH, "true")
    return replace(config, engine_arguments=arguments)


def name_fault(kind: str, arguments: Mapping[str, str]) -> str:
    """Return an error for the name of a parser in engine arguments; "" if the name may be right.

    Packages may add names when vLLM starts. So an unknown name is an error only if it resembles one of vLLM's names.
    """
    name = arguments.get(kind, "").strip()
    if not name or name.lower() in (AUTO, NONE) or name in NAMES[kind] or arguments.get(_PLUGINS[kind]):
        return ""
    nearest = difflib.get_close_matches(name.lower(), NAMES[kind], 1)
    if not nearest:
        return ""
    return f"vLLM has no such parser ({nearest[0]} is the nearest name); allowed: {allowed_names(kind)}"


def allowed_names(kind: str) -> str:
    """Return the values of an option that names a parser."""
    return ", ".join((AUTO, NONE, *NAMES[kind]))


def _given_template(config: EngineConfig) -> str:
    """Return the template that `option.chat_template` gives; "" if the option is not set."""
    given = config.engine_arguments.get("chat_template", "")
    path = os.path.join(config.model_dir, given.strip())
    return (_text(Path(path)) or "") if given and os.path.isfile(path) else given


class _Files:
    """The small files of a model, on this machine or on the hub."""

    def __init__(self, model: str, revision: str | None) -> None:
        self._model, self._revision = model, revision

    @property
    def are_known(self) -> bool:
        """Whether the files can be read. Check this first: if the hub does not answer, each request times out."""
        return os.path.isdir(self._model) or self.path("config.json") is not None

    def path(self, name: str) -> Path | None:
        """Return the path of a file; None if the model does not have it."""
        if not os.path.isdir(self._model):
            return hub_file(self._model, name, self._revision)
        path = Path(self._model, name)
        return path if path.is_file() else None

    def text(self, name: str) -> str | None:
        path = self.path(name)
        return None if path is None else _text(path)

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; {} if the file has none. vLLM then reports the error."""
        try:
            content = json.loads(self.text(name) or "{}")
        except (ValueError, RecursionError):
            return {}
        return content if isinstance(content, dict) else {}

    def template(self) -> str | None:
        """Return the template for chats with tools, from the places where transformers looks; None if there is none."""
        if (template := self.text("chat_template.jinja")) is not None:
            return self.text("additional_chat_templates/tool_use.jinja") or template
        for name in ("tokenizer_config.json", "chat_template.json"):
            found = self.json(name).get("chat_template")
            if isinstance(found, list):
                named = {str(one.get("name")): one.get("template") for one in found if isinstance(one, dict)}
                found = named.get("tool_use") or named.get("default")
            if isinstance(found, str) and found:
                return found
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None  # vLLM reports the error.
