"""The management API over ASGI. The models are customers' handlers in real worker processes."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import psutil
import pytest

from container.gpus import SliceNotChosen
from container.models import life_cycle, registration
from container.models.life_cycle import Lifecycle, State
from container.models.registration import Registrar
from container.models.registry import Model, Models
from container.settings.values import Value
from engines.interface import EngineStartError
from tests.settings import further_settings
from tests.unit.container.management import ECHO, HANDLERS, PLENTY, Api, error, serving
from tests.waiting import until


async def test_a_model_is_loaded_called_described_and_unloaded() -> None:
    async with serving() as api:
        assert (await api.client.get("/ping")).content == b"{}\n"
        answer = await api.register("a")
        assert (answer.status_code, answer.content) == (200, b'{\n  "status": "Model \\"a\\" registered."\n}\n')
        for path in ("/models/a/invoke", "/predictions/a", "/invocations?model_name=a"):
            assert (await api.client.post(path, content=b"hello")).content == b"hello"
        listed = (await api.client.get("/models")).json()
        assert listed == {"models": [{"modelName": "a", "modelUrl": ECHO, "status": "READY"}]}
        (described,) = (await api.client.get("/models/a")).json()
        (model,) = described["models"]
        assert (described["workflowName"], model["status"], model["loadedAtStartup"]) == ("a", "Healthy", False)
        assert [worker["status"] for worker in model["workerGroups"][0]["workers"]] == ["READY"]
        (pid,) = [worker.pid for worker in service(api, "a").custom.pool.workers]
        answer = await api.client.delete("/models/a")
        assert answer.json() == {"status": 'Model or workflow "a" unregistered'}
        assert not psutil.pid_exists(pid)
        assert error(await api.client.post("/predictions/a"))[:2] == (404, "ModelNotFoundException")
        assert error(await api.client.delete("/models/a"))[:2] == (404, "ModelNotFoundException")
        assert await api.names() == []


def service(api: Api, name: str) -> Any:
    found = api.models.choose(name).lifecycle.service
    assert found is not None
    return found


async def test_what_is_wrong_with_a_registration_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.dtype=float12")
    async with serving("a") as api:
        children = psutil.Process().children(recursive=True)
        assert error(await api.client.post("/models")) == (400, "BadRequestException", "Parameter url is required.")
        for url in ("/no/such/directory", "https://host/model", "relative", "file:///no/such", "http://[", "/a\0b"):
            assert error(await api.register("b", url))[:2] == (404, "ModelNotFoundException")
        assert error(await api.register("a")) == (
            409,
            "IllegalArgumentException",
            "Model a is already registered.",
        )
        code, kind, message = error(await api.register("b", str(tmp_path)))
        assert (code, kind) == (400, "IllegalConfigurationException")
        assert 'option.dtype is "float12"' in message
        code, kind, message = error(await api.register("b", max_worker="many"))
        assert (code, kind) == (400, "IllegalConfigurationException")
        assert 'maxWorkers is "many" (POST /models)' in message
        code, kind, message = error(await api.register("b", str(HANDLERS / "import_error")))
        assert (code, kind) == (500, "EngineException")
        assert message.startswith("model b cannot be loaded: ")
        assert await api.names() == ["a"]
        assert psutil.Process().children(recursive=True) == children
        assert (await api.client.post("/invocations", content=b"x")).content == b"x"


async def test_a_model_that_does_not_fit_is_507(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("required_memory_mb=1000\nreserved_memory_mb=24\n")
    (tmp_path / "model.py").write_text((HANDLERS / "echo" / "model.py").read_text())
    for mebibytes, status in ((1023, 507), (1024, 200)):
        async with serving(free=mebibytes << 20) as api:
            answer = await api.register("a", str(tmp_path))
            assert answer.status_code == status
            if status == 507:
                _, kind, message = error(answer)
                assert kind == "WlmOutOfMemoryException"
                assert "needs 1000 MiB of memory and 24 MiB have to stay free" in message
                assert await api.names() == []


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> AsyncMock:
    """Replace the load of a model by a failure. Tests that use this do not need the loaded model."""
    load = AsyncMock(side_effect=EngineStartError("enough is known"))
    monkeypatch.setattr(life_cycle, "load_service", load)
    return load


def devices(loads: AsyncMock) -> list[tuple[int, ...] | None]:
    """Return the GPUs of each model that was loaded."""
    return [call.args[0].devices for call in loads.call_args_list]


async def test_an_engine_gets_the_gpus_with_room_and_is_507_where_too_few_have_it(
    tmp_path: Path, loads: AsyncMock
) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 32}')
    (tmp_path / "serving.properties").write_text("option.tensor_parallel_degree=2\nrequired_memory_mb=20000\n")
    empty, full = 79 << 30, 8 << 30
    async with serving(gpus=(full, empty, full, empty)) as api:
        assert error(await api.register("a", str(tmp_path)))[:2] == (500, "EngineException")
    async with serving(gpus=(full, empty)) as api:
        code, kind, message = error(await api.register("a", str(tmp_path)))
        assert (code, kind) == (507, "WlmOutOfMemoryException")
        assert re.search("20000 MiB .* 2 GPUs .*500 MiB", message)
        assert message.endswith("free are 8192 MiB of GPU 0, 80896 MiB of GPU 1")
        assert await api.names() == []
    assert devices(loads) == [(1, 3, 0, 2)]


async def test_models_that_a_server_starts_with_are_placed_and_those_that_cannot_be_say_why(
    tmp_path: Path, loads: AsyncMock
) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = further_settings(Value(str(tmp_path), "startup"), "a", {})
    divided = Mock(side_effect=SliceNotChosen("set CUDA_VISIBLE_DEVICES"))
    for free, message in (
        (lambda: (1 << 30, 2 << 30, PLENTY), "enough is known"),
        (divided, "set CUDA_VISIBLE_DEVICES"),
    ):
        model = Model(Lifecycle(settings), str(tmp_path))
        with pytest.raises(EngineStartError, match=message):
            await Registrar(Models([model]), settings.server_config, Mock(), free=free).start()
        assert model.lifecycle.reason == message
    assert devices(loads) == [(1, 0)], "what it needs is not compared: the engine knows it better"


async def test_the_start_of_a_server_tells_the_plan_of_the_gpus_and_warns_of_idle_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load = AsyncMock(side_effect=lambda config, *_: Mock(config=config, custom=None, engine=None, running_engine=None))
    monkeypatch.setattr(life_cycle, "load_service", load)
    (tmp_path / "config.json").write_text("{}")
    of_one = "option.tensor_parallel_degree=1"
    for properties, gpus, levels in (
        (of_one, 4, ["INFO", "INFO", "WARNING"]),
        (f"{of_one}\nmaxWorkers=4", 4, ["INFO", "INFO"]),
        ("option.tensor_parallel_degree=4", 4, ["INFO", "INFO"]),
        (of_one, 0, []),
    ):
        monkeypatch.setattr(registration, "machine_gpus", lambda gpus=gpus: (24 << 30,) * gpus)
        (tmp_path / "serving.properties").write_text(properties)
        settings = further_settings(Value(str(tmp_path), "startup"), "a", {})
        caplog.clear()
        with caplog.at_level("INFO"):
            models = Models([Model(Lifecycle(settings), str(tmp_path))])
            await Registrar(models, settings.server_config, Mock(), free=lambda: (PLENTY,)).start()
        said = [record for record in caplog.records if record.name == registration.__name__]
        assert [record.levelname for record in said] == levels
        assert ("to use them: maxWorkers=4" in caplog.text) == ("WARNING" in levels)
        assert ("4 of 4: 4 copies with 1 GPU each" in caplog.text) == ("maxWorkers=4" in properties)


async def test_an_engine_or_handler_that_runs_out_of_memory_as_it_is_loaded_is_507(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...\nraise MemoryError\n")
    async with serving() as api:
        assert error(await api.register("a", str(tmp_path)))[:2] == (507, "WlmOutOfMemoryException")
        assert await api.names() == []


class Weights:
    """Weights in a reference cycle, as in real models. Only the garbage collector frees them."""

    def __init__(self) -> None:
        self.layers = [self]


async def test_what_a_load_that_fails_has_made_is_freed_before_its_client_hears_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    async def failing(*_: object) -> None:
        weights = Weights()
        made.append(weakref.ref(weights))
        raise EngineStartError("the engine started but generated nothing")

    monkeypatch.setattr(life_cycle, "load_service", failing)
    async with serving() as api:
        assert error(await api.register("a"))[:2] == (500, "EngineException")
        assert made[0]() is None


async def test_ping_has_an_entry_for_each_model_and_the_status_of_the_worst() -> None:
    async with serving("a", "b") as api:
        ping = await api.client.get("/ping")
        both = b'{\n  "a": {\n    "status": "Healthy"\n  },\n  "b": {\n    "status": "Healthy"\n  }\n}\n'
        assert (ping.status_code, ping.content) == (200, both)
        for worker in service(api, "b").custom.pool.workers:
            os.kill(worker.pid, signal.SIGKILL)

        async def has_failed() -> bool:
            return (await api.client.get("/ping")).status_code == 500

        await until(has_failed)
        ping = await api.client.get("/ping")
        assert ping.json()["b"]["status"] == "FAILED"
        assert ping.json()["a"] == {"status": "Healthy"}
        await api.client.delete("/models/b")
        assert (await api.client.get("/ping")).status_code == 200


async def test_a_model_may_be_loaded_in_the_background_and_ping_stays_ready() -> None:
    async with serving("a") as api:
        answer = await api.register("b", synchronous="false")
        assert (answer.status_code, answer.json()) == (202, {"status": 'Model "b" registration scheduled.'})
        ping = await api.client.get("/ping")
        assert (ping.status_code, ping.json()["b"]) == (200, {"status": "PENDING"})
        assert "\nslipway_ready 1.0\n" in (await api.client.get("/metrics")).text
        assert error(await api.client.post("/models/b/invoke"))[:2] == (503, "ServiceUnavailableException")
        assert error(await api.client.put("/models/b?max_worker=1"))[:2] == (503, "ServiceUnavailableException")
        await until(lambda: not api.registrar.loading, 60)
        assert (await api.client.get("/models/b")).json()[0]["models"][0]["status"] == "Healthy"
        assert (await api.client.post("/models/b/invoke", content=b"x")).content == b"x"


async def test_a_model_that_is_still_loading_can_be_unregistered() -> None:
    async with serving() as api:
        await api.register("a", synchronous="false")
        assert (await api.client.delete("/models/a")).status_code == 200
        assert not api.registrar.loading
        assert await api.names() == []
        assert (await api.register("a")).status_code == 200


async def test_a_client_that_goes_away_while_a_model_is_loaded_does_not_stop_the_load() -> None:
    async with serving() as api:
        registering = asyncio.create_task(api.register("a"))
        await until(lambda: api.registrar.loading)
        registering.cancel()
        await asyncio.wait([registering])
        assert registering.cancelled()
        await until(lambda: list(api.models) and not api.registrar.loading, 60)
        assert (await api.client.post("/models/a/invoke", content=b"x")).content == b"x"


async def test_workers_are_scaled_to_nothing_and_back() -> None:
    async with serving("a") as api:
        answer = await api.client.put("/models/a?min_worker=0&max_worker=0")
        text = 'Workflow "a" worker scaled. New Worker configuration min workers:0 max workers:0'
        assert (answer.status_code, answer.json()) == (200, {"status": text})
        code, kind, message = error(await api.client.post("/invocations"))
        assert (code, kind) == (503, "WlmShutdownException")
        assert "scaled to 0" in message
        assert (await api.client.get("/ping")).status_code == 200
        answer = await api.client.put("/models/a?min_worker=2&max_worker=2")
        assert answer.json()["status"].endswith("min workers:2 max workers:2")
        await until(lambda: service(api, "a").custom.pool.ready == 2, 60)
        assert (await api.client.post("/invocations", content=b"x")).content == b"x"
        assert error(await api.client.put("/models/a"))[:2] == (400, "BadRequestException")
        assert error(await api.client.put("/models/b?max_worker=1"))[:2] == (404, "ModelNotFoundException")


async def test_calls_that_run_end_before_their_model_is_unloaded(tmp_path: Path) -> None:
    async with serving("a") as api:
        await api.register("b", str(HANDLERS / "slow"))
        running = asyncio.create_task(api.client.post("/models/b/invoke", content=str(tmp_path / "go")))
        await until(lambda: api.models.choose("b").lifecycle.open_calls)
        unloading = asyncio.create_task(api.client.delete("/models/b"))
        await until(lambda: "b" not in api.models)
        assert error(await api.client.post("/models/b/invoke"))[0] == 404
        assert not unloading.done()
        (tmp_path / "go").touch()
        assert (await running).text == "done"
        assert (await unloading).status_code == 200


async def test_unloading_does_not_wait_for_ever() -> None:
    async with serving(drain_timeout=0.2) as api:
        await api.register("a")
        running = asyncio.create_task(api.client.post("/models/a/invoke?sleep=60"))
        await until(lambda: api.models.choose("a").lifecycle.open_calls)
        assert (await asyncio.wait_for(api.client.delete("/models/a"), 60)).status_code == 200
        assert (await asyncio.wait_for(running, 60)).status_code >= 400


async def test_a_server_that_ends_waits_for_no_memory_of_an_unloaded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the unloaded model may remain. A stop that waited for them and for other models would take too long."""
    monkeypatch.setattr(registration, "_LEAVING_SECONDS", 600.0)
    async with serving("a", drain_timeout=0.2) as api:
        await api.register("b")
        leaving = api.models.choose("b").lifecycle
        leaving.open_calls += 1
        unloading = asyncio.create_task(api.client.delete("/models/b"))
        await until(lambda: leaving.service is None)
        await asyncio.sleep(0.3)
        assert not unloading.done()
        api.models.draining = True
        assert (await asyncio.wait_for(unloading, 60)).status_code == 200


