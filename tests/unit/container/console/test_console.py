"""The console's routes over ASGI: what they show to whom. The page can call no other server."""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from container.app import create_app
from container.console.page import DIRECTORY
from container.http.router import Mount
from container.models.life_cycle import Lifecycle
from container.models.registration import Registrar
from container.models.registry import EngineRestart, Models
from container.settings import server as server_module
from container.settings.load import load_startup
from container.settings.settings import Settings
from engines.adapters import Adapter
from engines.interface import CopyState, EngineCopy, EngineHealth
from engines.pooling import PoolingModel
from engines.statistics import EngineStatistics
from handlers.loaded_service import Service
from tests.settings import load_settings
from tests.unit.container.one_model import client_of, served

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
SECRETS = {
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "OPTION_REGISTRY_API_KEY": "swordfish",
    "SERVING_KEYSTORE_PASSWORD": "swordfish",
}
FILES = sorted(DIRECTORY.iterdir())
TEXTS = {path.name: path.read_text() for path in FILES}
MAX_WEIGHT = 50_000
"""The maximum number of bytes that a browser loads for all files, compressed. docs/console.md states this number."""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "serving.properties").write_text("option.dtype=fp16\n")
    return directory


def settings_of(model_dir: Path, environ: dict[str, str]) -> Settings:
    return load_settings(model_dir, environ, {"model_name": "model"})


def console(model_dir: Path, *mounts: Mount, **environ: str) -> httpx.AsyncClient:
    return client_of(served(settings=settings_of(model_dir, environ), mounts=mounts)[1].main)


async def state_of(client: httpx.AsyncClient) -> Any:
    return (await client.get("/console/state")).json()


