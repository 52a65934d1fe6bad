"""Data capture: a record of each call, in SageMaker's JSON lines.

Source: "Capture data from real-time endpoint" in the SageMaker developer guide.
"""

from __future__ import annotations

import base64
import json
import logging
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from deploy.local.invocation import ContainerRequest
from deploy.local.parameters import INFERENCE_ID, VARIANT, Headers, value_of

logger = logging.getLogger(__name__)

_TEXTS = {"text/csv": "CSV", "application/json": "JSON"}  # Other types are encoded as BASE64.
_MAX_PENDING = 256 << 20  # Bytes of records that wait to be written.


@dataclass(frozen=True, slots=True)
class _Record:
    """A call that succeeded."""

    event_id: str
    request: ContainerRequest
    reply_type: str
    reply: bytes
    at: datetime

    @property
    def size(self) -> int:
        return len(self.request.body) + len(self.reply)

    def line(self) -> bytes:
        given = self.request.headers
        metadata = {"eventId": self.event_id}
        if inference_id := value_of(given, INFERENCE_ID):
            metadata["inferenceId"] = inference_id
        metadata["inferenceTime"] = f"{self.at:%Y-%m-%dT%H:%M:%SZ}"
        record = {
            "captureData": {
                "endpointInput": _data("INPUT", value_of(given, b"content-type"), self.request.body),
                "endpointOutput": _data("OUTPUT", self.reply_type, self.reply),
            },
            "eventMetadata": metadata,
            "eventVersion": "0",
        }
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _data(mode: str, content_type: str, body: bytes) -> dict[str, str]:
    encoding = _TEXTS.get(content_type.partition(";")[0].strip().lower(), "BASE64")
    try:
        data = base64.b64encode(body).decode() if encoding == "BASE64" else body.decode()
    except UnicodeDecodeError:
        encoding, data = "BASE64", base64.b64encode(body).decode()
    return {"observedContentType": content_type, "mode": mode, "data": data, "encoding": encoding}


class DataCapture:
    """Writes the records from a thread. A call never waits for its record, nor fails with it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "data-capture")  # The interpreter waits for it when it ends.
        self._files: dict[str, Path] = {}  # The current file of each endpoint.
        self._pending, self._counting = 0, threading.Lock()

    def record(self, event_id: str, request: ContainerRequest, headers: Headers, reply: bytes) -> None:
        """Record a call.

        Args:
            event_id: The id of the call.
            request: The request that the container got.
            headers: The headers of its reply.
            reply: The body of its reply.
        """
        record = _Record(event_id, request, value_of(headers, b"content-type"), reply, datetime.now(UTC))
        with self._counting:
            if self._pending + record.size > _MAX_PENDING:
                logger.error("call %s is not captured: %d bytes wait to be written", event_id, self._pending)
                return
            self._pending += record.size
        writing = self._thread.submit(self._write, record)

        def written(future: Future[None]) -> None:
            with self._counting:
                self._pending -= record.size
            if (error := future.exception()) is not None:
                logger.error("call %s is not captured: %s", event_id, error)

        writing.add_done_callback(written)

    def _write(self, record: _Record) -> None:
        endpoint = record.request.endpoint
        folder = self._directory / endpoint / VARIANT / f"{record.at:%Y/%m/%d/%H}"
        file = self._files.get(endpoint)
        if file is None or file.parent != folder:
            folder.mkdir(parents=True, exist_ok=True)
            milliseconds = record.at.microsecond // 1000
            file = folder / f"{record.at:%M-%S}-{milliseconds:03d}-{uuid.uuid4()}.jsonl"
        self._files.pop(endpoint, None)  # After a failed write the next record goes to another file.
        with file.open("ab") as lines:
            lines.write(record.line())
        self._files[endpoint] = file
