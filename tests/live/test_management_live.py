"""Several models in one server: two engines and a customer's handler. Models come and go while others serve."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.live.server import START_SECONDS, Server, free_port, records, stopped, write_model
from tests.waiting import lives, wait_until

pytestmark = pytest.mark.slow

HANDLERS = Path(__file__).parents[1] / "fixtures" / "handlers"
PROMPT = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> dict[str, Path]:
    """A model directory for vLLM, and a model directory with a handler."""
    root = tmp_path_factory.mktemp("models")
    found = {"vllm": write_model(root / "vllm", **small_options)}
    shutil.copytree(HANDLERS / "echo", root / "echo", ignore=shutil.ignore_patterns("__pycache__"))
    return found | {"echo": root / "echo"}


@pytest.fixture(scope="module")
def multi_model(host: Server, directories: dict[str, Path]) -> Server:
    """A multi-model endpoint with one model on vLLM. The last test that uses the endpoint unloads this model."""
    assert (host.client.get("/ping").content, host.client.get("/models").content) == (b"{}\n", b'{"models":[]}')
    load(host, "v", directories["vllm"])
    return host


def load(server: Server, name: str, directory: Path) -> None:
    answer = server.client.post("/models", json={"model_name": name, "url": str(directory)})
    assert (answer.status_code, answer.json()) == (200, {"status": f'Model "{name}" registered.'}), answer.text


def engine_cores(server: Server) -> list[int]:
    return [process.pid for process in server.engine_processes()]


def test_a_second_engine_is_loaded_called_and_unloaded_while_the_first_serves(
    multi_model: Server, directories: dict[str, Path]
) -> None:
    server, stop = multi_model, False

    def busy() -> set[str]:
        texts = set()
        while not stop:
            answer = server.client.post("/models/v/invoke", json=PROMPT)
            assert answer.status_code == 200, answer.text
            texts.add(answer.json()["generated_text"])
        return texts

    with ThreadPoolExecutor() as threads:
        traffic = threads.submit(busy)
        try:
            load(server, "s", directories["vllm"])
            ping = server.client.get("/ping")
            assert (ping.status_code, ping.json()) == (200, {"v": {"status": "Healthy"}, "s": {"status": "Healthy"}})
            text = server.client.post("/models/s/invoke", json=PROMPT).json()["generated_text"]
            assert server.client.delete("/models/s").status_code == 200
            assert server.client.post("/models/s/invoke", json=PROMPT).status_code == 404
        finally:
            stop = True
        assert traffic.result() == {text}


def test_a_load_prints_nothing_of_libraries_unless_the_log_is_verbose_and_all_of_a_customers_code(
    multi_model: Server, directories: dict[str, Path], tmp_path: Path
) -> None:
    of_libraries, printed = ("Loading safetensors", "VLLM_CPU_OMP_THREADS_BIND", "Warning: "), "printed by the handler"
    assert [text for text in of_libraries if text not in multi_model.log_text()] == []
    place = tmp_path / "own"
    place.mkdir()
    (place / "model.py").write_text(f"print({printed!r}, flush=True)\ndef handle(inputs): ...\n")
    environment = {"SAGEMAKER_MULTI_MODEL": "true", "SERVING_VERBOSE": "false"}
    with Server(None, tmp_path / "server.log", environment, name=None) as quiet:
        quiet.client.timeout = httpx.Timeout(START_SECONDS)
        for name in ("first", "second"):
            load(quiet, name, directories["vllm"])
            quiet.wait_for_log(f"model {name} is ready")
        assert [text for text in of_libraries if text in quiet.log_text()] == []
        load(quiet, "own", place)
        quiet.wait_for_log(printed)


def test_a_model_for_which_the_engine_has_no_memory_is_507_with_what_was_wrong(
    multi_model: Server, directories: dict[str, Path], tmp_path: Path
) -> None:
    place = shutil.copytree(directories["vllm"], tmp_path / "m")
    properties = place / "serving.properties"
    properties.write_text(properties.read_text() + "\noption.kv_cache_memory_bytes=10000000\n")
    before = engine_cores(multi_model)
    answer = multi_model.client.post("/models", json={"model_name": "large", "url": str(place)})
    assert (answer.status_code, answer.json()["type"]) == (507, "WlmOutOfMemoryException"), answer.text
    assert "is needed, which is larger than the available KV cache memory" in answer.json()["message"]
    assert [model["modelName"] for model in multi_model.client.get("/models").json()["models"]] == ["v"]
    assert engine_cores(multi_model) == before


FORMATTERS = """
import json, re, sys, threading
from beside import NAME
from djl_python.output_formatter import output_formatter
from djl_python.request_io import RequestOutput

@output_formatter
def write(output: RequestOutput) -> str:
    if not output.finished:
        return ""
    names = (re.sub("[0-9]+", "", thread.name) for thread in threading.enumerate())
    threads = sorted(name for name in names if not name.startswith("asyncio"))
    modules = sorted(set(sys.modules) - {__name__})
    return json.dumps({"name": NAME, "path": sys.path, "modules": modules, "threads": threads})
