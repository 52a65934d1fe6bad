"""The servers that are compared: Slipway, vLLM's servers, Triton, the bare engine, and a minimal front end (the floor).

Slipway also runs with copies of the model, and on Ray Serve. vLLM has a server in Python and one in Rust. All servers
get the same engine arguments. Instead of a model, all servers may run the same script (`benchmarks.scripted_engine`).
Each server has its own process group, so that all its processes can be paused, stopped and measured.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, ClassVar, Self

import msgspec
import psutil

from benchmarks.bare_engine import EngineLoad
from benchmarks.load import Figures, LoadSpec, command
from benchmarks.scripted_front_end import Script, processors
from container.gpus import gpu_count

MODEL = "m"  # The name of the served model.
LOGPROBS = "+logprobs"  # The suffix in the names of variants whose streams include log probabilities.
START_TIMEOUT_S = 300.0
IDLE_TIMEOUT_S, IDLE_CPU_S = 30.0, 0.1
STOP_TIMEOUT_S = 20.0
_BODIES = 64  # The number of different requests for vectors.
GRACE_S = 30.0  # The time for the load client's start and exit, in addition to the load's timeout.
LOG_TAIL_LINES = 30
# Parts of the titles of engine processes. The workers need their own title: if a fork server starts them, they are
# siblings of the engine, not its children.
ENGINE_PROCESSES = ("VLLM::EngineCore", "VLLM::Worker", "benchmarks.scripted_engine")
# Keeps the servers from logging a line for each request.
ENVIRONMENT = {"SERVING_LOG_LEVEL": "warning", "VLLM_NO_USAGE_STATS": "1"}

TRITON_STUB = "triton_python_backend_stub"
TRITON_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: true }
input [ { name: "text_input", data_type: TYPE_STRING, dims: [ 1 ] } ]
output [
  { name: "text_output", data_type: TYPE_STRING, dims: [ 1 ] },
  { name: "finish_reason", data_type: TYPE_STRING, dims: [ 1 ] }
]
instance_group [ { kind: KIND_CPU, count: 1 } ]
"""

EngineArguments = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The model and the engine arguments that every peer gets."""

    model_dir: Path
    arguments: EngineArguments  # Fields of `AsyncEngineArgs`, without the model.
    step_ms: float | None = None  # The time between two tokens of a scripted engine. None: a model runs.
    cache_blocks: int = 0  # The size of a scripted engine's prefix cache.

    @property
    def task(self) -> str:
        """vLLM's name for the engine's task: `embed` or `generate`."""
        return "embed" if self.arguments.get("runner") == "pooling" else "generate"


class ServerError(Exception):
    """A server did not start, or died. The message includes the end of its log."""


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Seconds of user and system time since the processes started."""

    front_end: float  # All processes except the engine.
    engine: float

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(self.front_end - earlier.front_end, self.engine - earlier.engine)


class Server:
    """A process and its children. Leaving the context stops them all."""

    def __init__(
        self, name: str, argv: Sequence[str], log: Path, *, pipes: bool = False, environment: Mapping[str, str] = {}
    ) -> None:
        """Start the process.

        Args:
            name: The name of the server.
            argv: The command line.
            log: The file for the output.
            pipes: Whether standard input and output carry requests and answers. If not, standard output also goes to
                the log.
            environment: Additional environment variables.
        """
        self.name = name
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                argv,
                env={**os.environ, **ENVIRONMENT, **environment},
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def stdin(self) -> IO[bytes]:
        assert self._process.stdin
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        assert self._process.stdout
        return self._process.stdout

    def wait_until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait until the server is ready.

        Raises:
            ServerError: The process exited, or took longer than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not ready():
            self.check_alive()
            if time.monotonic() > deadline:
                raise self.error(f"not ready after {timeout:g} s")
            time.sleep(0.2)

    def check_alive(self) -> None:
        if (status := self._process.poll()) is not None:
            raise self.error(f"ended with status {status}")

    def error(self, problem: str) -> ServerError:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return ServerError("\n".join([f"{self.name}: {problem}; the end of its log:", *lines]))

    def cpu_time(self) -> CpuTime:
        with contextlib.suppress(psutil.NoSuchProcess):
            return _tree_cpu_time(psutil.Process(self._process.pid), engine=False)
        raise self.error("ended")

    def wait_idle(self) -> None:
        """Wait until the server has finished starting, or for at most `IDLE_TIMEOUT_S`."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        used = IDLE_CPU_S + 1
        while used > IDLE_CPU_S and time.monotonic() < deadline:
            before = self.cpu_time()
            time.sleep(1.0)
            used = (self.cpu_time() - before).front_end

    def pause(self) -> None:
        """Pause all processes. Otherwise vLLM's workers would poll for a second after their last step."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def stop(self) -> None:
        """Terminate the process, then kill the rest of its group."""
        self.resume()
        self._process.terminate()  # Ends only this process, because Ray needs its children to stop cleanly.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process, its group, and children that left the group."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _signal(self, number: int) -> None:
        """Signal the process, its group, and children that left the group, such as Slipway's engine."""
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self._process.pid).children(recursive=True)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error or a signal, a clean stop would take too long.
        if kind is None:
            self.stop()
        else:
            self.kill()


