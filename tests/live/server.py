"""A real server for a test, and its HTTP client."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, ClassVar, Self

import httpx
import psutil

from tests.live import preloaded
from tests.waiting import wait_until

START_SECONDS = 550.0
METRIC_SECONDS = 120.0
ENGINE_NICENESS = 10
_ports = iter(random.sample(range(20_000, 32_000), 12_000))
"""Ports below the range that the kernel uses for connections, and above the range that Ray uses. Each is tried once."""


def free_port() -> int:
    """Return a port that stays free until its server takes it, because nothing else asks for it."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def unreachable_server() -> Iterator[str]:
    """Hold a port on which nothing listens, so that no other test's server takes it. Yields its URL."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


def write_model(directory: Path, **options: object) -> Path:
    """Write a model directory with only a serving.properties, and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"option.{name}={value}" for name, value in options.items()]
    (directory / "serving.properties").write_text("\n".join(lines) + "\n")
    return directory


def copy_model(fixture: Path, directory: Path, properties: str = "", **options: object) -> Path:
    """Copy a model directory, with a serving.properties for the copy.

    `properties`: further lines, whose names do not start with `option.`.
    """
    shutil.copytree(fixture, directory, ignore=shutil.ignore_patterns("__pycache__"))
    write_model(directory, **options)
    with (directory / "serving.properties").open("a") as file:
        file.write(properties + "\n")
    return directory