async def test_which_model_a_call_means() -> None:
    async with serving("a", "b") as api:
        inspect = {"params": {"inspect": "1"}, "content": b"x"}

        async def pid(**arguments: Any) -> int:
            arguments["params"] = {"inspect": "1", **arguments.get("params", {})}
            answer = await api.client.post("/invocations", **{**inspect, **arguments})
            return int(answer.json()["pid"])

        a, b = (service(api, name).custom.pool.workers[0].pid for name in "ab")
        assert await pid(params={"model_name": "b"}, headers={"model_name": "a"}) == b
        assert await pid(headers={"model_name": "a"}) == a
        assert await pid(headers={"X-Amzn-SageMaker-Custom-Attributes": "x=y; model_name=b"}) == b
        assert await pid(content=None, data={"model_name": "b"}) == b
        code, kind, message = error(await api.client.post("/invocations", content=b"x"))
        assert (code, kind) == (400, "BadRequestException")
        assert message.startswith("Parameter model_name is required")
        assert "(a, b)" in message
        assert error(await api.client.post("/invocations?model_name=c"))[:2] == (404, "ModelNotFoundException")
        await api.client.delete("/models/b")
        assert await pid() == a


async def test_a_model_that_came_later_is_never_meant_by_a_call_that_names_none() -> None:
    async with serving() as api:
        await api.register("a")
        assert error(await api.client.post("/invocations"))[:2] == (400, "BadRequestException")
    async with serving("a") as api:
        await api.register("b")
        assert (await api.client.post("/invocations", content=b"x")).content == b"x"


