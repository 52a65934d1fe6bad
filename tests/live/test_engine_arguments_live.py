"""For a few arguments, the program that tries vLLM's arguments gets the same results as the table."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_arguments import PAGE, results_in

ROOT = Path(__file__).parents[2]
# One argument of each kind.
FEW = {
    "stream_interval": "works",
    "disable_log_stats": "no effect",
    "enable_sleep_mode": "refused by both",
    "skip_tokenizer_init": "refused by Slipway: ",
}


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("skip_tokenizer_init",), id="refused by Slipway"),
        pytest.param(tuple(FEW), id="of each kind", marks=pytest.mark.long),
    ],
)
def test_a_few_arguments_are_still_as_in_the_table(names: tuple[str, ...], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copy(PAGE, page)
    text = page.read_text()
    known = results_in(text)
    for name in names:
        text = re.sub(rf"`{name}`(?:, )?", "", text)
    page.write_text(text)
    command = [sys.executable, "-m", "tests.engine_arguments", "--page", str(page), *names]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert page.read_text() == PAGE.read_text()
    assert all(known[name].startswith(FEW[name]) for name in names)
