"""vLLM's parsers of tool calls and reasoning, as the model's grammars need them.

A tool that is named or required is called by one of two grammars: that of the model's own syntax, by vLLM's structural
tags, which xgrammar alone enforces; or the JSON schema of the calls, which every back end can. A parser has to read the
syntax that the grammar makes. vLLM chooses once for a process, when the class of a parser is made; here it is chosen
for each model, so that it depends neither on the order of imports nor on other models.

With a parser of reasoning, vLLM constrains an answer from the end of its reasoning. A parser that cannot tell the end
(`granite`) would leave all answers unconstrained: they are constrained from the start, and have no reasoning.

`engines.vllm.internals` has the names of vLLM on which it relies. They mean:
- `ToolParser.__init_subclass__` does nothing but set `supports_required_and_named` to False;
- `ParserManager.get_parser` is where every serving object gets the class of its parser, a `DelegatingParser`, whose
  `_stream_state` says whether reasoning has ended;
- a parser of reasoning that cannot tell its end has `ReasoningParser.is_reasoning_end`, which tells nothing;
- the JSON schema of required calls has the schema of each tool in `items.anyOf`;
- `Hermes2ProToolParser` reads a streamed call by the three methods that `_Hermes` replaces, and finds the calls of a
  whole answer by `tool_call_regex`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import regex
import vllm.envs as envs
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tool_parsers import ToolParser, ToolParserManager
from vllm.tool_parsers.tool_strict_level import ToolStrictLevel
from vllm.tool_parsers.utils import partial_tag_overlap

from engines.vllm.constraints.schema_references import DATA
from engines.vllm.patches.parsers import patch_call_schemas, patch_parsers

logger = logging.getLogger(__name__)

_NOT_ENFORCED = (
    "`tool_choice` cannot be enforced with this model's option.tool_call_parser and back end of grammars; expected "
    'auto or none; option.structured_outputs_config={"backend": "xgrammar"} has grammars for more parsers'
)
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_backend: ContextVar[str] = ContextVar("_backend", default="")
_STRING = r'"(?:[^"\\]++|\\.)*+"'
_MEMBER = regex.compile(rf'\s*+[{{,]\s*+(?="(?P<name>[^"]*+)"){_STRING}\s*+:\s*+', regex.DOTALL)
_VALUE = regex.compile(
    rf'(?P<value>{_STRING}|[\[{{](?:[^\[\]{{}}"]++|{_STRING}|(?&value))*+[\]}}]|[^\[\]{{}}",\s]++)', regex.DOTALL
)


class _Enforcing:
    """Makes the call of a forced tool follow the tool's schema, or refuses the request if neither the parser nor the
    back end has a grammar of the call. vLLM would leave both to the model.
    """

    tool_strict_level: ToolStrictLevel | None  # vLLM 0.33 has None for the level of the model's parser.
    extract_reasoning: Callable[[str, Any], tuple[str | None, str | None]]

    def adjust_request(self, request: Any) -> Any:
        """Give a request its grammar.

        Raises:
            VLLMValidationError: There is none.
        """
        if _forces(request):
            self.tool_strict_level = ToolStrictLevel.PARAMETER  # this parser is the request's own
        adjusted = super().adjust_request(request)  # type: ignore[misc]
        if _forces(request) and adjusted.extract_structured_outputs() is None:
            raise VLLMValidationError(_NOT_ENFORCED, parameter="tool_choice")
        return adjusted

    def parse(self, model_output: str, request: Any, *rest: Any, **options: Any) -> Any:
        """Part a whole answer into reasoning, text and calls; a call that `max_tokens` has cut off is text."""
        reasoning, content, calls = super().parse(model_output, request, *rest, **options)  # type: ignore[misc]
        if content is None and not calls and _forces(request):
            content = self.extract_reasoning(model_output, request)[1]
        return reasoning, content, calls

    def parse_delta(self, *arguments: Any, **options: Any) -> Any:
        """Parse a part of a streamed answer. A call's null fields are left out, as they are for other back ends."""
        delta = super().parse_delta(*arguments, **options)  # type: ignore[misc]
        for call in delta.tool_calls if delta is not None else ():
            for part in (call, call.function):
                if part is not None:
                    part.model_fields_set.difference_update(
                        [name for name in part.model_fields_set if getattr(part, name) is None]
                    )
        return delta


