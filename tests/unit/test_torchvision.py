"""torchvision can be imported with torch's CPU build, in any process of the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import torch, torchvision
from torchvision.transforms.v2 import functional
print(tuple(functional.resize(torch.ones(3, 10, 10), [5, 4]).shape))
"""


@pytest.mark.slow
def test_torchvision_works_without_its_own_operators() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "(3, 5, 4)"
