"""Starts scripted engine cores (`benchmarks.scripted_engine`) and a front end that uses them.

    python -m benchmarks.scripted_front_end DIRECTORY SCRIPT MODULE [ARGUMENTS...]
    python -m benchmarks.scripted_front_end DIRECTORY SCRIPT rust FILE PORT

SCRIPT is a `Script` in JSON. MODULE runs as with `python -m`. It must use vLLM's `AsyncLLM` in its own process. `rust`
is vLLM's front end in Rust, and FILE is its program. If there are several processors, the front end uses the first
one, and the engines and the load client share the others.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

MAX_MODEL_LEN = 2048
BLOCK = 16  # The number of tokens in one block of the prefix cache.


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The behaviour of the engines."""

    model: str  # The directory that contains the tokenizer.
    step_ms: float  # The time between two tokens of a sequence.
    task: str = "generate"  # Or `embed`.
    engines: int = 1
    cache_blocks: int = 0  # The number of blocks in each prefix cache. 0: no cache.


def addresses(directory: Path, number: int = 0) -> dict[str, str]:
    """Return the addresses of an engine's sockets, as keyword arguments for `AsyncMPClient`."""
    return {"input_address": f"ipc://{directory}/input{number}", "output_address": f"ipc://{directory}/output{number}"}


def processors() -> tuple[list[int], list[int]]:
    """Return the processors for the front end, and those for the engines and the load client."""
    found = sorted(os.sched_getaffinity(0))
    return found[:1], found[1:] or found


def start_engines(directory: Path, script: str) -> None:
    """Start the engines in the process group of this process."""
    engines = subprocess.Popen([sys.executable, "-m", "benchmarks.scripted_engine", str(directory), script])
    front_end, others = processors()
    os.sched_setaffinity(engines.pid, others)
    os.sched_setaffinity(0, front_end)


def use_scripted_engines(directory: Path, count: int) -> None:
    """Make vLLM connect each new client to the next scripted engine. By default, vLLM starts an engine instead."""
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

    numbers = itertools.count()

    def connected(**given: Any) -> AsyncMPClient:
        number = next(numbers)
        assert number < count, f"the script has {count} engines, and the front end asks for one more"
        return AsyncMPClient(**given | {"client_addresses": addresses(directory, number)})

    EngineCoreClient.make_async_mp_client = staticmethod(connected)


def become_rust(directory: Path, model: str, program: str, port: str) -> None:
    """Bind the sockets of vLLM's Rust front end, and replace this process by that front end."""
    import zmq
    from vllm.utils.network_utils import make_zmq_listener

    where = addresses(directory)
    listeners = {
        "--listen-fd": socket.create_server(("127.0.0.1", int(port)), backlog=1024),
        "--input-listener-fd": make_zmq_listener(where["input_address"], zmq.ROUTER).socket,
        "--output-listener-fd": make_zmq_listener(where["output_address"], zmq.PULL).socket,
    }
    argv = [program, "frontend", "--engine-start-index=0", "--engine-count=1", "--data-parallel-size=1"]
    for option, listener in listeners.items():
        listener.set_inheritable(True)
        argv.append(f"{option}={listener.fileno()}")
    served = {"model_tag": model, "model": model, "served_model_name": ["m"], "max_model_len": MAX_MODEL_LEN}
    argv.append("--args-json=" + json.dumps({**served, "host": "127.0.0.1", "port": int(port)}))
    os.execv(program, argv)


def main() -> None:
    """Start the engines and the front end."""
    directory, text, module, *arguments = sys.argv[1:]
    script = msgspec.json.decode(text, type=Script)
    start_engines(Path(directory), text)
    if module == "rust":
        become_rust(Path(directory), script.model, *arguments)
    use_scripted_engines(Path(directory), script.engines)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
