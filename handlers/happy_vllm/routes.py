"""The routes of happy_vllm: the generating routes of releases up to 1.1.15, and the routes that generate nothing.

`/v1/completions`, `/v1/chat/completions` and `/v1/models` are vLLM's own routes and belong to OpenAI's contract.
Source: happy_vllm, "Generating endpoints" and "Technical endpoints".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version

import msgspec

from handlers.contract import JSON, Call, Exchange, Reply
from handlers.happy_vllm import tokens
from handlers.happy_vllm.answer import StreamAnswer, WholeAnswer
from handlers.happy_vllm.errors import json_reply, refuse
from handlers.happy_vllm.request import FieldReader, document, read_generation
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import ANYTHING, OBJECT, STRING, Schema, an_answer, an_array, an_object, parameters
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import VllmParameters, read_vllm_parameters, vllm_names
from handlers.route_declarations import (
    ContractRoutes,
    GenerationRoute,
    InfoRoute,
    ModelView,
    Operation,
    adapter_of,
)


class HappyVllmContract:
    """The contract of `/v1/generate` or of `/v1/generate_stream`. The two routes differ only in the answer."""

    def __init__(self, config: ModelConfig, *, stream: bool) -> None:
        self._config, self._stream = config, stream
        self._memo = ParameterMemo[tuple[bool, VllmParameters]]()

    def parse(self, call: Call) -> Exchange:
        values = document(call)
        generation, names = read_generation(values, self._memo), vllm_names(values)
        template = generation.parameters.request
        stream = self._stream and template.beam_search is None  # no token of a beam is final before the search ends
        request = msgspec.structs.replace(
            template,
            request_id=call.request_id,
            prompt=generation.prompt,
            stream=stream,
            tokens_apart=True,  # Each step is a line, even if its text is held back.
            adapter=adapter_of(call, self._config, None),
            **call.steering,
        )
        answer = (StreamAnswer if self._stream else WholeAnswer)(generation)
        return Exchange((request,), answer, names=names)


def readiness(call: Call, views: Sequence[ModelView]) -> Reply:
    """`GET /readiness`: the status is always 200, and the body says whether all models are ready."""
    return json_reply({"ready": "ok" if all(view.state == "ready" for view in views) else "ko"})


def info(call: Call, view: ModelView) -> Reply:
    """`GET /v1/info`."""
    model = view.text()
    return json_reply(
        {
            "application": "happy_vllm",
            "version": version("slipway"),
            "vllm_version": view.engine_version if view.engine == "vllm" else f"{view.engine} {view.engine_version}",
            "model_name": view.config.name,
            "truncation_side": model.texts.truncation_side,
            "max_length": model.max_model_len,
            "extra_information": {},
        }
    )


def live_metrics(call: Call, view: ModelView) -> Reply:
    """`GET /live_metrics`. vLLM no longer swaps sequences to the CPU, so the numbers about swapping are zero."""
    status = view.text().status()
    return json_reply(
        {
            "requests_running": status.running_requests,
            "requests_swapped": 0,
            "requests_pending": status.waiting_requests,
            "gpu_cache_usage": status.kv_cache_usage,
            "cpu_cache_usage": 0.0,
        }
    )


def abort_request(call: Call, views: Sequence[ModelView]) -> Reply:
    """`POST /v1/abort_request`: the reply is null, whether or not a model has such a request."""
    request_id = FieldReader(document(call)).required_string("request_id")
    for view in views:
        view.abort(request_id)
    return json_reply(None)


_TRUE: Schema = {"type": "boolean", "default": True}
_FALSE: Schema = {"type": "boolean", "default": False}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_STRINGS, _IDS = an_array(STRING), an_array(_COUNT)

_REQUEST = an_object(
    {
        "prompt": STRING,
        "prompt_in_response": _FALSE,
        "response_pool": _STRINGS,
        "json_format": OBJECT,
        "json_format_is_json_schema": _FALSE,
        **parameters(lambda reader: read_vllm_parameters({}, reader=reader)),
    },
    "prompt",
    name="HappyVllmRequest",
)
_ANSWER = an_answer(
    "HappyVllmAnswer",
    "For each sequence, the text, the finish reason (None while unfinished) and the token counts. `prompt` is present "
    "only with prompt_in_response.",
    *("responses", "finish_reasons", "usages", "prompt"),
)
_INVALID = an_answer(
    "HappyVllmError", "`detail` is a message, or an array of objects with type, loc and msg.", "detail"
)
_WRONG: Mapping[str, tuple[str, Mapping[str, Schema]]] = {"422": ("The request is wrong", {JSON: _INVALID})}
_REQUIRED = ("text", "token_ids", "tokens", "request_id")


def _generating(summary: str, texts: tuple[str, Mapping[str, Schema]]) -> Operation:
    return Operation(summary=f"{summary} (happy_vllm)", request=_REQUEST, answers={"200": texts, **_WRONG})


def _info(
    path: str, reply_of: Callable[[Call, ModelView], Reply], summary: str, answer: str, **fields: Schema
) -> InfoRoute:
    """Return a route that generates nothing.

    Args:
        answer: The names of the answer's fields, separated by spaces.
        fields: The fields of the body, if the route reads a body.
    """
    return InfoRoute(
        path=path,
        answer=reply_of,
        methods=("POST",) if fields else ("GET",),
        by_attribute=bool(fields),
        about=_operation(summary, answer, **fields),
    )


def _operation(summary: str, answer: str, **fields: Schema) -> Operation:
    shown = {"type": "object", "properties": {name: {} for name in answer.split()}} if answer else ANYTHING
    answers: dict[str, tuple[str, Mapping[str, Schema]]] = {"200": ("The answer", {JSON: shown})}
    if fields:
        answers["400"] = ("On routes below /v2: the request is wrong", {JSON: OBJECT})
        answers["404"] = ("On routes below /v2: the server does not have the model", {JSON: OBJECT})
        answers |= _WRONG
    request = an_object(fields, *(name for name in fields if name in _REQUIRED)) if fields else None
    return Operation(summary=f"{summary} (happy_vllm)", request=request, answers=answers)


_STREAMS = "Stream text: a line for each step, which has the whole text so far"
_TOKENIZED, _DECODED = "tokens_ids tokens_nb tokens_str", "decoded_string tokens_str"
_METRICS = "requests_running requests_swapped requests_pending gpu_cache_usage cpu_cache_usage"
_INFO = "application version vllm_version model_name truncation_side max_length extra_information"
_SHOWN: dict[str, Schema] = {"with_tokens_str": _FALSE, "vanilla": _TRUE}

HAPPY_VLLM = ContractRoutes(
    name="happy_vllm",
    routes=(
        GenerationRoute(
            path="/v1/generate",
            contract=lambda config, _: HappyVllmContract(config, stream=False),
            about=_generating("Generate text", ("The texts", {JSON: _ANSWER})),
        ),
        GenerationRoute(
            path="/v1/generate_stream",
            contract=lambda config, _: HappyVllmContract(config, stream=True),
            about=_generating(_STREAMS, ("Lines of JSON, each a HappyVllmAnswer. The reply has no Content-Type", {})),
        ),
        _info("/v1/tokenizer", tokens.tokenizer, "Token ids of a text", _TOKENIZED, text=STRING, **_SHOWN),
        _info("/v1/decode", tokens.decode, "Text of token ids", _DECODED, token_ids=_IDS, **_SHOWN),
        replace(
            _info(
                "/v2/tokenizer",
                tokens.tokenizer_v2,
                "Token ids of a prompt or a chat, as vLLM answers",
                "count max_model_len tokens",
                model=STRING,
                prompt=STRING,
                messages=an_array(OBJECT),
                add_special_tokens={"type": "boolean"},
                add_generation_prompt=_TRUE,
                continue_final_message=_FALSE,
                tools=an_array(OBJECT),
                chat_template_kwargs=OBJECT,
            ),
            chat=tokens.chat,
        ),
        _info(
            "/v2/decode", tokens.decode_v2, "Text of token ids, as vLLM answers", "prompt", model=STRING, tokens=_IDS
        ),
        _info(
            "/v1/split_text",
            tokens.split,
            "Split a text into chunks that end at separators",
            "split_text",
            text=STRING,
            num_tokens_in_chunk={**_COUNT, "default": tokens.DEFAULT_CHUNK},
            separators={**_STRINGS, "default": tokens.DEFAULT_SEPARATORS},
        ),
        _info(
            "/v1/metadata_text",
            tokens.metadata,
            "Count a text's tokens, and show what truncation drops",
            "tokens_nb truncated_text",
            text=STRING,
            truncation_side=STRING,
            max_length=_COUNT,
        ),
        InfoRoute.of_all(
            "/v1/abort_request",
            abort_request,
            methods=("POST",),
            about=_operation("End a running request", "", request_id=STRING),
        ),
        InfoRoute.of_all(
            "/liveness",
            lambda call, views: json_reply({"alive": "ok"}),
            about=_operation("Whether the server answers", "alive"),
        ),
        InfoRoute.of_all(
            "/readiness", readiness, about=_operation("Whether the model answers; the status is always 200", "ready")
        ),
        _info("/v1/info", info, "The application and its model", _INFO),
        _info("/v1/launch_arguments", lambda call, view: json_reply({}), "The launch arguments; always empty", ""),
        _info("/live_metrics", live_metrics, "Running and waiting requests, and the use of the KV cache", _METRICS),
    ),
    refuse=refuse,
    error=OBJECT,
    wrong_method=lambda _: json_reply({"detail": "Method Not Allowed"}, 405),
    redirects=True,
)