def _tree_cpu_time(process: psutil.Process, *, engine: bool) -> CpuTime:
    """Add up the CPU time of a process and its children.

    Raises:
        psutil.NoSuchProcess: The process itself has exited.
    """
    title = " ".join(process.cmdline())
    engine = engine or any(name in title for name in ENGINE_PROCESSES)
    times = process.cpu_times()
    used = times.user + times.system
    front_end, of_engine = (0.0, used) if engine else (used, 0.0)
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):
            below = _tree_cpu_time(child, engine=engine)
            front_end += below.front_end
            of_engine += below.engine
    return CpuTime(front_end, of_engine)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRequest:
    """The request of a load in one contract, and the criteria for a complete answer."""

    path: str
    body: dict[str, object]
    marker: str = ""  # A text that occurs once in each record of a stream.
    end_marker: str  # A text that occurs in the last bytes of a complete answer.
    exact_records: bool = False  # A stream has exactly one record for each token.


def lmi(load: EngineLoad) -> ContractRequest:
    """Return the request for LMI's rolling batch or for vectors."""
    if load.texts:
        return ContractRequest(path="/invocations", body={"inputs": _texts(load)}, end_marker="]")
    parameters: dict[str, object] = {"max_new_tokens": load.tokens, "ignore_eos_token": True}
    if load.stream and not load.logprobs:
        parameters["token_logprobs"] = False
    return ContractRequest(
        path="/invocations",
        body={"inputs": load.prompt, "parameters": parameters, **({"stream": True} if load.stream else {})},
        marker='"token": {' if load.stream else "",
        end_marker='"generated_text"',
        exact_records=load.stream,
    )


def openai(load: EngineLoad) -> ContractRequest:
    """Return the request for OpenAI's completions with vLLM's own parameters, or for embeddings."""
    if load.texts:
        return ContractRequest(
            path="/v1/embeddings", body={"model": MODEL, "input": _texts(load)}, end_marker='"completion_tokens":0'
        )
    body: dict[str, object] = {"model": MODEL, "prompt": load.prompt, "max_tokens": load.tokens, "temperature": 0}
    body |= {"ignore_eos": True, "stream": load.stream}
    if load.logprobs:
        body["logprobs"] = 0  # Only the chosen tokens, without alternatives, as in LMI.
    return ContractRequest(
        path="/v1/completions",
        body=body,
        marker="data: {" if load.stream else "",
        # The end-of-sequence token is ignored, so an answer ends at its limit with exactly that many tokens.
        end_marker='"finish_reason":"length"',
    )


def _texts(load: EngineLoad) -> str | list[str]:
    """Return the texts of a request for vectors. All texts differ, so that no server can cache them."""
    texts = [f"{random.getrandbits(32)} {load.prompt}" for _ in range(load.texts)]
    return texts[0] if load.texts == 1 else texts


def chat(load: EngineLoad) -> ContractRequest:
    """Return the request for OpenAI's chat completions with vLLM's own parameters."""
    body: dict[str, object] = {"model": MODEL, "messages": [{"role": "user", "content": load.prompt}]}
    body |= {"max_tokens": load.tokens, "temperature": 0, "ignore_eos": True, "stream": load.stream}
    if load.logprobs:
        body["logprobs"] = True
    return ContractRequest(
        path="/v1/chat/completions",
        body=body,
        marker="data: {" if load.stream else "",
        end_marker='"finish_reason":"length"',
    )


def triton(load: EngineLoad) -> ContractRequest:
    """Return the request for Triton's generate extension, in the format of its vLLM backend."""
    body: dict[str, object] = {"text_input": load.prompt, "max_tokens": load.tokens, "ignore_eos": True}
    body |= {"temperature": 0, "stream": load.stream, "return_finish_reason": True}
    if load.logprobs:
        body |= {"logprobs": 0, "return_logprobs": True}
    return ContractRequest(
        path=f"/v2/models/{MODEL}/generate{'_stream' if load.stream else ''}",
        body=body,
        marker="data: {" if load.stream else "",
        end_marker='"finish_reason":"length"',
        exact_records=load.stream,
    )


