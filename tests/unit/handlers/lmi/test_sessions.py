"""Sessions of the built-in handlers, on real files."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from djl_python.session_manager import Session, SessionBackup, SessionManager
from engines.interface import EngineStartError
from handlers.contract import Call, ContractError, Reply
from handlers.entry_point import load_service
from handlers.lmi.sessions import (
    CLOSED_SESSION_ID,
    NEW_SESSION_ID,
    SESSION_ID,
    Sessions,
    load_sessions,
    remove_sessions,
)
from handlers.loaded_service import Limits
from handlers.model_config import ModelConfig
from tests.contracts.exchange import call
from tests.settings import configured
from tests.stand_ins.request_headers import request_headers
from tests.waiting import until

NEW, CLOSE = {"requestType": "NEW_SESSION"}, {"requestType": "CLOSE"}


def given(document: Any, session: str = "") -> Call:
    return replace(call(document), headers=request_headers((SESSION_ID, session)))


def kept_in(path: Path, most: int = 10) -> Sessions:
    return Sessions(SessionManager({"sessions_path": str(path / "s")}), 503, most)


def end(path: Path) -> None:
    """Make all sessions expire."""
    for name in os.listdir(path / "s"):
        Session(name, str(path / "s")).put(".expiration_ts", 0.0)


async def begun(sessions: Sessions) -> str:
    reply = await sessions.answer(given(NEW))
    return dict(reply.headers)[NEW_SESSION_ID].partition(";")[0]


async def refusal(awaitable: Any) -> Reply:
    with pytest.raises(ContractError) as caught:
        await awaitable
    return caught.value.reply


async def test_a_session_is_known_from_its_creation_to_its_end(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path)
    name = await begun(sessions)
    await sessions.check(given({"inputs": "x"}, name))
    closed = await sessions.answer(given(CLOSE, name))
    assert dict(closed.headers) == {CLOSED_SESSION_ID: name}
    for gone in (sessions.check(given({}, name)), sessions.answer(given(CLOSE, name))):
        reply = await refusal(gone)
        assert (reply.status, json.loads(reply.body)["error"]) == (424, f"session not found: {name}")


async def test_a_new_session_takes_no_notice_of_the_header(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path)
    for value in ("NEW_SESSION", "not/an/id", "unknown"):
        assert (await sessions.answer(given(NEW, value))).status == 200


@pytest.mark.parametrize("value", ["unknown", "../..", "a" * 257, "3f1c8f0e-0b0e-4f6f-9d43-0d6d3e1f2a5b"])
async def test_an_id_that_was_never_given_out_is_424(tmp_path: Path, value: str) -> None:
    sessions = kept_in(tmp_path)
    assert (await refusal(sessions.check(given({}, value)))).status == 424
    assert (await refusal(sessions.answer(given(CLOSE, value)))).status == 424


async def test_closing_needs_an_id(tmp_path: Path) -> None:
    reply = await refusal(kept_in(tmp_path).answer(given(CLOSE)))
    assert json.loads(reply.body) == {
        "error": "CLOSE needs the session's id in the header X-Amzn-SageMaker-Session-Id",
        "code": 424,
    }


async def test_an_expired_session_is_424_and_says_so(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path)
    name = await begun(sessions)
    end(tmp_path)
    for over in (sessions.check(given({}, name)), sessions.answer(given(CLOSE, name))):
        reply = await refusal(over)
        assert (reply.status, json.loads(reply.body)["error"]) == (424, f"session has expired: {name}")


async def test_there_is_an_end_to_how_many_sessions_there_are_and_expired_ones_make_room(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path, most=2)
    for _ in range(2):
        await begun(sessions)
    full = await refusal(sessions.answer(given(NEW)))
    assert (full.status, json.loads(full.body)["type"]) == (503, "WlmCapacityException")
    end(tmp_path)
    await begun(sessions)
    assert len(os.listdir(tmp_path / "s")) == 1


async def test_256_calls_may_wait_for_their_sessions_and_failed_calls_make_room(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path)
    for _ in range(2):
        replies = await asyncio.gather(*[refusal(sessions.check(given({}, "unknown"))) for _ in range(257)])
        assert [reply.status for reply in replies] == [424] * 256 + [503]


async def test_where_they_are_off_headers_and_request_types_are_424_and_other_calls_pass() -> None:
    sessions = Sessions(None, 503)
    await sessions.check(given({"inputs": "x"}, "NEW_SESSION"))
    await sessions.check(call({"inputs": "x"}))
    for off in (sessions.check(given({}, "abc")), sessions.answer(given(NEW))):
        reply = await refusal(off)
        assert reply.status == 424
        assert "stateful sessions are not enabled" in json.loads(reply.body)["error"]


@pytest.mark.parametrize("spoil", [lambda path: path.chmod(0o777), lambda path: path.rmdir() or path.write_text("")])
async def test_a_directory_that_cannot_be_used_is_424_without_its_path(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    sessions = kept_in(tmp_path)
    spoil(tmp_path / "s")
    reply = await refusal(sessions.answer(given(NEW)))
    assert reply.status == 424
    assert str(tmp_path) not in reply.body.decode()


def settings(**options: Any) -> ModelConfig:
    return configured(ModelConfig(name="m", model_dir=Path("."), model_id="m"), **options)


async def test_a_directory_that_others_can_write_to_stops_the_start_where_it_was_asked_for(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(EngineStartError):
        await load_sessions(settings(sessions_path=str(open_to_all)), 503)


async def test_without_a_word_about_sessions_a_directory_that_cannot_be_used_only_switches_them_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("djl_python.session_manager._default_path", lambda: str(tmp_path / "file" / "sessions"))
    with caplog.at_level(logging.WARNING):
        sessions = await load_sessions(settings(), 503)
    assert "stateful sessions are off" in caplog.text
    assert (await refusal(sessions.answer(given(NEW)))).status == 424


@pytest.fixture
def save(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the function that copies a file to S3."""
    made = Mock()
    monkeypatch.setattr(SessionBackup, "save", made)
    return made


