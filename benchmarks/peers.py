"""What is compared: Slipway, vLLM's own API server and the bare engine, all with the same engine arguments."""

from __future__ import annotations

import json
import select
import subprocess
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from benchmarks.bare import BareLoad
from benchmarks.contracts import ALWAYS_LOGPROBS, CONTRACTS, MODEL, WITH_LOGPROBS, Wording, openai
from benchmarks.figures import Figures
from benchmarks.load import LoadSpec, command
from benchmarks.processes import CpuTime, Server, free_port

START_TIMEOUT_S = 300.0
GRACE_S = 30.0
"""Beyond a load's own time limit, for its process to start and to end."""

EngineArguments = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The model and the engine arguments that every peer gets."""

    model_dir: Path
    arguments: EngineArguments
    """As vLLM's `AsyncEngineArgs` names them, without the model."""

    def environment(self) -> dict[str, str]:
        # No server writes a line for each request.
        return {"SERVING_LOG_LEVEL": "warning", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What every request of a load asks for."""

    prompt: str
    tokens: int
    stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """How many clients for how long."""

    concurrency: int
    seconds: float
    timeout: float


class Peer(ABC):
    """One thing compared, and the ways in which it can be asked."""

    name: ClassVar[str]
    server: Server

    @abstractmethod
    def start(self, engine: Engine, work_dir: Path) -> Server:
        """Start it and return at once; the caller owns the server."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Return when it serves."""

    @abstractmethod
    def variants(self, shape: Shape) -> list[str]:
        """Names of the ways to ask for this shape; all start with the peer's name."""

    @abstractmethod
    def load(self, variant: str, shape: Shape, pressure: Pressure) -> Figures:
        """Make the load, and return what its client saw."""

    def cpu_time(self) -> CpuTime:
        return self.server.cpu_time()


class HttpPeer(Peer):
    """A server that the load client talks to."""

    ready_path: ClassVar[str]

    def start(self, engine: Engine, work_dir: Path) -> Server:
        self.port = free_port()
        argv = self.argv(engine, work_dir)
        self.server = Server(self.name, argv, work_dir / f"{self.name}.log", engine.environment())
        return self.server

    @abstractmethod
    def argv(self, engine: Engine, work_dir: Path) -> list[str]: ...

    @abstractmethod
    def load_spec(self, variant: str, shape: Shape, pressure: Pressure) -> LoadSpec: ...

    def spec(self, wording: Wording, shape: Shape, pressure: Pressure) -> LoadSpec:
        return LoadSpec(
            url=self.url(wording.path),
            body=json.dumps(wording.body),
            marker=wording.marker,
            end_marker=wording.end_marker,
            tokens=shape.tokens,
            exact_records=wording.exact_records,
            concurrency=pressure.concurrency,
            seconds=pressure.seconds,
            timeout=pressure.timeout,
        )

    def wait_ready(self) -> None:
        self.server.wait_until(self._is_ready, START_TIMEOUT_S)

    def load(self, variant: str, shape: Shape, pressure: Pressure) -> Figures:
        argv = command(self.load_spec(variant, shape, pressure))
        finished = subprocess.run(
            argv, stdout=subprocess.PIPE, check=True, timeout=pressure.timeout + GRACE_S, process_group=0
        )
        self.server.check_alive()
        return msgspec.json.decode(finished.stdout, type=Figures)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url(self.ready_path), timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class Slipway(HttpPeer):
    """Slipway over one contract or several: streams with log probabilities, as LMI's are by default, and without."""

    name = "slipway"
    ready_path = "/ping"

    def __init__(self, contracts: Sequence[str] = ("lmi",)) -> None:
        self._contracts = contracts

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        model_dir = work_dir / "model"
        model_dir.mkdir()
        (model_dir / "serving.properties").write_text(serving_properties(engine))
        program = [sys.executable, "-m", "container", "serve"]
        return [*program, "--model-dir", str(model_dir), *self.address()]

    def address(self) -> list[str]:
        return ["--host", "127.0.0.1", "--port", str(self.port), "--model-name", MODEL]

    def variants(self, shape: Shape) -> list[str]:
        found = []
        for contract in self._contracts:
            name = self.name if contract == "lmi" else f"{self.name}:{contract}"
            if not (shape.stream and contract in ALWAYS_LOGPROBS):
                found.append(name)
            if shape.stream and contract in WITH_LOGPROBS | ALWAYS_LOGPROBS:
                found.append(f"{name}+logprobs")
        return found

    def load_spec(self, variant: str, shape: Shape, pressure: Pressure) -> LoadSpec:
        contract = variant.removesuffix("+logprobs").partition(":")[2] or "lmi"
        wording = CONTRACTS[contract](shape.prompt, shape.tokens, shape.stream, variant.endswith("+logprobs"))
        return self.spec(wording, shape, pressure)


class Vllm(HttpPeer):
    """vLLM's API server, asked for completions: plain, and with what LMI's streams carry."""

    name = "vllm"
    ready_path = "/health"

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        # The module and not `vllm serve`, which refuses to run where vLLM was installed under another name.
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        address = ["--host", "127.0.0.1", "--port", str(self.port)]
        model = ["--model", str(engine.model_dir), "--served-model-name", MODEL]
        return [*program, *address, *model, "--disable-uvicorn-access-log", *command_line(engine.arguments)]

    def variants(self, shape: Shape) -> list[str]:
        return ["vllm", "vllm+logprobs"] if shape.stream else ["vllm"]

    def load_spec(self, variant: str, shape: Shape, pressure: Pressure) -> LoadSpec:
        wording = openai(shape.prompt, shape.tokens, shape.stream, variant.endswith("+logprobs"))
        return self.spec(wording, shape, pressure)


class Bare(Peer):
    """`AsyncLLM` without HTTP: what the engine and vLLM's Python client of it allow."""

    name = "bare"

    def start(self, engine: Engine, work_dir: Path) -> Server:
        arguments = json.dumps({**engine.arguments, "model": str(engine.model_dir)})
        argv = [sys.executable, "-m", "benchmarks.bare", arguments]
        self.server = Server(self.name, argv, work_dir / "bare.log", engine.environment(), pipes=True)
        return self.server

    def wait_ready(self) -> None:
        self._read_line(START_TIMEOUT_S)

    def variants(self, shape: Shape) -> list[str]:
        return ["bare", "bare+logprobs"] if shape.stream else ["bare"]

    def load(self, variant: str, shape: Shape, pressure: Pressure) -> Figures:
        load = BareLoad(
            prompt=shape.prompt,
            tokens=shape.tokens,
            stream=shape.stream,
            logprobs=variant.endswith("+logprobs"),
            concurrency=pressure.concurrency,
            seconds=pressure.seconds,
            timeout=pressure.timeout,
        )
        self.server.stdin.write(msgspec.json.encode(load) + b"\n")
        self.server.stdin.flush()
        return msgspec.json.decode(self._read_line(pressure.timeout + GRACE_S), type=Figures)

    def _read_line(self, timeout: float) -> bytes:
        readable, _, _ = select.select([self.server.stdout], [], [], timeout)
        line = self.server.stdout.readline() if readable else b""
        if not line:
            self.server.check_alive()
            raise self.server.error(f"no answer after {timeout:g} s")
        return line


PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (Slipway, Vllm, Bare)}


def command_line(arguments: EngineArguments) -> list[str]:
    """Engine arguments as vLLM's command line has them."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def serving_properties(engine: Engine) -> str:
    """The same engine as Slipway's settings file has it; the batch size goes by LMI's name."""
    options = {"model_id": str(engine.model_dir), "rolling_batch": "vllm"}
    for name, value in engine.arguments.items():
        options["max_rolling_batch_size" if name == "max_num_seqs" else name] = str(value).lower()
    return "".join(f"option.{name}={value}\n" for name, value in options.items())