class _WithoutReasoning:
    """For a parser of reasoning that cannot tell its end: an answer that has to call a tool is the call alone."""

    _stream_state: Any

    def extract_reasoning(self, model_output: str, request: Any) -> Any:
        """Part a whole answer into reasoning and the rest."""
        if _forces(request):
            return None, model_output
        return super().extract_reasoning(model_output, request)  # type: ignore[misc]

    def parse_delta(self, delta_text: str, delta_token_ids: list[int], request: Any, *rest: Any, **options: Any) -> Any:
        """Parse a part of a streamed answer."""
        if _forces(request):
            self._stream_state.prompt_reasoning_checked = self._stream_state.reasoning_ended = True
        return super().parse_delta(delta_text, delta_token_ids, request, *rest, **options)  # type: ignore[misc]


class _Hermes:
    """Reads the JSON of a streamed call as a whole answer is read.

    vLLM takes the first `"name"` and all text after the first `"arguments"`. It ends a call at the mark of its end,
    also within a string. Its clients then get arguments that are no JSON.
    """

    tool_call_start_token: str
    tool_call_end_token: str

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        begin, end = self.tool_call_start_token, self.tool_call_end_token
        call = rf"{begin}((?:{_STRING}|[^\"])*?){end}|{begin}(.*)"
        self.tool_call_regex = regex.compile(call, regex.DOTALL)

    def _extract_tool_call_jsons(self, text: str) -> list[tuple[str, bool]]:
        """Return the JSON of each call, as far as it has come, and whether the mark of its end has come."""
        calls: list[tuple[str, bool]] = []
        for whole, begun in self.tool_call_regex.findall(text):
            rest = len(begun) - partial_tag_overlap(begun, self.tool_call_end_token)
            calls.append(((whole or begun[:rest]).strip(), bool(whole)))
        return calls

    @staticmethod
    def _extract_tool_name(call: str) -> str | None:
        value, whole = _member(call, "name")
        return str(json.loads(value)) if whole else None

    @staticmethod
    def _extract_tool_args(call: str, _: bool) -> str | None:
        return _member(call, "arguments")[0] or None


def _member(call: str, name: str) -> tuple[str, bool]:
    """Return the JSON of an object's member, as far as it has come, and whether it is whole."""
    end = 0
    while found := _MEMBER.match(call, end):
        value = _VALUE.match(call, found.end())
        end = value.end() if value is not None else len(call)
        whole = call[end:].lstrip()[:1] in (",", "}")  # nothing more of a number can come
        if found["name"] == name:
            return call[found.end() : end if whole else None], whole
    return "", False


