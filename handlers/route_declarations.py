"""The declaration of a contract's routes and error bodies.

Each contract's package declares them in `routes.py`. `handlers.all_contracts` lists all contracts. `container` serves
an HTTP route for each declared route.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import msgspec

from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from engines.adapters import Adapter
from engines.errors import InvalidParameter, NotReady, NotServed, RequestError
from engines.loaded_model import LoadedModel
from handlers.contract import JSON, Call, Contract, Head, Reply, adapter_header
from handlers.management import ManagementOperation
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import Schema

# The error on routes that a model with a custom handler does not serve.
OWN_HANDLER = "this model has a handler of its own; /invocations, /predictions and /v1/chat/completions reach it"
# The kind of models that a route serves. "pooling" means models that make vectors or scores instead of text. Two routes
# may share a path, one for each kind. While the kind of a model is unknown, for example because the model is still
# loading, the route for generating models answers.
KindsOfModels = Literal["all", "generating", "pooling"]
# Stalled: the engine has requests and makes no progress. It may recover.
State = Literal["starting", "ready", "stalled", "failed", "restarting", "draining", "stopped"]


def error_body(message: str, kind: str, code: int, parameter: str | None = None) -> bytes:
    """Return vLLM's error object. `kind` is a name such as "BadRequestError"."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": parameter, "code": code}})


class RenderedChat(msgspec.Struct, frozen=True):
    """The prompt that `/v1/chat/completions` makes from a chat."""

    token_ids: list[int]
    text: str | None = None  # None if the chat becomes token ids directly.


def is_address(name: str) -> bool:
    """Return True if a name is the URL of a server instead of a model's name.

    Hugging Face's JavaScript client sends the URL of its endpoint as `model` unless the caller gives a model's name.
    """
    return name[:8].lower().startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class ModelView:
    """The state of a model at one moment, for routes that generate nothing."""

    config: ModelConfig
    state: State
    reason: str  # Why the model has failed or is unhealthy. Otherwise empty.
    started_at: float  # The time at which the server was started, in seconds since the epoch.
    loaded: LoadedModel | None  # None until the model is loaded. Also None if a custom handler generates.
    engine: str  # The runtime: "vllm", "dynamic_batch" or "python".
    engine_version: str
    max_requests: int  # The maximum number of sequences that may run or wait at the same time.
    model_aliases: tuple[str, ...]  # Further names of the model, including the empty name.
    # Ends the calls with this request id (`Service.abort`).
    abort: Callable[[str], None]
    adapters: tuple[Adapter, ...] = ()  # The registered adapters.
    # The prompt of the call's chat, or the error if the chat cannot become a prompt. None if `InfoRoute.chat` found no
    # chat.
    rendered: RenderedChat | RequestError | None = None

    def chat(self) -> RenderedChat:
        """Return the prompt of the chat that `InfoRoute.chat` found.

        Raises:
            RequestError: The chat cannot become a prompt.
        """
        assert self.rendered is not None, "`InfoRoute.chat` found no chat"
        if isinstance(self.rendered, RequestError):
            # Raises a copy: the traceback of the error itself would hold this object, which holds the error.
            raise copy(self.rendered)
        return self.rendered

    def text(self) -> LoadedModel:
        """Return the loaded model, for its tokenizer.

        Raises:
            NotReady: The model is not loaded yet.
            NotServed: The model has a custom handler, whose tokenizer is not known.
        """
        if self.loaded is not None:
            return self.loaded
        if self.config.handler is not None:
            raise NotServed(OWN_HANDLER)
        raise NotReady(f"the model {self.config.name!r} is not loaded yet")


# The name of the query parameter, header or path parameter with a model's version.
MODEL_VERSION = "model_version"
NO_ADAPTERS = "cannot be used: this server has no adapters"  # Follows the name of a parameter or header.


