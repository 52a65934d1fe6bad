"""The server under test: the statuses that `/ping` may return and does return, and what the server leaves behind."""

from __future__ import annotations

import contextlib
import getpass
import http.client
import os
import shutil
import signal
import tempfile
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from engines.cache_dir import cache_dir
from tests.chaos.contracts import CONTRACTS
from tests.live.server import Server, write_model
from tests.waiting import lives, wait_until

clock = time.monotonic
_PING_SECONDS = 0.05
_PING_TIMEOUT = 30.0
_CACHES = "torchinductor_"
"""The prefix of the directory in which PyTorch keeps compiled code."""
_SWEPT = "slipway-sockets-"
"""The prefix of the directory that a killed server leaves behind and the next server removes."""
_TOGETHER = 16
_END_SECONDS = 60.0
"""The time within which the processes of a killed server must end."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The observations that are allowed from a given time."""

    since: float
    statuses: frozenset[int]
    """Statuses of `/ping`. 0 means that nothing listens."""
    errors: bool
    """True if requests may fail."""


class Truth:
    """The observations that clients may make at each time. They depend on the actions against the server."""

    def __init__(self) -> None:
        self._moments = [Moment(0.0, frozenset({0}), True)]
        self._lock = threading.Lock()

    def is_now(self, *statuses: int, errors: bool = False, after: float = 0.0) -> None:
        """Allow these observations, starting `after` seconds from now. Entries for later times are removed."""
        with self._lock:
            since = clock() + after
            self._moments = [moment for moment in self._moments if moment.since < since]
            self._moments.append(Moment(since, frozenset(statuses), errors))

    def between(self, begin: float, end: float) -> Moment:
        """Return all observations that were allowed at any time in an interval."""
        with self._lock:
            ends = [moment.since for moment in self._moments[1:]] + [float("inf")]
            held = [m for m, until in zip(self._moments, ends, strict=True) if m.since <= end and until > begin]
        return Moment(begin, frozenset().union(*(m.statuses for m in held)), any(m.errors for m in held))


@dataclass(frozen=True, slots=True)
class Ping:
    """A call of `/ping`."""

    sent: float
    received: float
    status: int


class PingWatch:
    """A thread that calls `/ping` constantly, each time on a new connection, and compares replies with the truth."""

    def __init__(self, port: int, truth: Truth) -> None:
        self.pings: list[Ping] = []
        self.lies: list[str] = []
        self._port, self._truth = port, truth
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ping", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def first(self, status: int, since: float) -> float | None:
        """Return the time at which `/ping` first returned this status. Requests before `since` do not count."""
        later = self.pings[bisect_left(self.pings, since, key=lambda ping: ping.sent) :]
        return next((ping.received for ping in later if ping.status == status), None)

    def _run(self) -> None:
        lie = ""
        while not self._stop.wait(_PING_SECONDS):
            sent = clock()
            status, text = self._ping()
            ping = Ping(sent, clock(), status)
            self.pings.append(ping)
            allowed = self._truth.between(ping.sent, ping.received).statuses
            if status in allowed:
                lie = ""
            elif not lie:  # Each series of wrong answers is reported once.
                lie = f"/ping said {status} where {sorted(allowed)} would be true: {text}"
                self.lies.append(lie)

    def _ping(self) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_PING_TIMEOUT)
        try:
            connection.request("GET", "/ping")
            reply = connection.getresponse()
            return reply.status, reply.read().decode(errors="replace")
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)
        finally:
            connection.close()


