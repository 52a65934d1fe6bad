"""docker or podman, whichever is there, and containers that run in it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.live.server import free_port

START_SECONDS = 480.0
_CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


class NoEngine(Exception):
    """No container can be run on this machine; the message says why."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The command line of docker or podman."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables, "CONTAINER_ENGINE": self.name}

    def run(self, *arguments: str, check: bool = True, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        finished = subprocess.run(
            [self.name, *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        assert not check or finished.returncode == 0, f"{self.name} {' '.join(arguments)}: {finished.stderr}"
        return finished

    def has_image(self, tag: str) -> bool:
        return self.run("image", "inspect", tag, check=False).returncode == 0

    def config(self, image: str) -> dict[str, Any]:
        """The image's configuration: Entrypoint, Cmd, Env, Labels, ..."""
        config: dict[str, Any] = json.loads(self.run("image", "inspect", image).stdout)[0]["Config"]
        return config

    def output(self, image: str, *command: str) -> str:
        """What a command prints in a container of its own."""
        return self.run("run", "--rm", "--network", "none", "--entrypoint", "", image, *command).stdout


def find_engine(directory: Path) -> Engine:
    """The engine that CONTAINER_ENGINE names, else the first that answers; `directory` is for its settings.

    Raises:
        NoEngine: none answers.
    """
    names = [os.environ["CONTAINER_ENGINE"]] if os.environ.get("CONTAINER_ENGINE") else ["docker", "podman"]
    for name in names:
        if shutil.which(name) is None:
            continue
        engine = Engine(name, _podman_variables(directory) if name == "podman" else {})
        if engine.run("info", check=False).returncode == 0:
            return engine
    raise NoEngine(f"{' and '.join(names)}: none answers on this machine")


def _podman_variables(directory: Path) -> dict[str, str]:
    """Settings with which podman runs without systemd and without rights that this process has not."""
    if "CONTAINERS_CONF" in os.environ:
        return {}
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    processes = min(resource.getrlimit(resource.RLIMIT_NPROC)[1] % (1 << 63), 16384)
    lines = [
        "[containers]",
        f'default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]',
        "[engine]",
        'cgroup_manager = "cgroupfs"',
        'events_logger = "file"',
    ]
    if not _CGROUP_V2.exists() and shutil.which("runc"):
        lines.append('runtime = "runc"')  # podman's other one, crun, refuses such machines
    file = directory / "containers.conf"
    file.write_text("\n".join(lines) + "\n")
    return {"CONTAINERS_CONF": str(file)}


class Container:
    """`<engine> run ... <image> serve`, with the port on this machine."""

    def __init__(self, engine: Engine, image: str, model_dir: Path, *flags: str, command: tuple[str, ...] = ()) -> None:
        self.engine = engine
        self.port = free_port()
        variables = {"SERVING_PORT": self.port, "SERVING_HOST": "127.0.0.1", "HF_HUB_OFFLINE": 1}
        arguments = ["run", "--detach", "--network", "host", "--shm-size", "1g"]
        arguments += [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        arguments += ["--volume", f"{model_dir}:/opt/ml/model:ro", *flags, image, *(command or ("serve",))]
        started = time.monotonic()
        self.id = engine.run(*arguments).stdout.split()[-1]
        self.started = started
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)

    def wait_until_ready(self) -> float:
        """Returns the seconds since the container was asked for."""
        while time.monotonic() < self.started + START_SECONDS:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/ping").status_code == 200:
                    return time.monotonic() - self.started
            assert self.running(), f"the container ended:\n{self.log()[-4000:]}"
            time.sleep(0.5)
        raise AssertionError(f"not ready in {START_SECONDS:g} s:\n{self.log()[-4000:]}")

    def running(self) -> bool:
        return self.engine.run("inspect", "--format", "{{.State.Running}}", self.id).stdout.strip() == "true"

    def log(self) -> str:
        logs = self.engine.run("logs", self.id)
        return logs.stdout + logs.stderr

    def exec(self, *command: str) -> str:
        return self.engine.run("exec", self.id, *command).stdout

    def terminate(self) -> None:
        """SIGTERM to the container's first process, as `docker stop` and SageMaker send it."""
        self.engine.run("kill", "--signal", "TERM", self.id)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        return int(self.engine.run("wait", self.id, seconds=START_SECONDS).stdout.strip())

    def remove(self) -> None:
        self.client.close()
        self.engine.run("stop", "-t", "40", self.id, check=False)
        self.engine.run("rm", "--force", self.id, check=False)


@contextlib.contextmanager
def running(
    engine: Engine, image: str, model_dir: Path, *flags: str, command: tuple[str, ...] = ()
) -> Iterator[Container]:
    """A container that has just been started."""
    container = Container(engine, image, model_dir, *flags, command=command)
    try:
        yield container
    finally:
        container.remove()
