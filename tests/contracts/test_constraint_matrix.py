"""On each route, each form of constraint reaches the engine with the call's adapter, or is refused.

A refusal names the constraint. The application has all contracts, and its engine is scripted. For a call that Slipway
leaves to vLLM's front end, the tests look at the body that vLLM gets. If JSON's readers disagree about a body, Slipway
always reads it in the same way, or refuses it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from engines.interface import Generation, Sink
from engines.request import FinishReason, GenerationRequest, TokenDelta
from handlers import entry_point
from handlers.loaded_service import Limits, Service
from handlers.openai.contract import OpenAIContract
from handlers.openai.handler import OpenAIHandler
from handlers.openai.vllm_call import VllmApp
from handlers.queue import EngineQueue
from handlers.route_declarations import error_body
from tests.constrained import (
    ASYNCHRONOUS,
    BEAMS,
    CLOSED,
    DYNAMIC,
    LMI,
    MESSAGE,
    NAMES,
    OPENAI,
    REGEX,
    RESPONSE,
    ROUTES,
    TGI,
    TOKENWISE,
    TOOL,
    VLLM_NAMES,
    WRONG_FORMS,
    Fields,
    Refused,
    by_name,
    for_each,
    typed,
)
from tests.contracts.constraint_targets import (
    ADAPTER,
    ALIASES,
    ALL_ROUTES,
    BODIES,
    EVERY,
    OTHER_ADAPTER,
    OTHER_LAST,
    PLAIN,
    SPACED,
    TARGETS,
    TOOLS_TARGETS,
    WITHOUT,
    Request,
    Target,
)
from tests.contracts.exchange import MODEL
from tests.contracts.openai_exchange import FRONT_END
from tests.contracts.tgi_exchange import FakeModel
from tests.settings import configured
from tests.stand_ins.scripted_engine import ScriptedEngine
from tests.unit.container.one_model import make

Client = tuple[httpx.AsyncClient, "Seen"]

ADAPTERS = (ADAPTER, OTHER_ADAPTER)
LEFT_TO_VLLM = 418  # The status of the stand-in for vLLM's front end.
ENGINE_SETTINGS = replace(MODEL, rolling_batch="lmi-dist", enable_lora=True)
SETTINGS = {
    **dict.fromkeys(ASYNCHRONOUS, configured(ENGINE_SETTINGS, async_mode=True)),
    **dict.fromkeys(DYNAMIC, replace(MODEL, rolling_batch="disable")),
}
"""The settings of the model, by route. Other routes have `ENGINE_SETTINGS`."""


WITH_BEAMS: Refused = {
    f"{name} with beams": (BEAMS | fields, f"`{name}` cannot be used together with ")
    for name, fields in NAMES.items()
    if name in ("logit_bias", "bad_words", "allowed_token_ids")
}
OPENAIS: Refused = {
    **WRONG_FORMS,
    **by_name("min_new_tokens bad_sequences stop_sequences json_format response_pool regex ebnf json_schema"),
    **by_name("structural_tag guided_whitespace_pattern force_words_ids guided_decoding_guide function_call"),
    "extra_body": ({"extra_body": {"guided_json": CLOSED}}, "`guided_json` has no effect in `extra_body`"),
    **WITH_BEAMS,
    "stop with beams": (BEAMS | {"stop": ["Par"]}, "`stop` cannot be used together with `use_beam_search`"),
    "min_tokens with beams": (BEAMS | {"min_tokens": 3}, "`min_tokens` cannot be used together with `use_beam_search`"),
}
TOOLS: Refused = {
    "tool_choice: required": ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    "tool_choice: a function": ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
}
NAMED_TOOL = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}
OF_COMPLETIONS = ("completions", "completions, streamed", "LMI's completions")
READ_FORMS = {name: case for name, case in WRONG_FORMS.items() if name not in ("no end", "a minimum of tokens")}
"""The engine refuses the others (tests/live/test_constraint_forms_live.py)."""
UNREAD_ASYNCHRONOUS = "json_format regex ebnf guided_whitespace_pattern"
UNREAD = "json_format response_pool regex ebnf json_schema guided_whitespace_pattern force_words_ids"
VLLMS: Refused = {**READ_FORMS, **by_name("regex guided_whitespace_pattern ebnf bad_sequences")}
REFUSED: dict[str, Refused] = {
    **for_each(OPENAI, OPENAIS),
    **for_each(OF_COMPLETIONS, {**OPENAIS, "tool_choice": (NAMED_TOOL | {"tool_choice": "required"}, "tool_choice")}),
    **for_each(
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
    **for_each(
        MESSAGE,
        {
            **by_name(f"{' '.join(NAMES.keys() - {'stop_sequences'})}"),
            "output_format": ({"output_format": typed("json_schema", schema=CLOSED)}, "`output_format` "),
            "output_config without a schema": (
                {"output_config": {"format": typed("json_schema")}},
                "`output_config.format.schema` must be a JSON schema",
            ),
        },
    ),
    **for_each(LMI, {**READ_FORMS, **by_name(f"bad_sequences min_length stop_words structural_tag {UNREAD}")}),
    **for_each(VLLM_NAMES, VLLMS),
    **for_each(
        ASYNCHRONOUS, {**READ_FORMS, **by_name(f"bad_sequences min_new_tokens tool_choice {UNREAD_ASYNCHRONOUS}")}
    ),
    **for_each(
        TGI,
        {
            **{name: case for name, case in WRONG_FORMS.items() if "grammar" in name},
            **by_name(" ".join(NAMES.keys() - {"grammar", "stop", "stop_sequences"})),
        },
    ),
}
BESIDE: Refused = by_name("grammar guided_json response_format logit_bias bad_words stop min_new_tokens")
"""Fields that stand beside `inputs` instead of in `parameters`."""

_OWN_NAMES = [(fields, fields) for fields in TOKENWISE.values()]
_STOP = [({"stop": ["Par"]}, {"stop": ["Par"]})]
_STOP_SEQUENCES = [({"stop_sequences": ["Par"]}, {"stop": ["Par"]})]
OF_TOKENS: dict[str, list[tuple[Fields, Fields]]] = {
    **for_each((*OPENAI, *VLLM_NAMES, *ASYNCHRONOUS, *DYNAMIC), _OWN_NAMES),
    **for_each(RESPONSE, [*_STOP, (TOKENWISE["logit_bias"], TOKENWISE["logit_bias"])]),
    **for_each(MESSAGE, [({"stop_sequences": ["Par"]}, {"stop_sequences": ["Par"]})]),
    **for_each(LMI, [*_OWN_NAMES, *_STOP_SEQUENCES, ({"min_new_tokens": 6}, {"min_tokens": 6})]),
    **for_each(TGI, [*_STOP, *_STOP_SEQUENCES]),
}
"""For each route: the parameters that constrain single tokens.

