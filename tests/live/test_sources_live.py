"""Models that do not come from a plain directory, but from S3, a read-only disk, or another container's variables."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.live.server import START_SECONDS, Server
from tests.stand_ins.s3 import BUCKET, CREDENTIALS, gate_to, held, moto, put, refuse
from tests.waiting import SECONDS, wait_until

PROPERTIES = b"option.dtype=fp32\noption.kv_cache_memory_bytes=536870912\n"
FORMATTER = b"""
from djl_python import Input
from djl_python.output_formatter import output_formatter
from tiny_package import ANSWER


@output_formatter
def write(output):
    return ANSWER
"""


@pytest.fixture(scope="module")
def weights_may_come() -> threading.Event:
    return threading.Event()


@pytest.fixture(scope="module")
def starting(
    small_options: dict[str, object], tmp_path_factory: pytest.TempPathFactory, weights_may_come: threading.Event
) -> Iterator[Server]:
    """Start a server for a model directory on S3."""
    directory, weights = tmp_path_factory.mktemp("s3"), Path(str(small_options["model_id"]))
    with moto() as address, gate_to(address) as gate:
        files = {f"llms/smol/{path.name}": path.read_bytes() for path in weights.iterdir() if path.is_file()}
        put(address, files | {"llms/smol/serving.properties": PROPERTIES})
        gate.fault = held(weights_may_come, ending=".safetensors", first=1)
        environment = CREDENTIALS | {
            "AWS_ENDPOINT_URL_S3": gate.url,
            "HF_MODEL_ID": f"s3://{BUCKET}/llms/smol",
            "SERVING_DOWNLOAD_DIR": str(directory / "downloads"),
            "SERVING_MODEL_STORE": str(directory / "empty"),
            # Variables of a TGI deployment.
            "SM_NUM_GPUS": "1",
            "MAX_INPUT_LENGTH": "48",
            "MAX_TOTAL_TOKENS": "96",
            "MAX_BEST_OF": "3",
            "MESSAGES_API_ENABLED": "true",
            "OPTION_TGI_COMPAT": "true",
        }
        (directory / "empty").mkdir()
        server = Server(None, directory / "server.log", environment)
        try:
            yield server
        finally:
            weights_may_come.set()
            server.stop()


@pytest.fixture(scope="module")
def on_s3(starting: Server, weights_may_come: threading.Event) -> Server:
    """Return the same server when it is ready."""
    weights_may_come.set()
    starting.wait_until_ready()
    return starting


@pytest.mark.slow
def test_ping_is_pending_while_weights_are_downloaded_and_200_afterwards(
    starting: Server, weights_may_come: threading.Event
) -> None:
    wait_until(lambda: starting.ping() != 0, START_SECONDS)
    wait_until(lambda: starting.metric("slipway_download_bytes") > 0, START_SECONDS)
    answer = starting.client.get("/ping")
    assert (answer.status_code, answer.json()) == (503, {"model": {"status": "PENDING"}})
    assert starting.metric("slipway_download_bytes") < starting.metric("slipway_download_total_bytes")
    assert starting.metric("slipway_download_total_bytes") > 10_000_000
    weights_may_come.set()
    starting.wait_until_ready()
    assert starting.metric("slipway_download_bytes") == starting.metric("slipway_download_total_bytes")
    assert "downloaded s3://models/llms/smol/" in starting.log_text()


def test_a_client_of_tgi_is_served_under_its_own_limits(on_s3: Server) -> None:
    info = on_s3.client.get("/info").json()
    assert (info["max_input_tokens"], info["max_total_tokens"], info["max_best_of"]) == (48, 96, 3)
    answer = on_s3.client.post("/invocations", json={"inputs": "The capital of France is", "parameters": {}})
    assert answer.status_code == 200
    assert isinstance(answer.json()[0]["generated_text"], str)
    chat = on_s3.client.post(
        "/invocations", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "model": "tgi"}
    )
    assert chat.status_code == 200
    assert chat.json()["object"] == "chat.completion"


def test_a_prompt_beyond_the_limit_is_refused_in_the_words_of_each_contract(on_s3: Server) -> None:
    long = "word " * 60
    tgi = on_s3.client.post("/generate", json={"inputs": long, "parameters": {"max_new_tokens": 2}})
    assert tgi.status_code == 422
    assert "`inputs` must have less than 49 tokens. Given: " in tgi.json()["error"]
    lmi = on_s3.client.post("/predictions/model", json={"inputs": long, "parameters": {"max_new_tokens": 2}})
    assert lmi.status_code == 424
    assert "at most 48 are taken (option.max_prompt_tokens)" in lmi.text
    openai = on_s3.client.post("/v1/completions", json={"model": "model", "prompt": long, "max_tokens": 2})
    assert openai.status_code == 400
    assert "at most 48 are taken" in openai.json()["error"]["message"]
    beams = on_s3.client.post(
        "/invocations",
        json={"inputs": "The capital of France is", "parameters": {"num_beams": 2, "max_new_tokens": 60}},
    )
    assert beams.status_code == 200
    search = {"model": "model", "max_tokens": 60, "use_beam_search": True, "n": 2, "ignore_eos": True}
    for prompt, status in (("The capital of France is", 200), (long, 400)):
        assert on_s3.client.post("/v1/completions", json=search | {"prompt": prompt}).status_code == status


def test_a_download_that_fails_ends_the_process_with_its_reason(tmp_path: Path) -> None:
    with moto() as address, gate_to(address) as gate:
        put(address, {"m/config.json": b"{}", "m/model.safetensors": b"x" * 1000})
        environment = CREDENTIALS | {
            "AWS_ENDPOINT_URL_S3": gate.url,
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"),
        }
        fault = refuse(403, "AccessDenied")
        gate.fault = lambda passing: passing.path.endswith(".safetensors") and fault(passing)
        server = Server(f"s3://{BUCKET}/m", tmp_path / "server.log", environment)
        try:
            assert server.process.wait(START_SECONDS) == 1
            server.wait_for_log("the model cannot be served: s3://models/m/: An error occurred (AccessDenied)")
        finally:
            server.stop()


def test_sigterm_ends_a_download_at_once(tmp_path: Path) -> None:
    with moto() as address, gate_to(address) as gate:
        put(address, {"m/config.json": b"{}", "m/model.safetensors": b"x" * 1000})
        gate.fault = held(never := threading.Event(), ending=".safetensors")
        environment = CREDENTIALS | {
            "AWS_ENDPOINT_URL_S3": gate.url,
            "SERVING_DOWNLOAD_DIR": str(tmp_path / "downloads"),
        }
        server = Server(f"s3://{BUCKET}/m", tmp_path / "server.log", environment)
        try:
            wait_until(lambda: "downloading s3://" in server.log_text(), START_SECONDS, about=server.log_text)
            assert server.stop() == 0
        finally:
            never.set()
            server.stop()


@pytest.mark.slow
def test_sigterm_ends_the_process_whatever_the_management_api_waits_for(tmp_path: Path) -> None:
    """S3 never answers, and the server's import of a `model.py` takes an hour."""
    (tmp_path / "model.py").write_text(
        "import time\nfrom djl_python.output_formatter import output_formatter\n"
        "@output_formatter\ndef write(output): return ''\ntime.sleep(3600)\n"
    )
    (tmp_path / "serving.properties").write_text("option.model_id=org/name\n")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        environment = CREDENTIALS | {"SAGEMAKER_MULTI_MODEL": "true", "AWS_ENDPOINT_URL_S3": address}
        environment |= {"SERVING_DRAIN_TIMEOUT": "600"}
        server = Server(None, tmp_path / "server.log", environment, name=None)
        with server, ThreadPoolExecutor() as threads:
            calls = [
                threads.submit(server.client.post, "/models", params={"url": url, "model_name": name})
                for name, url in (("s3", f"s3://{BUCKET}/m"), ("hangs", str(tmp_path)))
            ]
            wait_until(lambda: '"hangs"' in server.client.get("/models").text, about=server.log_text)
            assert server.ping() == 200
            server.process.send_signal(signal.SIGTERM)
            assert [call.result().status_code for call in calls] == [503, 503]
            assert server.process.wait(SECONDS) == 0


