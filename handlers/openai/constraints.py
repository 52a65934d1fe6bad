"""Translates the constraints in bodies of OpenAI's routes to the forms that vLLM enforces.

vLLM silently ignores constraints in fields that it does not know, and in some fields that other fields override. This
module translates each such field to `structured_outputs`, or refuses it by name.

Source: vLLM, `vllm/entrypoints/openai` and `vllm/entrypoints/anthropic`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engines.errors import SHOWN, InvalidParameter
from engines.request import Constraint, SchemaPart
from handlers.parsing.constraints import (
    CONSTRAINING,
    FORMS,
    OLDER,
    agreed,
    asks,
    constraint_of,
    decoded,
    refuse_unread,
    strict_of,
    strictest,
)

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
BATCH, COUNT_TOKENS = "/v1/chat/completions/batch", "/v1/messages/count_tokens"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RENDER = "/rendered_chat"  # A path of the front end that clients cannot reach. It returns the prompt of a chat.

_SAMPLING = frozenset({"stop", "stop_token_ids", "bad_words", "logit_bias", "allowed_token_ids", "min_tokens"})
# The names in `CONSTRAINING` that have an effect on each path. vLLM enforces some of them, and Slipway translates the
# others for vLLM.
_READ = {
    CHAT: _SAMPLING | {"tool_choice", *FORMS},
    BATCH: _SAMPLING | {"tool_choice", *FORMS},
    COMPLETIONS: _SAMPLING | {*FORMS},
    RESPONSES: frozenset({"stop", "logit_bias", "tool_choice", *FORMS}),
    MESSAGES: frozenset({"stop_sequences", "tool_choice"}),
}
_ALSO = {CHAT: "", BATCH: "", COMPLETIONS: "", RESPONSES: ", text.format", MESSAGES: ", output_config.format"}
# Some clients and the APIs of other servers nest fields in these objects. vLLM does not read these objects.
_NESTS = ("extra_body", "parameters")
# The fields that `enforceable` reads.
FIELDS = CONSTRAINING | {"tools", "use_beam_search", "ignore_eos", "text", "output_config", "output_format", *_NESTS}
_NATIVE = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# OpenAI's forms, which apply to a message's text. A tool call has the form of the tool's arguments instead.
_TEXT_FORMAT = "text.format"
_OF_MESSAGES = ("response_format", _TEXT_FORMAT)
_TYPED = ("grammar", "output_config.format")  # Objects with a `type`. The APIs define no `strict` for these objects.
_TOOL_CHOICE = "tool_choice"
_OPTIONS = ("disable_any_whitespace", "disable_additional_properties")


def enforceable(body: Mapping[str, Any], path: str, *, parses_tools: bool = True) -> tuple[dict[str, Any], Form]:
    """Translate a body, so that vLLM enforces all constraints in it.

    Args:
        body: The body. Only its `FIELDS` are needed.
        parses_tools: True if the model has a tool-call parser.

    Returns:
        The fields to replace, and the form of the text. A field is removed if its new value is None.

    Raises:
        InvalidParameter: A field is wrong, or vLLM would ignore it. The error names the field.
    """
    if path in (TOKENIZE, RENDER):
        changes = _allowed_tools(body)
        return changes | _named_tool({**body, **changes}.get("tool_choice")), Form()
    if path not in _READ:
        return {}, Form()
    for nest in _NESTS:
        if isinstance(within := body.get(nest), dict):
            refuse_unread(within, within, f"has no effect in `{nest}`: put it into the body itself")
    read = _READ[path]
    refuse_unread(
        body, body.keys() - read, f"is not read on this route; expected {', '.join(sorted(read))}{_ALSO[path]}"
    )
    if body.get("use_beam_search"):
        refuse_unread(body, body, "cannot be used together with `use_beam_search`")
    changes = _allowed_tools(body) if path in (CHAT, BATCH, RESPONSES) else {}
    tools = tuple(_tools(body, path))  # Indices count all tools of the body, even if not all are allowed.
    body = {**body, **changes}
    _check_tool_choice(body, path, parses_tools)
    if path == MESSAGES:
        _check_output_config(body)
    if path in (CHAT, BATCH):
        changes |= _named_tool(body.get("tool_choice"))
    if _forced(body):
        named = _chosen_tool(body["tool_choice"])
        form = Form(
            _TOOL_CHOICE, None, tuple([tool for tool in tools if named in (None, tool.name)]), named is not None
        )
        return {} if path == MESSAGES else changes | _without_formats(body), form
    given = _forms(body, path)
    form = _form_named(body, given)
    if path == MESSAGES:
        return {}, form
    if len(given) > 1:
        kept = _agreed(body, given)
        changes |= dict.fromkeys([name for name in given if name != kept])
        given = [kept]
    for name in ("min_tokens", "ignore_eos") if given else ():
        if body.get(name):  # the engine would refuse it too, but only after a stream has begun
            raise InvalidParameter(given[0], f"cannot be used together with `{name}`")
    if not given or given[0] not in FORMS:
        return changes, form
    (name,) = given
    if name == "structured_outputs":
        _check_outputs(body[name])
        return changes, form
    if name == "response_format" and path != RESPONSES and _is_vllms(body[name]):
        return changes, form
    changes[name] = None
    if (constraint := constraint_of(name, body[name])) is not None:
        changes["structured_outputs"] = _spelled(constraint)
    return changes, form


class Tool(NamedTuple):
    """A tool in a body."""

    name: str  # The tool's name in vLLM's schema of tool calls.
    place: str  # The path of the schema of the tool's arguments in the body.
    strict: bool


class Form(NamedTuple):
    """The form that a body demands for the answer's text. `name` is the path of the field that demands the form."""

    name: str = "structured_outputs"
    strict: bool | None = None  # See `SchemaPart.strict`.
    tools: tuple[Tool, ...] = ()  # The model has to call one of these tools.
    is_named: bool = False  # Whether the client has named the tool.

    def parts(self, schema: Any) -> list[SchemaPart]:
        """Return the parts of the answer's JSON schema that the client wrote.

        Args:
            schema: The schema that vLLM has made from the body.
        """
        if self.name != _TOOL_CHOICE:
            return [SchemaPart(strict=self.strict)]
        if self.is_named:  # vLLM uses the last tool of this name.
            return [SchemaPart("#", f"{tool.place}#", tool.strict) for tool in self.tools[-1:]]
        parts: list[SchemaPart] = []
        tools: dict[str, list[Tool]] = {}
        for tool in reversed(self.tools):
            tools.setdefault(tool.name, []).append(tool)
        for i, name in enumerate(_called(schema)):
            if not tools.get(name):
                continue
            tool = tools[name].pop()  # Tools with the same name are in the order of the body.
            parts.append(SchemaPart(f"#/items/anyOf/{i}/properties/parameters", f"{tool.place}#", tool.strict))
            # If a tool's schema refers to itself, that schema is in `$defs` (`engines.vllm.parsers.classes`).
            if str(i) in schema.get("$defs", {}):
                parts.append(SchemaPart(f"#/$defs/{i}", f"{tool.place}#", tool.strict))
        return parts


