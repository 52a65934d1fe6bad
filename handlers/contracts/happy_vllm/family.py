"""happy_vllm's clients: the generating routes of releases up to 1.1.15, and the routes beside OpenAI's.

`/v1/completions`, `/v1/chat/completions` and `/v1/models` are vLLM's own and belong to the OpenAI family.
Source: happy_vllm, "Generating endpoints" and "Technical endpoints".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import msgspec

from handlers.contracts.family import ContractSetting, Family, Generates, ModelView, Tells
from handlers.contracts.happy_vllm import openapi as about
from handlers.contracts.happy_vllm import tokens
from handlers.contracts.happy_vllm.answer import StreamAnswer, WholeAnswer
from handlers.contracts.happy_vllm.errors import JSON, refuse, wrong_method
from handlers.contracts.happy_vllm.request import document, read_generation, required_string
from handlers.contracts.protocol import Call, ContractError, Exchange, Reply
from handlers.errors import InvalidParameter, RequestError


class HappyVllmContract:
    """`/v1/generate` or `/v1/generate_stream`; they differ in the answer alone."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream

    def parse(self, call: Call) -> Exchange:
        values = document(call)
        try:
            generation = read_generation(values)
        except InvalidParameter as error:
            raise ContractError(refuse(error), error.message) from None
        requests = (generation.request(call.request_id, self._stream),)
        if not self._stream:
            return Exchange(requests, WholeAnswer(generation))
        answer = StreamAnswer(generation)
        return Exchange(requests, answer, cumulative=answer)

    def refusal(self, error: RequestError) -> Reply:
        return refuse(error)


def liveness(call: Call, views: Sequence[ModelView]) -> Reply:
    """`GET /liveness`: whether the process answers."""
    return _reply({"alive": "ok"})


def readiness(call: Call, views: Sequence[ModelView]) -> Reply:
    """`GET /readiness`: always 200; the body says whether all models answer."""
    return _reply({"ready": "ok" if all(view.state == "ready" for view in views) else "ko"})


def info(call: Call, view: ModelView) -> Reply:
    """`GET /v1/info`."""
    model = view.text()
    return _reply(
        {
            "application": "happy_vllm",
            "version": version("slipway"),
            "vllm_version": view.engine_version if view.engine == "vllm" else f"{view.engine} {view.engine_version}",
            "model_name": view.settings.name,
            "truncation_side": model.texts.truncation_side,
            "max_length": model.max_model_len,
            "extra_information": {},
        }
    )


def launch_arguments(call: Call, view: ModelView) -> Reply:
    """`GET /v1/launch_arguments`: empty, as it is in happy_vllm unless it is told to show them."""
    return _reply({})


def live_metrics(call: Call, view: ModelView) -> Reply:
    """`GET /live_metrics`. vLLM no longer swaps sequences to the CPU, so what counts that is zero."""
    status = view.text().status()
    return _reply(
        {
            "requests_running": status.running_requests,
            "requests_swapped": 0,
            "requests_pending": status.waiting_requests,
            "gpu_cache_usage": status.kv_cache_usage,
            "cpu_cache_usage": 0.0,
        }
    )


def abort_request(call: Call, view: ModelView) -> Reply:
    """`POST /v1/abort_request`: null, whether or not there is such a request."""
    view.abort(required_string(document(call), "request_id"))
    return _reply(None)


def _reply(answer: dict[str, Any] | None) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(answer))


def _contract(setting: ContractSetting, *, stream: bool) -> HappyVllmContract:
    return HappyVllmContract(stream=stream)


_POST = ("POST",)

HAPPY_VLLM = Family(
    name="happy_vllm",
    routes=(
        Generates(path="/v1/generate", contract=partial(_contract, stream=False), about=about.GENERATE),
        Generates(path="/v1/generate_stream", contract=partial(_contract, stream=True), about=about.GENERATE_STREAM),
        Tells(path="/v1/tokenizer", tell=tokens.tokenizer, methods=_POST, about=about.TOKENIZER),
        Tells(path="/v1/decode", tell=tokens.decode, methods=_POST, about=about.DECODE),
        Tells(path="/v2/tokenizer", tell=tokens.tokenizer_v2, methods=_POST, about=about.TOKENIZER_V2),
        Tells(path="/v2/decode", tell=tokens.decode_v2, methods=_POST, about=about.DECODE_V2),
        Tells(path="/v1/split_text", tell=tokens.split, methods=_POST, about=about.SPLIT_TEXT),
        Tells(path="/v1/metadata_text", tell=tokens.metadata, methods=_POST, about=about.METADATA_TEXT),
        Tells(path="/v1/abort_request", tell=abort_request, methods=_POST, about=about.ABORT_REQUEST),
        Tells.of_all("/liveness", liveness, about=about.LIVENESS),
        Tells.of_all("/readiness", readiness, about=about.READINESS),
        Tells(path="/v1/info", tell=info, about=about.INFO),
        Tells(path="/v1/launch_arguments", tell=launch_arguments, about=about.LAUNCH_ARGUMENTS),
        Tells(path="/live_metrics", tell=live_metrics, about=about.LIVE_METRICS),
    ),
    refuse=refuse,
    wrong_method=wrong_method,
)
