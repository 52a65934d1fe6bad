"""The contract and the routes of TGI, Hugging Face's Text Generation Inference.

Source: TGI's router 3.3, `src/server.rs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import msgspec

from engines.errors import InvalidRequest
from engines.loaded_model import LoadedModel
from handlers.answers.token_answer import without
from handlers.contract import JSON, Call, Contract, ContractError, Exchange, Reply
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, struct
from handlers.parsing.axum import notes_of_unknown, read_request
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.route_declarations import (
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    KindsOfModels,
    Operation,
    adapter_of,
)
from handlers.tgi.answer import DETAILS, FORM, IDLE_COMMENT, LAST, OTHER, StreamAnswer, WholeAnswer, stream_headers
from handlers.tgi.errors import EVENTS, refuse, refuse_stream
from handlers.tgi.images import with_marks
from handlers.tgi.info import health, info
from handlers.tgi.request import TgiParameters, TgiRequest, unread_names, validate
from handlers.tgi.tokenize import ChatRequest, chat, chat_tokenize, tokenize

_NO_IMAGES: tuple[str, ...] = ()
# TGI's names for the engine's parameters, for error messages. A stop text that is a special token becomes an item of
# `stop_token_ids`.
_NAMES = {"adapter": "adapter_id", "stop_token_ids": "stop"}


class TgiContract:
    """Parses the bodies of /, /generate or /generate_stream for one model."""

    def __init__(self, config: ModelConfig, loaded: LoadedModel, *, streams: bool | None) -> None:
        """Create the contract of a route.

        Args:
            config: The settings of the model.
            loaded: The model.
            streams: True if the route streams its answers. None for the route /, where the body decides. On that route,
                an answer that is not streamed is an array, and by default texts begin with the prompt.
        """
        self._config, self._loaded, self._streams = config, loaded, streams
        self._memo = ParameterMemo[TgiParameters]()
        self._image_mark = loaded.texts.image_mark
        special_texts = {token_id: text for text, token_id in loaded.texts.special_tokens.items()}
        self._form = msgspec.structs.replace(FORM, special_texts=special_texts)

    def parse(self, call: Call) -> Exchange:
        body, document = read_request(call, TgiRequest)
        streams = bool(body.stream) if self._streams is None else self._streams
        try:
            notes = notes_of_unknown(unread_names(document), strict=self._config.strict_parameters)
            key = msgspec.json.encode((streams, body.parameters))
            if (known := self._memo.get(key)) is not None and body.inputs:
                parameters = known
            else:
                parameters = validate(body.inputs, body.parameters, self._config, self._loaded, streams=streams)
                self._memo.keep(key, parameters)
            prompt, images = body.inputs, _NO_IMAGES
            if self._image_mark is not None:
                prompt, images = with_marks(prompt, self._image_mark)
            adapter = adapter_of(call, self._config, parameters.request.adapter)
        except InvalidRequest as error:
            if not streams:
                raise
            headers = stream_headers(self._config.rolling_batch, len(body.inputs))
            raise ContractError(refuse_stream(error, headers), error.message) from None
        candidates = [parameters] * parameters.best_of
        if parameters.details:
            candidates = [parameters.seeded() for _ in candidates]
        requests = tuple(
            msgspec.structs.replace(
                candidate.request,
                request_id=call.request_id if parameters.best_of == 1 else f"{call.request_id}-{place}",
                prompt=prompt,
                adapter=adapter,
                **call.steering,
            )
            for place, candidate in enumerate(candidates)
        )
        full_text = body.parameters.return_full_text if body.parameters is not None else None
        left_out = () if parameters.top_tokens else ("top_tokens",)
        form = msgspec.structs.replace(
            self._form,
            details=without(LAST if streams else DETAILS, left_out) if parameters.details else (),
            others=without(OTHER, left_out),
            full_text=self._streams is None if full_text is None else full_text,
        )
        seeds = [candidate.shown_seed for candidate in candidates]
        compute_type = self._config.rolling_batch
        if streams:
            answer = StreamAnswer(form, body.inputs, seeds[0], compute_type)
            return Exchange(requests, answer, notes, images, _NAMES, IDLE_COMMENT)
        in_array = self._streams is None
        whole = WholeAnswer(form, body.inputs, seeds, in_array=in_array, compute_type=compute_type)
        return Exchange(requests, whole, notes, images, _NAMES)


_BODY = struct(TgiRequest, "TgiRequest")
_ANSWER = an_answer(
    "TgiAnswer",
    "`details`, if the request asks for them: finish_reason, generated_tokens, seed, prefill, tokens, top_tokens, "
    "best_of_sequences.",
    *("generated_text", "details"),
)
_EVENT = an_answer(
    "TgiEvent",
    "An event for each token, with its id, text, logprob and special. The last event has generated_text and details.",
    *("index", "token", "top_tokens", "generated_text", "details"),
)
_TOKENS = an_array(
    an_answer("TgiToken", "A token, and its position in the bytes of the text.", "id", "text", "start", "stop")
)
_ERROR = an_answer("TgiError", "A message, and the kind of the error.", "error", "error_type")
# The replies to bodies that cannot be read, in addition to the replies of `refuse`. 422 may be plain text (declared
# here) or JSON (from `refuse`).
_UNREADABLE: Mapping[str, tuple[str, Mapping[str, Schema]]] = {
    "400": ("The body is not JSON", {"text/plain": STRING}),
    "415": ("The content type is not application/json", {"text/plain": STRING}),
    "422": (
        "A parameter is wrong, the prompt is too long, or the chat template refuses the messages",
        {"text/plain": STRING},
    ),
}


def _operation(summary: str, answer: Mapping[str, Schema], request: Schema | None = None) -> Operation:
    """Return the description of a route.

    Args:
        answer: The schema of the answer, keyed by media type.
        request: The schema of the body.
    """
    answers: dict[str, tuple[str, Mapping[str, Schema]]] = {"200": (summary, answer)}
    if request is not None:
        answers |= _UNREADABLE
    return Operation(summary=f"{summary} (TGI)", request=request, answers=answers)


def _generation_route(
    path: str,
    contract: Callable[[ModelConfig, LoadedModel], Contract],
    summary: str,
    answer: Mapping[str, Schema],
    *,
    queued: bool = True,
    models: KindsOfModels = "all",
) -> GenerationRoute:
    about = _operation(summary, answer, _BODY)
    return GenerationRoute(path=path, contract=contract, queued=queued, models=models, about=about)


_HEALTH = Operation(
    summary="Health (TGI)", answers={"200": ("Health", {}), "503": ("A model is not ready", {JSON: _ERROR})}
)

TGI = ContractRoutes(
    name="tgi",
    routes=(
        _generation_route(
            "/",
            partial(TgiContract, streams=None),
            "Generate text; with `stream`, as events",
            {JSON: an_array(_ANSWER), EVENTS: _EVENT},
            queued=False,  # The body decides whether a refusal is a JSON object or an event.
            models="generating",
        ),
        _generation_route("/generate", partial(TgiContract, streams=False), "Generate text", {JSON: _ANSWER}),
        _generation_route(
            "/generate_stream",
            partial(TgiContract, streams=True),
            "Stream text, an event for each token; errors are events as well",
            {EVENTS: _EVENT},
            queued=False,  # A refusal is an event, and its headers contain the length of the body's `inputs`.
        ),
        InfoRoute.of_all("/", health, methods=("GET", "HEAD"), about=_HEALTH, models="generating"),
        InfoRoute.of_all("/health", health, methods=("GET", "HEAD"), about=_HEALTH, models="generating"),
        InfoRoute(
            path="/info",
            answer=info,
            models="generating",
            about=_operation("The model and its limits", {JSON: OBJECT}),
        ),
        InfoRoute(
            path="/tokenize",
            answer=tokenize,
            methods=("POST",),
            models="generating",
            with_field="inputs",
            by_attribute=True,
            about=_operation("Tokens of a text", {JSON: _TOKENS}, _BODY),
        ),
        InfoRoute(
            path="/chat_tokenize",
            chat=chat,
            answer=chat_tokenize,
            methods=("POST",),
            by_attribute=True,
            about=_operation(
                "Prompt and tokens of a chat",
                {JSON: an_object({"tokenize_response": _TOKENS, "templated_text": STRING})},
                struct(ChatRequest, "TgiChat"),
            ),
        ),
    ),
    refuse=refuse,
    error=_ERROR,
    wrong_method=lambda _: Reply(405, "", b""),  # axum, the web framework of TGI, sends the same reply.
)
