"""The GPUs of instance types, and the plan that a dry run shows."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import botocore.session
import pytest

from container.models.placement import gpu_plan
from container.settings.load import load_startup
from container.sources.download import RemoteModels
from deploy.sagemaker.configuration import Configuration, read_configuration
from deploy.sagemaker.instance_gpus import INSTANCE_GPUS, plan_lines
from tests.doc_tables import assert_written
from tests.unit.engines.memory.test_parallelism import MODELS

MEBIBYTE = 1 << 20
PAGE = Path(__file__).parents[4] / "docs" / "tasks" / "all_gpus.md"
PLANS = re.compile(r"(?<=<!-- plans -->\n).*?(?=<!-- end -->)", re.DOTALL)
SHOWN_MODELS = ("Llama-3.1-8B", "Qwen3-32B", "Llama-3.3-70B")
SHOWN_INSTANCES = {
    "4 × 24 GB": ("ml.g5.12xlarge", "ml.g6.12xlarge"),
    "8 × 24 GB": ("ml.g5.48xlarge",),
    "8 × 40 GB": ("ml.p4d.24xlarge",),
    "8 × 80 GB": ("ml.p5.48xlarge",),
}
# Types with GPUs that are too old for vLLM, and a type whose memory EC2 does not state.
LEFT_OUT = {"ml.p2.xlarge", "ml.p2.8xlarge", "ml.p2.16xlarge", "ml.p6e-gb200.36xlarge"}


def test_the_table_has_the_types_that_an_endpoint_may_have() -> None:
    shape = botocore.session.get_session().get_service_model("sagemaker").shape_for("ProductionVariantInstanceType")
    with_gpus = {name for name in shape.metadata["enum"] if name.startswith(("ml.g", "ml.p"))}
    assert with_gpus - LEFT_OUT <= INSTANCE_GPUS.keys()


def test_the_table_agrees_with_that_of_sagemakers_sdk() -> None:
    """For some types, the SDK has the rounded memory size that the GPU's maker states."""
    sdk = find_spec("sagemaker.core")
    if sdk is None or not sdk.submodule_search_locations:
        pytest.skip("SageMaker's SDK is not installed")
    (folder,) = sdk.submodule_search_locations
    regions = json.loads(Path(folder, "image_uri_config", "instance_gpu_info.json").read_text())
    theirs = {name: found for region in regions.values() for name, found in region.items() if name in INSTANCE_GPUS}
    assert theirs
    for name, found in theirs.items():
        ours = INSTANCE_GPUS[name]
        assert (name, len(ours)) == (name, found["Count"])
        assert found["TotalGpuMemoryInMiB"] * 0.92 <= sum(ours) / MEBIBYTE <= found["TotalGpuMemoryInMiB"], name


def write_model(directory: Path, name: str) -> Path:
    """Write a model without weights. Its file of weights has the right size, but takes no room on the disk."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(MODELS[name]["config"]))
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(MODELS[name]["weight_bytes"])
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of 8 billion parameters."""
    return write_model(tmp_path, "Llama-3.1-8B")


def configured(instance_type: str, model: str = "s3://models/llama/", **fields: Any) -> Configuration:
    given = {
        "name": "m",
        "image": "registry.example.com/slipway",
        "region": "eu-west-1",
        "instance_type": instance_type,
        "model": model,
    }
    return read_configuration(given | fields)


def plan(configuration: Configuration, *, reads_s3: bool = False) -> str:
    return "\n".join(plan_lines(configuration, reads_s3=reads_s3))


