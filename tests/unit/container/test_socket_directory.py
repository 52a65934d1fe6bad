from __future__ import annotations

import os
import socket
import tempfile
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from container.server import socket_directory

VARIABLE = "VLLM_RPC_BASE_PATH"


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_what_vllm_leaves_in_its_directory_goes_with_it() -> None:
    with socket_directory():
        directory = Path(os.environ[VARIABLE])
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(directory / "3b155a26-d96f-4f6a-8192-9f0803f196d9"))
    assert not directory.exists()
    assert VARIABLE not in os.environ


def test_multiprocessings_sockets_are_there_as_well() -> None:
    with socket_directory():
        assert get_temp_dir() == os.environ[VARIABLE]
    assert get_temp_dir() != os.environ.get(VARIABLE)


def test_what_a_killed_server_has_left_goes_with_the_next_start_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young, other = (tmp_path / name for name in ("slipway-sockets-a", "slipway-sockets-b", "slipway-other"))
    for directory in (left, young, other):
        directory.mkdir()
        (directory / "socket").touch()
    with socket_directory():
        own = next(path for path in tmp_path.iterdir() if path not in (left, young, other))
        for directory in (left, other, own):
            os.utime(directory, (0, 0))
        with socket_directory():  # of another server
            assert (left.exists(), young.exists(), other.exists(), own.exists()) == (False, True, True, True)


def test_a_directory_that_somebody_has_named_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with socket_directory():
        assert os.environ[VARIABLE] == str(tmp_path)
    assert os.environ[VARIABLE] == str(tmp_path)
    assert tmp_path.exists()


def test_a_path_that_is_too_long_for_sockets_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with socket_directory():
        assert VARIABLE not in os.environ
    assert not list(deep.iterdir())