class Subject:
    """A server that can be restarted, with checks of what its processes leave behind."""

    def __init__(self, directory: Path, environment: dict[str, str], **options: object) -> None:
        self.truth = Truth()
        self.left_behind: list[str] = []
        self.engine_restarts = 0
        """The number of times that this server will still restart its engine."""
        self.stall_timeout = float(environment.get("SERVING_STALL_TIMEOUT", "60"))
        self._directory = directory
        self._model_dir = write_model(directory / "model", **options)
        # vLLM's sockets are in this directory, so its path must be short.
        self._temporary = Path(tempfile.mkdtemp(prefix="chaos-"))
        compiled = cache_dir() / "inductor"
        compiled.mkdir(parents=True, exist_ok=True)
        (self._temporary / f"{_CACHES}{getpass.getuser()}").symlink_to(compiled)  # Compiling takes 20 s.
        self._environment = environment | {"TMPDIR": str(self._temporary), "TORCHINDUCTOR_CACHE_DIR": str(compiled)}
        self._logs: list[Path] = []
        self.server = self._started()
        self.watch = PingWatch(self.server.port, self.truth)

    def _started(self, port: int | None = None) -> Server:
        log = self._directory / f"server-{len(self._logs)}.log"
        self._logs.append(log)
        self.truth.is_now(0, 503, errors=True)
        chosen = {} if port is None else {"port": port}
        return Server(self._model_dir, log, self._environment, **chosen)

    def wait_until_ready(self) -> None:
        self.truth.is_now(0, 503, 200, errors=True)
        self.engine_restarts = int(self._environment.get("SERVING_ENGINE_RESTART", "0"))
        self._wait_until_served()

    def wait_until_restarted(self) -> None:
        """Wait until the server has restarted its engine."""
        self.truth.is_now(500, 200, errors=True)
        self.engine_restarts -= 1
        self._wait_until_served()

    def _wait_until_served(self) -> None:
        self.server.wait_until_ready()
        # The first requests compile code. On a busy machine, that takes longer than the stall time.
        self.truth.is_now(200, 500, errors=True)
        with ThreadPoolExecutor(_TOGETHER) as pool:
            for contract in CONTRACTS * 2:
                pool.submit(self.server.client.post, contract.path, json=contract.body(4))
        self.truth.is_now(200)

    def restart(self) -> None:
        """Start another server on the same port. The previous server must have ended."""
        self.server = self._started(self.server.port)
        self.wait_until_ready()

    def end(self, grace: float = 5.0) -> int:
        """Send SIGTERM, and return the exit code. `/ping` may return its former status for `grace` seconds."""
        before = self.truth.between(clock(), clock()).statuses
        self.truth.is_now(*before, 503, 0, errors=True)
        self.truth.is_now(503, 0, errors=True, after=grace)
        processes = self.held()
        self.server.process.send_signal(signal.SIGTERM)
        return self._ended(processes, clean=True)

    def kill(self) -> None:
        """Send SIGKILL, as the kernel does when memory runs out."""
        before = self.truth.between(clock(), clock()).statuses
        self.truth.is_now(*before, 0, errors=True)
        self.truth.is_now(0, errors=True, after=1.0)
        held = self.held()
        self.server.process.kill()
        self._ended(held, clean=False)

    def held(self) -> set[str]:
        """Return the shared-memory files that the server's processes have mapped."""
        found = set()
        for process in self.processes():
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    if "/dev/shm/" in line:
                        found.add(line[line.index("/dev/shm/") :].removesuffix(" (deleted)"))
        return found

    def shared_names(self) -> list[str]:
        """Return the names in /dev/shm that the server's processes created."""
        servers = [path.name for path in self._temporary.iterdir() if path.name.startswith(_SWEPT)]
        return [name for name in os.listdir("/dev/shm") if any(f"{server}-" in name for server in servers)]

    def processes(self) -> list[psutil.Process]:
        """Return all processes in the server's session, including the server."""
        session = self.server.process.pid
        return [process for process in psutil.process_iter() if _session(process.pid) == session]

    def process(self, name: str) -> psutil.Process:
        """Return the server's first process with this name in its command line."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):  # A zombie has no command line.
                if name in " ".join(process.cmdline()):
                    return process
        raise LookupError(f"no process {name}")

    def log_text(self) -> str:
        """Return the logs of all servers."""
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def close(self) -> None:
        """Kill the processes that still run, and remove their files, except for a copy of the log."""
        self.watch.stop()
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.server.stop()
        shutil.rmtree(self._temporary, ignore_errors=True)
        Path(tempfile.gettempdir(), "chaos-server.log").write_text(self.log_text())

    def _ended(self, shared_memory: set[str], *, clean: bool) -> int:
        code = self.server.process.wait(60)
        self.truth.is_now(0, errors=True)
        self.server.client.close()
        try:
            wait_until(lambda: not self._alive(), _END_SECONDS)
        except AssertionError:
            self.left_behind += [f"process {process.pid} {process.cmdline()}" for process in self._alive()]
        self.left_behind += [path for path in shared_memory if Path(path).exists()]
        files = [path for path in sorted(self._temporary.iterdir()) if not path.name.startswith(_CACHES)]
        self.left_behind += [str(path) for path in files if clean or not path.name.startswith(_SWEPT)]
        for path in files:  # Otherwise the next server would be blamed for these files.
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        return code

    def _alive(self) -> list[psutil.Process]:
        return [process for process in self.processes() if lives(process)]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return -1


@contextlib.contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Pause processes with SIGSTOP inside the block."""
    try:
        for process in processes:
            process.suspend()
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
