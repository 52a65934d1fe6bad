"""A family of clients: its routes and its error bodies, declared in the package of its wire contract.

All families are registered in `handlers.contracts`; `container` makes an HTTP endpoint of each route.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from engines.adapters import Adapter
from engines.errors import InvalidParameter, InvalidRequest, NotReady, NotServed, RequestError
from engines.loaded_model import LoadedModel
from engines.model_settings import ModelSettings
from handlers.contract import LONG_BODY, Call, Contract, Reply, adapter_header
from handlers.json_schemas import Schema

# What the routes of all families say where a custom handler runs the model.
OWN_HANDLER = "this model has a handler of its own; /invocations, /predictions and /v1/chat/completions reach it"
# Stalled: the engine has requests and makes no progress; it may recover.
State = Literal["starting", "ready", "stalled", "failed", "draining", "stopped"]


def error_body(message: str, kind: str, code: int, parameter: str | None = None) -> bytes:
    """vLLM's error object. `kind`: such as "BadRequestError"."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": parameter, "code": code}})


@dataclass(frozen=True, slots=True)
class ModelView:
    """The model at this moment, as a route that generates nothing sees it."""

    settings: ModelSettings
    state: State
    reason: str  # Why it has failed or is stalled; empty if neither.
    started_at: float  # When the server was started, in seconds since the epoch.
    loaded: LoadedModel | None  # None until it is loaded, and where a custom handler generates.
    engine: str  # What runs it: "vllm", "dynamic_batch" or "python".
    engine_version: str
    max_requests: int  # Sequences that may run or wait at a time.
    # Further names of the model, for clients that must name one; the empty one is among them.
    model_aliases: tuple[str, ...]
    # Ends the call with this request id, the latest if there are several; its client gets an aborted answer.
    abort: Callable[[str], None]
    adapters: tuple[Adapter, ...] = ()  # Those that are registered.

    def text(self) -> LoadedModel:
        """The loaded model. Raises NotReady: it is not loaded; NotServed: it has a custom handler, whose tokenizer is
        not known."""
        if self.loaded is not None:
            return self.loaded
        if self.settings.handler is not None:
            raise NotServed(OWN_HANDLER)
        raise NotReady(f"model {self.settings.name} is not loaded yet")


NO_ADAPTERS = "cannot be used: this server has no adapters"
"""Follows the name of a parameter or header that names one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractSetting:
    """The arguments of a contract."""

    settings: ModelSettings
    model: LoadedModel

    def adapter_of(self, call: Call, named: str | None) -> str | None:
        """Return the adapter that SageMaker's header names, or else `named`; None for the model itself.

        Raises:
            InvalidParameter: The header names one, and the server has no adapters.
        """
        header = adapter_header(call)
        if header is None:
            return named
        if header and not self.settings.enable_lora:
            raise InvalidParameter(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER, NO_ADAPTERS)
        return header or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a route does, as /openapi.json and /docs show it."""

    summary: str
    request: Schema | None = None  # The body's schema; None: there is no body.
    request_type: str = "application/json"
    # By status: what it means, and the body's schema by media type. Errors that the family's `refuse` words, and whose
    # meaning needs no more words, are left out.
    answers: Mapping[str, tuple[str, Mapping[str, Schema]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRoute:
    """A route on which text is generated."""

    path: str  # With `{name}` for one segment, and `{name:int}` for one of digits.
    contract: Callable[[ContractSetting], Contract]
    methods: tuple[str, ...] = ("POST",)
    long_body: int = LONG_BODY  # Bytes above which a body is parsed in a thread.
    # Whether a refusal is an event where a stream was asked for, and not the family's `refuse`.
    streams_refusals: bool = False
    # The reply to a path whose parameters alone are wrong, whatever the model's state; None if they are not.
    refuse_path: Callable[[Mapping[str, str], ModelSettings], Reply | None] | None = None
    about: Operation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoRoute:
    """A route that tells something of the model, whatever its state, and generates nothing."""

    path: str
    # Makes the reply. May raise ContractError, which has its reply, and RequestError, which the family answers. Called
    # in a thread where the body is long.
    answer: Callable[[Call, ModelView], Reply]
    # Makes the reply where there are several models or none; None: the route is about one.
    answer_all: Callable[[Call, Sequence[ModelView]], Reply] | None = None
    methods: tuple[str, ...] = ("GET",)
    with_field: str | None = None  # Takes only bodies with this field. The path's other route takes the rest.
    about: Operation | None = None

    @classmethod
    def of_all(
        cls,
        path: str,
        answer_all: Callable[[Call, Sequence[ModelView]], Reply],
        methods: tuple[str, ...] = ("GET",),
        about: Operation | None = None,
    ) -> InfoRoute:
        """A route about all models that there are, be it one or several."""
        return cls(
            path=path,
            answer=lambda call, view: answer_all(call, (view,)),
            answer_all=answer_all,
            methods=methods,
            about=about,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIRoute:
    """A route that goes to vLLM's own OpenAI server as it is."""

    path: str
    methods: tuple[str, ...] = ("POST",)
    prefix: str = ""  # The part of `path` that vLLM's own path does not have.
    own_handler: bool = False  # A custom handler gets such calls as it gets those of `/invocations`.


Route = GenerationRoute | InfoRoute | OpenAIRoute


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRoutes:
    """One kind of clients."""

    name: str
    routes: tuple[Route, ...]
    # Its error reply for anything in `engines.errors`, on routes of all kinds.
    refuse: Callable[[RequestError], Reply]
    error: Schema  # Of an error's JSON object.
    # The reply where the path is one of the family's, but not with this method; the server adds `allow`.
    wrong_method: Callable[[Call], Reply]
    body_names_model: bool = False  # The bodies of its calls may name the model, in `model`.
    prefix: str | None = None  # Unknown paths below it belong to the family, too.
    not_found: Callable[[Call], Reply] | None = None  # The reply to those.


# Of a text that is only tokenized, in UTF-8: about 300,000 tokens of English. A tokenizer takes up to 200 bytes of
# memory and 2 µs for each byte. Where text is generated, the model's context bounds the prompt.
MOST_BYTES = 1 << 20
# The same where the answer gives each token's place: that takes more memory and twice the time.
PLACED_BYTES = MOST_BYTES // 2
MOST_IDS = 1 << 19
# Bytes of a body: the longest text, and as many ids, with all characters beyond ASCII escaped.
MOST_BODY = 4 * MOST_BYTES


def check_body(call: Call) -> None:
    """Raise InvalidRequest if a body is too long to hold an allowed text; called before it is read."""
    if len(call.body) > MOST_BODY:
        raise InvalidRequest(f"the body has {len(call.body)} bytes; this route takes at most {MOST_BODY}")


def check_text(name: str, text: str, most: int = MOST_BYTES) -> str:
    """The text, which is the parameter `name` or made of it. Raises InvalidParameter: it is too long."""
    size = len(text) if len(text) > most or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidParameter(name, f"may have at most {most} bytes of text, got {size}")
    return text
