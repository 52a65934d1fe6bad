"""LMI's inference routes: `/invocations`, `/predictions/<model>` and `/models/<model>/invoke`."""

from __future__ import annotations

from collections.abc import Container, Mapping
from urllib.parse import parse_qs

from container.contract_routes import MODEL_VERSION
from container.custom_attributes import CUSTOM_ATTRIBUTES, attributes_of, is_plain_path, named_route
from container.http.body_limits import Receive
from container.http.refusals import front_end_refusal
from container.http.reply import NO_CACHE, Send
from container.http.request_head import RequestHead, Scope
from container.http.route import AppState, FixedReplyRoute, HandlerRoute, HttpRoute
from container.http.router import Router
from container.models.registry import Model
from engines.errors import RequestError, UnknownModel
from handlers.contract import JSON, Call, Handler, Reply
from handlers.djl_errors import front_end_reply
from handlers.forms import form_text
from handlers.json_cost import off_the_loop
from handlers.service import Service

_ROUTE = "`route` in X-Amzn-SageMaker-Custom-Attributes"
_SHOWN = 200  # Characters of a wrong route in the error.
_OF_SAGEMAKER = "/models/{model}/invoke"  # SageMaker calls it for a model of a multi-model endpoint.
_TARGET_MODEL = b"x-amzn-sagemaker-target-model"
_NAME = "model_name"
_SYNCHRONOUS, _TOKEN = b"x-synchronous", b"x-starting-token"  # DJL Serving's asynchronous inference.
_NO_TOKENS = (
    "asynchronous inference (x-synchronous: false, x-starting-token) is not served: leave it out, and the answer has "
    "the result"
)


class InvocationsRoute(HandlerRoute):
    """One of LMI's inference routes. It takes any method, as LMI does.

    The attribute `route` of SageMaker's custom attributes gives the call to another route. A call that asks for an
    answer by token is refused.
    """

    def __init__(self, state: AppState, path: str, router: Router) -> None:
        """Create the route.

        Args:
            state: The objects that all routes share.
            path: The path in the route table, for counts.
            router: Has the routes that the attribute `route` may name.
        """
        super().__init__(state, path, headers=NO_CACHE, queued=True, by_attribute=path != _OF_SAGEMAKER)
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.chosen(scope)
        if isinstance(route, InvocationsRoute):
            await HandlerRoute.__call__(route, scope, receive, send)
        else:
            await route(scope, receive, send)

    def chosen(self, scope: Scope) -> HttpRoute:
        route = self._attribute_route(scope)
        if isinstance(route, InvocationsRoute) and scope["method"] != "OPTIONS" and _asks_for_token(scope):
            return self._refused(_NO_TOKENS)
        return route

    def _attribute_route(self, scope: Scope) -> HttpRoute:
        named = named_route(dict(scope["headers"]).get(CUSTOM_ATTRIBUTES, b""))
        if named is None:
            return self
        if is_plain_path(named):
            target = {**scope, "path": named.decode("ascii"), "raw_path": named, "path_params": {}}
            route = self._router.find(target)
            if isinstance(route, HttpRoute) and route.by_attribute:
                asked, given = (scope.get("path_params") or {}).get("model"), target["path_params"].get("model")
                if asked and given and asked != given:
                    # SageMaker has chosen the model of a multi-model endpoint, and may have checked the right to it.
                    return self._refused(
                        f"{_ROUTE} must not name another model than {asked}, which the call is for, got {given}"
                    )
                try:
                    target["path_params"] = target["path_params"] or self._model_parameters(scope)
                except UnknownModel as error:
                    return FixedReplyRoute(self.state, self.path, self.refuse(error))
                scope.update(target)
                return route
        return self._refused(
            f"{_ROUTE} must be the path of a POST route that generates or tokenizes, such as /v1/chat/completions, got "
            f"{scope['method']} {named[:_SHOWN].decode('latin-1')}"
        )

    def _refused(self, reason: str) -> HttpRoute:
        return FixedReplyRoute(self.state, self.path, front_end_reply(400, "BadRequestException", reason))

    def _model_parameters(self, scope: Scope) -> dict[str, str]:
        """Return the model and the version that the call names, as parameters of the path of another route.

        Raises:
            UnknownModel: The server has no such model or version.
        """
        name, version = self._named(RequestHead.of(scope, self.state.id_header))
        if name is None:
            return {}
        self.state.models.choose(name, version)
        return {"model": name} | ({} if version is None else {MODEL_VERSION: version})

    def refuse(self, error: RequestError) -> Reply:
        settings = self.state.settings
        return front_end_refusal(error, settings.wlm_error_http_code, settings.server_error_http_code)

    def find(self, head: RequestHead) -> Model | Reply | None:
        name, version = self._named(head)
        if name is None and b"form" in head.headers.get(b"content-type", b"").lower():
            return None  # A field of the form may name the model.
        return self._chosen(head, name, version)

    async def find_by_body(self, head: RequestHead, call: Call) -> Model | Reply:
        _, version = self._named(head)
        name = await off_the_loop(call.body, form_text, call.body, call.content_type, _NAME)
        return self._chosen(head, name, version)

    def handler_of(self, service: Service) -> Handler:
        return service.invocations

    def _named(self, head: RequestHead) -> tuple[str | None, str | None]:
        return named_model(head.path_parameters, head.scope["query_string"], head.headers, self.state.models)

    def _chosen(self, head: RequestHead, name: str | None, version: str | None) -> Model | Reply:
        models = self.state.models
        model = models.startup() if name is None else models.choose(name, version)
        return Reply(200, JSON, b"{}\n") if head.method == "OPTIONS" else model


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
    found = {key: headers[key.encode()].decode("latin-1") for key in (_NAME, MODEL_VERSION) if key.encode() in headers}
    if CUSTOM_ATTRIBUTES in headers:
        for attribute, value in attributes_of(headers[CUSTOM_ATTRIBUTES]):
            found.setdefault(attribute.decode("latin-1"), value.decode("latin-1"))
    name = path.get("model") or next(iter(asked.get(_NAME, ())), None) or found.get(_NAME)
    if not name and _TARGET_MODEL in headers:
        name = _target_model(headers[_TARGET_MODEL].decode("latin-1"), served)
    version = path.get("version") or next(iter(asked.get(MODEL_VERSION, ())), None) or found.get(MODEL_VERSION)
    return name or None, version


def _asks_for_token(scope: Scope) -> bool:
    """Return True if a call asks for a token, with which a later call would fetch the answer. No answer is kept."""
    headers = scope["headers"]
    attributes = [pair for name, value in headers if name == CUSTOM_ATTRIBUTES for pair in attributes_of(value)]
    given = [*headers, *attributes]
    return any(name == _TOKEN or (name == _SYNCHRONOUS and value.lower() != b"true") for name, value in given)


def _target_model(artifact: str, served: Container[str]) -> str | None:
    """Return the model that SageMaker's Target-Model header names, such as `small.tar.gz`.

    None if the server has no such model. A client may send the header to an endpoint that has only one model.
    """
    name = artifact.rpartition("/")[2].removesuffix(".tar.gz")
    return next((known for known in (artifact, name) if known in served), None)