def happy_vllm(load: EngineLoad) -> ContractRequest:
    """Return the request for happy_vllm's generate route. Its streams repeat the whole text with each token."""
    return ContractRequest(
        path=f"/v1/generate{'_stream' if load.stream else ''}",
        body={"prompt": load.prompt, "max_tokens": load.tokens, "ignore_eos": True, "temperature": 0},
        marker='"responses"' if load.stream else "",
        end_marker='["length"]',
        exact_records=load.stream,
    )


def tgi(load: EngineLoad) -> ContractRequest:
    """Return the request for TGI's generate route.

    TGI cannot ignore the end-of-sequence token, so a model that ends early causes errors.
    """
    return ContractRequest(
        path=f"/generate{'_stream' if load.stream else ''}",
        body={"inputs": load.prompt, "parameters": {"max_new_tokens": load.tokens, "details": True}},
        marker='"token":{' if load.stream else "",
        end_marker='"finish_reason":"length"' if load.stream else '"details":{',
        exact_records=load.stream,
    )


CONTRACTS: dict[str, Callable[[EngineLoad], ContractRequest]] = {
    "lmi": lmi,
    "openai": openai,
    "chat": chat,
    "triton": triton,
    "happy_vllm": happy_vllm,
    "tgi": tgi,
}
# Contracts in which a client can choose whether streams have log probabilities. Streams with and without log
# probabilities are measured. TGI's streams always have them.
OPTIONAL_LOGPROBS = ("lmi", "openai", "chat", "triton")


def contract_of(variant: str) -> str:
    """Return the contract in a variant's name. An empty string means the peer's usual contract."""
    return variant.removesuffix(LOGPROBS).partition(":")[2]


class Peer(ABC):
    """A server to compare, and the variants of its requests."""

    name: ClassVar[str]
    server: Server

    def __init__(
        self, contracts: Sequence[str] = ("lmi",), rust: Path | None = None, triton: Path | None = None
    ) -> None:
        """Set the options.

        Args:
            contracts: The contracts for requests to Slipway. Other peers use the contracts that they support.
            rust: The path of the program vllm-rs.
            triton: The directory with the packages of nvidia-pytriton.
        """
        self.contracts, self.rust, self.triton = contracts, rust, triton

    def missing(self, engine: Engine) -> str:
        """Return the reason why this machine cannot run the peer. Empty if it can."""
        return ""

    @abstractmethod
    def start(self, engine: Engine, work_dir: Path) -> Server:
        """Start the server, and return without waiting. The caller owns the server."""

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until the server is ready."""

    @abstractmethod
    def load(self, variant: str, load: EngineLoad) -> Figures:
        """Run the load, and return the client's figures."""

    def variants(self, stream: bool) -> list[str]:
        """Return the names of the variants, such as `vllm`, `vllm:chat` and `vllm:chat+logprobs`."""
        return [self.name, self.name + LOGPROBS] if stream else [self.name]


def module(engine: Engine, work_dir: Path, name: str, *arguments: str, copies: int = 1) -> list[str]:
    """Return the command line that runs a module. If the engine is scripted, the module runs on scripted engines."""
    scripted: list[str] = []
    if engine.step_ms is not None:
        script = Script(
            model=str(engine.model_dir),
            step_ms=engine.step_ms,
            task=engine.task,
            engines=copies,
            cache_blocks=engine.cache_blocks,
        )
        scripted = ["benchmarks.scripted_front_end", str(work_dir), msgspec.json.encode(script).decode()]
    return [sys.executable, "-m", *scripted, name, *arguments]


