"""The end of workers and their child processes when the server is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import lives, wait_until

_SERVER = """
import asyncio, json, pathlib, sys
from handlers.custom.custom_handler import CustomHandler
from tests.unit.handlers.custom.harness import settings_for

async def main():
    handler = CustomHandler(settings_for(pathlib.Path(sys.argv[1])), queue_size=1, overload_status=503)
    await handler.start()
    print(json.dumps([worker.pid for worker in handler.pool.workers]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
_MODEL = """
import multiprocessing, subprocess, time
from djl_python import Output

children = [subprocess.Popen(["sleep", "600"])]

def handle(inputs):
    if inputs.is_empty():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        child.start()
        children.append(child)
    return Output()
"""


def test_a_killed_server_takes_its_workers_and_their_children_with_it(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(_MODEL)
    root = Path(__file__).parents[4]
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    ) as server:
        assert server.stdout is not None
        try:
            workers = json.loads(server.stdout.readline())
            everything = [psutil.Process(pid) for pid in workers]
            everything += [child for worker in tuple(everything) for child in worker.children(recursive=True)]
            commands = [process.name() for process in everything]
            assert "sleep" in commands
            assert len(everything) >= 3, "worker, and a child of each kind"
        finally:
            server.kill()
    wait_until(
        lambda: not any(map(lives, everything)), about=lambda: [process for process in everything if lives(process)]
    )
