"""LMI's routes: `/invocations` and `/predictions/<model>`. Source: contracts/lmi.md sections 1.2, 1.4 and 1.6."""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from urllib.parse import parse_qs

from container.endpoint import Endpoint, Scope, Site, Target
from container.response_headers import NO_CACHE
from container.settings import ServerSettings
from handlers.contracts.lmi.errors import JSON, front_end_error
from handlers.contracts.protocol import Call, Reply
from handlers.errors import BodyTooLarge, NotReady, RequestError, UnknownModel
from handlers.reply import ReplyWriter, Running

_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"


def invocations(site: Site, route: str) -> Endpoint:
    """An endpoint for one of LMI's inference routes. It takes any method, as LMI does."""
    model = site.lifecycle.model.name

    def check(scope: Scope, headers: dict[bytes, bytes]) -> Reply | None:
        name = scope.get("path_params", {}).get("model") or _named_model(scope, headers, frozenset({model}))
        if name is not None and name != model:
            raise UnknownModel(name, f"Model not found: {name}. This server has the model {model}.")
        if scope["method"] == "OPTIONS":
            return Reply(200, JSON, b"{}\n")
        site.service()  # a body that nobody is going to read need not be waited for
        return None

    def answer(call: Call, writer: ReplyWriter) -> Awaitable[Running]:
        return site.service().invocations.handle(call, writer)

    def refuse(error: RequestError) -> Reply:
        return _refusal(error, site.settings)

    return Endpoint(site, route, [Target(answer, refuse, early=check)], NO_CACHE)


def _refusal(error: RequestError, settings: ServerSettings) -> Reply:
    match error:
        case BodyTooLarge():
            return Reply(413, JSON, b"")
        case UnknownModel():
            return Reply(404, JSON, front_end_error(404, "ModelNotFoundException", error.message))
        case NotReady():
            status = settings.wlm_error_http_code
            return Reply(status, JSON, front_end_error(status, "ServiceUnavailableException", error.message))
        case _:
            status = settings.server_error_http_code
            return Reply(status, JSON, front_end_error(status, "InternalServerException", error.message))


def _named_model(scope: Scope, headers: dict[bytes, bytes], served: Collection[str]) -> str | None:
    """The model that a call to /invocations names. Source: contracts/lmi.md section 1.4."""
    query: bytes = scope["query_string"]
    if query and (names := parse_qs(query.decode("latin-1")).get("model_name")):
        return names[0]
    if b"model_name" in headers:
        return headers[b"model_name"].decode("latin-1")
    for attribute in headers.get(_CUSTOM_ATTRIBUTES, b"").split(b";"):
        key, _, value = attribute.partition(b"=")
        if key.strip() == b"model_name":
            return value.strip().decode("latin-1")
    return _target_model(headers, served)


def _target_model(headers: dict[bytes, bytes], served: Collection[str]) -> str | None:
    """The model of SageMaker's Target-Model, which names an artifact, such as `small.tar.gz`.

    None where no such model is served: a client may send the header to an endpoint that has but one model, whatever
    that is called. Source: contracts/sagemaker_hosting.md section 3.
    """
    artifact = headers.get(_TARGET_MODEL, b"").decode("latin-1")
    name = artifact.rpartition("/")[2].removesuffix(".tar.gz")
    return next((known for known in (artifact, name) if known in served), None)