"""


def test_models_in_the_servers_process_come_and_go_and_leave_nothing_behind(
    tmp_path: Path, engine_options: dict[str, object], directories: dict[str, Path]
) -> None:
    """Each model has formatters and a module beside them. Some requests run longer than the drain allows."""
    environment = {"SAGEMAKER_MULTI_MODEL": "true", "SERVING_DRAIN_TIMEOUT": "0.5"}
    told, files = [], []
    with Server(None, tmp_path / "server.log", environment, name=None) as server:
        process = psutil.Process(server.process.pid)
        for name in ("one", "two", "three"):
            directory = write_model(tmp_path / name, **engine_options | {"rolling_batch": "disable"})
            (directory / "model.py").write_text(FORMATTERS)
            (directory / "beside.py").write_text(f"NAME = {name!r}\n")
            load(server, "s", directory)
            told.append(server.client.post("/models/s/invoke", json=PROMPT).json())
            loaded = process.memory_info().rss >> 20
            assert told[-1]["name"] == name
            with ThreadPoolExecutor(2) as pool:
                long = {"inputs": "Once", "parameters": {"max_new_tokens": 900, "ignore_eos_token": True}}
                count = 0 if name == "one" else 2
                running = [pool.submit(server.client.post, "/models/s/invoke", json=long) for _ in range(count)]
                # A call that has not reached the engine would be refused with 503.
                gauges = ("slipway_engine_running", "slipway_engine_waiting")
                wait_until(lambda: sum(server.metric(gauge, "s") for gauge in gauges) == count)  # noqa: B023
                assert server.client.delete("/models/s").status_code == 200
                assert [call.result().status_code for call in running] == [500] * count

            def is_freed() -> bool:
                """Load and unload another model first.

                On a busy machine, a model may be unloaded before its last step ends.
                """
                load(server, "echo", directories["echo"])
                assert server.client.delete("/models/echo").status_code == 200
                return loaded - (process.memory_info().rss >> 20) > 400  # noqa: B023

            # The weights take 540 MB. The memory that stays in use varies by 50 MB from run to run.
            wait_until(is_freed, about=process.memory_info)
            files.append(process.num_fds())

    assert files[2] <= files[1], f"open files: {files}"
    assert [len(each["path"]) for each in told] == [len(told[0]["path"])] * 3
    assert told[2]["modules"] == told[1]["modules"]
    assert told[2]["threads"] == told[1]["threads"]


def test_streams_and_other_contracts_reach_a_model_by_its_name(multi_model: Server) -> None:
    server = multi_model
    streamed = server.client.post("/models/v/invoke", json={**PROMPT, "stream": True})
    assert streamed.headers["content-type"] == "application/jsonlines"
    assert len(records(streamed.text)) == 4
    triton = server.client.post("/v2/models/v/generate", json={"text_input": "The", "max_tokens": 2})
    assert triton.json()["model_name"] == "v"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        chat = client.chat.completions.create(
            model="v", messages=[{"role": "user", "content": "Hello"}], max_tokens=2, extra_headers={}
        )
        assert chat.model == "v"
        with pytest.raises(openai.NotFoundError, match="name one of this server's models"):
            client.completions.create(model="another", prompt="x")
    unnamed = server.client.post("/invocations", json=PROMPT)
    assert (unnamed.status_code, unnamed.json()["type"]) == (400, "BadRequestException")


def test_a_stream_ends_whole_before_its_model_is_gone_with_its_engine_process(multi_model: Server) -> None:
    server = multi_model
    (core,) = map(psutil.Process, engine_cores(server))
    with ThreadPoolExecutor() as threads:
        with stopped(core.pid):
            before = server.metric("slipway_generations_total", "v")
            stream = threads.submit(server.client.post, "/models/v/invoke", json={**PROMPT, "stream": True})
            wait_until(lambda: server.metric("slipway_generations_total", "v") > before)
            unloading = threads.submit(server.client.delete, "/models/v")
            wait_until(lambda: server.client.get("/models").content == b'{"models":[]}')
        assert "generated_text" in records(stream.result().text)[-1]
        assert unloading.result().status_code == 200
    assert not lives(core)
    assert engine_cores(server) == []
    assert server.client.get("/ping").status_code == 200


def test_a_store_of_several_models_has_a_management_port(tmp_path: Path, directories: dict[str, Path]) -> None:
    for name in ("a", "b"):
        shutil.copytree(directories["echo"], tmp_path / "store" / name)
    port = free_port()
    environment = {"SERVING_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{port}"}
    with Server(tmp_path / "store", tmp_path / "server.log", environment, name=None) as server:
        assert server.client.get("/ping").json() == {"a": {"status": "Healthy"}, "b": {"status": "Healthy"}}
        assert server.client.post("/predictions/b", content=b"x").content == b"x"
        assert server.client.get("/models").status_code == 404
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as management:
            listed = management.get("/models").json()["models"]
            assert [(model["modelName"], model["status"]) for model in listed] == [("a", "READY"), ("b", "READY")]
            assert management.post("/invocations").status_code == 404
            assert management.delete("/models/b").status_code == 200
        assert server.client.post("/invocations", content=b"x").content == b"x"
        assert server.stop() == 0