async def test_nothing_is_left_of_them_when_the_model_goes(tmp_path: Path, save: Mock) -> None:
    others = set(threading.enumerate())
    sessions = await load_sessions(settings(sessions_path=str(tmp_path / "s"), sessions_s3url="s3://bucket/x"), 503)
    name = await begun(sessions)
    own = [thread for thread in {*threading.enumerate()} - others if thread.name.startswith("session")]
    assert len(own) >= 2
    await sessions.stop()
    await until(lambda: not any(thread.is_alive() for thread in own))
    assert Path(save.call_args.args[0]).parent.name == name  # The saved session is the new one.


async def test_calls_that_come_while_the_model_is_loaded_anew_are_told_to_try_again(tmp_path: Path) -> None:
    sessions = kept_in(tmp_path)
    session = await begun(sessions)
    await sessions.stop()
    for refused in (
        sessions.answer(given(NEW)),
        sessions.answer(given(CLOSE, session)),
        sessions.check(given({}, session)),
    ):
        reply = await refusal(refused)
        assert (reply.status, json.loads(reply.body)["code"]) == (503, 503)


async def test_a_model_that_cannot_be_loaded_leaves_no_threads_of_its_sessions(tmp_path: Path, save: Mock) -> None:
    given = settings(
        sessions_path=str(tmp_path / "s"), sessions_s3url="s3://bucket/x", enable_lora=True, rolling_batch="disable"
    )
    others = set(threading.enumerate())
    with pytest.raises(EngineStartError, match=r"option\.enable_lora"):
        await load_service(given, Limits(queue_size=1, overload_status=503, unavailable_status=503))
    assert not [thread for thread in {*threading.enumerate()} - others if thread.name == "session-saver"]


async def test_a_server_leaves_none_of_its_sessions_in_the_default_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "djl_sessions"
    monkeypatch.setattr("djl_python.session_manager._default_path", lambda: str(directory))
    config = ModelConfig(name="m", model_dir=tmp_path, model_id="m")
    mine = await load_sessions(config, 503)
    another = Sessions(SessionManager({}), 503)
    for _ in range(3):
        await begun(mine)
    theirs = await begun(another)
    await mine.stop()
    assert len(os.listdir(directory)) == 4, "the engine may be started again, and its clients continue"
    remove_sessions()
    assert os.listdir(directory) == [theirs]
    another.remove_created()
    assert not directory.exists()
    await begun(another)


async def test_sessions_in_a_place_that_was_asked_for_stay(tmp_path: Path) -> None:
    config = configured(ModelConfig(name="m", model_dir=tmp_path, model_id="m"), sessions_path=str(tmp_path / "s"))
    name = await begun(await load_sessions(config, 503))
    remove_sessions()
    assert os.listdir(tmp_path / "s") == [name]
