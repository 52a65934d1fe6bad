"""LMI's inference routes: `/invocations`, `/predictions/<model>` and `/models/<model>/invoke`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from urllib.parse import parse_qs

from container.http.refusals import front_end_refusal
from container.http.reply import NO_CACHE
from container.http.request_head import RequestHead
from container.http.route import AppState, HandlerRoute
from container.models.registry import Model
from engines.errors import RequestError
from handlers.contract import Call, Handler, Reply
from handlers.djl_errors import JSON
from handlers.forms import FormError, form_fields, is_form
from handlers.json_cost import off_the_loop
from handlers.service import Service

_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_CUSTOM_ATTRIBUTES = b"x-amzn-sagemaker-custom-attributes"
_NAME, _VERSION = "model_name", "model_version"


class InvocationsRoute(HandlerRoute):
    """One of LMI's inference routes. It takes any method, as LMI does."""

    def __init__(self, state: AppState, path: str) -> None:
        super().__init__(state, path, headers=NO_CACHE, queued=True)

    def refuse(self, error: RequestError) -> Reply:
        settings = self.state.settings
        return front_end_refusal(error, settings.wlm_error_http_code, settings.server_error_http_code)

    def find(self, head: RequestHead) -> Model | Reply | None:
        name, version = self._named(head)
        if name is None and b"form" in head.headers.get(b"content-type", b"").lower():
            return None  # one of its fields may name the model
        return self._chosen(head, name, version)

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        _, version = self._named(head)
        return self._chosen(head, await off_the_loop(call.body, _named_by_form, call), version)

    def handler_of(self, service: Service) -> Handler:
        return service.invocations

    def _named(self, head: RequestHead) -> tuple[str | None, str | None]:
        return named_model(head.path_parameters, head.scope["query_string"], head.headers, self.state.models)

    def _chosen(self, head: RequestHead, name: str | None, version: str | None) -> Model | Reply:
        models = self.state.models
        model = models.startup() if name is None else models.choose(name, version)
        return Reply(200, JSON, b"{}\n") if head.method == "OPTIONS" else model


def _named_by_form(call: Call) -> str | None:
    """Return the model that a field of a form names; None if none does, or the body is no form."""
    if _NAME.encode() not in call.body or not is_form(call.content_type):
        return None
    try:
        fields = form_fields(call.body, call.content_type)
    except FormError:
        return None  # the handler reports the fault
    return next((value.decode("utf-8", "replace") for name, value in fields if name == _NAME), None)


def named_model(
    path: Mapping[str, str], query: bytes, headers: Mapping[bytes, bytes], served: Container[str]
) -> tuple[str | None, str | None]:
    """Return the model and the version that a request's head names; None for a part that it does not name.

    The order is: path, query, the headers `model_name` and `model_version`, SageMaker's custom attributes, SageMaker's
    Target-Model header.

    Args:
        path: The parameters of the path.
        query: The query string.
        headers: The headers, by names in lower case.
        served: The names of the server's models.
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
    """Return the model that SageMaker's Target-Model header names, such as `small.tar.gz`.

    None if the server has no such model. A client may send the header to an endpoint that has only one model.
    """
    name = artifact.rpartition("/")[2].removesuffix(".tar.gz")
    return next((known for known in (artifact, name) if known in served), None)
