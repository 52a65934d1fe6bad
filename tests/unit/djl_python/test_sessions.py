from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djl_python import Session, SessionManager


def manager(path: Path, **properties: Any) -> SessionManager:
    return SessionManager({"sessions_path": str(path)} | properties)


def test_a_session_keeps_values_between_requests_and_processes(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    session.put("a/b", {"x": [1, 2]})
    found = manager(tmp_path).get_session(session.session_id)
    assert found is not None
    assert found.get("a/b") == {"x": [1, 2]}
    assert (Path(session.files_path) / "a-b").is_file()
    assert found.get("none") is None
    assert found.get("none", 7) == 7
    assert found.expiration_ts == session.expiration_ts


def test_another_process_finds_the_session(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    code = (
        "import sys; from djl_python import SessionManager;"
        "SessionManager({'sessions_path': sys.argv[1]}).get_session(sys.argv[2]).put('k', 'from afar')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path), session.session_id], check=True, timeout=60)
    assert session.get("k") == "from afar"


def test_an_array_of_a_session_lives_in_its_file(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    array = session.get_as_numpy("m", (2, 3), create=True)
    assert array.dtype == np.float32
    array[1, 2] = 5
    array.flush()
    assert session.get_as_numpy("m", [2, 3])[1, 2] == 5
    assert session.get_as_numpy("i", 4, dtype="int64", create=True).tolist() == [0, 0, 0, 0]
    with pytest.raises(FileNotFoundError):
        session.get_as_numpy("other", (1,))


@pytest.mark.parametrize("key", ["", ".", ".."])
def test_a_key_cannot_lead_out_of_the_session(tmp_path: Path, key: str) -> None:
    session = manager(tmp_path).create_session()
    with pytest.raises(ValueError, match="cannot be the key"):
        session.put(key, 1)


def test_a_value_that_cannot_be_kept_leaves_the_old_one(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    session.put("k", 1)
    with pytest.raises((AttributeError, TypeError), match=r"pickle|Can't"):
        session.put("k", lambda: None)
    assert session.get("k") == 1
    assert sorted(os.listdir(session.files_path)) == [".expiration_ts", "k"]


@pytest.mark.parametrize("session_id", [None, "", "NEW_SESSION"])
def test_no_session_id_is_no_session(tmp_path: Path, session_id: str | None) -> None:
    assert manager(tmp_path).get_session(session_id) is None


@pytest.mark.parametrize("session_id", [str(uuid.uuid4()), "..", "../" + "a" * 33, "a/../b", "A" * 36])
def test_an_unknown_session_is_an_error(tmp_path: Path, session_id: str) -> None:
    sessions = manager(tmp_path)
    with pytest.raises(ValueError, match="session not found"):
        sessions.get_session(session_id)
    with pytest.raises(ValueError, match="session not found"):
        sessions.close_session(session_id)


def test_a_closed_session_is_gone(tmp_path: Path) -> None:
    sessions = manager(tmp_path)
    session = sessions.create_session()
    sessions.close_session(session.session_id)
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match="session not found"):
        sessions.get_session(session.session_id)
    with pytest.raises(ValueError, match="does not exist"):
        session.remove()
    with pytest.raises(ValueError, match="invalid session_id"):
        sessions.close_session("")


def test_an_expired_session_is_none_and_goes_with_the_next_one(tmp_path: Path) -> None:
    sessions = manager(tmp_path, sessions_expiration="1200")
    session = sessions.create_session()
    assert session.expiration_ts is not None
    assert 1190 < session.expiration_ts - time.time() <= 1200
    session.put(".expiration_ts", time.time() - 1)
    assert sessions.get_session(session.session_id) is None
    other = sessions.create_session()
    assert os.listdir(tmp_path) == [other.session_id]


def test_what_is_no_session_in_the_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    session = manager(tmp_path).create_session()
    assert sorted(os.listdir(tmp_path)) == sorted(["notes", session.session_id])


def test_only_the_owner_can_read_sessions(tmp_path: Path) -> None:
    session = manager(tmp_path / "sessions").create_session()
    for path in (tmp_path / "sessions", Path(session.files_path)):
        assert path.stat().st_mode & 0o077 == 0


def copying_tool(directory: Path, bucket: Path) -> str:
    """A PATH with a tool that understands `sync` as s5cmd does, with a directory for the bucket."""
    tool = directory / "s5cmd"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import glob, os, shutil, sys\n"
        "assert sys.argv[1:4] == ['--retry-count', '1', 'sync'], sys.argv\n"
        f"source, target = (path.replace('s3://bucket', {str(bucket)!r}) for path in sys.argv[4:])\n"
        "for path in glob.glob(source) + glob.glob(os.path.join(os.path.dirname(source), '.e*')):\n"
        "    to = os.path.join(target, os.path.basename(path))\n"
        "    shutil.copytree(path, to, dirs_exist_ok=True) if os.path.isdir(path) else shutil.copy(path, to)\n"
    )
    tool.chmod(0o755)
    return f"{directory}{os.pathsep}{os.environ['PATH']}"


def test_sessions_are_saved_when_the_process_ends_and_restored_when_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, first, second = tmp_path / "bucket", tmp_path / "first", tmp_path / "second"
    bucket.mkdir()
    monkeypatch.setenv("PATH", copying_tool(tmp_path, bucket))
    create = "session = sessions.create_session(); session.put('k', 'kept'); print(session.session_id)"
    created = with_sessions_in_s3(first, create).strip()
    assert with_sessions_in_s3(second, f"print(sessions.get_session({created!r}).get('k'))") == "kept\n"
    unknown = f"try: sessions.get_session('{uuid.uuid4()}')\nexcept ValueError as error: print(error)"
    assert with_sessions_in_s3(second, unknown).startswith("session not found")
    assert os.listdir(second) == [created]


def with_sessions_in_s3(path: Path, code: str) -> str:
    """What code prints in a process of its own, which saves its sessions when it ends."""
    setup = "import sys; from djl_python import SessionManager\n"
    setup += "sessions = SessionManager({'sessions_path': sys.argv[1], 'sessions_s3url': 's3://bucket/'})\n"
    done = subprocess.run([sys.executable, "-c", setup + code, str(path)], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_sessions_in_s3_need_a_tool_that_copies_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="needs s5cmd or aws"):
        manager(tmp_path / "sessions", sessions_s3url="s3://bucket")


def test_a_session_can_be_made_without_a_manager(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    session = Session("mine", str(tmp_path), expiration_ts=1.0)
    session.put("k", b"v")
    assert (session.get("k"), session.expiration_ts) == (b"v", 1.0)
    assert session.remove() is True