def _form_named(body: Mapping[str, Any], names: Sequence[str]) -> Form:
    """Return the form that these fields of a body demand. `names` are the paths of the fields."""
    if not names:
        return Form()
    strict: list[bool | None] = []
    for name in names:
        field, _, member = name.partition(".")
        form = body[field][member] if member else body[field]
        if name in _OF_MESSAGES:
            strict.append(strict_of(form))
        else:
            strict.append(strict_of(form) or None if name in _TYPED else None)
    return Form(names[0], strictest(strict))


def _chosen_tool(choice: Any) -> str | None:
    """Return the name of the tool that the model has to call. None if the model may call any tool."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind in ("required", "any"):
        return None
    return choice if isinstance(choice, str) else _tool_name(choice) or ""


def _called(schema: Any) -> list[str]:
    """Return the names of the tools in vLLM's schema of tool calls, in order.

    The list is empty if `schema` is not such a schema.
    """
    try:
        return [call["properties"]["name"]["enum"][0] for call in schema["items"]["anyOf"]]
    except (KeyError, IndexError, TypeError):
        return []


def _tools(body: Mapping[str, Any], path: str) -> Iterator[Tool]:
    """Yield the tools of a body."""
    for i, tool in enumerate(_items(body.get("tools"))):
        if not isinstance(tool, dict):
            continue
        if tool.get("type") == "namespace" and path == RESPONSES:
            for j, each in enumerate(_items(tool.get("tools"))):
                if isinstance(each, dict):
                    name = f"{tool.get('name')}__{each.get('name')}"
                    yield Tool(name, f"tools[{i}].tools[{j}].parameters", _is_strict(each))
        elif path == RESPONSES:
            yield Tool(str(tool.get("name")), f"tools[{i}].parameters", _is_strict(tool))
        elif path == MESSAGES:
            yield Tool(str(tool.get("name")), f"tools[{i}].input_schema", _is_strict(tool))
        elif isinstance(function := tool.get("function"), dict):
            yield Tool(str(function.get("name")), f"tools[{i}].function.parameters", _is_strict(function))


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool.get("strict") not in (None, False)


def _forms(body: Mapping[str, Any], path: str) -> list[str]:
    """Return the names of the forms that a body asks for.

    Raises:
        InvalidParameter: A form is invalid on this route.
    """
    given = [name for name in FORMS if asks(name, body.get(name))]
    form = _member(body, "text", "format") if path == RESPONSES else None
    if isinstance(form, dict) and form.get("type") != "text":  # vLLM refuses a value that is not an object
        if form.get("type") == "json_schema" and not isinstance(form.get("schema"), dict):
            raise InvalidParameter("text.format.schema", "must be a JSON schema: an object")
        given.append(_TEXT_FORMAT)
    if path == MESSAGES and _member(body, "output_config", "format") is not None:
        given.append("output_config.format")
    return given


def _agreed(body: Mapping[str, Any], given: Sequence[str]) -> str:
    """Choose one name for a form that the body has under several names. vLLM gets the form under this name.

    Raises:
        InvalidParameter: The forms differ.
    """
    if given[0] == "structured_outputs":
        given = [given[0], *[name for name in given[1:] if name not in OLDER]]
    if len(given) > 1:
        agreed([(name, _meaning(body, name)) for name in given])
    return _TEXT_FORMAT if _TEXT_FORMAT in given else given[0]


def _meaning(body: Mapping[str, Any], name: str) -> Constraint:
    form = body["text"]["format"] if name == _TEXT_FORMAT else body[name]
    if isinstance(form, dict) and "structural_tag" in (form.get("type"), *form):
        raise InvalidParameter(name, "cannot be combined with another form if it has structural tags")
    meant = constraint_of("response_format" if name == _TEXT_FORMAT else name, form)
    assert meant is not None, "it asks for something"
    return meant


def uses_tools(body: Mapping[str, Any]) -> bool:
    """Return True if the model may call one of the body's tools."""
    return bool(body.get("tools")) and _kind_of_choice(body) != "none"