class HttpPeer(Peer):
    """A peer that answers over HTTP."""

    ready_path: ClassVar[str]
    contract: ClassVar[str] = "openai"  # The contract of variants whose names have none.
    environment: Mapping[str, str] = {}

    @abstractmethod
    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        """Return the server's command line. The server listens on `self.port` of the loopback address."""

    def variants(self, stream: bool) -> list[str]:
        """Return the variants for completions and for chats. Other contracts are compared with completions."""
        names = [self.name, f"{self.name}:chat"] if "chat" in self.contracts else [self.name]
        return [name + end for name in names for end in ("", LOGPROBS)] if stream else names

    def start(self, engine: Engine, work_dir: Path) -> Server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._scripted = engine.step_ms is not None
        argv = self.argv(engine, work_dir)
        self.server = Server(self.name, argv, work_dir / f"{self.name}.log", environment=self.environment)
        return self.server

    def wait_ready(self) -> None:
        self.server.wait_until(self._is_ready, START_TIMEOUT_S)

    def load(self, variant: str, load: EngineLoad) -> Figures:
        load = msgspec.structs.replace(load, logprobs=variant.endswith(LOGPROBS))
        contract = CONTRACTS[contract_of(variant) or self.contract]
        request = contract(load)
        spec = LoadSpec(
            url=self._url(request.path),
            body="\n".join(json.dumps(contract(load).body) for _ in range(_BODIES if load.texts else 1)),
            marker=request.marker,
            end_marker=request.end_marker,
            tokens=load.tokens,
            exact_records=request.exact_records,
            concurrency=load.concurrency,
            seconds=load.seconds,
            timeout=load.timeout,
        )
        place = (lambda: os.sched_setaffinity(0, processors()[1])) if self._scripted else None
        finished = subprocess.run(
            command(spec),
            stdout=subprocess.PIPE,
            check=True,
            timeout=load.timeout + GRACE_S,
            process_group=0,
            preexec_fn=place,
        )
        self.server.check_alive()
        return msgspec.json.decode(finished.stdout, type=Figures)

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self._url(self.ready_path), timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class Slipway(HttpPeer):
    """Slipway, with requests in one or more contracts."""

    name = "slipway"
    program: ClassVar[tuple[str, ...]] = "slipway", "serve"
    copies: ClassVar[int] = 1
    ready_path = "/ping"
    contract = "lmi"

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        model_dir = work_dir / "model"
        model_dir.mkdir()
        (model_dir / "serving.properties").write_text(serving_properties(engine, self.copies))
        if engine.step_ms is not None:
            # Scripted engines need no separate processors, and may be more numerous than the processors.
            self.environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--model-name", MODEL]
        command = *self.program, "--model-dir", str(model_dir), *address
        return module(engine, work_dir, *command, copies=self.copies)

    def variants(self, stream: bool) -> list[str]:
        names: list[str] = []
        for contract in self.contracts:
            name = self.name + ("" if contract == "lmi" else f":{contract}")
            ends = ("", LOGPROBS) if contract in OPTIONAL_LOGPROBS else (LOGPROBS if contract == "tgi" else "",)
            names += [name + end for end in ends] if stream else [name]
        return names


class TwoCopies(Slipway):
    """Slipway with two copies of the model."""

    name = "slipway-2"
    copies = 2

    def missing(self, engine: Engine) -> str:
        gpus = gpu_count()
        return f"it needs {self.copies} GPUs, and there are {gpus}" if 0 < gpus < self.copies else ""


class FourCopies(TwoCopies):
    """Slipway with four copies of the model."""

    name = "slipway-4"
    copies = 4


class InTurn(TwoCopies):
    """Slipway with two copies that get requests in turn. See `benchmarks.copies_in_turn`."""

    name = "in-turn"
    program = "benchmarks.copies_in_turn", "slipway", "serve"


class Ray(Slipway):
    """Slipway on Ray Serve: one replica behind Serve's proxy, on a local cluster."""

    name = "ray"
    program = "slipway", "ray"

    def missing(self, engine: Engine) -> str:
        if engine.step_ms is not None:
            return "its front end has several processes, which do not run on one processor"
        return "" if importlib.util.find_spec("ray") else "Ray is not installed"


class Vllm(HttpPeer):
    """vLLM's API server in Python."""

    name = "vllm"
    ready_path = "/health"

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        # `vllm serve` fails if vLLM was installed under another name (`vllm-cpu`). vLLM's module runs in any case.
        arguments = ["--disable-uvicorn-access-log", "--host", "127.0.0.1", "--port", str(self.port)]
        arguments += ["--model", str(engine.model_dir), "--served-model-name", MODEL, *command_line(engine.arguments)]
        return module(engine, work_dir, "vllm.entrypoints.openai.api_server", *arguments)


class Rust(HttpPeer):
    """vLLM's Rust front end. The wheel for GPUs includes this front end."""

    name = "rust"
    ready_path = "/health"

    def missing(self, engine: Engine) -> str:
        if engine.step_ms is None:
            return "it is measured on the scripted engine only"
        return "" if self._program() else "the installed vLLM has no vllm-rs (give --rust FILE)"

    def _program(self) -> Path | None:
        vllm = importlib.util.find_spec("vllm")
        places = list(vllm.submodule_search_locations or ()) if vllm is not None else []
        return self.rust or next((file for place in places if (file := Path(place, "vllm-rs")).exists()), None)

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        return module(engine, work_dir, "rust", str(self._program()), str(self.port))