async def test_versions_of_a_model_take_turns() -> None:
    async with serving() as api:
        for version in ("1", "2"):
            assert (await api.register("m", model_version=version)).status_code == 200
        assert error(await api.register("m", model_version="2"))[0] == 409

        async def pid(path: str) -> int:
            return int((await api.client.post(f"{path}?inspect=1", content=b"x")).json()["pid"])

        first, second = await pid("/predictions/m/1"), await pid("/predictions/m/2")
        assert first != second
        assert {await pid("/predictions/m") for _ in range(4)} == {first, second}
        assert error(await api.client.post("/predictions/m/3"))[0] == 404
        assert [model["version"] for model in (await api.client.get("/models")).json()["models"]] == ["1", "2"]
        assert (await api.client.get("/ping")).json().keys() == {"m:1", "m:2"}
        assert len((await api.client.get("/models/m")).json()) == 2
        assert "m has several versions" in (await api.client.get("/models/m/adapters")).text
        assert (await api.client.delete("/models/m/1")).status_code == 200
        assert {await pid("/predictions/m") for _ in range(2)} == {second}
        assert (await api.client.delete("/models/m")).status_code == 200
        assert await api.names() == []


async def test_all_versions_of_a_model_are_unregistered_or_none() -> None:
    async with serving("m") as api:
        assert (await api.register("m", model_version="2")).status_code == 200
        first = next(model for model in api.models if model.version is None)
        first.lifecycle.stage = State.STARTING
        assert error(await api.client.delete("/models/m"))[0] == 503
        assert len((await api.client.get("/models/m")).json()) == 2
        first.lifecycle.stage = State.READY


