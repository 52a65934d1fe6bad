"""Records inference requests and their replies as JSON lines, which `slipway replay` reads (`SERVING_CAPTURE`)."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from container.http.router import Application

logger = logging.getLogger(__name__)

Headers = Iterable[tuple[bytes, bytes]]

RECORDED = "slipway.recorded"  # This key of an ASGI scope tells whether a mounted application records the call.
LAST_SECONDS = 2.0  # The time limit for writing the last records when the server stops.
MAX_PENDING = 256 << 20  # The maximum size of all records that are being collected or wait to be written.
_REQUEST_ID = b"x-request-id"
_OF_SAGEMAKER = (
    *(b"accept", b"adapter-alias", b"adapter-identifier", b"closed-session-id", b"content-type", b"custom-attributes"),
    *(b"forwarded-api", b"inference-component", b"inference-id", b"new-session-id", b"session-id", b"target-model"),
    *(b"target-container-hostname", b"target-variant"),
)
# The headers that are recorded: headers that a contract reads or writes, and the ids of a call. Any other header may
# contain a credential, because gateways and identity providers use their own names.
_RECORDED = frozenset(
    (
        # The body and its format.
        *(b"content-type", b"content-encoding", b"inference-header-content-length", b"accept"),
        # SageMaker's headers. The custom attributes are recorded unchanged, like the body.
        *(b"x-amzn-sagemaker-" + name for name in _OF_SAGEMAKER),
        # Headers that choose the model, the handler's function, the priority of the call, and the engine's replica.
        *(b"model_name", b"model_version", b"handler", b"x-synchronous", b"x-priority", b"x-vllm-priority"),
        *(b"x-data-parallel-rank", b"x-session-id", b"endpoint-load-metrics-format"),
        *(b"anthropic-version", b"anthropic-beta"),
        # The ids of the call and of its trace, and the header that asks for an explanation.
        *(_REQUEST_ID, b"request-id", b"x-amzn-trace-id", b"traceparent", b"x-slipway-explain"),
        # Headers of replies.
        *(b"allow", b"retry-after", b"cache-control", b"x-accel-buffering", b"endpoint-load-metrics"),
        *(b"x-compute-type", b"x-compute-time", b"x-compute-characters", b"x-compute-tokens", b"x-total-time"),
        *(b"x-validation-time", b"x-tokenization-time", b"x-queue-time", b"x-inference-time", b"x-time-per-token"),
        *(b"x-prompt-tokens", b"x-generated-tokens", b"x-slipway-not-held"),
    )
)
_RECORDED_PARAMETERS = frozenset(("model_name", "model_version", "adapter"))  # They choose the weights.


def recorded_headers(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers that are recorded (`_RECORDED`)."""
    return [(name, value) for name, value in headers if name.lower() in _RECORDED]


def recorded_query(query: bytes) -> bytes:
    """Return the query parameters that are recorded, preceded by a question mark."""
    named = [(unquote_plus(part.partition(b"=")[0].decode("latin-1")), part) for part in query.split(b"&")]
    parameters = [part for name, part in named if name in _RECORDED_PARAMETERS]
    return b"?" + b"&".join(parameters) if parameters else b""


class RecordFiles:
    """The files with the records: one file for each hour and folder. A thread writes them, so no call waits for a file.

    Only the server's user can read the files, because they contain prompts.
    """

    def __init__(self, directory: Path, max_pending: int = MAX_PENDING) -> None:
        self._directory, self._max_pending = directory, max_pending
        self._thread = ThreadPoolExecutor(1, "capture")  # The interpreter waits for this thread when it exits.
        self._files: dict[str, Path] = {}  # The current file of each folder.
        self._pending, self._counting = 0, threading.Lock()
        self._unwritten = 0  # The number of records that wait for the thread.

    def take(self, size: int) -> bool:
        """Reserve memory for a part of a record. Return False if too many bytes are already reserved."""
        with self._counting:
            if self._pending + size > self._max_pending:
                return False
            self._pending += size
            return True

    def give_back(self, size: int) -> None:
        """Release memory."""
        with self._counting:
            self._pending -= size

    def write(self, name: str, folder: str, at: datetime, size: int, line: Callable[[], bytes]) -> None:
        """Write a record. The caller has reserved its memory. The memory is released once the record is written.

        Args:
            name: The call, for the log.
            folder: The folder below the directory.
            at: The time of the record.
            size: The reserved memory.
            line: Returns the record. The thread calls it.
        """

        def written(future: Future[None]) -> None:
            self.give_back(size)
            with self._counting:
                self._unwritten -= 1
            if not future.cancelled() and (error := future.exception()) is not None:
                logger.error("call %s is not captured: %s", name, error)

        try:
            writing = self._thread.submit(self._write, folder, at, line)
        except RuntimeError:  # `finish` has shut the thread down.
            self.give_back(size)
            logger.error("call %s is not captured: the server has stopped", name)
            return
        with self._counting:
            self._unwritten += 1
        writing.add_done_callback(written)

    async def finish(self, seconds: float) -> None:
        """Wait until all records are written. The number of lost records is logged.

        Args:
            seconds: The time limit. A limit below `LAST_SECONDS` is raised to `LAST_SECONDS`.
        """
        try:
            end = self._thread.submit(lambda: None)
        except RuntimeError:
            return  # An earlier call has shut the thread down.
        await asyncio.wait([asyncio.wrap_future(end)], timeout=max(seconds, LAST_SECONDS))
        if not end.done():
            logger.error("%d captured calls are lost: writing them takes too long", self._unwritten)
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, folder: str, at: datetime, line: Callable[[], bytes]) -> None:
        hour = self._directory / folder / f"{at:%Y/%m/%d/%H}"
        file = self._files.get(folder)
        if file is None or file.parent != hour:
            # With its option `parents`, `mkdir` would create upper folders that other users can read.
            for missing in reversed([path for path in (hour, *hour.parents) if not path.exists()]):
                missing.mkdir(mode=0o700, exist_ok=True)
            file = hour / f"{at:%M-%S}-{at.microsecond // 1000:03d}-{uuid.uuid4()}.jsonl"
        self._files.pop(folder, None)  # After a failed write, the next record goes to another file.
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as lines:
            lines.write(line())
        self._files[folder] = file