Each pair has the fields of a body, and the parameters that the engine or vLLM gets for these fields.
"""


def _json_schema(**strict: Any) -> Fields:
    return {"response_format": typed("json_schema", json_schema={"name": "x", "schema": CLOSED, **strict})}


_WITH_STRICT = [(_json_schema(), False), (_json_schema(strict=False), False), (_json_schema(strict=True), True)]
_WITHOUT_STRICT = [
    ({"guided_json": CLOSED}, None),
    ({"grammar": typed("json", value=CLOSED)}, None),
    ({"grammar": typed("json_schema", json_schema={"schema": CLOSED})}, None),
]
STRICTNESS: dict[str, list[tuple[Fields, bool | None]]] = {
    **for_each(OPENAI, _WITH_STRICT),
    **for_each((*LMI, *ASYNCHRONOUS, *DYNAMIC, *VLLM_NAMES), [*_WITH_STRICT, *_WITHOUT_STRICT]),
    **for_each(TGI, _WITHOUT_STRICT[1:]),
}
"""For each route: fields with a schema, and whether the engine has to hold the whole schema.

tests/contracts/test_openai_constraints.py has the schemas for vLLM.
"""


class Engine(ScriptedEngine):
    """An engine that answers each request with a token, and keeps the requests."""

    max_model_len = 1024
    max_sequences = 64

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[GenerationRequest] = []
        self.texts = FakeModel().texts
        self.tokenizer: Any = self.texts.tokenizer
        self.tokenizer.pad_token = ""

    async def submit(self, request: GenerationRequest, sink: Sink) -> Generation:
        generation = await super().submit(request, sink)
        self.requests.append(request)
        for sequence in range(request.sequences):
            last = sequence == request.sequences - 1
            sink.on_delta(TokenDelta("a", [], sequence, FinishReason.LENGTH, 1, 1, -0.5, last=last))
        return generation

    async def stop(self, why: str = "") -> None: ...


@dataclass
class Seen:
    """The forms, the sampling parameters and the adapters of a call that reached the engine or vLLM's front end."""

    engine: Engine
    bodies: list[Fields] = field(default_factory=list)

    def take(self) -> tuple[list[Fields], list[Fields], list[str | None]]:
        requests, bodies = self.engine.requests[:], self.bodies[:]
        self.engine.requests.clear()
        self.bodies.clear()
        forms = [form_of(request) for request in requests] + [form_in(body) for body in bodies]
        sampling = [msgspec.to_builtins(request.sampling, str_keys=True) for request in requests]
        adapters = [request.adapter for request in requests]
        named = [body.get("model") if body.get("model") in ADAPTERS else None for body in bodies]
        return forms, sampling + bodies, adapters + named


