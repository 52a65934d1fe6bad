"""The options of `slipway serve` and `slipway config`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

from container.settings.command_line import read_startup
from container.settings.settings import Startup
from slipway.cli import app
from tests.unit.engines.memory.test_parallelism import MODELS

COUNTS = (1, 2, 4, 8)
DEGREES = (None, "1", "2", "max")
# The number of copies and the GPUs of each copy, on machines with 1, 2, 4 and 8 GPUs.
ONES = ["1x1", "2x1", "4x1", "8x1"]
TWOS = ["1x1", "1x2", "2x2", "4x2"]  # The model needs two GPUs.
FOURS = ["1x1", "1x2", "1x4", "2x4"]
ALL = ["1x1", "1x2", "1x4", "1x8"]
OF_TWO = ["1x2", "1x2", "2x2", "4x2"]  # Degree 2: one GPU is too few.
# A key has a model, and the size of each GPU in GiB. A value has the plans for each degree in DEGREES.
PLANS = {
    ("Llama-3.2-1B", 24): (ONES, ONES, OF_TWO, ALL),
    ("Llama-3.2-1B", 80): (ONES, ONES, OF_TWO, ALL),
    ("Llama-3.1-8B", 24): (TWOS, ONES, OF_TWO, ALL),
    ("Llama-3.1-8B", 80): (ONES, ONES, OF_TWO, ALL),
    ("Qwen3-32B", 24): (FOURS, ONES, OF_TWO, ALL),
    ("Qwen3-32B", 80): (TWOS, ONES, OF_TWO, ALL),
    ("Llama-3.3-70B", 24): (ALL, ONES, OF_TWO, ALL),
    ("Llama-3.3-70B", 80): (FOURS, ONES, OF_TWO, ALL),
}
# LMI's plans. They do not depend on the model. Without a degree, one copy has all GPUs.
LMI = (ALL, ONES, ["-", *OF_TWO[1:]], ALL)


def _served(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Startup:
    served: list[Startup] = []

    def run(startup: Startup) -> NoReturn:
        served.append(startup)
        raise SystemExit(0)

    monkeypatch.setattr("slipway.serve.run", run)
    done = CliRunner().invoke(app, ["serve", *arguments])
    assert done.exit_code == 0, done.output
    return served[0]


def test_slipway_serve_takes_api_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("def handle(inputs): ...\n")
    arguments = ["--model-dir", str(tmp_path), "--api-key", "one", "--api-key", "two"]
    assert _served(arguments, monkeypatch).server_config.api_keys is not None


def test_a_refusal_comes_with_the_warnings_that_may_explain_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serving.properties").write_text("translatorFactory=org.Mine\n")
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(SystemExit) as caught:
        read_startup(str(tmp_path), None, None, None)
    assert caught.value.code == 2
    refusal, warning = capsys.readouterr().err.splitlines()
    assert refusal.startswith("slipway: there is no model: give option.model_id")
    assert warning == (
        "slipway: warning: translatorFactory (serving.properties: translatorFactory) is ignored: "
        "the model has no such setting; options of the engine start with option."
    )


def test_a_wrong_model_directory_is_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(SystemExit):
        read_startup(str(tmp_path / "none"), None, None, None)
    (problem,) = capsys.readouterr().err.splitlines()
    assert f"there is no directory {tmp_path}/none" in problem


@pytest.mark.parametrize("form", [["org/name"], ["--model", "org/name"]])
def test_a_model_of_the_hub_is_served_by_its_name_whatever_the_environment_names(
    form: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"HF_MODEL_ID": "other/model", "OPTION_MODEL_ID": "third/model", "SERVING_MODEL_STORE": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (model,) = _served(form, monkeypatch).models
    assert (model.settings.config.model_id, model.settings.config.name) == ("org/name", "org_name")


@pytest.mark.parametrize("option", [[], ["--model"], ["--model-dir"]])
def test_a_directory_may_be_given_as_the_model(
    option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path, "Llama-3.2-1B")
    (model,) = _served([*option, str(folder)], monkeypatch).models
    assert model.settings.config.model_id == str(folder)


def test_two_different_models_are_refused(tmp_path: Path) -> None:
    for arguments in (["a/b", "--model", "c/d"], [str(tmp_path), "--model-dir", str(tmp_path)]):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 2


def test_the_command_line_has_a_version() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"slipway {version('slipway')}\n"


def write_model(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(MODELS[name]["weight_bytes"])  # takes no room on the disk
    return folder


@pytest.mark.parametrize(("name", "gibibytes"), PLANS)
def test_the_plan_for_other_machines(tmp_path: Path, name: str, gibibytes: int) -> None:
    model = write_model(tmp_path, name)
    for degree, row, theirs in zip(DEGREES, PLANS[name, gibibytes], LMI, strict=True):
        for count, copies, other in zip(COUNTS, row, theirs, strict=True):
            found = planned(model, f"{count}x{gibibytes}GiB", {"TENSOR_PARALLEL_DEGREE": degree})
            (use,) = found["models"]
            cell = (name, gibibytes, degree, count)
            assert found["memory_bytes"] == [gibibytes << 30] * count
            assert (*cell, f"{use['copies']}x{use['gpus_of_copy']}") == (*cell, copies)
            assert (found["idle"], use["to_use_idle"]) == (0, {}), "no GPU is left with counts that are powers of 2"
            assert (*cell, bool(found["warning"])) == (*cell, use["gpus"] > count)
            assert degree is None or other in ("-", copies), "a degree leads to LMI's copies"


@pytest.mark.parametrize(
    ("variables", "copies"),
    [
        # TGI splits a model over NUM_SHARD GPUs, and does not use other GPUs. Slipway runs copies on these.
        ({"NUM_SHARD": "2"}, "2x2"),
        ({"SM_NUM_GPUS": "1", "SAGEMAKER_MODEL_SERVER_WORKERS": "1"}, "4x1"),  # as JumpStart sets them
        ({"SHARDED": "true", "NUM_SHARD": "2"}, "2x2"),
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "1", "SM_VLLM_DATA_PARALLEL_SIZE": "4"}, "1x4"),
        ({"SM_VLLM_TENSOR_PARALLEL_SIZE": "1", "SM_VLLM_PIPELINE_PARALLEL_SIZE": "2"}, "2x2"),
        ({"TENSOR_PARALLEL_DEGREE": "1", "SERVING_MAX_WORKERS": "2"}, "2x1"),
        ({"TENSOR_PARALLEL_DEGREE": "1", "SAGEMAKER_NUM_MODEL_WORKERS": "3"}, "3x1"),
        ({"TENSOR_PARALLEL_DEGREE": "2", "SERVING_LOAD_ON_DEVICES": "2"}, "1x2"),
        ({"SERVING_LOAD_ON_DEVICES": "0;3"}, "1x2"),
        ({}, "2x2"),
    ],
)
def test_the_variables_of_other_containers_lead_to_copies_on_all_gpus(
    tmp_path: Path, variables: dict[str, str], copies: str
) -> None:
    (use,) = planned(write_model(tmp_path, "Llama-3.1-8B"), "4x24GiB", dict(variables))["models"]
    assert f"{use['copies']}x{use['gpus_of_copy']}" == copies


def test_the_text_has_the_same_plan(tmp_path: Path) -> None:
    model = write_model(tmp_path, "Llama-3.1-8B")
    arguments = ["config", "-m", str(model), "--model-name", "m", "--gpus"]
    done = CliRunner().invoke(app, [*arguments, "4x24GiB"])
    assert "GPUs of model m: 4 of 4: 2 copies with 2 GPUs each, about 206,000 tokens" in done.output
    done = CliRunner().invoke(app, [*arguments, "3x24GiB"])
    assert "warning: 1 of 3 GPUs stay idle\n" in done.output, "a degree of 1 would not hold a sequence"
    done = CliRunner().invoke(app, [*arguments, "3x80GiB"], env={"TENSOR_PARALLEL_DEGREE": "2"})
    assert "warning: 1 of 3 GPUs stay idle; to use them: option.tensor_parallel_degree=1" in done.output
    done = CliRunner().invoke(app, [*arguments, "4x24GiB"], env={"SERVING_MAX_WORKERS": "1"})
    assert "GPUs of model m: 4 of 4: 2 copies with 2 GPUs each" in done.output, "1 is LMI's default for each GPU"
    done = CliRunner().invoke(app, [*arguments, "8x24GiB"], env={"SERVING_MAX_WORKERS": "2"})
    assert "GPUs of model m: 4 of 8: 2 copies with 2 GPUs each" in done.output
    assert "warning: 4 of 8 GPUs stay idle; to use them: maxWorkers=4 or option.tensor_parallel_degree=4" in done.output


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
        "import sys; from typer.testing import CliRunner; from slipway.cli import app; "
        f"done = CliRunner().invoke(app, ['config', '-m', {str(tmp_path)!r}, '--gpus', '2x24GB']); "
        "assert done.exit_code == 0, done.output; print({'torch', 'vllm', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
