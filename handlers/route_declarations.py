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
# The kind of models whose calls a route takes. "pooling": models that make vectors or scores in place of text.
KindsOfModels = Literal["all", "generating", "pooling"]
# Stalled: the engine has requests and makes no progress. It may recover.
State = Literal["starting", "ready", "stalled", "failed", "restarting", "draining", "stopped"]


def error_body(message: str, kind: str, code: int, parameter: str | None = None) -> bytes:
    """Return vLLM's error object. `kind` is a name such as "BadRequestError"."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": parameter, "code": code}})


class RenderedChat(msgspec.Struct, frozen=True):
    """The prompt that a chat becomes on `/v1/chat/completions`."""

    token_ids: list[int]
    text: str | None = None  # None if the chat becomes token ids at once.


def is_address(name: str) -> bool:
    """Return True if a name is the URL of a server, and so the name of no model.

    Hugging Face's JavaScript client sends the URL of its endpoint as `model` unless it is given a name.
    """
    return name[:8].lower().startswith(("http://", "https://"))


@dataclass(frozen=True, slots=True)
class ModelView:
    """The state of a model at one moment, for routes that generate nothing."""

    config: ModelConfig
    state: State
    reason: str  # The reason if it has failed or is unhealthy, else empty.
    started_at: float  # The time at which the server was started, in seconds since the epoch.
    loaded: LoadedModel | None  # None until it is loaded, and if a custom handler generates.
    engine: str  # The runtime: "vllm", "dynamic_batch" or "python".
    engine_version: str
    max_requests: int  # Sequences that may run or wait at a time.
    model_aliases: tuple[str, ...]  # Further names of the model, among them the empty one.
    # Ends the call with this request id, the latest of several. Its client gets an aborted answer.
    abort: Callable[[str], None]
    adapters: tuple[Adapter, ...] = ()  # The registered adapters.
    # The prompt of the call's chat, or the reason why it has none. None if `InfoRoute.chat` found no chat.
    rendered: RenderedChat | RequestError | None = None

    def chat(self) -> RenderedChat:
        """Return the prompt of the chat that `InfoRoute.chat` found.

        Raises:
            RequestError: The chat cannot become a prompt.
        """
        assert self.rendered is not None, "`InfoRoute.chat` found no chat"
        if isinstance(self.rendered, RequestError):
            # The traceback of the error itself would hold this object, which holds the error.
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


# The name of a model's version in the head of a call, and as a parameter of the path that such a head leads to.
MODEL_VERSION = "model_version"
NO_ADAPTERS = "cannot be used: this server has no adapters"  # Follows the name of a parameter or header.


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractSetting:
    """The arguments with which a contract is created for a model."""

    config: ModelConfig
    model: LoadedModel

    def adapter_of(self, call: Call, named: str | None) -> str | None:
        """Return the adapter that SageMaker's header names, or else `named`.

        None is the model itself.

        Raises:
            InvalidParameter: The header names an adapter, and the server has none.
        """
        header = adapter_header(call)
        if header is None:
            return named
        if header and not self.config.enable_lora:
            raise InvalidParameter(SAGEMAKER_ADAPTER_IDENTIFIER_HEADER, NO_ADAPTERS)
        return header or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The description of a route, for `/openapi.json` and `/docs`."""

    summary: str
    request: Schema | None = None  # The schema of the body. None if the request has no body.
    request_type: str = JSON
    # For each status its meaning, and the schema of the body by media type. Errors that `ContractRoutes.refuse` words
    # are left out unless they need more words.
    answers: Mapping[str, tuple[str, Mapping[str, Schema]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRoute:
    """A route on which the engine works: it generates text, or makes vectors or scores."""

    path: str  # `{name}` is one segment, `{name:int}` one of digits.
    # Creates the contract for a model. None: the model's handler of OpenAI's API answers (`handlers.openai.handler`).
    contract: Callable[[ContractSetting], Contract] | None = None
    methods: tuple[str, ...] = ("POST",)
    models: KindsOfModels = "all"  # The path's other route takes the calls of the other models.
    with_field: str | None = None  # Takes only bodies with this field. The path's other route takes the rest.
    # Every call needs a place in the queue, and its refusal does not depend on its body.
    queued: bool = True
    own_handler: bool = False  # A custom handler answers the route if the model has one.
    by_attribute: bool = True  # `route` in SageMaker's custom attributes may name it: it infers or tokenizes.
    # Returns the refusal of wrong path parameters, which does not depend on the model's state. None if they are right.
    refuse_path: Callable[[Mapping[str, str], ModelConfig], Reply | None] | None = None
    about: Operation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoRoute:
    """A route that describes the model, in any state, or works on text without generating any."""

    path: str
    # Returns the reply. It may raise ContractError, which holds a reply, and RequestError, which
    # `ContractRoutes.refuse` words. It is called in a thread if the body is long.
    answer: Callable[[Call, ModelView], Reply]
    # Returns the chat of a call as a call of `/v1/chat/completions`, or None. It is rendered before `answer` is called.
    # It may raise the same errors, and is called in the same way.
    chat: Callable[[Call, ModelView], Call | None] | None = None
    # Returns the reply if the server has several models or none. None if the route is about one model.
    answer_all: Callable[[Call, Sequence[ModelView]], Reply] | None = None
    methods: tuple[str, ...] = ("GET",)
    models: KindsOfModels = (
        "all"  # The path's other route takes the calls of the other models, and of models that load.
    )
    with_field: str | None = None  # Takes only bodies with this field. The path's other route takes the rest.
    by_attribute: bool = False  # `route` in SageMaker's custom attributes may name it: it only works on a text.
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
    """A route for the handler of `/invocations`. It takes any method, and its head may name the model."""

    methods: ClassVar[tuple[str, ...]] = ("*",)
    path: str
    counted: str  # The path under which calls are counted.
    # Returns the names of the model and the version in the head of a call; None for a part that it does not name. The
    # first argument has the names of the server's models.
    names: Callable[[Container[str], Head], tuple[str | None, str | None]]
    form_field: str  # The field of a form that names the model if the head does not.
    refuse_head: Callable[[Head], Reply | None]  # Returns the refusal of a wrong head. None if it is right.
    options: Reply  # To OPTIONS, if the server has the model.
    by_attribute: bool = True  # `route` in SageMaker's custom attributes may name it.


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagementRoute:
    """A route that manages models or adapters. Browsers may not call it for other sites."""

    path: str
    operations: Mapping[str, ManagementOperation]  # By method.
    counted: str | None = None  # The path under which calls are counted, if it is another.
    refuse: Callable[[RequestError], Reply] | None = None  # The form of its errors, if it is not the contract's.
    # Replies to all other methods, in place of `ContractRoutes.wrong_method`.
    wrong_method: Callable[[Call], Reply] | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(self.operations) if self.wrong_method is None else ("*",)


Route = GenerationRoute | InfoRoute | InvocationRoute | ManagementRoute


def takes(route: Route, *, pooling: bool) -> bool:
    """Return True if a route takes calls of models that pool, or of models that generate."""
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
    # Returns the reply if the path has no such method. The server adds the header `allow`.
    wrong_method: Callable[[Call], Reply]
    body_names_model: bool = False  # Bodies may name the model in `model`.
    id_header: str | None = None  # Its name for the header with the request's id, which replies have besides.
    prefixes: tuple[str, ...] = ()  # Unknown paths below these belong to the contract too.
    not_found: Callable[[Call], Reply] | None = None  # Returns the reply to such a path.
    headers: tuple[tuple[str, str], ...] = ()  # Of every reply that its routes make.
    redirects: bool = False  # A path with slashes at its end is redirected to the path without them, as by FastAPI.


# The largest text in UTF-8 that is only tokenized: about 300,000 tokens of English. A tokenizer takes up to 200 bytes
# of memory and 2 µs for each byte. On generating routes the model's context bounds the prompt.
MOST_BYTES = 1 << 20
# The same if the answer has the position of each token, which takes more memory and twice the time.
PLACED_BYTES = MOST_BYTES // 2
MOST_IDS = 1 << 19  # Token ids that are only decoded, in one call of the tokenizer.


def check_text(name: str, text: str, most: int = MOST_BYTES) -> str:
    """Return a text that came in the parameter `name`.

    Raises:
        InvalidParameter: The text has more than `most` bytes.
    """
    size = len(text) if len(text) > most or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if size > most:
        raise InvalidParameter(name, f"may have at most {most} bytes of text, got {size}")
    return text
