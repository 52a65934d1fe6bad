"""LMI's inference routes: `/invocations`, `/predictions/<model>` and `/models/<model>/invoke`.

Source: contracts/lmi.md sections 1.2, 1.4 and 1.6.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from urllib.parse import parse_qs

from container.http.endpoint import Endpoint, Scope, Site, Target
from container.http.reply import NO_CACHE
from container.models.registry import Model, ModelNotNamed, Models, NoWorkers
from container.settings.settings import ServerSettings
from handlers.contracts.lmi.body import FormError, form_fields, is_form
from handlers.contracts.lmi.errors import JSON, front_end_reply
from handlers.contracts.protocol import Call, Reply
from handlers.errors import BodyTimeout, BodyTooLarge, NotReady, RequestError, UnknownModel
from handlers.reply import ReplyWriter, Running

_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_NAME, _VERSION = "model_name", "model_version"
_NAME_NEEDED = "Parameter model_name is required:"


@dataclass(frozen=True, slots=True)
class _Named:
    """The model that a call is for, as far as it says so."""

    name: str | None
    version: str | None = None


def invocations(site: Site, route: str) -> Endpoint:
    """An endpoint for one of LMI's inference routes. It takes any method, as LMI does."""
    models = site.models

    def check(scope: Scope, headers: dict[bytes, bytes]) -> Reply | None:
        named = _named(scope.get("path_params") or {}, scope["query_string"], headers, models)
        a_field_may_name_it = not models.single and is_form(headers.get(b"content-type", b"").decode("latin-1"))
        if named.name is None and a_field_may_name_it:
            return None
        found = [models.startup()] if named.name is None else models.versions(named.name, named.version)
        if scope["method"] == "OPTIONS":
            return Reply(200, JSON, b"{}\n")
        if len(found) == 1:
            found[0].service()  # a body that nobody is going to read need not be waited for
        return None

    async def answer(call: Call, writer: ReplyWriter) -> Running | None:
        model = models.startup() if models.single and not _says_more(call) else _chosen(models, call)
        return await model.answer(model.service().invocations, call, writer)

    def refuse(error: RequestError) -> Reply:
        return _refusal(error, site.settings)

    return Endpoint(site, route, [Target(answer, refuse, early=check)], NO_CACHE)


def _refusal(error: RequestError, settings: ServerSettings) -> Reply:
    match error:
        case BodyTooLarge():
            return Reply(413, JSON, b"")
        case BodyTimeout():
            return front_end_reply(408, "BadRequestException", error.message)
        case ModelNotNamed():
            return front_end_reply(400, "BadRequestException", f"{_NAME_NEEDED} {error.message}")
        case UnknownModel():
            return front_end_reply(404, "ModelNotFoundException", error.message)
        case NoWorkers():
            return front_end_reply(503, "WlmShutdownException", error.message)
        case NotReady():
            status = settings.wlm_error_http_code
            return front_end_reply(status, "ServiceUnavailableException", error.message)
        case _:
            status = settings.server_error_http_code
            return front_end_reply(status, "InternalServerException", error.message)


def _says_more(call: Call) -> bool:
    """Whether the call's body may name a model; whatever else does was checked before the body was read."""
    return is_form(call.content_type) and _NAME.encode() in call.body


def _chosen(models: Models, call: Call) -> Model:
    headers = {name.lower().encode("latin-1"): value.encode("latin-1", "replace") for name, value in call.headers}
    query = dict(reversed(call.query))  # the first of several counts
    named = _attributes(headers, models)
    name = call.path_parameters.get("model") or query.get(_NAME) or named.name
    version = call.path_parameters.get("version") or query.get(_VERSION) or named.version
    if name is None and _says_more(call):
        name = _form_field(call)
    return models.startup() if name is None else models.choose(name, version)


def _form_field(call: Call) -> str | None:
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError:
        return None  # the handler says what is wrong with it
    return next((value.decode("utf-8", "replace") for name, value in fields if name == _NAME), None)


def _named(path: dict[str, str], query: bytes, headers: dict[bytes, bytes], served: Container[str]) -> _Named:
    """The model that a call names before its body. Source: contracts/lmi.md section 1.4."""
    asked = parse_qs(query.decode("latin-1")) if query else {}
    named = _attributes(headers, served)
    name = path.get("model") or next(iter(asked.get(_NAME, ())), None) or named.name
    return _Named(name, path.get("version") or next(iter(asked.get(_VERSION, ())), None) or named.version)


def _attributes(headers: dict[bytes, bytes], served: Container[str]) -> _Named:
    """What headers say, or SageMaker's custom attributes, or its Target-Model."""
    found = {key: headers[key.encode()].decode("latin-1") for key in (_NAME, _VERSION) if key.encode() in headers}
    if _CUSTOM_ATTRIBUTES in headers:
        for attribute in headers[_CUSTOM_ATTRIBUTES].split(b";"):
            key, _, value = attribute.partition(b"=")
            found.setdefault(key.strip().decode("latin-1"), value.strip().decode("latin-1"))
    return _Named(found.get(_NAME) or _target_model(headers, served), found.get(_VERSION))


def _target_model(headers: dict[bytes, bytes], served: Container[str]) -> str | None:
    """The model of SageMaker's Target-Model, which names an artifact, such as `small.tar.gz`.

    None where no such model is served: a client may send the header to an endpoint that has but one model, whatever
    that is called. Source: contracts/sagemaker_hosting.md section 3.
    """
    artifact = headers.get(_TARGET_MODEL, b"").decode("latin-1")
    name = artifact.rpartition("/")[2].removesuffix(".tar.gz")
    return next((known for known in (artifact, name) if known in served), None)
