from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import boto3
import numpy as np
import pytest

from djl_python import Session, SessionManager
from djl_python.session_manager import SessionBackup
from tests.stand_ins.s3 import BUCKET, CREDENTIALS, gate_to, held, moto, put
from tests.waiting import wait_until


def manager(path: Path, **properties: Any) -> SessionManager:
    return SessionManager({"sessions_path": str(path)} | properties)


def test_a_session_keeps_values_between_requests_and_processes(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    session.put("a/b", {"x": [1, 2]})
    found = manager(tmp_path).get_session(session.session_id)
    assert found is not None
    assert found.get("a/b") == {"x": [1, 2]}
    assert (Path(session.files_path) / "a-b.value").is_file()
    assert found.get("none") is None
    assert found.get("none", 7) == 7
    assert found.expiration_ts == session.expiration_ts


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
    assert sorted(os.listdir(session.files_path)) == [".expiration_ts.value", "k.value"]


@pytest.mark.parametrize("session_id", [None, "", "NEW_SESSION"])
def test_no_session_id_is_no_session(tmp_path: Path, session_id: str | None) -> None:
    assert manager(tmp_path).get_session(session_id) is None


@pytest.mark.parametrize(
    "session_id", ["39235d2f-dcdc-4b25-a7b2-481cc3f87ed0", "..", "../" + "a" * 33, "a/../b", "A" * 36]
)
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


def test_only_the_owner_can_read_sessions(tmp_path: Path) -> None:
    session = manager(tmp_path / "sessions").create_session()
    for path in (tmp_path / "sessions", Path(session.files_path)):
        assert path.stat().st_mode & 0o077 == 0


@pytest.fixture(scope="module")
def s3_address() -> Iterator[str]:
    with moto() as address:
        put(address, {})
        yield address


@pytest.fixture
def s3(s3_address: str, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """Set the environment's variables for S3 and return a bucket with a new prefix."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_address)
    return Bucket(f"sessions-{uuid.uuid4()}")


class Bucket:
    def __init__(self, prefix: str) -> None:
        self.url = f"s3://{BUCKET}/{prefix}"
        self._objects = boto3.resource("s3").Bucket(BUCKET).objects.filter(Prefix=f"{prefix}/")

    def read(self, session_id: str, file: str) -> bytes | None:
        found = (item for item in self._objects.all() if item.key.endswith(f"/{session_id}/{file}"))
        return next((item.get()["Body"].read() for item in found), None)

    def value(self, session_id: str, key: str) -> Any:
        pickled = self.read(session_id, f"{key}.value")
        return None if pickled is None else pickle.loads(pickled)

    def sessions(self) -> set[str]:
        return {item.key.split("/")[-2] for item in self._objects.all()}


def test_sessions_are_saved_when_the_process_ends_and_restored_until_they_are_closed(
    tmp_path: Path, s3: Bucket
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    created = with_sessions_in_s3(s3, first, CREATE).strip()
    assert s3.sessions() == {created}
    assert with_sessions_in_s3(s3, second, f"print(sessions.get_session({created!r}).get('k'))") == "kept\n"
    assert os.listdir(second) == [created]
    close = f"sessions.close_session({created!r})\ntry: sessions.get_session({created!r})\n"
    close += "except ValueError as error: print(error)"
    assert with_sessions_in_s3(s3, tmp_path / "third", close).startswith("session not found")
    assert s3.sessions() == set()


CREATE = "session = sessions.create_session(); session.put('k', 'kept'); print(session.session_id)"


def with_sessions_in_s3(s3: Bucket, path: Path, code: str) -> str:
    """Run code in a new process, and return its output. The process saves its sessions when it ends."""
    setup = "import sys; from djl_python import SessionManager\n"
    setup += f"sessions = SessionManager({{'sessions_path': sys.argv[1], 'sessions_s3url': {s3.url!r}}})\n"
    done = subprocess.run([sys.executable, "-c", setup + code, str(path)], timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@contextmanager
def saving(s3: Bucket, path: Path) -> Iterator[SessionBackup]:
    """Create a backup that checks for changes often."""
    backup = SessionBackup(s3.url, str(path), interval_s=0.02)
    yield backup
    backup.close()


def test_what_changes_is_saved_while_the_process_goes_on(tmp_path: Path, s3: Bucket) -> None:
    session = manager(tmp_path / "sessions").create_session()
    with saving(s3, tmp_path / "sessions") as backup:
        backup.watch(session.session_id)
        session.put("k", 1)
        wait_until(lambda: s3.value(session.session_id, "k") == 1)
        session.put("k", 2)
        wait_until(lambda: s3.value(session.session_id, "k") == 2)
        array = session.get_as_numpy("a", (2,), create=True)
        wait_until(lambda: s3.read(session.session_id, "a.array"))
        array[:] = 7
        array.flush()
        wait_until(lambda: s3.read(session.session_id, "a.array") == array.tobytes())


def test_a_session_that_is_removed_is_no_longer_saved(tmp_path: Path, s3: Bucket) -> None:
    sessions = manager(tmp_path / "sessions")
    gone, other = sessions.create_session(), sessions.create_session()
    gone.remove()
    with saving(s3, tmp_path / "sessions") as backup:
        backup.watch(gone.session_id)
        backup.watch(other.session_id)
    assert s3.sessions() == {other.session_id}


def test_a_session_that_is_being_restored_is_seen_complete_or_not_at_all(
    tmp_path: Path, s3: Bucket, s3_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = with_sessions_in_s3(s3, tmp_path / "first", CREATE).strip()
    second = tmp_path / "second"
    with gate_to(s3_address) as gate, ThreadPoolExecutor(3) as pool:
        gate.fault = held(may_come := threading.Event())
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", gate.url)
        workers = [manager(second, sessions_s3url=s3.url) for _ in range(3)]

        def kept(worker: SessionManager) -> Any:
            found = worker.get_session(created)
            return found and found.get("k")

        values = [pool.submit(kept, worker) for worker in workers]
        wait_until(lambda: any(name.startswith(".new-") for name in os.listdir(second)))
        # Creating a session removes expired sessions, and sessions without an expiration.
        new = manager(second).create_session()
        assert not (second / created).exists()
        may_come.set()
        assert [value.result() for value in values] == ["kept"] * 3
        for worker in workers:
            worker.close()
    assert sorted(os.listdir(second)) == sorted([created, new.session_id])


def test_what_a_killed_worker_has_not_finished_is_removed_later_and_what_is_no_session_stays(tmp_path: Path) -> None:
    for name, age_s in ((".new-old", 7200), (".new-young", 60), ("notes", 7200)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, times=(time.time() - age_s,) * 2)
    session = manager(tmp_path).create_session()
    assert sorted(os.listdir(tmp_path)) == sorted([".new-young", "notes", session.session_id])


@pytest.mark.parametrize("broken", [b"", b"\x80", b"cno.such\nthing\n.", pickle.dumps("soon")])
def test_a_session_whose_end_cannot_be_read_has_ended(
    tmp_path: Path, broken: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = manager(tmp_path)
    session = sessions.create_session()
    (Path(session.files_path) / ".expiration_ts.value").write_bytes(broken)
    assert sessions.get_session(session.session_id) is None
    assert f"The session {session.session_id} counts as expired: cannot read its end" in caplog.text
    other = sessions.create_session()
    assert os.listdir(tmp_path) == [other.session_id]


def test_the_bytes_of_an_array_are_never_unpickled(tmp_path: Path) -> None:
    session = manager(tmp_path).create_session()
    for key in ("k", "k.value"):
        array = session.get_as_numpy(key, 64, dtype="uint8", create=True)
        harmful = b"cos\nabort\n(tR."  # This would end the process of the tests.
        array[: len(harmful)] = np.frombuffer(harmful, "uint8")
        array.flush()
        assert session.get(key) is None
    session.put("k", "value")
    assert session.get("k") == "value"
    assert bytes(session.get_as_numpy("k", 64, dtype="uint8"))[:3] == b"cos"


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    for mode in (0o777, 0o770):
        tmp_path.chmod(mode)
        with pytest.raises(ValueError, match=f"writable for no other user.*mode {mode:o}"):
            manager(tmp_path)
    tmp_path.chmod(0o755)
    assert manager(tmp_path).create_session().session_id
    if os.geteuid() == 0:  # only root can give a directory away
        os.chown(tmp_path, 12345, -1)
        with pytest.raises(ValueError, match="belongs to 12345"):
            manager(tmp_path)


def test_a_failure_to_copy_is_logged_and_tried_again(
    tmp_path: Path, s3: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    session = manager(tmp_path / "sessions").create_session()
    with (
        patch.object(SessionBackup, "save", autospec=True, side_effect=OSError("no network")) as save,
        saving(s3, tmp_path / "sessions") as backup,
    ):
        backup.watch(session.session_id)
        wait_until(lambda: f"Session {session.session_id} cannot be saved to S3: no network" in caplog.text)
        save.side_effect = None
        tries = save.call_count
        wait_until(lambda: save.call_count > tries)


def test_a_session_that_cannot_be_read_from_s3_is_not_there(
    tmp_path: Path, s3: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    sessions = manager(tmp_path, sessions_s3url="s3://there-is-no-such-bucket/x")
    unknown = str(uuid.uuid4())
    with pytest.raises(ValueError, match="session not found"):
        sessions.get_session(unknown)
    assert f"Session {unknown} cannot be restored from S3" in caplog.text
    sessions.close()


@pytest.mark.parametrize("url", ["s3://", "bucket/x"])
def test_the_place_in_s3_must_be_an_url(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="sessions_s3url must be s3://"):
        manager(tmp_path / "sessions", sessions_s3url=url)


def test_a_session_can_be_made_without_a_manager(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    session = Session("mine", str(tmp_path), expiration_ts=1.0)
    session.put("k", b"v")
    assert (session.get("k"), session.expiration_ts) == (b"v", 1.0)
    assert session.remove() is True
