"""The forms of constraints on each route: those that are enforced, and those that are refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from tests.live.constrained import (
    BEAMS,
    CLOSED,
    FORMS,
    LMI,
    MESSAGE,
    NAMES,
    OPENAI,
    POOL,
    REGEX,
    RESPONSE,
    TGI,
    TOKENWISE,
    TOOL,
    VLLM_NAMES,
    WRONG_FORMS,
    Check,
    Fields,
    Route,
    begins_object,
    by_name,
    is_json,
    is_of_pool,
    tgi_forms,
    typed,
)

Cases = TypeVar("Cases")
Enforced = Mapping[str, tuple[Fields, Check]]
Refused = Mapping[str, tuple[Fields, str]]

ROUTES: dict[str, Route] = {**OPENAI, **RESPONSE, **MESSAGE, **LMI, **VLLM_NAMES, **TGI}
COMPLETIONS = ("completions", "completions, streamed", "LMI's completions")
HAPPY = ("happy_vllm", "happy_vllm, streamed")
STOPS: Enforced = {"stop": ({"stop": ["France"]}, lambda text: text != "" and "France" not in text)}
"""Of a chat, whose answer repeats the question."""
TGI_STOPS: Enforced = {name: ({name: ["Par"]}, lambda text: text == " Par") for name in ("stop", "stop_sequences")}
"""TGI's texts end with the stop text."""
BIASED_END = TOKENWISE["min_tokens"]
OF_TOKENS = {*TOKENWISE, *TGI_STOPS, "min_new_tokens"}
"""Names of the parameters that constrain single tokens."""


def _each(names: Iterable[str], cases: Cases) -> dict[str, Cases]:
    return dict.fromkeys(names, cases)


ENFORCED: dict[str, Enforced] = {
    **_each(OPENAI, {**FORMS, **STOPS}),
    **_each(COMPLETIONS, {**FORMS, **TOKENWISE}),
    **_each(
        RESPONSE,
        {
            **FORMS,
            **STOPS,
            "text.format: json_schema": ({"text": {"format": typed("json_schema", name="x", schema=CLOSED)}}, is_json),
            "text.format: json_object": ({"text": {"format": typed("json_object")}}, begins_object),
        },
    ),
    **_each(
        MESSAGE,
        {
            "output_config.format": ({"output_config": {"format": typed("json_schema", schema=CLOSED)}}, is_json),
            "stop_sequences": ({"stop_sequences": ["France"]}, STOPS["stop"][1]),
        },
    ),
    **_each(
        LMI,
        {
            **FORMS,
            **TOKENWISE,
            "stop_sequences": ({"stop_sequences": ["Par"]}, TOKENWISE["stop"][1]),
            "min_new_tokens": ({"logit_bias": BIASED_END[0]["logit_bias"], "min_new_tokens": 6}, BIASED_END[1]),
        },
    ),
    **_each(VLLM_NAMES, {**FORMS, **TOKENWISE}),
    **_each(
        HAPPY,
        {
            **FORMS,
            **TOKENWISE,
            "response_pool": ({"response_pool": POOL}, is_of_pool),
            "json_format": ({"json_format": {"n": "boolean"}}, lambda text: text in ('{"n":true}', '{"n":false}')),
        },
    ),
    **_each(TGI, {**tgi_forms("grammar"), **TGI_STOPS}),
}


def each_once(cases: Mapping[str, Enforced]) -> dict[str, Enforced]:
    """Leave each case to the first route that has it. A route whose cases are all taken keeps its first one."""
    seen: set[str] = set()
    chosen: dict[str, Enforced] = {}
    for route, own in cases.items():
        new = [name for name in own if name not in seen] or list(own)[:1]
        seen |= own.keys()
        chosen[route] = {name: own[name] for name in new}
    return chosen


