"""The image's command `serve`, without a container. It is installed by the image's script, and started like
SageMaker's.

`make image-test` starts it in containers. These tests are for machines that cannot run containers. `make long` runs
the test with vLLM.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path

import psutil
import pytest

from tests.live.server import Server, free_port, records, write_model
from tests.waiting import SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "container" / "image" / "Dockerfile.cpu"
ECHO = ROOT / "tests" / "fixtures" / "handlers" / "echo"
PROMPT = "The capital of France is"
OF_THE_MACHINE = ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "LD_LIBRARY_PATH")
"""Variables that servers inherit from the tests. Python needs the last. The others share the cores between servers."""
Start = Callable[..., AbstractContextManager["Serve"]]


@dataclass
class Serve(Server):
    """A `serve` process that has only the environment variables that SageMaker and the image set."""

    prefix: Path = Path("/opt/slipway")

    def command(self) -> list[str]:
        return [str(self.prefix / "bin" / "serve"), *self.arguments]

    def all_variables(self) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in OF_THE_MACHINE if name in os.environ}
        return inherited | self.environment

    def terminate(self) -> int:
        """Stop the process like SageMaker, and return its exit code. If it ends too late, the exit code differs."""
        self.process.terminate()
        return self.process.wait(SECONDS)


def copied_sources() -> list[str]:
    """Return the files that the Dockerfile copies into the build."""
    copies = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    return [source for sources in copies for source in sources.split() if not source.startswith("requirements/")]


def image_variables(prefix: Path, home: Path) -> dict[str, str]:
    """Return the variables in the Dockerfile's ENV, with this prefix and this home directory."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    (assignments,) = re.findall(r"^ENV (.*)$", text, re.MULTILINE)
    variables = dict(assignment.split("=", 1) for assignment in shlex.split(assignments))
    path = variables["PATH"].replace("/opt/slipway", str(prefix)).replace("$PATH", os.defpath)
    return variables | {"PATH": path, "HOME": str(home)}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install Slipway's wheel and the image's programs with the image's script.

    The packages of the lock file come from the environment that runs the tests. A .pth file adds the directory of these
    packages to the path. Python does not run the .pth files in this directory, which would add the editable Slipway of
    the environment.
    """
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("opt") / "slipway"
    for name in copied_sources():
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    venv.create(made, symlinks=True)
    (site,) = made.glob("lib/python3*/site-packages")
    (site / "locked.pth").write_text(get_path("purelib") + "\n")
    for step in ("project", "programs"):
        script = ["sh", "install.sh", step]
        done = subprocess.run(
            script, cwd=source, env=os.environ | {"PREFIX": str(made)}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def start(prefix: Path, tmp_path: Path) -> Start:
    @contextlib.contextmanager
    def started(model_dir: Path, *arguments: str) -> Iterator[Serve]:
        home, port = tmp_path / "home", free_port()
        home.mkdir()
        of_sagemaker = {"SAGEMAKER_BIND_TO_PORT": str(port), "SERVING_MODEL_STORE": str(model_dir)}
        with Serve(
            None,
            tmp_path / "server.log",
            image_variables(prefix, home) | of_sagemaker,
            port,
            arguments=arguments,
            working_directory=model_dir,
            prefix=prefix,
        ) as server:
            yield server

    return started


@pytest.mark.long  # tests/image runs vLLM in containers.
def test_vllm_is_served_and_its_processes_end_with_sigterm(
    start: Start, tmp_path: Path, small_options: dict[str, object]
) -> None:
    with start(write_model(tmp_path / "model", **small_options)) as server:
        plain = server.invoke(PROMPT, max_new_tokens=8, ignore_eos_token=True, do_sample=False)
        assert plain.status_code == 200, plain.text
        streamed = server.invoke(PROMPT, stream=True, max_new_tokens=8, ignore_eos_token=True, do_sample=False)
        texts = [record["token"]["text"] for record in records(streamed.text)]
        assert "".join(texts) == plain.json()["generated_text"]
        processes = server.children()
        assert len(processes) > 1
        assert server.terminate() == 0
        _, left = psutil.wait_procs(processes, timeout=SECONDS)
        assert left == []


def test_a_custom_handler_is_served(start: Start, tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    shutil.copytree(ECHO, model_dir)
    # The working directory is the model's directory. Python must not import Slipway's packages from it.
    (model_dir / "container.py").write_text("raise SystemExit('a file of the model was imported')\n")
    with start(model_dir, "--host", "127.0.0.1", "--model-name", "echo") as server:
        packages = "container, djl_python, handlers, slipway"
        script = f"import {packages}\nfor package in ({packages}): print(package.__file__)"
        python = [server.prefix / "bin" / "python", "-P", "-c", script]
        shown = subprocess.run(python, env=server.all_variables(), capture_output=True, text=True, check=True).stdout
        assert all(Path(line).is_relative_to(server.prefix) for line in shown.splitlines())
        assert server.client.post("/invocations", content=b"hello").content == b"hello"
        told = server.client.post("/invocations", data={"inspect": "1"}).json()
        assert Path(told["executable"]).is_relative_to(server.prefix)
        assert server.terminate() == 0
