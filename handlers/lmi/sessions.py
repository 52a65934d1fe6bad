"""LMI's stateful sessions for the built-in handlers: created, checked and closed in threads.

The built-in handlers store nothing in a session. It makes SageMaker send a client's requests to the same instance,
which has its prefix in the KV cache. Source: djl_python, `session_manager.py`; Amazon SageMaker, "Stateful sessions
with Amazon SageMaker AI models".
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from djl_python.session_manager import Session, SessionManager
from engines.daemon_thread import in_daemon_thread
from engines.errors import Overloaded
from engines.interface import EngineStartError
from engines.model_settings import ModelSettings
from handlers.contract import LONG_BODY, Call, ContractError, Reply
from handlers.djl_errors import JSON, failed_dependency, overloaded
from handlers.json_cost import JsonDecoder
from handlers.lmi.errors import payload_refused

logger = logging.getLogger(__name__)

T = TypeVar("T")

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "NEW_SESSION"  # The id that SageMaker's client sends before it has a session.
CLOSE = "CLOSE"
# Each is a directory with a small file, 4 KiB of disk or shared memory. A new session looks at all of them, which takes
# less than 0.1 s of a thread with this many.
MOST_SESSIONS = 2_000
_THREADS = 4
_MOST_WAITING = 256  # Calls whose sessions are looked up at a time.
_SECONDS = 30.0
_LAST_SAVE_SECONDS = 5.0
_ID = re.compile(r"[A-Za-z0-9-]{1,256}")
_LONGEST_SHOWN = 64
_OFF = "stateful sessions are not enabled (option.enable_stateful_sessions)"

_in_default_place: list[Sessions] = []

_decode_fields = JsonDecoder(dict[str, msgspec.Raw]).decode


class Sessions:
    """The sessions of one model. Without a manager sessions are off, and calls that need one are refused."""

    def __init__(self, manager: SessionManager | None, overload_status: int, most: int = MOST_SESSIONS) -> None:
        self._manager, self._overload_status, self._most = manager, overload_status, most
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sessions")
        self._open = 0
        self._made: set[str] = set()

    async def check(self, call: Call) -> None:
        """Check that the session that a call names exists; a call that names none passes.

        Raises:
            ContractError: 424; there is no such session, it has expired, or sessions are off.
        """
        if not (session_id := session_of(call)):
            return
        manager = self._on(f"{SESSION_ID} names a session, but ")
        await self._run(lambda: _check(manager, session_id))

    async def answer(self, call: Call) -> Reply:
        """Return the reply to a body with a `requestType`.

        Raises:
            ContractError: 424, as for `check` or because the body is wrong; or the status of overload if there are too
                many sessions.
        """
        action = action_of(call.body)
        manager = self._on("`requestType` asks for a session, but ")
        if action != CLOSE:
            session = await self._run(lambda: self._create(manager))
            assert session.expiration_ts is not None
            return created(session.session_id, session.expiration_ts)
        if not (session_id := session_of(call)):
            raise failed_dependency(f"CLOSE needs the session's id in the header {SESSION_ID}")
        await self._run(lambda: _close(manager, session_id))
        return closed(session_id)

    async def stop(self) -> None:
        """End the threads, and wait a few seconds for sessions to be saved to S3."""
        self._threads.shutdown(wait=False)
        if self._manager is None:
            return
        try:
            await asyncio.wait_for(in_daemon_thread(self._manager.close), _LAST_SAVE_SECONDS)
        except TimeoutError:
            logger.warning("sessions are still being saved to %s", self._manager.sessions_s3url)

    def _on(self, what: str) -> SessionManager:
        if self._manager is None:
            raise failed_dependency(what + _OFF)
        return self._manager

    def _create(self, manager: SessionManager) -> Session:
        manager.make_directory()
        if len(os.listdir(manager.sessions_path)) >= self._most:
            manager.remove_expired()
            if len(os.listdir(manager.sessions_path)) >= self._most:
                raise self._full(f"{self._most} sessions are open; close one, or try again later")
        if len(self._made) >= self._most:
            self._made.intersection_update(os.listdir(manager.sessions_path))  # others were closed, or have expired
        session = manager.create_session()
        self._made.add(session.session_id)
        return session

    def remove_made(self) -> None:
        """Remove the sessions that were created here, and their directory if no others are in it."""
        if self._manager is None:
            return
        path = self._manager.sessions_path
        for session_id in self._made:
            shutil.rmtree(os.path.join(path, session_id), ignore_errors=True)
        with contextlib.suppress(OSError):  # another server has sessions there
            os.rmdir(path)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._open >= _MOST_WAITING:
            raise self._full(f"{self._open} calls wait for their sessions; try again later")
        self._open += 1
        try:
            looked_up = asyncio.get_running_loop().run_in_executor(self._threads, work)
            return await asyncio.wait_for(looked_up, _SECONDS)
        except TimeoutError:
            raise failed_dependency(f"the session was not found within {_SECONDS:g} s; try again later") from None
        except (OSError, ValueError):  # ValueError: the directory belongs to another user by now
            logger.exception("a session cannot be read or written")
            raise failed_dependency("the session cannot be read or written; the server's log says why") from None
        finally:
            self._open -= 1

    def _full(self, message: str) -> ContractError:
        return ContractError(overloaded(Overloaded(message, self._overload_status)), message)


async def load_sessions(settings: ModelSettings, overload_status: int) -> Sessions:
    """Return the sessions of a model with these settings.

    They are off if they cannot be kept in the default place. Raises EngineStartError: they cannot be kept in the place
    that the settings name.
    """
    if not settings.enable_stateful_sessions:
        return Sessions(None, overload_status)
    properties = {
        "sessions_expiration": settings.sessions_expiration,
        "sessions_path": settings.sessions_path,
        "sessions_s3url": settings.sessions_s3url,
    }
    try:
        manager = await asyncio.to_thread(SessionManager, properties)
    except (ValueError, OSError) as error:
        if settings.sessions_path or settings.sessions_s3url:
            raise EngineStartError(f"sessions cannot be kept: {error}") from None
        logger.warning("stateful sessions are off: %s", error)
        return Sessions(None, overload_status)
    sessions = Sessions(manager, overload_status)
    if not settings.sessions_path:
        _in_default_place.append(sessions)
    return sessions


def remove_sessions() -> None:
    """Remove the sessions that this process has made in the default directory.

    Call it when the process ends. When a model ends it may be started again, and its clients continue their sessions.
    """
    while _in_default_place:
        _in_default_place.pop().remove_made()


def _check(manager: SessionManager, session_id: str) -> None:
    try:
        session = manager.get_session(session_id)
    except ValueError as error:
        raise failed_dependency(str(error)) from None
    if session is None:
        raise failed_dependency(f"session has expired: {session_id}")


def _close(manager: SessionManager, session_id: str) -> None:
    _check(manager, session_id)
    try:
        manager.close_session(session_id)
    except ValueError as error:
        raise failed_dependency(str(error)) from None


def session_of(call: Call) -> str:
    """Return the session that the call's header names; empty if it names none or asks for a new one.

    Raises:
        ContractError: 424; the header is not an id.
    """
    given = dict(call.headers).get(SESSION_ID, "").strip()
    if given in ("", NEW_SESSION):
        return ""
    if not _ID.fullmatch(given):
        raise failed_dependency(f"{SESSION_ID} is {_shown(given)}; expected 1 to 256 letters, digits and hyphens")
    return given


def action_of(body: bytes) -> str:
    """Return the action that a body with a `requestType` asks for.

    Raises:
        ContractError: 424; it is another, or the body has further fields.
    """
    if len(body) >= LONG_BODY:
        raise payload_refused("`requestType` goes without other fields")
    try:
        fields = _decode_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise payload_refused("a field of the body cannot be read") from None
    further = sorted(fields.keys() - {"requestType"})
    if further:
        raise payload_refused(f"`requestType` goes without other fields, got {_shown(further[0])} beside it")
    asked = bytes(fields["requestType"]).decode("utf-8", "replace")
    if asked not in (f'"{NEW_SESSION}"', f'"{CLOSE}"'):
        raise payload_refused(f"`requestType` must be {NEW_SESSION} or {CLOSE}, got {_shown(asked)}")
    return asked.strip('"')


def created(session_id: str, expires: float) -> Reply:
    """Return the reply to NEW_SESSION.

    Args:
        expires: In seconds since the epoch. SageMaker reads the first of the headers; clients that ask LMI directly
            read the second.
    """
    value = f"{session_id}; Expires={datetime.fromtimestamp(expires, UTC):%Y-%m-%dT%H:%M:%SZ}"
    return _done(session_id, "created", ((NEW_SESSION_ID, value), (SESSION_ID, value)))


def closed(session_id: str) -> Reply:
    """Return the reply to CLOSE."""
    return _done(session_id, "closed", ((CLOSED_SESSION_ID, session_id),))


def _done(session_id: str, what: str, headers: tuple[tuple[str, str], ...]) -> Reply:
    return Reply(200, JSON, f'{{"result": "Session {session_id} {what}"}}\n'.encode(), headers)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else text[:_LONGEST_SHOWN] + "...")