async def test_the_page_and_all_that_it_refers_to_are_served(model_dir: Path) -> None:
    client = console(model_dir)
    page = await client.get("/console")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    referred = set(re.findall(r'(?:href|src)="(console/[^"]+)"', page.text))
    assert {"console/console.css", "console/console.js"} <= referred
    referred |= {f"console/{name}" for text in TEXTS.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert referred == {f"console/{path.name}" for path in FILES if path.suffix != ".html"}
    for path in referred:
        assert (await client.get(f"/{path}")).status_code == 200
    assert (await client.get("/console/")).headers["location"] == "../console"


async def test_only_browsers_get_the_page_at_the_root(model_dir: Path) -> None:
    client = console(model_dir)
    page, shown = await client.get("/", headers=BROWSER), await client.get("/console")
    assert page.content == shown.content
    assert "accept" in page.headers["vary"].split(", ")
    assert "<html" in page.text
    assert "<html" not in (await client.post("/", headers=BROWSER)).text
    without = console(model_dir, SERVING_CONSOLE="false")
    for accept in ("*/*", "application/json", ""):
        ours, theirs = (
            await client.get("/", headers={"accept": accept}),
            await without.get("/", headers={"accept": accept}),
        )
        assert (ours.status_code, ours.content) == (theirs.status_code, theirs.content)


async def test_where_it_is_off_nothing_of_it_is_there(model_dir: Path) -> None:
    client = console(model_dir, SERVING_CONSOLE="false")
    for path in ("/console", "/console/", "/console/console.js", "/console/state"):
        assert (await client.get(path)).status_code == 404
    assert "<html" not in (await client.get("/", headers=BROWSER)).text


async def test_on_sagemaker_it_is_off_unless_it_is_asked_for(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SAGEMAKER_METADATA", model_dir / "config.json")
    assert (await console(model_dir).get("/console/state")).status_code == 404
    assert (await console(model_dir, SERVING_CONSOLE="true").get("/console/state")).status_code == 200


@pytest.mark.parametrize("path", ["/console", "/", "/console/console.js", "/console/state"])
async def test_every_reply_is_held_to_this_server(model_dir: Path, path: str) -> None:
    headers = (await console(model_dir, SERVING_CORS_ALLOWED_ORIGIN="*").get(path, headers=BROWSER)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("default-src") == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {"'self'"}
    assert {policy[name] for name in ("frame-ancestors", "form-action", "base-uri", "trusted-types")} == {"'none'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers


async def test_the_page_is_light(model_dir: Path) -> None:
    client = console(model_dir)
    names = ["/console", *(f"/console/{path.name}" for path in FILES if path.suffix != ".html")]
    for encoding in ("gzip", "identity", "gzip"):
        replies = [await client.get(name, headers={"accept-encoding": encoding}) for name in names]
        assert all(reply.num_bytes_downloaded == int(reply.headers["content-length"]) for reply in replies)
    assert sum(reply.num_bytes_downloaded for reply in replies) < MAX_WEIGHT


@pytest.mark.parametrize("name", TEXTS)
async def test_nothing_of_the_page_comes_from_elsewhere(name: str) -> None:
    text = TEXTS[name].replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.findall(r"""(?:https?:)?//[\w-]+\.[\w.-]+""", text)
    assert not re.findall(r"\b(?:innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function)", text)
    assert not re.findall(r"""<[^>]+\s(?:style|on\w+)=""", text), "the policy forbids both"


def _luminance(colour: str) -> float:
    """WCAG's relative luminance of `#rrggbb`."""
    shares = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.03928 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    return sum(weight * share for weight, share in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


TEXT_ON = {
    "paper": "ink dim accent good bad",
    "card": "ink dim accent good bad",
    "bad-paper": "ink bad",
    "accent": "on-accent",
    "ink": "card",
    **dict.fromkeys(("mark", "added", "removed", "shade"), "ink"),
}


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_texts_have_the_contrast_of_wcag_aa(scheme: str) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\);", TEXTS["console.css"])
    colours = {name: light if scheme == "light" else dark for name, light, dark in found}
    pairs = [(under, over, 4.5) for under, names in TEXT_ON.items() for over in names.split()]
    pairs += [(under, "field", 3.0) for under in ("paper", "card")]  # the edges of controls
    low = {}
    for under, over, least in pairs:
        dark, light = sorted((_luminance(colours[under]), _luminance(colours[over])))
        if (light + 0.05) / (dark + 0.05) < least:
            low[over, under] = round((light + 0.05) / (dark + 0.05), 2)
    assert not low


async def test_the_packages_data_has_the_page() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-data"]["container.console"] == ["static/*"]
    assert all(path.is_file() for path in FILES)


async def test_the_state_is_that_of_ping_and_of_slipway_config(model_dir: Path) -> None:
    client = console(model_dir)
    response = await client.get("/console/state")
    assert response.headers["cache-control"] == "no-store"
    state, ping = response.json(), await client.get("/ping")
    assert state["health"] == {"status": ping.status_code, "models": ping.json()}
    (model,) = state["models"]
    assert (model["name"], model["state"], model["contract"]) == ("model", "ready", "rolling batch")
    settings = {entry["name"]: entry for entry in model["settings"]["settings"]}
    assert settings["option.dtype"] == {
        "name": "option.dtype",
        "value": "float16",
        "source": "serving.properties: option.dtype",
    }
    assert settings["console"]["source"] == "default"


async def test_a_model_that_has_failed_shows_why(model_dir: Path) -> None:
    lifecycle, applications = served(settings=settings_of(model_dir, {}))
    lifecycle.fail("the engine is gone")
    state = await state_of(client_of(applications.main))
    assert state["health"]["status"] == 500
    assert (state["models"][0]["state"], state["models"][0]["reason"]) == ("failed", "the engine is gone")


async def test_secrets_are_masked(model_dir: Path) -> None:
    allowed = {"SERVING_ALLOW_UNKNOWN_SETTINGS": "true"}
    response = await console(model_dir, **SECRETS, **allowed).get("/console/state")
    names = {entry["name"] for entry in response.json()["models"][0]["settings"]["settings"]}
    assert "option.registry_api_key" in names
    assert not [secret for secret in SECRETS.values() if secret in response.text]


async def test_what_belongs_to_the_management_api_is_on_its_address_alone(model_dir: Path) -> None:
    environ = {"SERVING_MANAGEMENT_ADDRESS": "http://127.0.0.1:9999"}
    _, both = served(settings=settings_of(model_dir, environ))
    state = await state_of(client_of(both.main))
    assert (state["management"], state["models"][0]["settings"]) == (False, None)
    assert str(model_dir) not in str({**state, "models": [state["models"][0] | {"model_id": None}]})
    state = await state_of(client_of(both.management))
    assert state["management"]
    assert state["models"][0]["settings"]["settings"]
    _, off = served(settings=settings_of(model_dir, environ | {"SERVING_CONSOLE": "false"}))
    assert (await client_of(off.management).get("/console/state")).status_code == 404


async def test_adapters_are_shown_without_credentials(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = Adapter(name="red", src="https://me:swordfish@host/red", path=model_dir, id=1, pin=True)
    view = Lifecycle.view
    monkeypatch.setattr(Lifecycle, "view", lambda lifecycle: replace(view(lifecycle), adapters=(adapter,)))
    (model,) = (await state_of(console(model_dir)))["models"]
    assert model["adapters"] == [{"name": "red", "src": "https://***@host/red", "pinned": True}]
    apart = console(model_dir, SERVING_MANAGEMENT_ADDRESS="http://127.0.0.1:9999")
    (model,) = (await state_of(apart))["models"]
    assert model["adapters"] == [{"name": "red", "src": None, "pinned": True}]


def loaded_as(pooling: PoolingModel | None, *, takes_images: bool = False) -> Any:
    return SimpleNamespace(
        pooling=pooling, takes_images=takes_images, max_model_len=8, texts=SimpleNamespace(has_chat_template=False)
    )


LABELS = {0: "good", 1: "bad"}
EMBEDDING = PoolingModel(kind="embedding", task="embed", tasks=frozenset({"embed"}), vector_size=8, labels=LABELS)
CLASSIFIER = PoolingModel(
    kind="classifier", task="classify", tasks=frozenset({"classify"}), vector_size=0, labels=LABELS
)


@pytest.mark.parametrize(
    ("loaded", "kind", "images", "labels"),
    [
        (None, None, False, {}),
        (loaded_as(None), "generation", False, {}),
        (loaded_as(None, takes_images=True), "generation", True, {}),
        (loaded_as(EMBEDDING), "embedding", False, {}),
        (loaded_as(CLASSIFIER), "classifier", False, {"0": "good", "1": "bad"}),
    ],
)
async def test_the_kind_of_a_model_is_shown(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, loaded: Any, kind: str | None, images: bool, labels: Any
) -> None:
    view = Lifecycle.view
    monkeypatch.setattr(Lifecycle, "view", lambda lifecycle: replace(view(lifecycle), loaded=loaded))
    (model,) = (await state_of(console(model_dir)))["models"]
    assert (model["kind"], model["images"], model["labels"]) == (kind, images, labels)


async def test_a_server_without_a_model_shows_its_own_settings() -> None:
    startup = load_startup(None, {"SAGEMAKER_MULTI_MODEL": "true"}, {})
    models = Models()
    registrar = Registrar(models, startup.server_config, Mock())
    app = create_app(models, startup.server_config, registrar, report=startup.report).main
    state = await state_of(client_of(app))
    assert (state["models"], state["single"]) == ([], False)
    assert {"name": "multi_model", "value": True, "source": "environment: SAGEMAKER_MULTI_MODEL"} in state["settings"][
        "settings"
    ]


async def test_the_local_endpoints_names_are_shown(model_dir: Path) -> None:
    async def nothing(*_: Any) -> None: ...

    client = console(model_dir, Mount("/endpoints/", nothing, ("my-endpoint",)))
    assert (await state_of(client))["endpoints"] == ["my-endpoint"]


COPIES = [EngineCopy(1, CopyState.DEAD, 0.0, (0, 1)), EngineCopy(2, CopyState.DEAD, 0.0, (2, 3))]


def console_of(model_dir: Path, restarts: str, restarted: Sequence[EngineRestart] = ()) -> httpx.AsyncClient:
    """Return a client of a server whose engine has died. Calls wait for the engine."""
    settings = settings_of(model_dir, {"SERVING_ENGINE_RESTART": restarts})
    lifecycle, applications = served(settings=settings, restarts=restarted)
    engine: Any = SimpleNamespace(
        **vars(loaded_as(None)),
        statistics=EngineStatistics(continued_requests=24, down_seconds=3.5),
        health=lambda: EngineHealth(alive=False, reason="the engine has died"),
        waits=restarts != "0",
        copies=COPIES,
    )
    lifecycle.service = Service(lifecycle.config, Mock(), engine, engine=engine)
    return client_of(applications.main)


async def test_an_engine_that_is_started_again_is_shown_with_its_restarts_and_calls(model_dir: Path) -> None:
    now = time.monotonic()
    restarted = [(now - 601, {1}), (now - 60, {1}), (now - 50, {2}), (now - 40, {1, 2}), (now, {1})]
    restarts = [EngineRestart(at, frozenset(copies)) for at, copies in restarted]
    state = await state_of(console_of(model_dir, "3", restarts))
    (model,) = state["models"]
    assert (state["health"]["status"], model["state"], model["reason"]) == (200, "restarting", "the engine has died")
    assert model["restarts"] == {
        "recent": 3,
        "most": 3,
        "window_seconds": 600,
        "continued_calls": 24,
        "down_seconds": 3.5,
    }
    assert model["copies"] == [
        {"number": 1, "state": "dead", "gpus": [0, 1]},
        {"number": 2, "state": "dead", "gpus": [2, 3]},
    ]


async def test_an_engine_that_is_not_started_again_is_shown_as_failed_and_without_restarts(model_dir: Path) -> None:
    state = await state_of(console_of(model_dir, "0"))
    assert (state["health"]["status"], state["models"][0]["state"]) == (500, "failed")
    assert state["models"][0]["restarts"] is None
