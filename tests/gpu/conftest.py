"""The device, the model, the options and the servers for the GPU tests.

`GPU_MODEL`: the directory of a model. The default is the sample model. `GPU_DTYPE`: the model's data type. If it is not
set, texts are compared in fp32, and adapters are served in bf16. `GPU_PROOF_ON_CPU=1` runs the tests on a CPU, to check
the tests themselves.

Tests that require equal texts use fp32. fp32's rounding also depends on the batch, but the error is far below the
distance between the two likeliest tokens. In 16-bit types, two tokens are often equally likely. vLLM's batch-invariant
mode would help there, but it runs other kernels than customers use, and needs an H100 or a newer GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from container.gpus import gpu_count
from container.sources.sample_model import prepare
from tests.live.continued_calls import STEPPED
from tests.live.lora import make_adapter
from tests.live.server import START_SECONDS, Server, serving
from tests.live.small_model import prepare_small_model

ON_CPU = os.environ.get("GPU_PROOF_ON_CPU") == "1"
TOKENS = 8 if ON_CPU else 64
LONG = 16 if ON_CPU else 800
"""The number of tokens in an answer that takes at least a second on any device. A process is killed meanwhile."""
RecordProperty = Callable[[str, object], None]
"""pytest's fixture `record_property`. It records a figure for the summary."""
needs_gpu = pytest.mark.skipif(ON_CPU, reason="needs a GPU")
_LORA: dict[str, object] = {"enable_lora": "true", "max_loras": 2, "max_lora_rank": 8}
_MEMORY: dict[str, object] = {"kv_cache_memory_bytes": (512 << 20 if ON_CPU else 4 << 30)}
"""The fixed size of the KV cache: it does not depend on the free memory, and two engines fit on one GPU."""
_SHARE: dict[str, object] = {} if ON_CPU else {"gpu_memory_utilization": 0.3}
"""The share of the GPU's memory that has to be free when an engine starts."""


def text_options(model: Path, dtype: str | None) -> dict[str, object]:
    """Return the few options that an engine needs for comparing texts. All other options are as in production."""
    return {"model_id": model, "dtype": dtype or "fp32", "max_model_len": 1024} | _MEMORY | _SHARE


def adapter_options(model: Path, dtype: str | None) -> dict[str, object]:
    """Return these options with adapters enabled. vLLM's LoRA kernels for GPUs support only fp16 and bf16."""
    return text_options(model, "bf16" if dtype in (None, "fp32") else dtype) | _LORA


class OneServer:
    """The running server. A GPU has room for only one server at a time, and tests in several files share a server."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._running = contextlib.ExitStack()
        self._server: Server | None = None
        self._name = ""

    def of(self, name: str, serve: Callable[[Path], Server]) -> Server:
        """Return a server. If it is not running, it is started, after any other server is stopped.

        Args:
            name: The server's name.
            serve: Starts the server in a directory.
        """
        if name == self._name:
            if self._server is None:
                pytest.fail("its server did not start for the first test")
            if self._server.process.poll() is None:
                return self._server
        self.stop()
        self._name = name
        self._server = self._running.enter_context(serve(self._directories.mktemp(name)))
        return self._server

    def stop(self) -> None:
        self._name, self._server = "", None
        self._running.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason="there is no NVIDIA GPU (GPU_PROOF_ON_CPU=1 runs it on the CPU)")
    for item in items:
        if Path(__file__).parent not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        # torch, transformers and vLLM cause warnings about each other.
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if not (ON_CPU or gpu_count()):
            item.add_marker(missing)


@pytest.fixture(scope="session")
def gpu_model() -> Path:
    given = os.environ.get("GPU_MODEL")
    return Path(given) if given else prepare()


@pytest.fixture(scope="session")
def gpu_options(gpu_model: Path) -> dict[str, object]:
    """Return options for comparing texts. On a CPU, the model is a small one, because any text will do."""
    return text_options(prepare_small_model() if ON_CPU else gpu_model, os.environ.get("GPU_DTYPE"))


@pytest.fixture(scope="session")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneServer]:
    running = OneServer(tmp_path_factory)
    yield running
    running.stop()


@pytest.fixture(scope="session")
def used_without_server(one_server: OneServer) -> int:
    """Return the MiB of GPU memory that are in use while no server runs."""
    one_server.stop()
    return used_gpu_memory()


@pytest.fixture
def server(
    one_server: OneServer, used_without_server: int, gpu_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Server:
    """Return a server that runs as lmi-dist with two adapters, so that all of Slipway's changes to vLLM are active."""

    def serve(directory: Path) -> Server:
        for seed, name in enumerate(("red", "blue"), start=1):
            make_adapter(directory / "model" / "adapters" / name, gpu_model, seed, scale=0.9)
        options = adapter_options(gpu_model, os.environ.get("GPU_DTYPE")) | {"tool_call_parser": "hermes"} | STEPPED
        return serving(directory, {"SERVING_ENGINE_RESTART": "3"}, rolling_batch="lmi-dist", **options)

    return one_server.of("adapters", serve)


@pytest.fixture
def host(one_server: OneServer) -> Server:
    """Return a server without a model. Tests load models into it one after the other (`hosted`)."""

    def serve(directory: Path) -> Server:
        running = Server(None, directory / "server.log", {"SAGEMAKER_MULTI_MODEL": "true"}, name=None)
        running.client.timeout = httpx.Timeout(START_SECONDS)  # The time limit for loading a model.
        return running

    return one_server.of("host", serve)


def used_gpu_memory() -> int:
    """Return the MiB of memory in use on all GPUs, by any process. In a container, processes cannot be told apart."""
    if shutil.which("nvidia-smi") is None:
        return 0
    asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return sum(map(int, subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True).stdout.split()))