async def test_a_model_whose_name_is_no_text_is_refused_in_the_contracts_form() -> None:
    async with serving("a", "b") as api:
        answer = await api.client.post("/v1/completions", content=b'{"model":"\xff","prompt":"x"}')
        assert answer.status_code in (400, 404, 422)
        assert "internal error" not in answer.text


async def test_routes_without_a_model_refuse_in_their_own_words_where_there_are_several() -> None:
    async with serving("a", "b") as api:
        body = {"inputs": "x", "prompt": "x", "text_input": "x", "model": "c", "messages": []}
        for path, key in (
            ("/generate", "error_type"),
            ("/v1/generate", "detail"),
            ("/v1/chat/completions", "error"),
        ):
            answer = await api.client.post(path, json=body)
            assert answer.status_code == 404
            assert key in answer.json()
            assert "(a, b)" in answer.text
        answer = await api.client.post("/v2/models/c/generate", json=body)
        assert (answer.status_code, answer.json()) == (404, {"error": "Request for unknown model: 'c' is not found"})
        for path in ("/v2/health/live", "/v2/health/ready", "/health", "/liveness", "/v2/models/a/ready"):
            assert (await api.client.get(path)).status_code == 200
        assert (await api.client.get("/readiness")).json() == {"ready": "ok"}
        assert [card["id"] for card in (await api.client.get("/v1/models")).json()["data"]] == ["a", "b"]
        stats = (await api.client.get("/v2/models/stats")).json()["model_stats"]
        assert [model["name"] for model in stats] == ["a", "b"]
        assert (await api.client.get("/v2")).json()["name"] == "triton"
        answer = await api.client.post("/v1/completions", json={**body, "model": "b"})
        assert "handler of its own" in answer.text
        answer = await api.client.post("/v1/chat/completions", json={**body, "model": "b"})
        assert answer.json() == {**body, "model": "b"}