@dataclass
class Server:
    """A `slipway serve` process, which starts at once.

    A `with` block waits until the server is ready, and stops it at the end.
    """

    model_dir: Path | str | None
    """None: the environment decides."""
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    program: tuple[str, ...] = ("slipway", "serve")
    """A module of Slipway, and its command."""
    arguments: tuple[str, ...] = ()
    name: str | None = "model"
    """The model's name. None: the server chooses the name, or has several models."""
    working_directory: Path | None = None
    """The server's working directory. None: the working directory of the tests."""
    forked: ClassVar[bool] = True
    """Whether servers may be forked (`tests.live.preloaded`). Otherwise they are started in the same way as users start
    them.
    """
    gives_way: bool = True
    """Whether the engine gives way to other processes."""

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"
        self.boxes_dir = self.log.parent / f"{self.log.stem}-boxes"
        self.permitted_steps = self.log.with_suffix(".steps")
        self.client = httpx.Client(base_url=self.url, timeout=120)
        with self.log.open("wb") as log:
            self.process = self._started(log)

    def _started(self, log: IO[bytes]) -> subprocess.Popen[bytes] | preloaded.ForkedProgram:
        command, variables = self.command(), self.all_variables()
        if self.forked and self.working_directory is None and preloaded.can_start(variables):
            return preloaded.start(self.program[0], command[3:], variables, log.fileno())
        return subprocess.Popen(
            command,
            cwd=self.working_directory,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )

    def command(self) -> list[str]:
        """Return the program and its arguments."""
        command = [sys.executable, "-m", *self.program]
        command += ["--model-dir", str(self.model_dir)] if self.model_dir is not None else []
        command += self.arguments
        command += ["--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--model-name", self.name] if self.name else []
        return command

    def all_variables(self) -> dict[str, str]:
        """Return the environment of the process. The log has all lines, for tests that fail."""
        given = {"HF_HUB_OFFLINE": "1", "SERVING_ENGINE_RESTART": "0", "SERVING_VERBOSE": "true"}
        given |= {"SERVING_BLACKBOX_DIR": str(self.boxes_dir), "PERMITTED_STEPS": str(self.permitted_steps)}
        return preloaded.plain_environment() | given | self.environment

    def __enter__(self) -> Self:
        """Wait until the server is ready. The server stops at the end of the block."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log_text()[-4000:]}")
            if self.ping() == 200:
                if self.gives_way:
                    self.give_way()
                return
            time.sleep(0.25)
        raise AssertionError(f"the server was not ready in {START_SECONDS:g} s:\n{self.log_text()[-4000:]}")

    def give_way(self) -> None:
        """Lower the priority of the engine process. The engine polls, and would delay other tests by many seconds."""
        for engine in self.engine_processes():
            for thread in engine.threads():
                os.setpriority(os.PRIO_PROCESS, thread.id, ENGINE_NICENESS)

    def ping(self) -> int:
        """Return the status of /ping, or 0 if nothing listens."""
        try:
            return self.client.get("/ping").status_code
        except httpx.TransportError:
            return 0

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for_log(self, text: str) -> None:
        """Wait until the text is logged. A thread of the server writes the log after the answers."""
        wait_until(lambda: text in self.log_text(), about=lambda: f"{text!r} is not in {self.log_text()[-4000:]}")

    def invoke(self, inputs: object, stream: bool | None = None, **parameters: object) -> httpx.Response:
        document: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if stream is not None:
            document["stream"] = stream
        return self.client.post("/invocations", json=document)

    def explain(self, path: str, body: object, **headers: str) -> dict[str, Any]:
        """Ask for an explanation. Ask again if the machine is so busy that the search for origins times out."""
        for _ in range(5):
            reply = self.client.post(path, json=body, headers={"x-slipway-explain": "1"} | headers)
            assert reply.status_code == 200, reply.text
            document: dict[str, Any] = reply.json()
            if document.get("origins_known", True):
                break
        return document

    def send(self, path: str, document: object) -> socket.socket:
        """Send a request, and return its connection. Closing the connection is the way in which a client leaves."""
        body = json.dumps(document).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        client = socket.create_connection(("127.0.0.1", self.port), timeout=120)
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        return client

    def metric(self, name: str, model: str = "") -> float:
        """Return the value of a metric without labels.

        If the server has several models, the model's name is the only label. The default is the fixture's model.
        """
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"{name} ", f'{name}{{model="{model or self.name}"}} ')):
                return float(line.split()[-1])
        raise AssertionError(f"no metric {name}")

    def by_engine(self, name: str) -> Counter[str]:
        """Return the values of a counter of vLLM, by the number of the copy or the data-parallel rank."""
        found = re.findall(rf'^{re.escape(name)}{{engine="(\d+)".*}} (\S+)$', self.client.get("/metrics").text, re.M)
        return Counter({engine: int(float(value)) for engine, value in found})

    def workers(self) -> list[dict[str, Any]]:
        """Return the model's workers, as LMI lists them."""
        ((model,),) = (workflow["models"] for workflow in self.client.get(f"/models/{self.name}").json())
        return [worker for group in model["workerGroups"] for worker in group["workers"]]

    def wait_for_metric(self, name: str, value: float) -> None:
        wait_until(lambda: self.metric(name) == value, METRIC_SECONDS, about=lambda: f"{name} is {self.metric(name)}")

    def children(self) -> list[psutil.Process]:
        """Return the processes below the server."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine_processes(self) -> list[psutil.Process]:
        """Return vLLM's engine cores: one for each model and data-parallel rank."""
        found = []
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):  # The process may end at this moment.
                if "EngineCore" in child.name():
                    found.append(child)
        return found

    def engine_process(self) -> int:
        """Return the process id of the first engine core."""
        return self.engine_processes()[0].pid

    def has_engine_process(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return bool(self.engine_processes())
        return False

    def worker_process(self) -> psutil.Process:
        """Return the engine's first worker."""
        return next(child for child in self.children() if "Worker" in " ".join(child.cmdline()))

    def stop(self) -> int:
        """Stop the server, and return its exit code."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


class HostedModel(Server):
    """A model in a running server that may have other models. Its requests name it."""

    def __init__(self, host: Server, name: str) -> None:
        self.__dict__ |= host.__dict__
        self.name = name
        self.client = httpx.Client(base_url=host.url, timeout=120, params={"model_name": name})
        self._logged = len(host.log_text())
        self._before = set(super().children())

    def children(self) -> list[psutil.Process]:
        """Return the processes that were started for the model."""
        return [child for child in super().children() if child not in self._before]

    def log_text(self) -> str:
        """Return the log since the model was loaded."""
        return super().log_text()[self._logged :]


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """Pause a process inside the block."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@contextlib.contextmanager
def hosted(host: Server, model_dir: Path) -> Iterator[Server]:
    """Load a model into a running server for the time of a test. A new server would take much longer."""
    model = HostedModel(host, model_dir.parent.name)
    order = {"model_name": model.name, "url": str(model_dir)}
    try:
        answer = host.client.post("/models", json=order)
        assert answer.status_code == 200, answer.text + model.log_text()[-4000:]
        model.give_way()
        yield model
    finally:
        model.client.close()
        host.client.delete(f"/models/{model.name}")


def serving_copy(
    fixture: Path, directory: Path, environment: dict[str, str] | None = None, properties: str = "", **options: object
) -> Server:
    """Start a server for a copy of a model directory."""
    model_dir = copy_model(fixture, directory / "model", properties, **options)
    return Server(model_dir, directory / "server.log", environment or {})


def serving(
    directory: Path, environment: dict[str, str] | None = None, *, gives_way: bool = True, **options: object
) -> Server:
    """Start a server for a model with these options."""
    model_dir = write_model(directory / "model", **options)
    return Server(model_dir, directory / "server.log", environment or {}, gives_way=gives_way)


def records(body: str) -> list[dict[str, Any]]:
    """Return the records of a jsonlines or SSE body."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    return [json.loads(line) for line in lines]
