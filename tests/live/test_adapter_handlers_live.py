"""Adapters of a custom handler, over HTTP: the handler decides what they do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.server import START_SECONDS, Server, serving_copy, write_model

pytestmark = pytest.mark.slow

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A handler with two workers, and an adapter beside its `model.py`."""
    directory = tmp_path_factory.mktemp("handler")
    fixture = shutil.copytree(HANDLERS / "adapters", directory / "fixture")
    (fixture / "adapters" / "beside").mkdir(parents=True)
    with serving_copy(fixture, directory, properties="minWorkers=2\nmaxWorkers=2", enable_lora="true") as running:
        yield running


def test_the_whole_life_of_an_adapter(handler: Server, tmp_path: Path) -> None:
    client = handler.client
    assert [one["name"] for one in client.get("/models/model/adapters").json()["adapters"]] == ["beside"]
    assert client.post("/invocations?adapter=beside").json()["adapter"]["name"] == "beside"

    source = {"name": "mine", "src": str(tmp_path), "say": "welcome"}
    alias = {"X-Amzn-SageMaker-Adapter-Alias": "nice"}
    assert client.post("/adapters", params=source, headers=alias).json() == {"status": "welcome"}
    assert client.post("/adapters", params=source).status_code == 409
    assert client.get("/adapters/mine").json() == {
        "name": "mine",
        "src": str(tmp_path),
        "preload": True,
        "pin": False,
    }
    said = client.post("/invocations?adapter=mine").json()["adapter"]
    assert (said["alias"], said["property_src"]) == ("nice", str(tmp_path))
    assert client.post("/adapters/mine/update?preload=false").json() == {"status": "Adapter mine updated"}
    assert client.delete("/models/model/adapters/mine").json() == {"status": "Adapter mine unregistered"}
    assert client.delete("/adapters/mine").status_code == 404
    gone = client.post("/invocations?adapter=mine")
    assert (gone.status_code, gone.json()["error"]) == (424, "the adapter 'mine' is not registered")


def test_adapters_need_an_engine_that_has_them(tmp_path: Path, sample_model: Path) -> None:
    model_dir = write_model(tmp_path / "model", model_id=sample_model, rolling_batch="disable", enable_lora="true")
    server = Server(model_dir, tmp_path / "server.log")
    try:
        assert server.process.wait(START_SECONDS) != 0
        server.wait_for_log("option.enable_lora is true: adapters need the vLLM engine")
    finally:
        server.stop()