async def test_wrong_methods_and_pages() -> None:
    async with serving("a", "b") as api:
        for call in ("PUT /models", "DELETE /workflows", "POST /models/a", "PATCH /models/a/1"):
            answer = await api.client.request(*call.split())
            assert error(answer)[:2] == (405, "MethodNotAllowedException")
            assert "GET" in answer.headers["allow"]
        page = (await api.client.get("/models?limit=1")).json()
        assert ([model["modelName"] for model in page["models"]], page["nextPageToken"]) == (["a"], "1")
        page = (await api.client.get("/workflows?limit=1&next_page_token=1")).json()
        assert page == {"workflows": [{"workflowName": "b"}]}
        assert (await api.client.get("/workflows/a")).json()[0]["workflowName"] == "a"
        assert error(await api.client.get("/models?limit=none"))[0] == 400
        assert error(await api.client.delete("/models/a/1"))[0] == 404
        assert await api.names() == ["a", "b"]


async def test_metrics_name_the_model_where_there_are_several() -> None:
    async with serving("a") as api:
        assert "\nslipway_workers 1.0\n" in (await api.client.get("/metrics")).text
        await api.register("b")
        text = (await api.client.get("/metrics")).text
        assert 'slipway_workers{model="a"} 1.0' in text
        assert 'slipway_workers{model="b"} 1.0' in text
        assert text.count("# TYPE slipway_workers ") == 1


async def test_a_multi_model_endpoint_has_sagemakers_form() -> None:
    async with serving(multi_model=True) as api:
        assert (await api.client.get("/models")).content == b'{"models":[]}'
        assert (await api.client.get("/ping")).status_code == 200
        answer = await api.client.post("/models", json={"model_name": "0a1b", "url": ECHO})
        assert answer.status_code == 200
        shown = {"modelName": "0a1b", "modelUrl": ECHO}
        assert (await api.client.get("/models")).json() == {"models": [shown]}
        assert (await api.client.get("/models/0a1b")).json() == shown
        assert error(await api.client.get("/models/nope"))[0] == 404
        assert (await api.client.post("/models", json={"model_name": "0a1b", "url": ECHO})).status_code == 409
        assert (await api.client.post("/models/0a1b/invoke", content=b"x")).content == b"x"
        assert (await api.client.get("/ping")).json() == {"0a1b": {"status": "Healthy"}}
        assert (await api.client.delete("/models/0a1b")).status_code == 200
        assert (await api.client.get("/models")).content == b'{"models":[]}'


