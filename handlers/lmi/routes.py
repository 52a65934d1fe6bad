"""LMI's routes: inference, the management of models and adapters, and the form of the front end's errors.

Sources: DJL Serving, `InferenceRequestHandler` and `ManagementRequestHandler`; the documentation of its APIs.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import replace
from functools import partial
from urllib.parse import parse_qs

from handlers.contract import JSON, Call, Head, Reply
from handlers.djl_errors import NO_CACHE, front_end_refusal, front_end_reply
from handlers.lmi.management import adapters, models
from handlers.management import ManagementOperation
from handlers.openapi_schemas import OBJECT
from handlers.route_declarations import MODEL_VERSION, ContractRoutes, InvocationRoute, ManagementRoute

_OF_SAGEMAKER = "/models/{model}/invoke"  # SageMaker calls this path for a model of a multi-model endpoint.
_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_NAME = "model_name"
_NAMING = frozenset({_NAME.encode(), MODEL_VERSION.encode(), _TARGET_MODEL})  # The headers that may name a model.
_SYNCHRONOUS, _TOKEN = b"x-synchronous", b"x-starting-token"  # DJL Serving's asynchronous inference.
_NO_TOKENS = (
    "asynchronous inference (x-synchronous: false, x-starting-token) is not served: leave it out, and the answer has "
    "the result"
)
_SHOWN = 1024  # The maximum number of characters of an unknown path in the error.


def named_model(served: Container[str], head: Head) -> tuple[str | None, str | None]:
    """Return the model and the version that a request's head names, or None for each that it does not name.

    The model and the version are looked up separately, each in these sources in order: the path, the query, the headers
    `model_name` and `model_version`, SageMaker's custom attributes, and, only for the model, SageMaker's Target-Model
    header.
    """
    path, headers = head.path_parameters, head.headers
    if not (path or head.query or head.attributes) and _NAMING.isdisjoint(headers):
        return None, None
    found = {key: headers[key.encode()].decode("latin-1") for key in (_NAME, MODEL_VERSION) if key.encode() in headers}
    for attribute, value in head.attributes:
        found.setdefault(attribute.decode("latin-1"), value.decode("latin-1"))
    asked = parse_qs(head.query.decode("latin-1")) if head.query else {}
    name = path.get("model") or next(iter(asked.get(_NAME, ())), None) or found.get(_NAME)
    # The Target-Model header has a file name, such as `small.tar.gz`. An endpoint for one model may get it, too. So a
    # name that is not served is ignored.
    if not name and _TARGET_MODEL in headers:
        artifact = headers[_TARGET_MODEL].decode("latin-1")
        names = (artifact, artifact.rpartition("/")[2].removesuffix(".tar.gz"))
        name = next((known for known in names if known in served), None)
    version = path.get("version") or next(iter(asked.get(MODEL_VERSION, ())), None) or found.get(MODEL_VERSION)
    return name or None, version


def _refuse_token(head: Head) -> Reply | None:
    """Refuse DJL Serving's asynchronous inference, whose reply is a token with which the client fetches the answer.

    Slipway stores no answer that a client could fetch with such a token.
    """
    for given in (head.headers, dict(head.attributes)):
        if head.method != "OPTIONS" and (_TOKEN in given or given.get(_SYNCHRONOUS, b"true").lower() != b"true"):
            return front_end_reply(400, "BadRequestException", _NO_TOKENS)
    return None


_INVOCATIONS = InvocationRoute(
    path="/invocations",
    counted="/invocations",
    names=named_model,
    form_field=_NAME,
    refuse_head=_refuse_token,
    options=Reply(200, JSON, b"{}\n", NO_CACHE),
)


def _adapter_routes(prefix: str) -> tuple[ManagementRoute, ...]:
    path = f"{prefix}/adapters"
    operations = {
        path: {"GET": adapters.list_adapters, "POST": adapters.register},
        f"{path}/{{adapter}}": {"GET": adapters.describe, "DELETE": adapters.unregister},
        f"{path}/{{adapter}}/update": {"POST": adapters.update},
    }
    return tuple(
        ManagementRoute(
            path=each, operations=table, counted=path, refuse=adapters.refuse, wrong_method=adapters.wrong_method
        )
        for each, table in operations.items()
    )


def _model_routes(collection: str, listed: ManagementOperation) -> tuple[ManagementRoute, ...]:
    of_one = {"GET": models.describe, "PUT": models.scale, "DELETE": models.unregister}
    operations: dict[str, Mapping[str, ManagementOperation]] = {
        collection: {"GET": listed, "POST": models.register},
        f"{collection}/{{model}}": of_one,
        f"{collection}/{{model}}/{{version}}": of_one,
    }
    # The settings for error statuses apply only to inference.
    return tuple(
        ManagementRoute(path=path, operations=table, refuse=front_end_refusal) for path, table in operations.items()
    )


def _not_found(call: Call) -> Reply:
    message = f"Requested resource is not found: {call.path[:_SHOWN]}"
    return front_end_reply(404, "ResourceNotFoundException", message)


def lmi(not_ready: int = 503, internal: int = 500) -> ContractRoutes:
    """Return the contract.

    Args:
        not_ready: The status if the model is not ready (`wlm_error_http_code`).
        internal: The status of internal errors (`server_error_http_code`).
    """
    return ContractRoutes(
        name="lmi",
        routes=(
            _INVOCATIONS,
            replace(_INVOCATIONS, path="/predictions/{model}", counted="/predictions"),
            replace(_INVOCATIONS, path="/predictions/{model}/{version}", counted="/predictions"),
            replace(_INVOCATIONS, path=_OF_SAGEMAKER, counted=_OF_SAGEMAKER, by_attribute=False),
            *_adapter_routes(""),
            *_adapter_routes("/models/{model}"),
            *_model_routes("/models", models.list_models),
            *_model_routes("/workflows", models.list_workflows),
        ),
        refuse=partial(front_end_refusal, not_ready=not_ready, otherwise=internal),
        error=OBJECT,
        wrong_method=models.wrong_method,
        prefixes=("/",),
        not_found=_not_found,
        headers=NO_CACHE,
    )