def adapter_of(call: Call, config: ModelConfig, named: str | None) -> str | None:
    """Return the adapter from SageMaker's header, or `named` if the call has no such header.

    None means the model itself.

    Raises:
        InvalidParameter: The header names an adapter, but the server has no adapters.
    """
    header = adapter_header(call)
    if header is None:
        return named
    if header and not config.enable_lora:
        raise InvalidParameter(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER, NO_ADAPTERS)
    return header or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The description of a route, for `/openapi.json` and `/docs`."""

    summary: str
    request: Schema | None = None  # The schema of the body. None if the request has no body.
    request_type: str = JSON
    # Maps each status to its meaning, and to the schemas of its body, keyed by media type. Errors from
    # `ContractRoutes.refuse` are left out unless they need a further explanation.
    answers: Mapping[str, tuple[str, Mapping[str, Schema]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRoute:
    """A route that uses the engine: it generates text, or makes vectors or scores."""

    path: str  # `{name}` matches one segment, and `{name:int}` a segment of digits.
    # Creates the contract for a model. If None, the model's OpenAI handler answers (`handlers.openai.handler`).
    contract: Callable[[ModelConfig, LoadedModel], Contract] | None = None
    methods: tuple[str, ...] = ("POST",)
    models: KindsOfModels = "all"
    # If set, the route answers only bodies with this field. Another route with the same path answers the other bodies.
    with_field: str | None = None
    # Whether every call needs a place in the queue. If True, a call may be refused before its body is read, so the
    # refusal must not depend on the body.
    queued: bool = True
    own_handler: bool = False  # Whether a custom handler answers the route if the model has one.
    by_attribute: bool = True  # Whether `route` in SageMaker's custom attributes may name this route.
    # Returns the refusal of invalid path parameters, or None. The refusal does not depend on the model's state.
    refuse_path: Callable[[Mapping[str, str], ModelConfig], Reply | None] | None = None
    about: Operation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoRoute:
    """A route that describes a model in any state, or that processes text without generating text."""

    path: str
    # Returns the reply. It may raise ContractError, which holds a reply, and RequestError, which
    # `ContractRoutes.refuse` turns into a reply. It is called in a thread if the body is long.
    answer: Callable[[Call, ModelView], Reply]
    # Returns a call's chat as a call of `/v1/chat/completions`, or None if the call has no chat. Before `answer` is
    # called, the chat is rendered to `ModelView.rendered`. This function may raise the same errors as `answer`, and is
    # also called in a thread if the body is long.
    chat: Callable[[Call, ModelView], Call | None] | None = None
    # Returns the reply if the server does not have exactly one model. A route about one model has no such function.
    answer_all: Callable[[Call, Sequence[ModelView]], Reply] | None = None
    methods: tuple[str, ...] = ("GET",)
    models: KindsOfModels = "all"
    with_field: str | None = None  # As in `GenerationRoute`.
    # Whether `route` in SageMaker's custom attributes may name this route. Only routes that process text allow this.
    by_attribute: bool = False
    about: Operation | None = None

    @classmethod
    def of_all(
        cls,
        path: str,
        answer_all: Callable[[Call, Sequence[ModelView]], Reply],
        methods: tuple[str, ...] = ("GET",),
        about: Operation | None = None,
        models: KindsOfModels = "all",
    ) -> InfoRoute:
        """Create a route about all models of the server."""
        return cls(
            path=path,
            answer=lambda call, view: answer_all(call, (view,)),
            answer_all=answer_all,
            methods=methods,
            models=models,
            about=about,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationRoute:
    """A route for the handler of `/invocations`. The route takes any method. The head of a call may name the model."""

    methods: ClassVar[tuple[str, ...]] = ("*",)
    path: str
    counted: str  # The path under which calls are counted.
    # Returns the model and the version that the head of a call names. The result has None for a model or a version that
    # the head does not name. The first argument holds the names of the server's models.
    names: Callable[[Container[str], Head], tuple[str | None, str | None]]
    form_field: str  # The field of a form that names the model if the head does not.
    refuse_head: Callable[[Head], Reply | None]  # Returns the refusal of an invalid head, or None.
    options: Reply  # The reply to OPTIONS, if the server has the model.
    by_attribute: bool = True  # Whether `route` in SageMaker's custom attributes may name this route.


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementRoute:
    """A route that manages models or adapters. Cross-site calls from browsers are refused."""

    path: str
    operations: Mapping[str, ManagementOperation]  # The operations, keyed by HTTP method.
    counted: str | None = None  # The path under which calls are counted, if it differs from `path`.
    refuse: Callable[[RequestError], Reply] | None = None  # Makes the error replies. If None, the contract makes them.
    # Replies to all other methods, instead of `ContractRoutes.wrong_method`.
    wrong_method: Callable[[Call], Reply] | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.operations) if self.wrong_method is None else ("*",)


Route = GenerationRoute | InfoRoute | InvocationRoute | ManagementRoute


def takes(route: Route, *, pooling: bool) -> bool:
    """Return True if a route serves one kind of models.

    Args:
        route: The route.
        pooling: True for pooling models, False for generating models.
    """
    kind = "pooling" if pooling else "generating"
    return not isinstance(route, GenerationRoute | InfoRoute) or route.models in ("all", kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRoutes:
    """The routes of a contract and the forms of its errors."""

    name: str
    routes: tuple[Route, ...]
    # Returns the error reply for each error of `engines.errors`.
    refuse: Callable[[RequestError], Reply]
    error: Schema  # The schema of an error's JSON object.
    # Returns the reply to a method that the path does not have. The server adds the header `allow`.
    wrong_method: Callable[[Call], Reply]
    body_names_model: bool = False  # Whether bodies may name the model in `model`.
    id_header: str | None = None  # The contract's own header for the request's id, in addition to the server's header.
    prefixes: tuple[str, ...] = ()  # Unknown paths below these prefixes also belong to the contract.
    not_found: Callable[[Call], Reply] | None = None  # Returns the reply to such an unknown path.
    headers: tuple[tuple[str, str], ...] = ()  # Headers of every reply that the routes make.
    redirects: bool = False  # A path with slashes at its end is redirected to the path without them, as in FastAPI.


# The maximum number of bytes of UTF-8 text in a call that only tokenizes: about 300,000 tokens of English. A tokenizer
# takes up to 200 bytes of memory and 2 µs for each byte. On generating routes, the model's context limits the prompt.
MOST_BYTES = 1 << 20
# The maximum number of bytes of text if the answer has the position of each token. Positions take more memory and
# double the time.
PLACED_BYTES = MOST_BYTES // 2
MOST_IDS = 1 << 19  # The maximum number of token ids in a call that only decodes.


def check_text(name: str, text: str, most: int = MOST_BYTES) -> str:
    """Return `text`, which is the value of the parameter `name`.

    Raises:
        InvalidParameter: The text has more than `most` bytes.
    """
    size = len(text) if len(text) > most or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidParameter(name, f"may have at most {most} bytes of text, got {size}")
    return text