async def test_the_secure_mode_refuses_a_model_with_400() -> None:
    controls = "DISALLOW_CUSTOM_INFERENCE_SCRIPTS"
    environ = {"SAGEMAKER_SECURE_MODE": "true", "SAGEMAKER_SECURITY_CONTROLS": controls}
    async with serving(environ=environ) as api:
        code, kind, message = error(await api.register("a"))
        assert (code, kind) == (400, "IllegalConfigurationException")
        assert message == f"{controls}: there is a model.py"


async def test_a_management_address_of_its_own_parts_the_routes() -> None:
    async with serving("a", management_address="http://127.0.0.1:9999") as api:
        assert api.applications.management is not None
        management = httpx.AsyncClient(
            transport=httpx.ASGITransport(api.applications.management), base_url="http://server"
        )
        async with management:
            assert (await management.get("/models")).status_code == 200
            assert (await management.options("/")).content == b"{}\n"
            for path in ("/invocations", "/ping", "/generate", "/models/a/invoke", "/v2/health/live"):
                assert (await management.post(path)).status_code in (404, 405)
        assert (await api.client.get("/models")).status_code == 404
        assert (await api.client.delete("/models/a")).status_code == 404
        assert (await api.client.post("/models/a/invoke", content=b"x")).content == b"x"


async def test_a_server_that_stops_takes_no_models_and_gives_up_loads() -> None:
    async with serving("a") as api:
        loading = asyncio.create_task(api.register("b"))
        await until(lambda: api.registrar.loading)
        await api.models.drain(0.0)
        assert error(await api.register("c"))[:2] == (503, "ServiceUnavailableException")
        assert (await api.client.get("/ping")).status_code == 503
        await api.registrar.stop()
        assert error(await loading)[:2] == (503, "ServiceUnavailableException")
        assert len(psutil.Process(os.getpid()).children()) <= 1


COMMANDS = [
    *(("GET", path) for path in ("/models", "/models/model", "/workflows")),
    *(("GET", path) for path in ("/console/state", "/metrics", "/openapi.json")),
    *(("POST", f"/models?url={ECHO}&model_name=other"), ("PUT", "/models/model?min_worker=1")),
    *((method, "/models/model") for method in ("DELETE", "PATCH")),
    *(("POST", "/adapters?name=a&src=/tmp"), ("DELETE", "/adapters/a"), ("POST", "/adapters/a/update")),
    *(("POST", "/models/model/adapters?name=a&src=/tmp"), ("OPTIONS", "/models")),
    *(("POST", f"/v1/{verb}_lora_adapter") for verb in ("load", "unload")),
]
BROWSERS = [
    {"sec-fetch-site": "cross-site", "origin": "http://evil.example", "host": "127.0.0.1:8080"},
    {"sec-fetch-site": "same-site", "host": "localhost:8080"},
    {"origin": "http://evil.example", "host": "10.0.0.1:8080", "content-type": "text/plain"},
    {"sec-fetch-site": "same-origin", "host": "evil.example:8080"},
    {"user-agent": "Mozilla/5.0", "host": "evil.example:8080"},
]


async def test_what_a_browser_sends_for_another_site_commands_nothing_and_is_told_nothing() -> None:
    async with serving("model", cors_allowed_origin="*") as api:
        for (method, path), headers in itertools.product(COMMANDS, BROWSERS):
            refused = await api.client.request(method, path, headers=headers)
            assert refused.status_code == 403, f"{method} {path}: {refused.text}"
            assert "a browser sent this request" in str(refused.json())
            assert "access-control-allow-origin" not in refused.headers
        assert await api.names() == ["model"]


async def test_contracts_and_ping_answer_browsers_as_before() -> None:
    async with serving("model", cors_allowed_origin="*") as api:
        for headers in BROWSERS:
            answer = await api.client.post("/invocations", content=b"hello", headers=headers)
            assert (answer.status_code, answer.text) == (200, "hello")
            assert answer.headers["access-control-allow-origin"] == "*"
            assert (await api.client.get("/ping", headers=headers)).status_code == 200


async def test_a_configured_name_is_one_of_the_servers() -> None:
    async with serving("model", allowed_hosts=("llm.example",)) as api:
        headers = {"sec-fetch-site": "same-origin", "host": "llm.example:8080"}
        assert (await api.client.get("/models", headers=headers)).status_code == 200
