"""The routes of NVIDIA's Triton Inference Server: its generate extension, and KServe's routes.

Triton's clients call KServe's routes before they generate.

Source: Triton 2.68, "Generate Extension".
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from engines.errors import SHOWN, InvalidParameter
from engines.loaded_model import LoadedModel
from handlers.contract import JSON, Answer, Call, Contract, Exchange, Reply
from handlers.model_config import ModelConfig
from handlers.openapi_schemas import OBJECT, STRING, Schema, an_answer, an_array, an_object, parameters
from handlers.parsing.parameter_memo import ParameterMemo
from handlers.parsing.vllm_parameters import read_vllm_parameters
from handlers.route_declarations import ContractRoutes, GenerationRoute, InfoRoute, Operation, Route, adapter_of
from handlers.triton import metadata as model
from handlers.triton.answer import CollectedAnswer, EventAnswer
from handlers.triton.embeddings import GeneratedEmbeddingContract, InferContract
from handlers.triton.errors import SeveralResponses, TritonRefusal, error_reply, missing_model, refusal
from handlers.triton.request import TENSORRT_LLM_INPUTS, VLLM_INPUTS, TritonRequest, read_request


class TritonContract:
    """The contract of `/generate` or `/generate_stream` for one model."""

    def __init__(self, config: ModelConfig, loaded: LoadedModel, *, events: bool) -> None:
        """Create the contract.

        Args:
            events: If True, the answer consists of server-sent events: one event for each step of the engine if the
                request sets `stream`, otherwise one event with the whole answer.
        """
        self._config, self._loaded, self._events = config, loaded, events
        self._memo = ParameterMemo[TritonRequest]()

    def parse(self, call: Call) -> Exchange:
        encoding = (call.header("Content-Encoding") or "").strip().lower()
        if encoding not in ("", "identity"):
            raise TritonRefusal(
                f"Content-Encoding '{encoding[:SHOWN]}' is not supported; send the body as it is (identity)"
            )
        request = read_request(call.body, self._config, self._loaded, self._memo)
        if request.stream and request.vllm.request.sequences > 1 and not self._events:
            raise SeveralResponses
        most = self._loaded.max_top_tokens
        if (request.vllm.logprobs or 0) > most:
            raise InvalidParameter("logprobs", f"must be at most {most}, got {request.vllm.logprobs}")
        model = self._config.name
        if request.stream and self._events:
            answer: Answer = EventAnswer(model, request)
        else:
            answer = CollectedAnswer(model, request, events=self._events)
        notes = (f"parameters without effect: {', '.join(request.ignored)}",) if request.ignored else ()
        adapter = adapter_of(call, self._config, request.adapter)
        return Exchange((request.for_engine(call, adapter),), answer, notes, request.images, request.names)


EVENTS = "text/event-stream"
_SCALARS = ("string", "integer", "number", "boolean")
_KINDS: dict[str, Schema] = {
    "text": STRING,
    "texts": {"type": ["string", "array"], "items": STRING},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer"},
}


def _in_parameters(schema: Schema) -> Schema:
    """Return the schema of a vLLM parameter as a member of `parameters`.

    `parameters` holds only scalars, so arrays and objects are given as text.
    """
    if schema["type"] in _SCALARS:
        return schema
    return STRING if "string" in schema["type"] else {**STRING, "contentMediaType": JSON}


_SAMPLING = {
    name: _in_parameters(schema)
    for name, schema in parameters(lambda reader: read_vllm_parameters({}, reader)).items()
    if name not in TENSORRT_LLM_INPUTS
}
_BODY = an_object(
    {
        "id": STRING,
        **{name: _KINDS[kind] for name, kind in (VLLM_INPUTS | TENSORRT_LLM_INPUTS).items()},
        "parameters": an_object(
            _SAMPLING,
            additionalProperties={"type": _SCALARS},
            description="Sampling parameters with vLLM's names. The body may also have them next to `parameters`.",
        ),
    },
    "text_input",
    name="TritonRequest",
)
_RESPONSE = an_answer(
    "TritonResponse",
    "`text_output` is the text, or in a stream the new part of the text. With n above 1, outputs are arrays. The "
    "inputs whose names begin with return_ add the other fields.",
    *("id", "model_name", "model_version", "text_output", "finish_reason", "cumulative_logprob", "logprobs"),
    *("num_input_tokens", "num_output_tokens", "cum_log_probs", "output_log_probs"),
)
_ERROR = an_answer("TritonError", "A message.", "error")
_INDEX = an_object({"ready": {"type": "boolean", "default": False, "description": "List only models that are ready."}})


def _about(summary: str, answer: Schema | None = OBJECT, kind: str = JSON, request: Schema | None = None) -> Operation:
    """Describe a route for the API description.

    Args:
        answer: The schema of the reply's body. None for an empty body.
    """
    return Operation(summary=summary, request=request, answers={"200": (summary, {kind: answer} if answer else {})})


def _probe(question: str) -> Operation:
    return Operation(summary=question, answers={"200": ("Yes", {}), "400": ("No", {JSON: {}})})


_INFER = Operation(summary="Vectors of texts, as tensors; only for embedding models (KServe)")
_MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version:int}")


def _of_model(path: str, tell: model.Tell, about: Operation, method: str = "GET") -> tuple[InfoRoute, ...]:
    return tuple(InfoRoute(path=prefix + path, answer=tell, methods=(method,), about=about) for prefix in _MODEL_PATHS)


def _generates(path: str, summary: str, kind: str) -> tuple[GenerationRoute, ...]:
    about = _about(summary, _RESPONSE, kind, _BODY)
    contract = partial(_contract, events=kind == EVENTS)
    return tuple(
        GenerationRoute(path=prefix + path, contract=contract, refuse_path=missing_model, about=about)
        for prefix in _MODEL_PATHS
    )


def _contract(config: ModelConfig, loaded: LoadedModel, *, events: bool) -> Contract:
    if loaded.pooling is not None:
        return GeneratedEmbeddingContract(config, loaded, events=events)
    return TritonContract(config, loaded, events=events)


_ROUTES: tuple[Route, ...] = (
    *_generates("/generate", "Generate text (Triton)", JSON),
    *_generates("/generate_stream", "Generate text as server-sent events, one for each response (Triton)", EVENTS),
    InfoRoute.of_all("/v2", model.server_metadata, about=_about("Server metadata (KServe)")),
    InfoRoute.of_all("/v2/health/live", model.live, about=_probe("Does the server run? (KServe)")),
    InfoRoute.of_all("/v2/health/ready", model.ready, about=_probe("Is the server ready? (KServe)")),
    InfoRoute.of_all("/v2/models/stats", model.statistics, about=_about("Statistics of all models (Triton)")),
    *_of_model("", model.metadata, _about("Model metadata (KServe)")),
    *_of_model("/ready", model.model_ready, _probe("Is the model ready? (KServe)")),
    *_of_model("/config", model.configuration, _about("Model configuration (Triton)")),
    *_of_model("/stats", model.model_statistics, _about("Statistics of the model (Triton)")),
    *(
        replace(route, models="generating", by_attribute=True)
        for route in _of_model("/infer", model.infer, _INFER, "POST")
    ),
    *(
        GenerationRoute(path=f"{prefix}/infer", contract=InferContract, models="pooling", refuse_path=missing_model)
        for prefix in _MODEL_PATHS
    ),
    *(
        InfoRoute.of_all(
            path,
            model.repository_index,
            methods=("POST",),
            about=_about("Models of this server (Triton)", an_array(OBJECT), request=_INDEX),
        )
        for path in ("/v2/repository/index", "/v2/repository/{repository}/index")
    ),
    *(
        InfoRoute.of_all(
            f"/v2/repository/{{repository}}/models/{{name}}/{action}",
            model.of_one_repository,
            methods=("POST",),
            about=Operation(
                summary=f"{action} a model of one repository; always refused (Triton)".capitalize(),
                answers={"501": ("It is not supported", {JSON: _ERROR})},
            ),
        )
        for action in ("load", "unload")
    ),
    InfoRoute(
        path="/v2/repository/models/{model}/load",
        answer=model.load,
        methods=("POST",),
        about=_about("Load a model; succeeds only for a model that is already served (Triton)", None),
    ),
    InfoRoute(
        path="/v2/repository/models/{model}/unload",
        answer=model.unload,
        methods=("POST",),
        about=_about("Unload a model; refused for a model that is served (Triton)", None),
    ),
)

TRITON = ContractRoutes(
    name="triton",
    routes=_ROUTES,
    refuse=refusal,
    error=_ERROR,
    wrong_method=lambda _: error_reply(405, "Method Not Allowed"),
    prefixes=("/v2/",),
    not_found=lambda _: Reply(404, "text/plain", b'{"error":"Not Found"}'),
)
