"""Runs containers with docker or podman, or in buildah's chroot."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import pytest

from tests.live.server import free_port

START_SECONDS = 480.0
UNPRIVILEGED = "12345:12345"
# Directories of this machine that the machine's own programs need in an empty container.
_OF_THE_MACHINE = ("/usr", "/lib", "/lib64")
_CGROUP_V2 = Path("/sys/fs/cgroup/cgroup.controllers")


class NoEngine(Exception):
    """This machine cannot run containers. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Engine:
    """The command line of docker or podman."""

    name: str
    variables: Mapping[str, str] = field(default_factory=dict)
    # The reason why containers run in buildah's chroot, or "". The chroot shares podman's images, and needs no cgroups.
    chroot: str = ""

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, **self.variables, "CONTAINER_ENGINE": self.name}

    def run(self, *arguments: str, check: bool = True, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        return self.call(self.name, *arguments, check=check, seconds=seconds)

    def call(self, *command: str, check: bool = True, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        finished = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
        assert not check or finished.returncode == 0, f"{' '.join(command)}: {finished.stderr}"
        return finished

    def has_image(self, tag: str) -> bool:
        return self.run("image", "inspect", tag, check=False).returncode == 0

    def config(self, image: str) -> dict[str, Any]:
        """Return the image's configuration: Entrypoint, Cmd, Env, Labels, ..."""
        config: dict[str, Any] = json.loads(self.run("image", "inspect", image).stdout)[0]["Config"]
        return config

    def output(self, image: str, *command: str) -> str:
        """Run a command in a new container, and return its output."""
        if not self.chroot:
            return self.run("run", "--rm", "--network", "none", "--entrypoint", "", image, *command).stdout
        container = self.call("buildah", "from", "--pull-never", image).stdout.strip()
        try:
            return self.call("buildah", "run", "--isolation", "chroot", container, "--", *command).stdout
        finally:
            self.call("buildah", "rm", container)

    def needs_container(self, feature: str) -> None:
        """Skip the test if containers run in a chroot, which does not support `feature`."""
        if self.chroot:
            pytest.skip(f"a chroot does not support {feature}, and {self.chroot}")


def find_engine(directory: Path) -> Engine:
    """Return the engine that CONTAINER_ENGINE names, or the first one that answers.

    CONTAINER_ENGINE=buildah: podman builds images, and containers run in buildah's chroot.

    Args:
        directory: The directory for the engine's settings.

    Raises:
        NoEngine: No engine answers.
    """
    wanted = os.environ.get("CONTAINER_ENGINE")
    if wanted == "buildah":
        return Engine("podman", _podman_variables(directory), "CONTAINER_ENGINE is buildah")
    names = [wanted] if wanted else ["docker", "podman"]
    for name in names:
        if shutil.which(name) is None:
            continue
        engine = Engine(name, _podman_variables(directory) if name == "podman" else {})
        if engine.run("info", check=False).returncode == 0:
            return _in_chroot_if_need_be(engine)
    raise NoEngine(f"{' and '.join(names)}: none of them answers on this machine")


def _in_chroot_if_need_be(engine: Engine) -> Engine:
    """Return the engine. If podman cannot start containers, set it to use buildah's chroot.

    Raises:
        NoEngine: podman cannot start containers, and buildah's chroot does not work either.
    """
    if engine.name != "podman":
        return engine
    tried = engine.run("run", "--rm", "--network", "none", "--rootfs", "/:O", "true", check=False)
    if tried.returncode == 0:
        return engine
    refused = f"podman cannot start containers on this machine ({_in_one_line(tried.stderr)})"
    if shutil.which("buildah") is None:
        raise NoEngine(f"{refused}, and buildah is not installed")
    container = engine.call("buildah", "from", "scratch", check=False)
    mounts = [part for directory in _OF_THE_MACHINE for part in ("--volume", f"{directory}:{directory}:ro")]
    command = ["buildah", "run", "--isolation", "chroot", *mounts, container.stdout.strip(), "--", "/usr/bin/true"]
    tried = container if container.returncode else engine.call(*command, check=False)
    engine.call("buildah", "rm", container.stdout.strip(), check=False)
    if tried.returncode:
        raise NoEngine(f"{refused}, and nothing runs in buildah's chroot ({_in_one_line(tried.stderr)})")
    return replace(engine, chroot=refused)


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _podman_variables(directory: Path) -> dict[str, str]:
    """Return settings for podman, so that it needs neither systemd nor rights that this process lacks."""
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
        lines.append('runtime = "runc"')  # podman's default runtime, crun, does not run on such machines.
    file = directory / "containers.conf"
    file.write_text("\n".join(lines) + "\n")
    return {"CONTAINERS_CONF": str(file)}


class Container(ABC):
    """A container of the image with a model. It serves on a port of this machine."""

    def __init__(
        self,
        engine: Engine,
        image: str,
        model_dir: Path,
        unprivileged: bool,
        command: tuple[str, ...],
        variables: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self.port = free_port()
        self.started = time.monotonic()
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120)
        # SageMaker sets the port in the same way. The containers share this machine's network.
        every = {"SAGEMAKER_BIND_TO_PORT": str(self.port), "HF_HUB_OFFLINE": "1", **variables}
        # Flags that set the variables of the container.
        self.environment = [part for name, value in every.items() for part in ("--env", f"{name}={value}")]
        self._start(image, model_dir, unprivileged, command)

    @abstractmethod
    def _start(self, image: str, model_dir: Path, unprivileged: bool, command: tuple[str, ...]) -> None: ...

    def wait_until_ready(self) -> float:
        """Wait for /ping. Return the seconds since the start of the container."""
        while time.monotonic() < self.started + START_SECONDS:
            with contextlib.suppress(httpx.TransportError):
                if self.client.get("/ping").status_code == 200:
                    return time.monotonic() - self.started
            assert self.running(), f"the container ended:\n{self.log()[-4000:]}"
            time.sleep(1)
        raise AssertionError(f"not ready in {START_SECONDS:g} s:\n{self.log()[-4000:]}")

    @abstractmethod
    def running(self) -> bool: ...

    @abstractmethod
    def log(self) -> str: ...

    @abstractmethod
    def exec(self, *command: str) -> str:
        """Run a further command in the container, and return its output. Its exit code has to be 0."""

    @abstractmethod
    def terminate(self) -> None:
        """Send SIGTERM to the container's first process, as `docker stop` and SageMaker do."""

    @abstractmethod
    def wait(self) -> int:
        """Wait for the end of the container, and return its exit code."""

    @abstractmethod
    def remove(self) -> None:
        """Stop the container if it runs, and remove it."""


class EngineContainer(Container):
    """A container of `<engine> run ... <image> serve`."""

    def _start(self, image: str, model_dir: Path, unprivileged: bool, command: tuple[str, ...]) -> None:
        arguments = ["run", "--detach", "--network", "host", "--shm-size", "1g", *self.environment]
        arguments += shlex.split(os.environ.get("CONTAINER_FLAGS", ""))
        if unprivileged:
            arguments += ["--user", UNPRIVILEGED, "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
        arguments += ["--volume", f"{model_dir}:/opt/ml/model:ro", image, *command]
        self._id = self._engine.run(*arguments).stdout.split()[-1]

    def running(self) -> bool:
        return self._engine.run("inspect", "--format", "{{.State.Running}}", self._id).stdout.strip() == "true"

    def log(self) -> str:
        logs = self._engine.run("logs", self._id)
        return logs.stdout + logs.stderr

    def exec(self, *command: str) -> str:
        return self._engine.run("exec", self._id, *command).stdout

    def terminate(self) -> None:
        self._engine.run("kill", "--signal", "TERM", self._id)

    def wait(self) -> int:
        return int(self._engine.run("wait", self._id, seconds=START_SECONDS).stdout.strip())

    def remove(self) -> None:
        self.client.close()
        self._engine.run("stop", "-t", "40", self._id, check=False)
        self._engine.run("rm", "--force", self._id, check=False)


class ChrootContainer(Container):
    """A container of `buildah run --isolation chroot`.

    It has the image's files, variables, entry point and user, and shares the host's processes.
    """

    def _start(self, image: str, model_dir: Path, unprivileged: bool, command: tuple[str, ...]) -> None:
        self._id = self._engine.call("buildah", "from", "--pull-never", image).stdout.strip()
        flags = ["--isolation", "chroot", "--volume", f"{model_dir}:/opt/ml/model:ro", *self.environment]
        if unprivileged:
            flags += ["--user", UNPRIVILEGED, "--cap-drop", "all"]
        self._run = ["buildah", "run", *flags, self._id, "--"]
        config = self._engine.config(image)
        self._log: IO[str] = (model_dir.parent / f"{self._id}.log").open("w+")
        self._process = subprocess.Popen(
            [*self._run, *config["Entrypoint"], *(command or config["Cmd"])],
            env=self._engine.environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def running(self) -> bool:
        return self._process.poll() is None

    def log(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def exec(self, *command: str) -> str:
        return self._engine.call(*self._run, *command).stdout

    def terminate(self) -> None:
        for process in psutil.Process(self._process.pid).children(recursive=True):
            if not process.cmdline()[0].startswith("buildah"):
                process.send_signal(signal.SIGTERM)
                return
        raise AssertionError("nothing runs in the chroot")

    def wait(self) -> int:
        return self._process.wait(START_SECONDS)

    def remove(self) -> None:
        self.client.close()
        if self.running():
            with contextlib.suppress(AssertionError, psutil.NoSuchProcess):
                self.terminate()
            try:
                self._process.wait(40)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(self._process.pid).children(recursive=True):
                    process.kill()
                self._process.wait()
        self._log.close()
        self._engine.call("buildah", "rm", self._id, check=False)


@contextlib.contextmanager
def running(
    engine: Engine, image: str, model_dir: Path, *command: str, unprivileged: bool = False, **variables: str
) -> Iterator[Container]:
    """Start a container, and remove it at the end.

    Args:
        engine: The container engine.
        image: The tag of the image.
        model_dir: The directory that becomes /opt/ml/model.
        command: The command. Default: the command of the image.
        unprivileged: Run as a user that the image does not know, without capabilities and, if the engine supports it,
            with a read-only root file system.
        variables: Environment variables of the container.
    """
    make = ChrootContainer if engine.chroot else EngineContainer
    container = make(engine, image, model_dir, unprivileged, command, variables)
    try:
        yield container
    finally:
        container.remove()


def main() -> int:
    """Print the reason if this machine cannot run containers. Return 0 if it can."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            find_engine(Path(directory))
        except NoEngine as error:
            print(f"image-test: the images are not tested: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