class Floor(HttpPeer):
    """A front end in Python that does the least possible work. See `benchmarks.floor`."""

    name = "floor"
    ready_path = "/health"

    def missing(self, engine: Engine) -> str:
        return "it is measured on the scripted engine only" if engine.step_ms is None else ""

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        return module(engine, work_dir, "benchmarks.floor", str(work_dir), str(self.port))

    def variants(self, stream: bool) -> list[str]:
        return [self.name, self.name + LOGPROBS] if stream else [self.name]  # The floor serves only completions.


class Triton(HttpPeer):
    """NVIDIA's Triton from the wheel nvidia-pytriton, with `benchmarks.triton_model` in its Python backend."""

    name = "triton"
    ready_path = "/v2/health/ready"
    contract = "triton"

    def missing(self, engine: Engine) -> str:
        if engine.step_ms is None:
            return "it is measured with the scripted model only"
        return "" if self.triton else "the directory of nvidia-pytriton is missing (give --triton DIR)"

    def variants(self, stream: bool) -> list[str]:
        return [self.name] if stream else []  # Triton's model only streams.

    def argv(self, engine: Engine, work_dir: Path) -> list[str]:
        assert self.triton is not None, "`missing` has checked it"
        home = self.triton / "pytriton" / "tritonserver"
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        shutil.copytree(home / "backends" / "python", work_dir / "backends" / "python")
        stub = shutil.copy(home / "python_backend_stubs" / version / TRITON_STUB, work_dir / "backends" / "python")
        (work_dir / "models" / MODEL / "1").mkdir(parents=True)
        shutil.copy(Path(__file__).with_name("triton_model.py"), work_dir / "models" / MODEL / "1" / "model.py")
        (work_dir / "models" / MODEL / "config.pbtxt").write_text(TRITON_CONFIG)
        program = home / "bin" / "tritonserver"
        for file in (Path(stub), program):
            file.chmod(0o755)
        self.environment = {
            "STEP_MS": str(engine.step_ms),
            "LD_LIBRARY_PATH": str(self.triton / "nvidia_pytriton.libs"),
            "PACKAGES": str(self.triton),
        }
        options = [f"--model-repository={work_dir}/models", f"--backend-directory={work_dir}/backends"]
        options += [f"--http-port={self.port}", "--http-address=127.0.0.1", "--allow-grpc=0", "--allow-metrics=0"]
        place = ",".join(map(str, processors()[0]))
        return ["taskset", "-c", place, str(program), *options]


class Bare(Peer):
    """`AsyncLLM` without HTTP. See `benchmarks.bare_engine`."""

    name = "bare"

    def start(self, engine: Engine, work_dir: Path) -> Server:
        arguments = json.dumps({**engine.arguments, "model": str(engine.model_dir)})
        argv = module(engine, work_dir, "benchmarks.bare_engine", arguments)
        self.server = Server(self.name, argv, work_dir / "bare.log", pipes=True)
        return self.server

    def wait_ready(self) -> None:
        self._read_line(START_TIMEOUT_S)

    def load(self, variant: str, load: EngineLoad) -> Figures:
        load = msgspec.structs.replace(load, logprobs=variant.endswith(LOGPROBS))
        self.server.stdin.write(msgspec.json.encode(load) + b"\n")
        self.server.stdin.flush()
        return msgspec.json.decode(self._read_line(load.timeout + GRACE_S), type=Figures)

    def _read_line(self, timeout: float) -> bytes:
        readable, _, _ = select.select([self.server.stdout], [], [], timeout)
        line = self.server.stdout.readline() if readable else b""
        if not line:
            self.server.check_alive()
            raise self.server.error(f"no answer after {timeout:g} s")
        return line


_EVERY = (Slipway, TwoCopies, FourCopies, InTurn, Ray, Vllm, Rust, Floor, Triton, Bare)
PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in _EVERY}


def command_line(arguments: EngineArguments) -> list[str]:
    """Return the engine arguments as options of vLLM."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        else:
            words.append(f"--{option}={value}")
    return words


def serving_properties(engine: Engine, copies: int) -> str:
    """Return the text of Slipway's settings file. LMI has a different name for the batch size.

    On GPUs, a single copy is loaded only on the first GPU, because it is compared with one engine of a peer.
    `maxWorkers=1` would mean one copy for each GPU.
    """
    options = {"model_id": str(engine.model_dir), "rolling_batch": "vllm"}
    for name, value in engine.arguments.items():
        options["max_rolling_batch_size" if name == "max_num_seqs" else name] = str(value).lower()
    limit = f"maxWorkers={copies}\n" if copies > 1 else "load_on_devices=0\n" if gpu_count() else ""
    return limit + "".join(f"option.{name}={value}\n" for name, value in options.items())
