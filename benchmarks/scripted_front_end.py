"""Runs a front end on a scripted engine core (`benchmarks.scripted_engine`), and starts both.

    python -m benchmarks.scripted_front_end DIRECTORY MODEL STEP_MS TASK MODULE [ARGUMENTS...]
    python -m benchmarks.scripted_front_end DIRECTORY MODEL STEP_MS TASK rust FILE PORT

TASK is `generate` or `embed`. MODULE runs as with `python -m`. It must use vLLM's `AsyncLLM` in its own process. `rust`
is vLLM's front end in Rust, whose program is FILE. On several processors, the front end has the first one, and the
engine and the load client share the others.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 2048


def addresses(directory: Path) -> dict[str, str]:
    """Return the addresses of the engine's sockets, as arguments of `AsyncMPClient`."""
    return {"input_address": f"ipc://{directory}/input", "output_address": f"ipc://{directory}/output"}


def processors() -> tuple[list[int], list[int]]:
    """Return the processors of the front end, and the processors of the engine and the load client."""
    found = sorted(os.sched_getaffinity(0))
    return found[:1], found[1:] or found


def start_engine(directory: Path, model: str, step_ms: str, task: str) -> None:
    """Start the engine, in the process group of this process."""
    argv = [sys.executable, "-m", "benchmarks.scripted_engine", str(directory), model, step_ms, task]
    engine = subprocess.Popen(argv)
    front_end, others = processors()
    os.sched_setaffinity(engine.pid, others)
    os.sched_setaffinity(0, front_end)


def use_scripted_engine(directory: Path) -> None:
    """Make vLLM connect to the scripted engine. By default it starts an engine."""
    from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient

    def connected(**given: Any) -> AsyncMPClient:
        return AsyncMPClient(**given | {"client_addresses": addresses(directory)})

    EngineCoreClient.make_async_mp_client = staticmethod(connected)


def become_rust(directory: Path, model: str, program: str, port: str) -> None:
    """Replace this process by vLLM's front end in Rust, which gets its sockets already bound."""
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
    """Start the engine and the front end."""
    directory, model, step_ms, task, module, *arguments = sys.argv[1:]
    start_engine(Path(directory), model, step_ms, task)
    if module == "rust":
        become_rust(Path(directory), model, *arguments)
    use_scripted_engine(Path(directory))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
