"""Adapts vLLM's tool-call parsers and reasoning parsers to the grammars of a model.

If a request forces a tool call, one of two grammars enforces it. The first is the model's own syntax, through vLLM's
structural tags, which only xgrammar supports. The second is the JSON schema of the calls, which every back end
supports. The parser must read the syntax that the grammar produces. vLLM chooses the grammar once in a process, when
the class of a parser is created. This module chooses the grammar for each model, so that the choice does not depend on
the order of imports or on other models.

With a reasoning parser, vLLM constrains an answer after the end of its reasoning. A parser that cannot find the end
(`granite`) would leave all answers unconstrained. So with such a parser, answers are constrained from the start, and
have no reasoning.

The module relies on these private names of vLLM, which are in the table of `engines.vllm.internals`:
- `ToolParser.__init_subclass__` only sets `supports_required_and_named` to False.
- `ParserManager.get_parser` returns the class of the parser, a `DelegatingParser`, to every serving object. The
  parser's `_stream_state` has a flag for the end of reasoning.
- A reasoning parser that cannot find the end of reasoning inherits `ReasoningParser.is_reasoning_end`.
- The JSON schema of required calls has the schema of each tool in `items.anyOf`.
- `Hermes2ProToolParser` reads a streamed call with the three methods that `_Hermes` replaces. In a complete answer, it
  finds the calls with `tool_call_regex`.
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
    """Enforces the schema of a forced tool call.

    If no grammar for the call fits both the parser and the back end, the request is refused. vLLM would let the model
    decide whether it calls the tool.
    """

    tool_strict_level: ToolStrictLevel | None  # In vLLM 0.33, None means the level of the model's parser.
    extract_reasoning: Callable[[str, Any], tuple[str | None, str | None]]

    def adjust_request(self, request: Any) -> Any:
        """Add the grammar to a request.

        Raises:
            VLLMValidationError: No grammar exists for a forced call.
        """
        if _forces(request):
            self.tool_strict_level = ToolStrictLevel.PARAMETER  # Only this request uses the parser.
        adjusted = super().adjust_request(request)  # type: ignore[misc]
        if _forces(request) and adjusted.extract_structured_outputs() is None:
            raise VLLMValidationError(_NOT_ENFORCED, parameter="tool_choice")
        return adjusted

    def parse(self, model_output: str, request: Any, *rest: Any, **options: Any) -> Any:
        """Split a complete answer into reasoning, text and calls. A call that `max_tokens` cuts off becomes text."""
        reasoning, content, calls = super().parse(model_output, request, *rest, **options)  # type: ignore[misc]
        if content is None and not calls and _forces(request):
            content = self.extract_reasoning(model_output, request)[1]
        return reasoning, content, calls

    def parse_delta(self, *arguments: Any, **options: Any) -> Any:
        """Parse a part of a streamed answer. The null fields of a call are omitted, as with other back ends."""
        delta = super().parse_delta(*arguments, **options)  # type: ignore[misc]
        for call in delta.tool_calls if delta is not None else ():
            for part in (call, call.function):
                if part is not None:
                    part.model_fields_set.difference_update(
                        [name for name in part.model_fields_set if getattr(part, name) is None]
                    )
        return delta


class _WithoutReasoning:
    """For reasoning parsers that cannot find the end of reasoning. If a call is forced, the answer is only the call."""

    _stream_state: Any

    def extract_reasoning(self, model_output: str, request: Any) -> Any:
        """Split a complete answer into reasoning and the rest."""
        if _forces(request):
            return None, model_output
        return super().extract_reasoning(model_output, request)  # type: ignore[misc]

    def parse_delta(self, delta_text: str, delta_token_ids: list[int], request: Any, *rest: Any, **options: Any) -> Any:
        """Parse a part of a streamed answer."""
        if _forces(request):
            self._stream_state.prompt_reasoning_checked = self._stream_state.reasoning_ended = True
        return super().parse_delta(delta_text, delta_token_ids, request, *rest, **options)  # type: ignore[misc]


class _Hermes:
    """Reads the JSON of a call in the same way in a stream and in a complete answer.

    vLLM itself would take the name from the first `"name"` in the text. It would take the arguments from all text after
    the first `"arguments"`. It would end a call at the end marker even within a string. Clients would then get
    arguments that are not JSON.
    """

    tool_call_start_token: str
    tool_call_end_token: str

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        begin, end = self.tool_call_start_token, self.tool_call_end_token
        call = rf"{begin}((?:{_STRING}|[^\"])*?){end}|{begin}(.*)"
        self.tool_call_regex = regex.compile(call, regex.DOTALL)

    def _extract_tool_call_jsons(self, text: str) -> list[tuple[str, bool]]:
        """Return the JSON of each call as received so far, and whether its end marker was received."""
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
    """Return the JSON of an object's member as received so far, and whether this JSON is complete."""
    end = 0
    while found := _MEMBER.match(call, end):
        value = _VALUE.match(call, found.end())
        end = value.end() if value is not None else len(call)
        # Only a comma or a closing brace shows that a number has ended.
        whole = call[end:].lstrip()[:1] in (",", "}")
        if found["name"] == name:
            return call[found.end() : end if whole else None], whole
    return "", False


