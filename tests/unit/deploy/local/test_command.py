"""The options of the local endpoint that are refused, and the options of `serve` that stay."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from container.settings.settings import Startup
from deploy.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local-endpoint", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--local-endpoint", "e", "--component", ""], "Value '' at 'endpointName' failed"),
        (["--local-endpoint", "e", "--adapter", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--adapter", "fr"], "has no meaning without --local-endpoint"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(arguments: list[str], message: str) -> None:
    environment = {"HF_MODEL_ID": "org/model", "COLUMNS": "200", "TERM": "dumb"}
    result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--container'"),
        (["--container", "localhost:8080"], "expected http://host:port"),
        (["--container", "http://x", "--endpoint-name", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--container", "http://x", "--max-payload-mb", "0"], "Input should be greater than or equal to 1"),
    ],
)
def test_before_a_container_of_its_own_they_are_refused_as_well(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["local", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def options_of_serve(module: str) -> set[str]:
    command = [sys.executable, "-m", module, "serve", "--help"]
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    return set(re.findall(r"--[a-z-]+", shown))


def test_slipway_serve_has_all_options_of_the_containers_serve() -> None:
    known = options_of_serve("container")
    assert {"--model-dir", "--port", "--host", "--model-name", "--api-key"} <= known
    assert options_of_serve("deploy") == known | {"--local-endpoint", "--component", "--adapter"}


def test_slipway_serve_takes_api_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Startup] = []

    def run(startup: Startup) -> NoReturn:
        served.append(startup)
        raise SystemExit(0)

    monkeypatch.setattr("container.cli.run", run)
    (tmp_path / "model.py").write_text("def handle(inputs): ...\n")
    arguments = ["serve", "--model-dir", str(tmp_path), "--api-key", "one", "--api-key", "two"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert served[0].server.api_keys is not None
