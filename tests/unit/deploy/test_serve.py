"""The options of `slipway serve` and `slipway config`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from container.settings.settings import Startup
from deploy.cli import app
from deploy.serve import read_startup
from tests.unit.engines.test_parallelism import MODELS

COUNTS = (1, 2, 4, 8)
# For machines with 1, 2, 4 and 8 GPUs: those that the model takes, and the copies that would use the idle ones.
ONE = [(1, 1), (1, 2), (1, 4), (1, 8)]
ONE_AT_MOST = [(1, 1)] * 4  # The weights do not fit one GPU, and so no copies are proposed.
TWO = [(1, 1), (2, 1), (2, 2), (2, 4)]
GIVEN_TWO = [(2, 1), (2, 1), (2, 2), (2, 4)]
TWO_AT_MOST = [(2, 1)] * 4
FOUR = [(1, 1), (2, 1), (4, 1), (4, 2)]
ALL = [(1, 1), (2, 1), (4, 1), (8, 1)]
PLANS = {  # By the model and the GiB of a GPU: without a degree, with 1, with 2, and with max.
    ("Llama-3.2-1B", 24): (ONE, ONE, GIVEN_TWO, ALL),
    ("Llama-3.2-1B", 80): (ONE, ONE, GIVEN_TWO, ALL),
    ("Llama-3.1-8B", 24): (TWO, ONE, GIVEN_TWO, ALL),
    ("Llama-3.1-8B", 80): (ONE, ONE, GIVEN_TWO, ALL),
    ("Qwen3-32B", 24): (FOUR, ONE_AT_MOST, TWO_AT_MOST, ALL),
    ("Qwen3-32B", 80): (TWO, ONE, GIVEN_TWO, ALL),
    ("Llama-3.3-70B", 24): (ALL, ONE_AT_MOST, TWO_AT_MOST, ALL),
    ("Llama-3.3-70B", 80): (FOUR, ONE_AT_MOST, GIVEN_TWO, ALL),
}


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


@pytest.mark.parametrize(("name", "gibibytes"), PLANS)
def test_the_plan_for_other_machines(tmp_path: Path, name: str, gibibytes: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(MODELS[name]["weight_bytes"])  # takes no room on the disk
    for degree, row in zip((None, "1", "2", "max"), PLANS[name, gibibytes], strict=True):
        for count, (gpus, copies) in zip(COUNTS, row, strict=True):
            found = planned(tmp_path, f"{count}x{gibibytes}GiB", {"TENSOR_PARALLEL_DEGREE": degree})
            (use,) = found["models"]
            cell = (degree, count)
            assert found["memory_bytes"] == [gibibytes << 30] * count
            assert (*cell, use["gpus"], found["idle"]) == (*cell, gpus, max(count - gpus, 0))
            assert (*cell, use["to_use_idle"].get("option.data_parallel_size", 1)) == (*cell, copies)
            assert bool(found["warning"]) == (gpus != count)


def planned(model: Path, gpus: str, environ: dict[str, str | None]) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["config", "-m", str(model), "--json", "--gpus", gpus], env=environ)
    assert done.exit_code == 0, done.output
    plan: dict[str, Any] = json.loads(done.stdout)["gpus"]
    return plan


@pytest.mark.parametrize("text", ["4y", "0", "4x", "x24GiB", "4x24TB", "-1", "999x24GiB", "2x0.5GiB", ""])
def test_a_wrong_machine_is_refused_with_an_example(text: str) -> None:
    done = CliRunner().invoke(app, ["config", "--gpus", text], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "4x24GiB" in done.output


def test_settings_are_read_for_the_machine_that_is_planned_for(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...\n")
    (tmp_path / "serving.properties").write_text(
        "gpu.minWorkers=2\ngpu.maxWorkers=2\noption.tensor_parallel_degree=2\n"
    )
    found = planned(tmp_path, "4", {"SERVING_LOAD_ON_DEVICES": "3;1"})
    assert (found["memory_bytes"], found["models"][0]["gpus"], found["idle"]) == ([0] * 4, 2, 2)
    refused = CliRunner().invoke(app, ["config", "-m", str(tmp_path), "--gpus", "1"])
    assert refused.exit_code == 2


def test_a_plan_needs_neither_torch_nor_a_driver(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    program = (
        "import sys; from typer.testing import CliRunner; from deploy.cli import app; "
        f"done = CliRunner().invoke(app, ['config', '-m', {str(tmp_path)!r}, '--gpus', '2x24GB']); "
        "assert done.exit_code == 0, done.output; print({'torch', 'vllm', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
