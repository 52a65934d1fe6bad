"""The options of the local endpoint that are refused, and the options of `serve` that stay."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

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


@pytest.mark.parametrize("module", ["container", "deploy"])
def test_each_command_that_serves_has_the_containers_options(module: str) -> None:
    command = [sys.executable, "-m", module, "serve", "--help"]
    environment = os.environ | {"COLUMNS": "200", "TERM": "dumb"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout
    assert all(option in shown for option in ("--model-dir", "--port", "--host", "--model-name"))
    assert ("--local-endpoint" in shown) == (module == "deploy")