def _forced(body: Mapping[str, Any]) -> bool:
    return _kind_of_choice(body) not in (None, "", "auto", "none")


def _kind_of_choice(body: Mapping[str, Any]) -> Any:
    choice = body.get("tool_choice")
    return choice.get("type", "function") if isinstance(choice, dict) else choice


def _named_tool(choice: Any) -> dict[str, Any]:
    """Return `tool_choice` in OpenAI's form if the choice is only a tool's name. TGI's clients send only the name."""
    if not isinstance(choice, str) or choice in ("", "auto", "none", "required"):
        return {}
    return {"tool_choice": {"type": "function", "function": {"name": choice}}}


def _allowed_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields to replace if only some of the tools are allowed. The model then gets only the allowed tools.

    Raises:
        InvalidParameter: The choice is invalid.
    """
    choice = body.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return {}
    within = choice.get("allowed_tools")  # The choice of a chat is in this member.
    choice = within if isinstance(within, dict) else choice
    if (mode := choice.get("mode")) not in ("auto", "required"):
        raise InvalidParameter("tool_choice.mode", "must be one of auto, required")
    names, tools = [[_tool_name(tool) for tool in _items(owner.get("tools"))] for owner in (choice, body)]
    if not names or None in names or not set(names) <= set(tools):
        raise InvalidParameter("tool_choice.tools", "must hold one or more of the functions in `tools`")
    allowed = [tool for tool, name in zip(_items(body.get("tools")), tools, strict=True) if name in names]
    return {"tool_choice": mode, "tools": allowed}


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _tool_name(tool: Any) -> str | None:
    """Return the name of a tool, in the form of chats or of the Responses API."""
    if not isinstance(tool, dict):
        return None
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _check_tool_choice(body: Mapping[str, Any], path: str, parses_tools: bool) -> None:
    if not _forced(body):
        return
    choice = body["tool_choice"]
    if path == RESPONSES:  # on other routes, vLLM itself refuses such choices
        if not parses_tools:
            raise InvalidParameter("tool_choice", "needs option.tool_call_parser, unless it is auto or none")
        if isinstance(choice, dict) and choice.get("type") not in ("function", "custom"):
            raise InvalidParameter("tool_choice.type", "must be one of function, custom; others cannot be enforced")
    if forms := [form for form in _forms(body, path) if form not in _OF_MESSAGES]:
        raise InvalidParameter(forms[0], "cannot be combined with a `tool_choice` that makes the model call a tool")
    if path == MESSAGES and not body.get("tools"):  # vLLM itself refuses such chats
        raise InvalidParameter("tool_choice", "needs `tools`, unless it is auto or none")


def _without_formats(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields to replace if the model has to call a tool.

    Raises:
        InvalidParameter: `response_format` is invalid.
    """
    changes: dict[str, Any] = {}
    if (form := body.get("response_format")) is not None:
        changes["response_format"] = None
        if not _is_vllms(form):
            constraint_of("response_format", form)
    if _member(body, "text", "format") is not None:
        changes["text"] = {name: value for name, value in body["text"].items() if name != "format"}
    return changes