@pytest.mark.slow
def test_a_read_only_model_directory_without_a_home_is_served(small_options: dict[str, object], tmp_path: Path) -> None:
    """A formatter imports a package from a requirements.txt beside the model."""
    from tests.stand_ins.wheel import make_wheel

    model = tmp_path / "model"
    model.mkdir()
    for path in Path(str(small_options["model_id"])).iterdir():
        if path.is_file():
            os.link(path, model / path.name) if path.stat().st_dev == model.stat().st_dev else shutil.copy(path, model)
    (model / "serving.properties").write_bytes(b"option.dtype=fp32\noption.rolling_batch=disable\n")
    (model / "model.py").write_bytes(FORMATTER)
    make_wheel(model / "requirements", "from a package")
    (model / "requirements.txt").write_text("tiny-package\n")
    before = listing(model)
    for directory, _, _ in os.walk(model):
        os.chmod(directory, 0o555)
    try:
        with Server(model, tmp_path / "server.log", {"HOME": "/proc/nonexistent", "DJL_OFFLINE": "true"}) as server:
            answer: httpx.Response = server.invoke("The capital of France is", max_new_tokens=2)
            assert (answer.status_code, answer.text) == (200, "from a package" * 2)
            server.wait_for_log("HOME is /proc/nonexistent, which cannot be written; using ")
    finally:
        os.chmod(model, 0o755)
    assert listing(model) == before


def listing(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