@pytest.mark.parametrize(
    ("instance_type", "env", "told"),
    [
        ("ml.g5.12xlarge", {}, "4 of 4: 2 copies with 2 GPUs each"),
        ("ml.g5.12xlarge", {"TENSOR_PARALLEL_DEGREE": "1"}, "4 of 4: 4 copies with 1 GPU each"),
        ("ml.g5.12xlarge", {"SM_NUM_GPUS": 4}, "4 of 4: 1 copy with 4 GPUs"),
        ("ml.g6e.48xlarge", {}, "8 of 8: 8 copies with 1 GPU each"),
        ("ml.p5.48xlarge", {"SERVING_MAX_WORKERS": 3}, "3 of 8: 3 copies with 1 GPU each"),
        ("ml.g6e.xlarge", {}, "1 of 1: 1 copy with 1 GPU, "),
    ],
)
def test_a_dry_run_tells_the_plan_for_its_instance_type(
    model: Path, instance_type: str, env: dict[str, Any], told: str
) -> None:
    found = plan(configured(instance_type, upload=str(model), env=env))
    assert f"the plan for {instance_type}:\n" in found
    assert told in found
    assert ("5 of 8 GPUs stay idle; to use them: maxWorkers=8" in found) == ("SERVING_MAX_WORKERS" in env)


def test_a_component_has_its_own_gpus(model: Path) -> None:
    found = plan(configured("ml.g5.12xlarge", upload=str(model), component={"gpus": 2}))
    assert "2 of 2: 1 copy with 2 GPUs" in found
    assert plan(configured("ml.g5.12xlarge", upload=str(model), component={"gpus": 0})) == ""


def test_a_model_of_the_hub_has_a_plan(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("container.models.placement.hub_file", lambda *_: model / "config.json")
    assert "model org_name: 4 of 4: 2 copies" in plan(configured("ml.g5.12xlarge", "org/name"))


def test_a_model_on_s3_has_a_plan_if_it_can_be_read(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_s3 = configured("ml.g5.12xlarge")
    assert plan(on_s3) == "slipway: note: no plan of the GPUs: the model is on S3"
    refused = plan(on_s3, reads_s3=True)
    assert refused.startswith("slipway: note: no plan of the GPUs: ")
    assert "there is no S3 here" in refused
    monkeypatch.setattr(RemoteModels, "open", lambda self, url: model)
    assert "4 of 4: 2 copies with 2 GPUs each" in plan(on_s3, reads_s3=True)


def test_without_a_plan_the_reason_is_told(model: Path) -> None:
    unknown = plan(configured("ml.c7i.xlarge", upload=str(model)))
    assert unknown == "slipway: note: no plan of the GPUs: those of ml.c7i.xlarge are not known"
    archive = plan(configured("ml.g5.12xlarge", "s3://models/m.tar.gz"), reads_s3=True)
    assert archive == "slipway: note: no plan of the GPUs: the model is in an archive"
    wrong = plan(configured("ml.g5.12xlarge", upload=str(model), env={"OPTION_LORA_MODULES": "a=none"}))
    assert "no plan of the GPUs: option.lora_modules" in wrong


def test_the_page_has_the_plans_of_instance_types(tmp_path: Path) -> None:
    """`UPDATE_TABLES=1` writes them."""
    names = [name.rpartition("-")[2] for name in SHOWN_MODELS]
    rows = [f"| instance | GPUs | {' | '.join(names)} |", "| --- | --- | --- | --- | --- |"]
    for gpus, types in SHOWN_INSTANCES.items():
        (memory,) = {INSTANCE_GPUS[instance_type] for instance_type in types}
        cells = [shown_plan(write_model(tmp_path / name, name), memory) for name in SHOWN_MODELS]
        shown = ", ".join(f"`{instance_type}`" for instance_type in types)
        rows.append(f"| {shown} | {gpus} | {' | '.join(cells)} |")
    text = PAGE.read_text()
    assert PLANS.search(text)
    assert_written(PAGE, PLANS.sub("\n".join(rows) + "\n", text))


def shown_plan(model: Path, gpus: tuple[int, ...]) -> str:
    """Return the number of copies, the GPUs of each copy, and how many thousand tokens its KV cache holds."""
    (startup,) = load_startup(model, {}, {}, len(gpus)).models
    (use,) = gpu_plan([startup.settings], gpus).models
    return f"{use.copies}×{use.gpus_of_copy}, {use.cache_tokens // 1000}k" if use.cache_tokens else "too large"