WITH_BEAMS: Refused = {
    f"{name} with beams": (BEAMS | fields, f"`{name}` cannot be used together with ")
    for name, fields in NAMES.items()
    if name in ("logit_bias", "bad_words", "allowed_token_ids")
}
TAGS: dict[str, Fields] = {
    "a structural tag": {
        "structures": [{"begin": " Paris: ", "schema": CLOSED, "end": "."}],
        "triggers": [" Paris"],
    },
    "a structural tag of the newer kind": {"format": typed("regex", pattern=REGEX)},
}
OPENAIS: Refused = {
    **WRONG_FORMS,
    **by_name("min_new_tokens bad_sequences stop_sequences json_format response_pool regex ebnf json_schema"),
    **by_name("structural_tag guided_whitespace_pattern force_words_ids guided_decoding_guide function_call"),
    "extra_body": ({"extra_body": {"guided_json": CLOSED}}, "`guided_json` has no effect in `extra_body`"),
    **{
        name: (
            {"response_format": typed("structural_tag", **tag)},
            "`response_format.structural_tag` is not enforced",
        )
        for name, tag in TAGS.items()
    },
    **WITH_BEAMS,
    "stop with beams": (BEAMS | {"stop": ["Par"]}, "`stop` cannot be used together with `use_beam_search`"),
    "min_tokens with beams": (BEAMS | {"min_tokens": 3}, "`min_tokens` cannot be used together with `use_beam_search`"),
}
TOOLS: Refused = {
    "tool_choice: required": ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "tool_choice: a function": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
}
NAMED_TOOL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
CHAT_TOOLS: Refused = {
    "tool_choice: required": (NAMED_TOOL | {"tool_choice": "required"}, "tool_choice"),
    "tool_choice: a function": (
        NAMED_TOOL | {"tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
    ),
}
LMI_BEAMS: Refused = {
    name: ({"num_beams": 2, **NAMES[name]}, f"`{name}` cannot be used together with beam search")
    for name in ("logit_bias", "bad_words", "allowed_token_ids", "guided_choice")
}
UNREAD = "json_format response_pool regex ebnf json_schema guided_whitespace_pattern force_words_ids"
VLLMS: Refused = {**WRONG_FORMS, **by_name("regex guided_whitespace_pattern ebnf bad_sequences")}
REFUSED: dict[str, Refused] = {
    **_each(OPENAI, {**OPENAIS, **CHAT_TOOLS}),
    **_each(COMPLETIONS, {**OPENAIS, "tool_choice": (NAMED_TOOL | {"tool_choice": "required"}, "tool_choice")}),
    **_each(
        RESPONSE,
        {
            **{name: case for name, case in WRONG_FORMS.items() if name != "a minimum of tokens"},
            **TOOLS,
            **by_name(f"bad_words allowed_token_ids min_tokens stop_token_ids structural_tag {UNREAD}"),
            "text.format and another": (
                {"text": {"format": typed("json_object")}, "guided_regex": REGEX},
                "`text.format` cannot be combined with `guided_regex`",
            ),
        },
    ),
    **_each(
        MESSAGE,
        {
            **by_name(f"{' '.join(NAMES.keys() - {'stop_sequences'})}"),
            "output_format": ({"output_format": typed("json_schema", schema=CLOSED)}, "`output_format` "),
            "output_config without a schema": (
                {"output_config": {"format": typed("json_schema")}},
                "`output_config.format.schema` must be a JSON schema",
            ),
            "tool_choice": (
                {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"}},
                "tool_choice",
            ),
        },
    ),
    **_each(LMI, {**WRONG_FORMS, **by_name(f"bad_sequences min_length stop_words structural_tag {UNREAD}")}),
    **_each(("LMI", "LMI, several"), {**WRONG_FORMS, **by_name(f"bad_sequences {UNREAD}"), **LMI_BEAMS}),
    **_each(VLLM_NAMES, VLLMS),
    **_each(("happy_vllm", "Triton", "Triton, sampling_parameters"), {**VLLMS, **WITH_BEAMS}),
    **_each(
        TGI,
        {
            **{name: case for name, case in WRONG_FORMS.items() if "grammar" in name},
            **by_name(" ".join(NAMES.keys() - {"grammar", "stop", "stop_sequences"})),
        },
    ),
}
BESIDE: Refused = by_name("grammar guided_json response_format logit_bias bad_words stop min_new_tokens")
"""Beside `inputs`, in the place of `parameters`."""
