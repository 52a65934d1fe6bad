"""LMI's inference routes: `/invocations`, `/predictions/<model>` and `/models/<model>/invoke`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial
from operator import attrgetter
from urllib.parse import parse_qs

from container.http.endpoint import AppState, Endpoint, Scope, front_end_refusal, handed_to
from container.http.reply import NO_CACHE
from container.models.registry import Model
from handlers.contract import Call, Reply
from handlers.djl_errors import JSON
from handlers.forms import FormError, form_fields, is_form
from handlers.json_cost import off_the_loop

_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_NAME, _VERSION = "model_name", "model_version"


def invocations(state: AppState, route: str) -> Endpoint:
    """An endpoint for one of LMI's inference routes. It takes any method, as LMI does."""
    models = state.models

    def find(scope: Scope, headers: dict[bytes, bytes]) -> Model | Reply | None:
        name, version = named_model(scope.get("path_params") or {}, scope["query_string"], headers, models)
        if name is None and b"form" in headers.get(b"content-type", b"").lower():
            return None  # one of its fields may name the model
        return chosen(scope, name, version)

    async def find_by_body(scope: Scope, headers: dict[bytes, bytes], call: Call) -> Model | Reply:
        _, version = named_model(scope.get("path_params") or {}, scope["query_string"], headers, models)
        return chosen(scope, await off_the_loop(call.body, _named_by_form, call), version)

    def chosen(scope: Scope, name: str | None, version: str | None) -> Model | Reply:
        model = models.startup() if name is None else models.choose(name, version)
        return Reply(200, JSON, b"{}\n") if scope["method"] == "OPTIONS" else model

    answer = handed_to(attrgetter("invocations"))
    not_ready, otherwise = state.settings.wlm_error_http_code, state.settings.server_error_http_code
    refuse = partial(front_end_refusal, not_ready=not_ready, otherwise=otherwise)
    return Endpoint(state, route, answer, refuse, find=find, find_by_body=find_by_body, headers=NO_CACHE, queued=True)


def _named_by_form(call: Call) -> str | None:
    """The model that a field of a form names; None if none does, or the body is no form."""
    if _NAME.encode() not in call.body or not is_form(call.content_type):
        return None
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError:
        return None  # the handler says what is wrong with the form
    return next((value.decode("utf-8", "replace") for name, value in fields if name == _NAME), None)


def named_model(
    path: Mapping[str, str], query: bytes, headers: Mapping[bytes, bytes], served: Container[str]
) -> tuple[str | None, str | None]:
    """Name and version of the model that a request's head names; None for what it does not say.

    The path goes before the query, that before the headers `model_name` and `model_version`, those before SageMaker's
    custom attributes, and these before its Target-Model header.
    """
    asked = parse_qs(query.decode("latin-1")) if query else {}
    found = {key: headers[key.encode()].decode("latin-1") for key in (_NAME, _VERSION) if key.encode() in headers}
    if _CUSTOM_ATTRIBUTES in headers:
        for attribute in headers[_CUSTOM_ATTRIBUTES].split(b";"):
            key, _, text = attribute.partition(b"=")
            found.setdefault(key.strip().decode("latin-1"), text.strip().decode("latin-1"))
    name = path.get("model") or next(iter(asked.get(_NAME, ())), None) or found.get(_NAME)
    if not name and _TARGET_MODEL in headers:
        name = _target_model(headers[_TARGET_MODEL].decode("latin-1"), served)
    version = path.get("version") or next(iter(asked.get(_VERSION, ())), None) or found.get(_VERSION)
    return name or None, version


def _target_model(artifact: str, served: Container[str]) -> str | None:
    """The model of SageMaker's Target-Model, such as `small.tar.gz`; None where none is called so: a client may send
    the header to an endpoint that has but one model.
    """
    name = artifact.rpartition("/")[2].removesuffix(".tar.gz")
    return next((known for known in (artifact, name) if known in served), None)
