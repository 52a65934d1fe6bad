"""The Dockerfiles agree with the project and with each other. `make lint` also checks them with hadolint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
SCRIPTS = ROOT / "container" / "image"
DOCKERFILES = [SCRIPTS / "Dockerfile.cpu", SCRIPTS / "Dockerfile.gpu"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

by_device = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.suffix[1:])


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return each instruction and its arguments, on one line."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(parts[0], parts[1]) for line in lines if len(parts := line.split(maxsplit=1)) == 2]


def arguments(file: Path, instruction: str) -> list[str]:
    return [rest for name, rest in instructions(file) if name == instruction]


@by_device
def test_every_copied_source_is_there_and_gets_into_the_build(file: Path) -> None:
    sent = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copied in arguments(file, "COPY"):
        if copied.startswith("--from="):
            continue
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == path or source.startswith(f"{path}/") for path in sent), source


@by_device
def test_every_package_of_the_project_is_installed(file: Path) -> None:
    patterns = PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]
    assert {pattern.rstrip("*") for pattern in patterns} <= {copied.split()[0] for copied in arguments(file, "COPY")}


@by_device
def test_the_lock_of_its_own_device_is_installed(file: Path) -> None:
    locks = [copied for copied in arguments(file, "COPY") if "requirements/" in copied]
    assert locks == [f"requirements/{file.suffix[1:]}.txt requirements.txt"]


def test_the_cpu_images_python_is_the_one_of_its_lock() -> None:
    """Debian 12 has Python 3.11."""
    (base,) = [value for value in arguments(DOCKERFILES[0], "ARG") if value.startswith("BASE_IMAGE=")]
    assert base.startswith("BASE_IMAGE=debian:bookworm-slim@sha256:")
    assert re.search(r"[Pp]ython(-version)? 3\.11\b", (ROOT / "requirements" / "cpu.txt").read_text())


def test_the_gpu_image_is_made_of_vllms_own_image_of_the_locked_version() -> None:
    locked = re.search(r"^vllm==([\d.]+)", (ROOT / "requirements" / "gpu.txt").read_text(), re.MULTILINE)
    assert locked is not None
    assert f"BASE_IMAGE=vllm/vllm-openai:v{locked.group(1)}" in arguments(DOCKERFILES[1], "ARG")


def test_base_images_are_named_by_digest_but_for_vllms_whose_digest_the_build_looks_up() -> None:
    files = [*DOCKERFILES, *(ROOT / "tests" / "image").glob("*.Dockerfile")]
    named = [value.partition("=")[::2] for file in files for value in arguments(file, "ARG") if "_IMAGE=" in value]
    assert len(named) == 4
    by_tag = [value for _, value in named if not re.search(r"@sha256:[0-9a-f]{64}$", value)]
    assert [value.partition(":")[0] for value in by_tag] == ["vllm/vllm-openai"]
    assert len({value for _, value in named if value.startswith("debian:")}) == 1


@by_device
def test_commands_run_under_tini_without_a_shell_between(file: Path) -> None:
    (entry_point,) = (json.loads(value) for value in arguments(file, "ENTRYPOINT"))
    assert entry_point[:2] == ["tini", "--"]
    assert json.loads(arguments(file, "CMD")[-1]) == ["serve"]
    assert os.access(SCRIPTS / "serve", os.X_OK)
    assert "serve" not in PROJECT["project"]["scripts"], "Ray has a program of that name"
    assert arguments(file, "EXPOSE") == ["8080"]


@by_device
def test_what_runs_beside_the_server_is_there(file: Path) -> None:
    named = set(re.findall(r"/opt/slipway/libexec/([\w.-]+)", file.read_text()))
    assert not [name for name in named if not (SCRIPTS / name).is_file()]


class Pinged(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/ping" else 404)  # type: ignore[attr-defined]
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.mark.parametrize("variable", ["SAGEMAKER_BIND_TO_PORT", "SERVING_PORT"])
@by_device
def test_the_health_check_is_whether_ping_answers_200(file: Path, variable: str) -> None:
    (check,) = (json.loads(value[value.index("[") :]) for value in arguments(file, "HEALTHCHECK"))
    assert check[:2] == ["/opt/slipway/bin/python", "-Ic"]
    with HTTPServer(("127.0.0.1", 0), Pinged) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            environment = {variable: str(server.server_port)}
            for status, code in ((200, 0), (503, 1)):
                server.status = status  # type: ignore[attr-defined]
                assert subprocess.run([sys.executable, *check[1:]], env=environment, check=False).returncode == code
        finally:
            server.shutdown()
        closed = subprocess.run([sys.executable, *check[1:]], env={variable: "9"}, capture_output=True, check=False)
    assert closed.returncode == 1


def test_both_images_have_the_same_settings_and_labels_but_for_their_device() -> None:
    cpu, gpu = (dict(labels(file)) for file in DOCKERFILES)
    assert cpu.keys() == gpu.keys()
    differing = {label for label in cpu if cpu[label] != gpu[label]}
    assert differing == {"org.opencontainers.image.description"}
    for capability in ("accept-bind-to-port", "multi-models"):
        assert cpu[f"com.amazonaws.sagemaker.capabilities.{capability}"] == "true"
    variables = [set(re.findall(r"(\w+)=", " ".join(arguments(file, "ENV")))) for file in DOCKERFILES]
    # The GPU image compiles kernels, and resets the search path of AWS's base.
    assert variables[1] - variables[0] == {"USER", "PYTHONPATH"}
    # The GPU image has a compiler.
    assert variables[0] - variables[1] == {"TORCH_COMPILE_DISABLE"}


def labels(file: Path) -> list[tuple[str, str]]:
    return re.findall(r'([\w.-]+)="([^"]*)"', " ".join(arguments(file, "LABEL")))
