"""Ten thousand requests need no more memory than a thousand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.replay.stand_in import reply, serving

_PEAK = """
import resource
from slipway.cli import main
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
_TEXT = "word " * 2000


def peak_of(directory: Path, count: int) -> int:
    """Return the peak memory of a replay of `count` requests, in kilobytes."""
    source = directory / f"{count}.jsonl"
    line = {"path": "/generate", "body": {"inputs": _TEXT}, "answer": {"body": {"generated_text": _TEXT}}}
    with source.open("w") as lines:
        for number in range(count):
            lines.write(json.dumps(line | {"id": str(number)}) + "\n")
    with serving(reply({"generated_text": _TEXT, "more": 1})) as server:
        command = ["replay", str(source), "--to", server.url, "--recorded", "--output", str(directory / str(count))]
        done = subprocess.run([sys.executable, "-c", _PEAK, *command], capture_output=True, text=True, check=False)
        assert len(server.asked) == count
    assert done.returncode == 1, done.stderr
    report = json.loads((directory / str(count) / "report.json").read_text())
    assert (report["requests"], report["differences"][0]["count"]) == (count, count)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
def test_memory_does_not_grow_with_the_requests(tmp_path: Path) -> None:
    few, many = peak_of(tmp_path, 1000), peak_of(tmp_path, 10_000)
    assert many < few + 40_000  # The bodies of the other 9000 requests have 180 MB.
