"""Serving on a CPU without a compiler."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path

import pytest


def go_without_compiler(environ: MutableMapping[str, str]) -> bool:
    from engines.vllm import loading

    return loading.go_without_compiler(environ)


def with_compiler(directory: Path, name: str = "g++") -> Path:
    (directory / name).write_text("#!/bin/sh\n")
    (directory / name).chmod(0o755)
    return directory


def test_without_a_compiler_torch_compiles_nothing_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"PATH": str(tmp_path)}
    with caplog.at_level(logging.INFO):
        assert go_without_compiler(environ)
        assert not go_without_compiler(environ)
    assert environ["TORCH_COMPILE_DISABLE"] == "1"
    (message,) = [record.getMessage() for record in caplog.records if record.name.startswith("engines")]
    assert "no C++ compiler (g++)" in message
    assert go_without_compiler({"PATH": str(with_compiler(tmp_path)), "CXX": "clang++-99"}), "which is not there"


def test_a_compiler_that_is_there_is_used_and_what_the_operator_has_set_stays(tmp_path: Path) -> None:
    for environ in (
        {"PATH": str(with_compiler(tmp_path))},
        {"PATH": "/nowhere", "CXX": str(with_compiler(tmp_path, "clang++") / "clang++")},
        {"PATH": "/nowhere", "TORCH_INDUCTOR_INSTALL_GXX": "1"},
        {"PATH": "/nowhere", "TORCH_COMPILE_DISABLE": "0"},
        {"PATH": "/nowhere", "TORCH_COMPILE_DISABLE": "1"},
    ):
        before = dict(environ)
        assert not go_without_compiler(environ)
        assert environ == before


_COMPILES = """
import torch
print(torch.compile(lambda x: x.log_softmax(-1).sum(), dynamic=True)(torch.ones(4)).item())
"""


def test_a_process_that_is_started_then_runs_what_torch_would_compile(tmp_path: Path) -> None:
    environ = {**os.environ, "PATH": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    for variable in ("CXX", "TORCH_COMPILE_DISABLE", "TORCH_INDUCTOR_INSTALL_GXX"):
        environ.pop(variable, None)
    assert go_without_compiler(environ)
    done = subprocess.run(
        [sys.executable, "-c", _COMPILES], env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert round(float(done.stdout), 3) == -5.545
