"""Invalid options of the local endpoint are refused."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from slipway.cli import app


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("serve --local-endpoint a_b", "Value 'a_b' at 'endpointName' failed"),
        ("serve --local-endpoint e --component ''", "Value '' at 'endpointName' failed"),
        ("serve --local-endpoint e --adapter a_b", "Value 'a_b' at 'endpointName' failed"),
        ("serve --local-endpoint e --async-output /out", "is '/out': allowed: s3://bucket/prefix/"),
        ("serve --local-endpoint e --async-failures s3://b/../c", "a key may not have empty parts"),
        ("serve --local-endpoint e --s3-folder /dev/null/a", "cannot be made: "),
        ("serve --local-endpoint e --capture /dev/null/a", "cannot be made: "),
        ("serve --adapter fr", "has no meaning without --local-endpoint"),
        ("serve --capture /dev/null/a", "cannot be made: "),
        ("local", "Missing option '--container'"),
        ("local --container localhost:8080", "expected http://host:port"),
        ("local --container http://localhost:abc", "expected http://host:port"),
        ("local --container http://x --endpoint-name a_b", "Value 'a_b' at 'endpointName' failed"),
        ("local --container http://x --max-payload-mb 0", "Input should be greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(command: str, message: str) -> None:
    environment = {"HF_MODEL_ID": "org/model", "COLUMNS": "200", "TERM": "dumb"}
    result = CliRunner().invoke(app, command, env=environment)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
