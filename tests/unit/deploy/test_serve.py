"""The options of `slipway serve`."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
from typer.testing import CliRunner

from container.settings.settings import Startup
from deploy.cli import app
from deploy.serve import read_startup


def test_slipway_serve_takes_api_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[Startup] = []

    def run(startup: Startup) -> NoReturn:
        served.append(startup)
        raise SystemExit(0)

    monkeypatch.setattr("deploy.serve.run", run)
    (tmp_path / "model.py").write_text("def handle(inputs): ...\n")
    arguments = ["serve", "--model-dir", str(tmp_path), "--api-key", "one", "--api-key", "two"]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert served[0].server.api_keys is not None


def test_a_refusal_comes_with_the_warnings_that_may_explain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serving.properties").write_text("model_id=org/name\n")
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(SystemExit) as caught:
        read_startup(str(tmp_path), None, None, None)
    assert caught.value.code == 2
    refusal, warning = capsys.readouterr().err.splitlines()
    assert refusal.startswith("slipway: there is no model: give option.model_id")
    assert warning == (
        "slipway: warning: model_id (serving.properties: model_id) is ignored: "
        "the model has no such setting; option.model_id is meant"
    )