def form_of(request: GenerationRequest) -> Fields:
    constraint = request.sampling.constraint
    return {} if constraint is None else _read(constraint.for_vllm())


def form_in(body: Fields) -> Fields:
    """Return the form that vLLM reads from a body."""
    forms = [
        *(body.get(name) for name in ("response_format", "structured_outputs")),
        *((body.get(name) or {}).get("format") for name in ("text", "output_config")),
    ]
    given = [form for form in forms if form is not None and form != {"type": "text"}]
    choice = body.get("tool_choice")
    if choice is not None:
        assert not given
        return {"tool_choice": choice}
    assert len(given) <= 1, given
    return _read(given[0]) if given else {}


def _read(form: Fields) -> Fields:
    if form.get("type") == "json_object":
        return {"json_object": True}
    if form.get("type") == "json_schema":
        return {"json": form.get("json_schema", form)["schema"]}
    form = {name: value for name, value in form.items() if not name.startswith("disable_")}
    return {**form, "json": json.loads(form["json"])} if isinstance(form.get("json"), str) else form


@pytest_asyncio.fixture
async def client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    """A client of an application with all contracts, and the requests that reach its engine."""
    engine = Engine()
    seen = Seen(engine)

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        with contextlib.suppress(ValueError):  # vLLM refuses bodies that Python cannot read
            seen.bodies.append(json.loads((await receive())["body"]))
        answer = error_body("left to vLLM", "Error", LEFT_TO_VLLM)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": LEFT_TO_VLLM, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    async def openai(queue: EngineQueue, *_: object) -> OpenAIHandler:
        contract = OpenAIContract(replace(FRONT_END, adapters=ADAPTERS))
        return OpenAIHandler(VllmApp(vllm, None, parses_tools=parses_tools), queue, contract, "m", ADAPTERS)

    name = request.node.callspec.params["name"]
    parses_tools, config = name in TOOLS_TARGETS, SETTINGS.get(name, ENGINE_SETTINGS)
    monkeypatch.setattr(entry_point, "choose_engine", lambda settings: settings)  # vLLM need not be installed.
    monkeypatch.setattr(entry_point, "engine_factory", lambda _: lambda _: engine)
    for name in ("begin_import", "import_front_end"):
        monkeypatch.setattr(entry_point, name, lambda _: None)
    monkeypatch.setattr(entry_point, "openai_handler", openai)
    service: Service = await entry_point.load_service(config, Limits(64, 503, 503))
    lifecycle, http = make()
    lifecycle.service = service
    async with http:
        yield http, seen
    await service.stop()


async def post(
    http: httpx.AsyncClient, target: Target, request: Request, content: bytes | None = None
) -> httpx.Response:
    return await http.post(
        target.route.path + request.query,
        content=json.dumps(request.document).encode() if content is None else content,
        headers={"content-type": "application/json", **request.headers},
    )


@pytest.mark.parametrize("name", EVERY)
async def test_every_form_reaches_the_engine(client: Client, name: str) -> None:
    """Each form is sent with a different way to name an adapter, in turn."""
    (http, seen), target = client, EVERY[name]
    for form, way in zip(target.forms, cycle([WITHOUT, *target.ways])):
        response = await post(http, target, target.request(form, way))
        forms, _, adapters = seen.take()
        assert forms, f"{form}: {response.text}"
        assert all(found == target.forms[form][1] for found in forms), form
        assert set(adapters) == {None if way == WITHOUT else ADAPTER}, way


