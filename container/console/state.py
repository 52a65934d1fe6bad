"""`/console/state`: what the page shows of the server, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import msgspec

from container.health import ping
from container.http.endpoint import AppState
from container.models.registry import Model
from container.settings.report import report_object
from container.settings.settings import ServerReport
from container.settings.values import masked


class AdapterShown(msgspec.Struct, frozen=True):
    """A registered adapter."""

    name: str
    src: str | None
    """None where the management API has an address of its own, which alone says so."""
    pinned: bool


class ModelShown(msgspec.Struct, frozen=True):
    """One model at this moment."""

    name: str
    version: str | None
    names: tuple[str, ...]
    """What OpenAI's clients call it."""
    state: str
    reason: str
    engine: str
    """"vllm", "dynamic_batch" or "python"."""
    engine_version: str
    model_id: str
    contract: str
    """Whose body `/invocations` takes: "rolling batch", "asynchronous", "dynamic batch" or "handler"."""
    tgi_compat: bool
    context: int | None
    """Tokens of prompt and answer together; None until it is loaded."""
    chat: bool
    """It has a chat template."""
    startup: Mapping[str, float]
    """Seconds of each phase."""
    adapters: tuple[AdapterShown, ...]
    settings: Mapping[str, Any] | None
    """What `slipway config --json` prints; None where the management API has an address of its own."""


class Health(msgspec.Struct, frozen=True):
    """`/ping`'s answer. It is here as well since a browser reports each answer that is not 2xx as an error."""

    status: int
    models: Mapping[str, Mapping[str, str]]


class ConsoleState(msgspec.Struct, frozen=True):
    """The document."""

    version: str
    health: Health
    models: tuple[ModelShown, ...]
    single: bool
    """The server started with one model, and calls need not name it."""
    settings: Mapping[str, Any] | None
    """The server's, where it has not exactly one model, whose report has them otherwise."""
    management: bool
    """The listener that was asked serves the management API."""
    endpoints: tuple[str, ...]
    """SageMaker's endpoints that the container itself serves."""


def console_state(
    state: AppState, report: ServerReport | None, endpoints: tuple[str, ...], *, management: bool
) -> bytes:
    """The document as JSON. Without `management`: less what only callers of the management API are to see."""
    health = ping(state.models, state.settings, state.error_rates)
    return msgspec.json.encode(
        ConsoleState(
            version=version("slipway"),
            health=Health(health.status, msgspec.json.decode(health.body)),
            models=tuple(_model(model, management) for model in state.models),
            single=state.models.single,
            settings=report_object(report) if report is not None and management else None,
            management=management,
            endpoints=endpoints,
        )
    )


def _model(model: Model, management: bool) -> ModelShown:
    view = model.lifecycle.view()
    settings, loaded = view.settings, view.loaded
    return ModelShown(
        name=model.name,
        version=model.version,
        names=settings.public_names,
        state=view.state,
        reason=view.reason,
        engine=view.engine,
        engine_version=view.engine_version,
        model_id=settings.model_id,
        contract=_contract(model),
        tgi_compat=settings.tgi_compat,
        context=loaded.max_model_len if loaded is not None else None,
        chat=loaded is not None and loaded.texts.has_chat_template,
        startup=model.lifecycle.startup_times.seconds,
        adapters=tuple(
            AdapterShown(adapter.name, masked("src", adapter.src) if management else None, adapter.pin)
            for adapter in view.adapters
        ),
        settings=report_object(model.lifecycle.settings) if management else None,
    )


def _contract(model: Model) -> str:
    settings = model.lifecycle.model
    if settings.handler is not None:
        return "handler"
    if settings.rolling_batch == "disable":
        return "dynamic batch"
    return "asynchronous" if settings.async_mode else "rolling batch"
