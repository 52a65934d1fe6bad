"""The options of the local endpoint that are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from slipway.cli import app


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--local-endpoint", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--local-endpoint", "e", "--component", ""], "Value '' at 'endpointName' failed"),
        (["--local-endpoint", "e", "--adapter", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--local-endpoint", "e", "--async-output", "/out"], "is '/out': allowed: s3://bucket/prefix/"),
        (["--local-endpoint", "e", "--async-failures", "s3://b/../c"], "a key may not have empty parts"),
        (["--local-endpoint", "e", "--s3-folder", "/dev/null/a"], "cannot be made: "),
        (["--local-endpoint", "e", "--capture", "/dev/null/a"], "cannot be made: "),
        (["--adapter", "fr"], "has no meaning without --local-endpoint"),
        (["--capture", "/dev/null/a"], "cannot be made: "),
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
        (["--container", "http://localhost:abc"], "expected http://host:port"),
        (["--container", "http://x", "--endpoint-name", "a_b"], "Value 'a_b' at 'endpointName' failed"),
        (["--container", "http://x", "--max-payload-mb", "0"], "Input should be greater than or equal to 1"),
    ],
)
def test_before_a_container_of_its_own_they_are_refused_as_well(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["local", *arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
