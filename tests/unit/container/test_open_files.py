"""The limit of open files."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
from container.server import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("limits", "raised"), [("256 4096", "4096 4096"), ("1024 1024", "1024 1024")])
def test_as_many_files_may_be_open_as_the_hard_limit_says(limits: str, raised: str) -> None:
    command = [sys.executable, "-c", SCRIPT, *limits.split()]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == raised