def _forces(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice not in (None, "auto", "none")


def _fitting(parser: type[ToolParser], backend: str) -> type[ToolParser]:
    """Return the class of a parser that reads the output of a back end's grammar."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser  # made after `patch_parsers`

    if parser.structural_tag_model is None:
        return parser
    bases = (_Hermes, parser) if issubclass(parser, Hermes2ProToolParser) else (parser,)
    if backend == "xgrammar" and envs.VLLM_ENFORCE_STRICT_TOOL_CALLING:
        return type(parser.__name__, bases, {"supports_required_and_named": False})
    return type(parser.__name__, bases, {"structural_tag_model": None})


def _tells_end(parser: type[ReasoningParser]) -> bool:
    return parser.is_reasoning_end is not ReasoningParser.is_reasoning_end


def tells_end_of_reasoning(config: VllmConfig) -> bool:
    """Return True if a model has a parser of reasoning that knows where reasoning ends."""
    name = config.structured_outputs_config.reasoning_parser
    return bool(name) and _tells_end(ReasoningParserManager.get_reasoning_parser(name))


def constrained_text(config: VllmConfig, tokenizer: Any, state: Any, options: Mapping[str, Any]) -> str | None:
    """Return the text of a finished answer that its constraint holds for.

    Args:
        config: vLLM's.
        tokenizer: The model's.
        state: The state of its sequence in vLLM.
        options: Of its request. They say whether the prompt has ended the reasoning, and have options of the parser.

    Returns:
        The text. None if the parser of reasoning cannot split the answer.
    """
    settings = config.structured_outputs_config
    ended = options.get("reasoning_ended")
    try:  # A plugin may be the parser.
        whole = str(state.detokenizer.output_text)
        if ended or settings.enable_in_reasoning:
            return whole
        find = ReasoningParserManager.get_reasoning_parser(settings.reasoning_parser)
        parser = find(tokenizer, **(options.get("reasoning_parser_kwargs") or {}))
        if ended is None and parser.is_reasoning_end(list(state.prompt_token_ids or ())):
            return whole
        content = parser.extract_content_ids(list(state.detokenizer.output_token_ids))
        return str(tokenizer.decode(content, skip_special_tokens=True))
    except Exception:
        logger.exception("request %s: the end of its reasoning is not found", state.external_req_id)
        return None


@contextmanager
def parsers_for(backend: str) -> Iterator[None]:
    """Give parsers that fit a back end to the serving objects that are made in the block."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def import_plugin(path: str) -> None:
    """Import a file that registers parsers of tool calls.

    Raises:
        Exception: The file does.
    """
    ToolParserManager.import_tool_parser(path)


def _choosing(find: Callable[..., type[Parser] | None]) -> Callable[..., type[Parser] | None]:
    """Return vLLM's `get_parser` with the choice for the model that gets the parser."""

    def get_parser(*arguments: Any, **options: Any) -> type[Parser] | None:
        parser = find(*arguments, **options)
        backend = _backend.get()
        if parser is None or not backend:
            return parser
        reasoning, tools = parser.reasoning_parser_cls, parser.tool_parser_cls
        bases: tuple[type, ...] = (parser,)
        if reasoning is not None and not _tells_end(reasoning):
            bases = (_WithoutReasoning, *bases)
        if tools is None:
            return type(parser.__name__, bases, {})
        return type(parser.__name__, (_Enforcing, *bases), {"tool_parser_cls": _fitting(tools, backend)})

    return get_parser


def _with_references(schema: dict[str, Any]) -> dict[str, Any]:
    """Let the references of a tool's schema to itself hold in the schema of the calls of all tools.

    Args:
        schema: As vLLM has made it. A tool that has references becomes one of its `$defs`.
    """
    definitions: dict[str, Any] = {}
    for index, call in enumerate(schema["items"]["anyOf"]):
        members, place = call["properties"], f"#/$defs/{index}"
        moved = _moved(members["parameters"], place)
        if moved != members["parameters"]:
            definitions[str(index)], members["parameters"] = moved, {"$ref": place}
    return schema | {"$defs": definitions} if definitions else schema


def _moved(part: Any, place: str, *, is_map: bool = False) -> Any:
    """Return a part of a schema, changed for the place that the schema has in another schema.

    Args:
        is_map: Its keys are names and no keywords.
    """
    if isinstance(part, list):
        return [_moved(each, place) for each in part]
    if not isinstance(part, dict):
        return part
    moved = {}
    for key, value in part.items():
        if not is_map and key in _REFERENCES and isinstance(value, str) and value[:2] in ("#", "#/"):
            moved[key] = place + value[1:]
        elif not is_map and key in DATA:
            moved[key] = value
        else:
            moved[key] = _moved(value, place, is_map=not is_map and key in _MAPS_OF_SCHEMAS)
    return moved


patch_parsers(_choosing)
patch_call_schemas(_with_references)
