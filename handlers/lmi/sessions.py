"""LMI's stateful sessions for the built-in handlers. Threads create, check and close sessions.

The built-in handlers store no data in a session. A session makes SageMaker send all requests of a client to one
instance. This instance then has their common prefix in its KV cache. Sources: djl_python, `session_manager.py`; Amazon
SageMaker, "Stateful sessions with Amazon SageMaker AI models".
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
from engines.errors import SHOWN, Overloaded
from engines.interface import EngineStartError
from handlers.contract import JSON, LONG_BODY, Call, ContractError, Reply
from handlers.djl_errors import failed_dependency, overloaded
from handlers.lmi.errors import payload_refused
from handlers.model_config import ModelConfig
from handlers.parsing.json_limits import JsonDecoder

logger = logging.getLogger(__name__)

T = TypeVar("T")

SESSION_ID = "X-Amzn-SageMaker-Session-Id"
NEW_SESSION_ID = "X-Amzn-SageMaker-New-Session-Id"
CLOSED_SESSION_ID = "X-Amzn-SageMaker-Closed-Session-Id"
NEW_SESSION = "NEW_SESSION"  # The id that SageMaker's client sends before it has a session.
CLOSE = "CLOSE"
# The maximum number of open sessions. Each is a directory with a small file, and takes 4 KiB of disk or shared memory.
# Creating a session lists all sessions, which takes a thread less than 0.1 s for this many.
MOST_SESSIONS = 2_000
_THREADS = 4
_MOST_WAITING = 256  # The maximum number of calls that may wait for their sessions.
_SECONDS = 30.0  # The time limit for an operation on a session.
_LAST_SAVE_SECONDS = 5.0  # The time limit for saving sessions to S3 when the model stops.
_ID = re.compile(r"[A-Za-z0-9-]{1,256}")
_OFF = "stateful sessions are not enabled (option.enable_stateful_sessions)"

_in_default_directory: list[Sessions] = []

_decode_fields = JsonDecoder(dict[str, msgspec.Raw]).decode


class Sessions:
    """The sessions of one model. Without a manager, sessions are off, and calls that need a session are refused."""

    def __init__(self, manager: SessionManager | None, overload_status: int, most: int = MOST_SESSIONS) -> None:
        self._manager, self._overload_status, self._most = manager, overload_status, most
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="sessions")
        self._open = 0
        self._stopped = False
        self._created: set[str] = set()

    async def check(self, call: Call) -> None:
        """Check that the session of a call exists. A call without a session passes.

        Raises:
            ContractError: The session does not exist or has expired, or sessions are off. The reply is a 424.
        """
        if not (session_id := session_of(call)):
            return
        manager = self._enabled_manager(f"{SESSION_ID} names a session, but ")
        await self._run(lambda: _check(manager, session_id))

    async def answer(self, call: Call) -> Reply:
        """Return the reply to a body with a `requestType`.

        Raises:
            ContractError: The body is invalid, the session to close does not exist or has expired, or sessions are off.
                The reply is a 424. If too many sessions are open, the reply has the status for overload.
        """
        action = action_of(call.body)
        manager = self._enabled_manager("`requestType` asks for a session, but ")
        if action != CLOSE:
            session = await self._run(lambda: self._create(manager))
            assert session.expiration_ts is not None
            # SageMaker reads the id in `NEW_SESSION_ID`. Clients that call LMI directly read it in `SESSION_ID`.
            ends = datetime.fromtimestamp(session.expiration_ts, UTC)
            value = f"{session.session_id}; Expires={ends:%Y-%m-%dT%H:%M:%SZ}"
            return _reply(session.session_id, "created", ((NEW_SESSION_ID, value), (SESSION_ID, value)))
        if not (session_id := session_of(call)):
            raise failed_dependency(f"CLOSE needs the session's id in the header {SESSION_ID}")
        await self._run(lambda: _close(manager, session_id))
        return _reply(session_id, "closed", ((CLOSED_SESSION_ID, session_id),))

    async def stop(self) -> None:
        """Stop the threads, and wait a few seconds until the sessions are saved to S3."""
        self._stopped = True
        self._threads.shutdown(wait=False)
        if self._manager is None:
            return
        try:
            await asyncio.wait_for(in_daemon_thread(self._manager.close), _LAST_SAVE_SECONDS)
        except TimeoutError:
            logger.warning("sessions are still being saved to %s", self._manager.sessions_s3url)

    def _enabled_manager(self, reason: str) -> SessionManager:
        if self._manager is None:
            raise failed_dependency(reason + _OFF)
        return self._manager

    def _create(self, manager: SessionManager) -> Session:
        manager.make_directory()
        if len(os.listdir(manager.sessions_path)) >= self._most:
            manager.remove_expired()
            if len(os.listdir(manager.sessions_path)) >= self._most:
                raise self._full(f"{self._most} sessions are open; close one, or try again later")
        if len(self._created) >= self._most:
            self._created.intersection_update(
                os.listdir(manager.sessions_path)
            )  # Forgets sessions that were closed or have expired.
        session = manager.create_session()
        self._created.add(session.session_id)
        return session

    def remove_created(self) -> None:
        """Remove the sessions that this object created, and then the directory if it is empty."""
        if self._manager is None:
            return
        path = self._manager.sessions_path
        for session_id in self._created:
            shutil.rmtree(os.path.join(path, session_id), ignore_errors=True)
        with contextlib.suppress(OSError):  # Another server may have sessions in the directory.
            os.rmdir(path)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._stopped:  # The model is being reloaded, and calls still arrive.
            raise self._full("the model is not ready; try again later")
        if self._open >= _MOST_WAITING:
            raise self._full(f"{self._open} calls wait for their sessions; try again later")
        self._open += 1
        try:
            async with asyncio.timeout(_SECONDS):  # After an error, `wait_for` of Python 3.11 leaves a reference cycle.
                return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except TimeoutError:
            raise failed_dependency(f"the session was not found within {_SECONDS:g} s; try again later") from None
        except (OSError, ValueError):  # ValueError means that the directory now belongs to another user.
            logger.exception("a session cannot be read or written")
            raise failed_dependency("the session cannot be read or written; the server's log says why") from None
        finally:
            self._open -= 1

    def _full(self, message: str) -> ContractError:
        return ContractError(overloaded(Overloaded(message, self._overload_status)), message)


async def load_sessions(config: ModelConfig, overload_status: int) -> Sessions:
    """Return the sessions of a model with these settings.

    Sessions are off if they cannot be stored in the default directory.

    Raises:
        EngineStartError: Sessions cannot be stored in the location that the settings name.
    """
    if not config.lmi.enable_stateful_sessions:
        return Sessions(None, overload_status)
    properties = {
        "sessions_expiration": config.lmi.sessions_expiration,
        "sessions_path": config.lmi.sessions_path,
        "sessions_s3url": config.lmi.sessions_s3url,
    }
    try:
        manager = await asyncio.to_thread(SessionManager, properties)
    except (ValueError, OSError) as error:
        if config.lmi.sessions_path or config.lmi.sessions_s3url:
            raise EngineStartError(f"sessions cannot be kept: {error}") from None
        logger.warning("stateful sessions are off: %s", error)
        return Sessions(None, overload_status)
    sessions = Sessions(manager, overload_status)
    if not config.lmi.sessions_path:
        _in_default_directory.append(sessions)
    return sessions


def remove_sessions() -> None:
    """Remove the sessions that this process created in the default directory.

    Call it when the process ends, not when a model stops: the model may be restarted, and its clients then continue
    their sessions.
    """
    while _in_default_directory:
        _in_default_directory.pop().remove_created()


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
    """Return the id of the session that the call's header names.

    The id is empty if the header is absent or asks for a new session.

    Raises:
        ContractError: The header is not an id. The reply is a 424.
    """
    given = (call.header(SESSION_ID) or "").strip()
    if given in ("", NEW_SESSION):
        return ""
    if not _ID.fullmatch(given):
        raise failed_dependency(f"{SESSION_ID} is {_shown(given)}; expected 1 to 256 letters, digits and hyphens")
    return given


def action_of(body: bytes) -> str:
    """Return the action of a body with a `requestType`: NEW_SESSION or CLOSE.

    Raises:
        ContractError: The action is unknown, or the body has other fields. The reply is a 424.
    """
    if len(body) >= LONG_BODY:
        raise payload_refused("`requestType` goes without other fields")
    try:
        fields = _decode_fields(body)
    except msgspec.DecodeError:
        raise payload_refused("a field of the body cannot be read") from None
    further = sorted(fields.keys() - {"requestType"})
    if further:
        raise payload_refused(f"`requestType` goes without other fields, got {_shown(further[0])} beside it")
    asked = bytes(fields["requestType"]).decode("utf-8", "replace")
    if asked not in (f'"{NEW_SESSION}"', f'"{CLOSE}"'):
        raise payload_refused(f"`requestType` must be {NEW_SESSION} or {CLOSE}, got {_shown(asked)}")
    return asked.strip('"')


def _reply(session_id: str, action: str, headers: tuple[tuple[str, str], ...]) -> Reply:
    return Reply(200, JSON, f'{{"result": "Session {session_id} {action}"}}\n'.encode(), headers)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "...")