@pytest.mark.parametrize("name", [*TARGETS, *ALIASES])
async def test_every_way_of_naming_an_adapter_names_it(client: Client, name: str) -> None:
    (http, seen), target = client, EVERY[name]
    for way in (WITHOUT, *target.ways):
        response = await post(http, target, target.request(WITHOUT, way))
        forms, _, adapters = seen.take()
        assert forms, f"{way}: {response.text}"
        assert not any(forms)
        assert set(adapters) == {None if way == WITHOUT else ADAPTER}, way


@pytest.mark.parametrize("name", STRICTNESS)
async def test_the_strictness_of_a_schema_reaches_the_engine(client: Client, name: str) -> None:
    """A header of the reply names the parts of the schema that the engine does not hold."""
    http, seen = client
    seen.engine.not_held = ("#/a/contains", "#/b/uniqueItems")
    for fields, strict in STRICTNESS[name]:
        response = await post(http, TARGETS[name], Request(ALL_ROUTES[name].body(fields)))
        requests = seen.engine.requests[:]
        seen.take()
        assert {request.sampling.constraint and request.sampling.constraint.strict for request in requests} == {strict}
        assert response.headers["x-slipway-not-held"] == "#/a/contains,#/b/uniqueItems"


@pytest.mark.parametrize("name", ["chat", "LMI", "happy_vllm", "Triton"])
async def test_plain_text_is_no_constraint(client: Client, name: str) -> None:
    http, seen = client
    await post(http, TARGETS[name], Request(ROUTES[name].body({"response_format": typed("text")})))
    assert seen.take()[0] == [{}]


@pytest.mark.parametrize("name", OF_TOKENS)
async def test_parameters_that_constrain_tokens_reach_the_engine(client: Client, name: str) -> None:
    http, seen = client
    for fields, expected in OF_TOKENS[name]:
        response = await post(http, TARGETS[name], Request(ALL_ROUTES[name].body(fields)))
        _, sampling, _ = seen.take()
        assert sampling, response.text
        for found in sampling:
            assert {key: _plain(found.get(key)) for key in expected} == expected


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_enforced_is_refused_by_its_name(client: Client, name: str) -> None:
    http, seen = client
    for case, (fields, words) in REFUSED[name].items():
        response = await post(http, TARGETS[name], Request(ALL_ROUTES[name].body(fields)))
        assert TARGETS[name].is_refused(response), f"{case}: {response.status_code} {response.text}"
        assert words in response.text, case
        assert not seen.take()[0], case


@pytest.mark.parametrize("name", ["LMI", "generate", "generate_stream", "TGI's root"])
async def test_a_constraint_beside_inputs_is_refused(client: Client, name: str) -> None:
    http, seen = client
    for fields, words in BESIDE.values():
        response = await post(http, TARGETS[name], Request({"inputs": "x", **fields}))
        assert TARGETS[name].is_refused(response), response.text
        assert words in response.text
        assert not seen.take()[0]


@pytest.mark.parametrize("name", EVERY)
async def test_a_body_that_json_readers_disagree_about_means_the_same_or_is_refused(client: Client, name: str) -> None:
    """Each body is sent with a different form and a different way to name an adapter, in turn."""
    (http, seen), target = client, EVERY[name]
    for body, form, way in zip(BODIES, cycle(target.forms), cycle([*target.ways, WITHOUT])):
        request, sent = target.request(form, way), target.sent(form, way)
        await post(http, target, replace(request, document=sent.other))
        (of_other, *_), _, (its_adapter, *_) = seen.take()
        expected = (target.forms[form][1], None if way == WITHOUT else ADAPTER)
        assert of_other
        assert of_other != expected[0]
        response = await post(http, target, request, BODIES[body](sent))
        forms, _, adapters = seen.take()
        case = f"{body}, {form}, {way}: {response.status_code} {response.text}"
        if not forms:
            assert body not in (PLAIN, SPACED), case
            assert response.status_code == LEFT_TO_VLLM or target.is_refused(response), case
            continue
        if body in OTHER_LAST:
            expected = (of_other, its_adapter)
        assert all(found == expected for found in zip(forms, adapters, strict=True)), case
