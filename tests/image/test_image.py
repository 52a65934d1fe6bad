"""Builds and runs the images for CPUs and GPUs. The GPU image has a base with vLLM's CPU build."""

from __future__ import annotations

import csv
import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.building import ROOT
from tests.image.container_engine import Container, Engine, running
from tests.live.server import records

PROMPT = "The capital of France is"
# A request that takes far longer than SERVING_DRAIN_TIMEOUT allows.
ENDLESS = {
    "inputs": "Once upon a time",
    "parameters": {"max_new_tokens": 1000, "ignore_eos_token": True, "details": True},
    "stream": True,
}


def ask_everything(container: Container) -> None:
    """Send one request of each kind to a container that is ready."""
    client = container.client
    assert client.get("/ping").status_code == 200
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 8}}
    plain = client.post("/invocations", json=body)
    assert plain.status_code == 200, plain.text
    assert "Paris" in plain.json()["generated_text"]
    streamed = client.post("/invocations", json=body | {"stream": True})
    assert streamed.status_code == 200, streamed.text
    assert "".join(record["token"]["text"] for record in records(streamed.text)) == plain.json()["generated_text"]
    chat = client.post(
        "/v1/chat/completions",
        json={"model": "model", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8},
    )
    assert chat.status_code == 200, chat.text
    assert chat.json()["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def unprivileged(engine: Engine, image: str, model_dir: Path) -> Iterator[Container]:
    with running(engine, image, model_dir, unprivileged=True, SERVING_DRAIN_TIMEOUT="600") as container:
        yield container


def test_the_unprivileged_container_serves_without_a_command(unprivileged: Container) -> None:
    seconds = unprivileged.wait_until_ready()
    print(f"ready after {seconds:.1f} s")
    assert unprivileged.exec("id", "-u").strip() == "12345"
    ask_everything(unprivileged)


def test_nothing_but_tmp_can_be_written_while_it_serves(engine: Engine, unprivileged: Container) -> None:
    engine.needs_container("a read-only root file system")
    script = "for place in / /opt/slipway /tmp; do touch $place/new 2>/dev/null && echo $place; done; true"
    assert unprivileged.exec("sh", "-c", script).split() == ["/tmp"]
    assert "ro," in unprivileged.exec("grep", " / ", "/proc/mounts")


def test_tini_is_the_first_process(engine: Engine, unprivileged: Container) -> None:
    engine.needs_container("a separate first process")
    assert unprivileged.exec("cat", "/proc/1/cmdline").split("\0")[0] == "tini"


def test_sigterm_drains_and_the_exit_code_is_0(unprivileged: Container) -> None:
    body = {
        "inputs": "Once upon a time",
        "parameters": {"max_new_tokens": 60, "ignore_eos_token": True, "details": True},
        "stream": True,
    }
    with unprivileged.client.stream("POST", "/invocations", json=body) as response:
        lines = response.iter_lines()
        received = [next(lines)]
        unprivileged.terminate()
        received += [line for line in lines if line]
    last = json.loads(received[-1])
    assert last["details"]["generated_tokens"] == 60, last
    assert len(received) > 1
    assert unprivileged.wait() == 0
    assert "drained" in unprivileged.log()


@pytest.fixture
def whole_base(device: str) -> None:
    """Skip the test for a GPU image on the stand-in base, because the CPU image's test shows the same."""
    if device == "gpu" and not {"IMAGE", "GPU_BASE_IMAGE"} & os.environ.keys():
        pytest.skip("the image for CPUs shows the same")


@pytest.mark.usefixtures("whole_base")
def test_the_container_serves_as_root_and_stops_in_time_as_sagemaker_runs_it(
    engine: Engine, image: str, model_dir: Path
) -> None:
    with running(engine, image, model_dir, "serve", SERVING_DRAIN_TIMEOUT="5") as container:
        container.wait_until_ready()
        assert container.exec("id", "-u").strip() == "0"
        ask_everything(container)
        with container.client.stream("POST", "/invocations", json=ENDLESS) as response:
            lines = response.iter_lines()
            next(lines)
            container.terminate()
            last = [line for line in lines if line][-1]
            # A server that still runs 25 s after the signal exits with another code. The test's own clock would also
            # count the time that the container engine takes.
            assert container.wait() == 0, container.log()[-4000:]
    assert json.loads(last)["details"]["finish_reason"] == "error", "it was still running"


def test_serve_takes_arguments(engine: Engine, image: str, model_dir: Path) -> None:
    with running(engine, image, model_dir, "serve", "--help") as container:
        assert container.wait() == 0
        assert "--model-name" in container.log()


@pytest.mark.usefixtures("whole_base")
def test_a_model_that_cannot_be_loaded_ends_the_container_with_1_and_says_why(
    engine: Engine, image: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchForCausalLM"]}')
    (tmp_path / "serving.properties").write_text("option.rolling_batch=vllm\n")
    tmp_path.chmod(0o755)
    with running(engine, image, tmp_path) as container:
        assert container.wait() == 1
        assert "the model cannot be served" in container.log()
        assert "NoSuchForCausalLM" in container.log()


def test_other_commands_run_in_place_of_serve(engine: Engine, image: str, model_dir: Path) -> None:
    with running(engine, image, model_dir, "slipway", "config") as container:
        assert container.wait() == 0
        assert "/opt/ml/model" in container.log()


def test_the_image_says_what_it_is(engine: Engine, image: str, device: str) -> None:
    config = engine.config(image)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert config["Labels"]["org.opencontainers.image.version"] == version
    assert config["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    for capability in ("accept-bind-to-port", "multi-models"):
        assert config["Labels"][f"com.amazonaws.sagemaker.capabilities.{capability}"] == "true"
    compatibility = [] if device == "cpu" else ["sh", "/opt/slipway/libexec/cuda-compat.sh"]
    assert config["Entrypoint"] == ["tini", "--", *compatibility]
    assert config["User"] in {"", "root"}
    assert config["WorkingDir"] == "/opt/slipway", "the loader also searches the working directory for libraries"
    assert config["Cmd"] == ["serve"]
    assert "8080/tcp" in config["ExposedPorts"]


def test_the_licence_of_every_package_is_listed(engine: Engine, image: str) -> None:
    listed = list(csv.DictReader(engine.output(image, "cat", "/opt/slipway/licenses.csv").splitlines()))
    assert [package for package in listed if package["license"] in ("", "unknown")] == []
    names = {(package["kind"], package["name"]): package["license"] for package in listed}
    assert names["python", "slipway"] == "Apache-2.0"
    assert "BSD-3-Clause" in names["python", "torch"]
    script = "from importlib.metadata import distributions; print(*{package.name for package in distributions()})"
    installed = engine.output(image, "/opt/slipway/bin/python", "-I", "-c", script).split()
    assert {name for kind, name in names if kind == "python"} == set(installed)
    debian = engine.output(image, "dpkg-query", "--show", "--showformat", "${Package} ").split()
    assert {name for kind, name in names if kind == "debian"} == set(debian)


def test_there_is_no_compiler_and_there_are_no_caches(engine: Engine, image: str, device: str) -> None:
    if device == "gpu":
        pytest.skip("vLLM's image needs its compilers, because it compiles kernels at run time")
    find = (
        "find /usr/bin -name 'gcc*' -o -name 'cc' -o -name 'g++*'; ls /var/lib/apt/lists; ls /root/.cache 2>/dev/null"
    )
    assert engine.output(image, "sh", "-c", f"{find}; true").strip() == ""


def test_a_handlers_requirements_can_be_installed(engine: Engine, image: str) -> None:
    commands = "python -m venv --without-pip /tmp/own && python -m pip --version"
    assert engine.output(image, "sh", "-c", commands).startswith("pip ")


def test_every_module_is_compiled(engine: Engine, image: str) -> None:
    script = (
        "import importlib.util, pathlib, struct, sys\n"
        "stale = []\n"
        "for packages in [path for path in sys.path if path.endswith('-packages')]:\n"
        "    for source in pathlib.Path(packages).rglob('*/**/*.py'):\n"
        "        compiled = pathlib.Path(importlib.util.cache_from_source(source))\n"
        "        stat = source.stat()\n"
        "        wanted = (int(stat.st_mtime), stat.st_size)\n"
        "        if not compiled.exists() or struct.unpack('<8xII', compiled.read_bytes()[:16]) != wanted:\n"
        "            try:\n"
        "                compile(source.read_bytes(), source, 'exec')\n"
        "            except SyntaxError:\n"
        "                continue  # a template\n"
        "            stale.append(str(source))\n"
        "print(len(stale), *stale[:20])\n"
    )
    assert engine.output(image, "/opt/slipway/bin/python", "-W", "ignore", "-c", script).split() == ["0"]


@pytest.fixture(scope="module")
def gpu_image(device: str, request: pytest.FixtureRequest) -> str:
    if device == "cpu":
        pytest.skip("the CPU image has all packages in /opt/slipway")
    image: str = request.getfixturevalue("image")
    return image


def test_vllm_and_what_it_needs_are_the_base_images_own(engine: Engine, gpu_image: str) -> None:
    script = "import torch, transformers, vllm; print(torch.__file__, transformers.__file__, vllm.__file__)"
    places = engine.output(gpu_image, "/opt/slipway/bin/python", "-W", "ignore", "-c", script).split()[-3:]
    assert len(places) == 3
    assert not [place for place in places if place.startswith("/opt/slipway")]
    # Slipway's environment has the packages that the base lacks.
    place = engine.output(gpu_image, "/opt/slipway/bin/python", "-c", "import boto3; print(boto3.__file__)").strip()
    assert place.startswith("/opt/slipway/")
    # The base's Python does not see Slipway's packages.
    script = "import importlib.util; print([importlib.util.find_spec(name) for name in ('boto3', 'container')])"
    base_python = engine.output(gpu_image, "sh", "-c", "PATH=${PATH#/opt/slipway/bin:} command -v python3").strip()
    assert engine.output(gpu_image, base_python, "-I", "-c", script).strip() == "[None, None]"