@dataclass(slots=True)
class _Record:
    """The record of a call that is being served."""

    scope: Any
    files: RecordFiles
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float = field(default_factory=time.perf_counter)
    request: list[bytes] = field(default_factory=list)
    reply: list[bytes] = field(default_factory=list)
    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    first_byte: float | None = None
    seconds: float = 0.0
    complete: bool = False
    size: int = 0  # The number of reserved bytes.
    too_large: bool = False
    finished: bool = False  # If True, later parts of the reply are not kept. They may come after the client has left.

    def keep(self, parts: list[bytes], data: bytes) -> None:
        if self.too_large or not data:
            return
        if self.files.take(len(data)):
            self.size += len(data)
            parts.append(data)
        else:
            self.too_large = True
            self.request.clear()
            self.reply.clear()

    def take(self, message: Any) -> None:
        """Keep a message of the reply."""
        if self.finished:
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message["headers"])
        elif message["type"] == "http.response.body":
            body = message.get("body", b"")
            if body and self.first_byte is None:
                self.first_byte = time.perf_counter() - self.began
            self.keep(self.reply, bytes(body))
            if not message.get("more_body", False):
                self.complete = True
                self.seconds = time.perf_counter() - self.began

    @property
    def request_id(self) -> str:
        found = next((value for name, value in self.headers if name == _REQUEST_ID), b"")
        return found.decode("latin-1") or str(uuid.uuid4())

    def line(self, request_id: str) -> bytes:
        scope = self.scope
        target: bytes = scope["raw_path"] + recorded_query(scope["query_string"])
        answer: dict[str, Any] = {
            "status": self.status,
            "headers": _as_object(self.headers),
            **_body(b"".join(self.reply)),
            "complete": self.complete,
            "seconds": round(self.seconds, 6),
        }
        if self.first_byte is not None:
            answer["first_byte_seconds"] = round(self.first_byte, 6)
        record = {
            "id": request_id,
            "time": f"{self.at:%Y-%m-%dT%H:%M:%S}.{self.at.microsecond // 1000:03d}Z",
            "method": scope["method"],
            "path": target.decode("latin-1"),
            "headers": _as_object(scope["headers"]),
            **_body(b"".join(self.request)),
            "answer": answer,
        }
        return msgspec.json.encode(record) + b"\n"


def _as_object(headers: Headers) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in recorded_headers(headers)}


def _body(body: bytes) -> dict[str, str]:
    """Return the field for a body. Text is stored as text, so that people can read the file."""
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}


class RequestCapture:
    """An ASGI application that records the requests of another application. Replies pass through without delay."""

    def __init__(
        self,
        application: Application,
        infers: Callable[[Any], bool],
        files: RecordFiles,
    ) -> None:
        """Wrap an application.

        Args:
            application: Serves the requests.
            infers: Returns True for the ASGI scope of a request that is recorded.
            files: Store the records.
        """
        self._application, self._infers, self._files = application, infers, files

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        # A mounted application calls the container's own routes through `scope["app"]`. These calls are recorded, too.
        scope["app"] = self
        if scope["type"] != "http" or scope.get(RECORDED) or not self._infers(scope):
            await self._application(scope, receive, send)
            return
        record = _Record(scope, self._files)

        async def receive_and_keep() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                record.keep(record.request, message.get("body", b""))
            return message

        async def send_and_keep(message: Any) -> None:
            record.take(message)
            await send(message)

        try:
            await self._application(scope, receive_and_keep, send_and_keep)
        finally:
            self._finish(record)

    def _finish(self, record: _Record) -> None:
        record.finished = True
        request_id = record.request_id
        if record.too_large or not record.status:
            self._files.give_back(record.size)
            if record.too_large:
                logger.error("call %s is not captured: too many bytes wait to be written", request_id)
            return
        if not record.complete:
            record.seconds = time.perf_counter() - record.began
        self._files.write(request_id, "", record.at, record.size, lambda: record.line(request_id))
