"""Models from S3 that the management API loads."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from container.models.life_cycle import Lifecycle
from container.models.registry import Model
from container.settings.server import ServerConfig
from container.settings.settings import Settings
from engines.interface import CopyState
from tests.contracts.exchange import MODEL
from tests.stand_ins.copied_engine import CopiedEngine
from tests.stand_ins.s3 import CREDENTIALS, Gate, held, put, refuse
from tests.unit.container.management import ECHO, error, serving
from tests.unit.container.one_model import with_engine
from tests.waiting import until

MEBIBYTE = 1 << 20


@pytest.fixture
def model(s3_address: str, prefix: str, gate: Gate) -> Gate:
    files = {
        "serving.properties": b"reserved_memory_mb=0\noption.no_such_thing=1\n",
        "model.py": Path(ECHO, "model.py").read_bytes(),
        "model.safetensors": bytes(10 * MEBIBYTE),
    }
    put(s3_address, {f"{prefix}/{name}": body for name, body in files.items()})
    return gate


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads")}


@pytest.fixture
def silent_s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The listener of a server for S3 that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for name, value in CREDENTIALS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener


async def test_a_model_of_s3_is_loaded_called_and_unloaded(model: Gate, url: str, environ: dict[str, str]) -> None:
    async with serving(environ=environ) as api:
        assert (await api.register("a", url)).status_code == 200
        assert (await api.client.post("/models/a/invoke", content=b"x")).content == b"x"
        assert (await api.client.delete("/models/a")).status_code == 200


async def test_its_weights_count_when_the_room_for_it_is_measured(
    model: Gate, url: str, environ: dict[str, str]
) -> None:
    async with serving(environ=environ, free=11 * MEBIBYTE) as api:
        code, kind, message = error(await api.register("a", url))
        assert (code, kind) == (507, "WlmOutOfMemoryException")
        assert "needs 12 MiB" in message


async def test_its_download_does_not_keep_other_models_from_loading(
    model: Gate, url: str, environ: dict[str, str]
) -> None:
    model.fault = held(let_go := threading.Event(), ".safetensors")
    async with serving(environ=environ) as api:
        assert (await api.register("a", url, synchronous="false")).status_code == 202
        assert (await api.register("b")).status_code == 200
        assert [m["status"] for m in (await api.client.get("/models")).json()["models"]] == ["PENDING", "READY"]
        assert (await api.client.delete("/models/a")).status_code == 200
    let_go.set()


async def test_free_memory_is_measured_when_the_copies_of_other_models_are_loaded() -> None:
    async with serving() as api:
        lifecycle, engine = Lifecycle(Settings(server_config=ServerConfig(), config=MODEL)), CopiedEngine(1)
        with_engine(lifecycle, engine)
        api.models.add(Model(lifecycle, "copied", at_startup=False))
        engine.states |= {2: CopyState.STARTING}
        registered = asyncio.create_task(api.register("a"))
        await until(lambda: api.registrar.loading)
        await asyncio.sleep(0.2)
        api.free_memory.assert_not_called()
        engine.states |= {2: CopyState.READY}
        assert (await registered).status_code == 200
        api.free_memory.assert_called_once()


async def test_what_is_wrong_with_a_url_names_the_call(gate: Gate, environ: dict[str, str]) -> None:
    async with serving(environ=environ) as api:
        code, kind, message = error(await api.register("a", "s3://no-such-bucket-here/x"))
        assert (code, kind) == (400, "IllegalConfigurationException")
        assert message.startswith('model directory is "s3://no-such-bucket-here/x" (POST /models: url): ')


async def test_a_download_that_fails_leaves_nothing_on_the_disk(model: Gate, url: str, environ: dict[str, str]) -> None:
    model.fault = refuse(403, "AccessDenied")
    async with serving(environ=environ) as api:
        assert error(await api.register("a", url))[0] == 400
    assert not any(".partial." in folder for folder, _, _ in os.walk(environ["SERVING_DOWNLOAD_DIR"]))


async def test_a_server_that_stops_does_not_wait_for_s3(silent_s3: socket.socket, environ: dict[str, str]) -> None:
    async with serving(environ=environ) as api:
        waiting = asyncio.create_task(api.register("a", "s3://bucket/model"))
        connection, _ = await asyncio.to_thread(silent_s3.accept)
        assert (await api.client.get("/ping")).status_code == 200
        started = time.monotonic()
        await api.models.drain(0.0)
        await api.registrar.stop()
        assert error(await waiting)[:2] == (503, "ServiceUnavailableException")
        assert time.monotonic() - started < 50
        connection.close()


async def test_warnings_of_its_settings_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(environ={"SM_NUM_GPUS": "1", "NUM_SHARD": "2"}) as api:
        with caplog.at_level(logging.WARNING, "container.models.registration"):
            for name in "ab":
                assert (await api.register(name)).status_code == 200
    (warning,) = [record.message for record in caplog.records if record.name == "container.models.registration"]
    assert warning.startswith("model a: NUM_SHARD")


async def test_warnings_of_a_models_own_settings_are_logged_for_each_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(ECHO, tmp_path / "m")
    (tmp_path / "m" / "serving.properties").write_text("minWorkers=2\nmaxWorkers=1\n")
    async with serving() as api:
        with caplog.at_level(logging.WARNING, "container.models.registration"):
            for name in "ab":
                assert (await api.register(name, str(tmp_path / "m"))).status_code == 200
    said = [record.message for record in caplog.records if record.name == "container.models.registration"]
    assert [text[:8] for text in said] == ["model a:", "model b:"]


async def test_a_version_that_is_there_is_the_only_one_that_answers() -> None:
    async with serving("a") as api:
        assert api.models.choose("a", "2").version is None, "the model without a version stands in"
        assert (await api.register("a", model_version="2")).status_code == 200
        assert {api.models.choose("a", "2").version for _ in range(4)} == {"2"}
        assert {api.models.choose("a").version for _ in range(4)} == {None, "2"}