def _forces(request: Any) -> bool:
    return bool(request.tools) and request.tool_choice not in (None, "auto", "none")


def _fitting(parser: type[ToolParser], backend: str) -> type[ToolParser]:
    """Return a parser class that reads the output of the back end's grammar."""
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser  # The import must come after `patch_parsers`.

    if parser.structural_tag_model is None:
        return parser
    bases = (_Hermes, parser) if issubclass(parser, Hermes2ProToolParser) else (parser,)
    if backend == "xgrammar" and envs.VLLM_ENFORCE_STRICT_TOOL_CALLING:
        return type(parser.__name__, bases, {"supports_required_and_named": False})
    return type(parser.__name__, bases, {"structural_tag_model": None})


def _tells_end(parser: type[ReasoningParser]) -> bool:
    return parser.is_reasoning_end is not ReasoningParser.is_reasoning_end


def tells_end_of_reasoning(config: VllmConfig) -> bool:
    """Return True if the model has a reasoning parser that can find the end of reasoning."""
    name = config.structured_outputs_config.reasoning_parser
    return bool(name) and _tells_end(ReasoningParserManager.get_reasoning_parser(name))


def constrained_text(config: VllmConfig, tokenizer: Any, state: Any, options: Mapping[str, Any]) -> str | None:
    """Return the part of a finished answer to which its constraint applies.

    Args:
        config: vLLM's configuration.
        tokenizer: The model's tokenizer.
        state: vLLM's state of the sequence.
        options: The request's `reasoning_ended` (whether the prompt ends the reasoning) and `reasoning_parser_kwargs`.

    Returns:
        The text. None if the reasoning parser cannot split the answer.
    """
    outputs_config = config.structured_outputs_config
    ended = options.get("reasoning_ended")
    try:  # The parser may be a plugin, which may raise any error.
        whole = str(state.detokenizer.output_text)
        if ended or outputs_config.enable_in_reasoning:
            return whole
        find = ReasoningParserManager.get_reasoning_parser(outputs_config.reasoning_parser)
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
    """Choose parsers that fit the back end, for all serving objects that are created in the `with` block."""
    token = _backend.set(backend)
    try:
        yield
    finally:
        _backend.reset(token)


def import_plugin(path: str) -> None:
    """Import a file that registers tool-call parsers.

    Raises:
        Exception: The file raises it.
    """
    ToolParserManager.import_tool_parser(path)


def _choosing(find: Callable[..., type[Parser] | None]) -> Callable[..., type[Parser] | None]:
    """Return a wrapper of vLLM's `get_parser` that chooses the parser class for each model."""

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
    """Return the schema of all calls, in which the references of each tool's schema still resolve.

    Args:
        schema: vLLM's schema of all calls. If a tool's schema has references, the tool's schema is moved to
            `$defs`.
    """
    definitions: dict[str, Any] = {}
    for index, call in enumerate(schema["items"]["anyOf"]):
        members, place = call["properties"], f"#/$defs/{index}"
        moved = _moved(members["parameters"], place)
        if moved != members["parameters"]:
            definitions[str(index)], members["parameters"] = moved, {"$ref": place}
    return schema | {"$defs": definitions} if definitions else schema


def _moved(part: Any, place: str, *, is_map: bool = False) -> Any:
    """Return a part of a schema, rewritten for its move into a larger schema. References get the prefix `place`.

    Args:
        part: The part.
        place: The JSON pointer to the moved schema in the larger schema, as a URI fragment.
        is_map: Whether the keys of the part are names, not keywords.
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