def _member(body: Mapping[str, Any], name: str, member: str) -> Any:
    value = body.get(name)
    return value.get(member) if isinstance(value, dict) else None


def _check_output_config(body: Mapping[str, Any]) -> None:
    if body.get("output_format") is not None:
        raise InvalidParameter("output_format", "is not read on this route; expected output_config.format")
    form = _member(body, "output_config", "format")
    if isinstance(form, dict) and not (isinstance(form.get("schema"), dict) and form["schema"]):
        raise InvalidParameter("output_config.format.schema", "must be a JSON schema: an object that is not empty")


def _is_vllms(form: Any) -> bool:
    if not isinstance(form, dict):
        return False
    kind, members = (
        form.get("type"),
        {name for name in ("value", "schema", "json_schema") if form.get(name) is not None},
    )
    if kind == "structural_tag":
        return not members
    if kind == "json_schema":
        return members == {"json_schema"} and isinstance(_member(form, "json_schema", "schema"), dict)
    return kind == "json_object" and not members


def _check_outputs(given: Any) -> None:
    """Check that vLLM's own field has exactly one constraint, and only members that a back end enforces."""
    name = "structured_outputs"
    if not isinstance(given, dict):
        return  # vLLM refuses the value.
    values = {member: value for member, value in given.items() if value is not None}
    kinds = [kind for kind in _NATIVE if kind in values]
    if len(kinds) != 1:
        raise InvalidParameter(
            name, f"must have exactly one of {', '.join(_NATIVE)}; got {' and '.join(kinds) or 'none'}"
        )
    if values.get("json_object") is False:
        raise InvalidParameter(f"{name}.json_object", "must be true if it is given")
    if kinds == ["json"] and not isinstance(decoded(values["json"]), dict):
        raise InvalidParameter(f"{name}.json", "must be a JSON schema: an object, or the text of one")
    for member in sorted(values.keys() - {*_NATIVE, *_OPTIONS}):
        if values[member]:
            raise InvalidParameter(f"{name}.{member}"[:SHOWN], "is not a field that this server can follow")


def _spelled(constraint: Constraint) -> dict[str, Any]:
    form, compact = constraint.for_vllm(), not constraint.any_whitespace
    if constraint.json_schema is not None:
        return form | {"disable_any_whitespace": compact, "disable_additional_properties": compact}
    return form | {"disable_any_whitespace": compact} if constraint.json_object else form
