"""The program that tries vLLM's arguments: what it finds of a few is what the table says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_arguments import PAGE, rows

ROOT = Path(__file__).parents[2]
TRIED = ("stream_interval", "enable_mfu_metrics", "enable_sleep_mode", "skip_tokenizer_init")
"""One that works, one without effect, one that vLLM refuses and one that Slipway does."""


@pytest.mark.long
def test_a_few_arguments_are_still_what_the_table_says(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    shutil.copy(PAGE, page)
    known = rows(page.read_text())
    text = page.read_text()
    for name in TRIED:
        text = text.replace(f"| `option.{name}` | {known[name]} |\n", "")
    page.write_text(text)
    command = [sys.executable, "-m", "tests.engine_arguments", "--page", str(page), *TRIED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert page.read_text() == PAGE.read_text()
    assert [known[name].split(" | ")[1].split()[0] for name in TRIED] == ["works", "no", "refused,", "refused"]
