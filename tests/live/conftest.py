from __future__ import annotations

import json
import os
from collections.abc import Iterator
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest

from container.sources.sample_model import make_once, prepare
from engines.cache_dir import cache_dir
from engines.engine_choice import running_engine
from engines.memory.garbage_collection import release_memory
from handlers.model_config import ModelConfig
from tests.live.bare_vllm import texts_of_bare_vllm
from tests.live.chromium import Page, chromium
from tests.live.preloaded import plain_environment
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS
from tests.live.server import START_SECONDS, Server, write_model
from tests.live.small_model import MAX_MODEL_LEN, prepare_small_model

# float32, because these tests compare texts: in bfloat16, a greedy answer can change if two tokens are equally likely.
ENGINE = {"dtype": "fp32", "max_model_len": 1024, "kv_cache_memory_bytes": 512 << 20, "max_rolling_batch_size": 32}

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Tests run at the same time, so each engine has one thread, on any free core.
    os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # transformers keeps the code of models there. Two processes that write it would disturb each other.
    os.environ["HF_MODULES_CACHE"] = str(cache_dir() / f"modules-{worker}")
plain_environment()  # It is cached here, before a test imports vLLM.


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in Path(item.path).parents:
            item.add_marker(pytest.mark.live)
            # torch, transformers and vLLM warn of each other.
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="module", autouse=True)
def memory_of_engines() -> Iterator[None]:
    """Release the memory of engines in this process, because servers that start later need it."""
    yield
    release_memory()


@pytest.fixture
def own_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start servers as users do. Otherwise they are forked with their modules imported (`preloaded`)."""
    monkeypatch.setattr(Server, "forked", False)


@pytest.fixture(scope="session")
def sample_model() -> Path:
    return prepare()


@pytest.fixture(scope="session")
def engine_options(sample_model: Path) -> dict[str, object]:
    return {"model_id": sample_model, **ENGINE}


@pytest.fixture(scope="session")
def small_options() -> dict[str, object]:
    """Return options of an engine for tests in which the text does not matter."""
    return {
        "model_id": prepare_small_model(),
        "rolling_batch": "vllm",
        "dtype": "fp32",
        "max_model_len": MAX_MODEL_LEN,
        "kv_cache_memory_bytes": 128 << 20,
        "max_rolling_batch_size": 32,
    }


@pytest.fixture(scope="session", params=["lmi-dist"])
def engine(request: pytest.FixtureRequest) -> str:
    """Return the shared server's `option.rolling_batch`. With `lmi-dist`, `typical_p` has an effect, too.

    The fixture has a parameter, so that a test's name shows that the test uses a shared server (tests/conftest.py).
    """
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, engine: str, small_options: dict[str, object]) -> Iterator[Server]:
    """Start the server of most tests, with the small model: its answers have the right form, but no meaning."""
    with _local_endpoint(tmp_path_factory.mktemp("server"), small_options | {"rolling_batch": engine}) as running:
        yield running


@pytest.fixture(scope="session", params=["sample"])
def sample_server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, engine_options: dict[str, object]
) -> Iterator[Server]:
    """Start a server with the sample model. Some tests need this model's text, or a text that the model ends itself.

    This fixture has a parameter for the same reason as the fixture `engine`.

    A token takes 90 ms of processor time. The context has 1024 tokens.
    """
    options = engine_options | {"rolling_batch": "lmi-dist"}
    with _local_endpoint(tmp_path_factory.mktemp(request.param), options) as running:
        yield running


def _local_endpoint(directory: Path, options: dict[str, object]) -> Server:
    """Start a server with the default formatter. It also serves SageMaker's runtime API, for `my-endpoint`.

    The folder `s3` beside the server's log stands for S3.
    """
    folders = ("--s3-folder", str(directory / "s3"))
    model = write_model(directory / "model", **options)
    return Server(model, directory / "server.log", arguments=("--local-endpoint", "my-endpoint", *folders))


@pytest.fixture(scope="session", params=["host"])
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server without a model, for tests that load their own models (`hosted`).

    The parameter is like `engine`'s.
    """
    directory = tmp_path_factory.mktemp("host")
    environment = {"SAGEMAKER_MULTI_MODEL": "true", "VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    if worker:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = str(max(os.sched_getaffinity(0)))
    with Server(None, directory / "server.log", environment, name=None) as server:
        server.client.timeout = httpx.Timeout(START_SECONDS)  # of a model's load
        yield server


@pytest.fixture(scope="module")
def shared_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """Open a page in a browser of its own, for all tests of the console in a file."""
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser.new_page()


@pytest.fixture(scope="session")
def bare_texts(sample_model: Path) -> dict[str, dict[str, Any]]:
    """Return the greedy text of bare vLLM for each of PROMPTS. The texts are cached, because they do not vary."""
    arguments = {name: ENGINE[name] for name in ("max_model_len", "kv_cache_memory_bytes")}
    arguments |= {"model": str(sample_model), "dtype": "float32", "enforce_eager": True}
    script = Path(__file__).with_name("bare_vllm.py").read_text()
    config = ModelConfig(name="m", model_dir=sample_model, model_id=str(sample_model), rolling_batch="vllm")
    made_by = [arguments, script, PROMPTS, MAX_NEW_TOKENS, running_engine(config), version("torch")]
    digest = sha256(json.dumps(made_by).encode()).hexdigest()[:16]

    def write(directory: Path) -> None:
        (directory / "texts.json").write_text(json.dumps(texts_of_bare_vllm(**arguments)))

    kept = make_once(cache_dir() / f"bare-vllm-{digest}", write)
    texts: dict[str, dict[str, Any]] = json.loads((kept / "texts.json").read_text())
    return texts
