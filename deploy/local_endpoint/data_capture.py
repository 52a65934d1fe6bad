"""Data capture: a record of each call, in SageMaker's JSON lines.

Source: "Capture data from real-time endpoint" in the SageMaker developer guide.
"""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from container.http.custom_attributes import CUSTOM_ATTRIBUTES
from container.observability.traffic_capture import RecordFiles
from deploy.local_endpoint.invocation import ContainerRequest
from deploy.local_endpoint.parameters import INFERENCE_ID, VARIANT, Headers, value_of

logger = logging.getLogger(__name__)

_TEXTS = {"text/csv": "CSV", "application/json": "JSON"}  # Other types are encoded as BASE64.
_DEFAULT_PATH = "/invocations"


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
        metadata: dict[str, Any] = {"eventId": self.event_id}
        if inference_id := value_of(given, INFERENCE_ID):
            metadata["inferenceId"] = inference_id
        if attributes := value_of(given, CUSTOM_ATTRIBUTES):
            metadata["customAttributes"] = [attributes]
        if self.request.path != _DEFAULT_PATH:  # SageMaker captures only /invocations, so its records have no `path`.
            metadata["path"] = self.request.path
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
    """Records calls. A call never waits for its record, and never fails because of it."""

    def __init__(self, directory: Path) -> None:
        self.files = RecordFiles(directory)

    def record(self, event_id: str, request: ContainerRequest, headers: Headers, reply: bytes) -> None:
        """Record a call.

        Args:
            event_id: The id of the call.
            request: The request that was sent to the container.
            headers: The headers of the container's reply.
            reply: The body of the container's reply.
        """
        record = _Record(event_id, request, value_of(headers, b"content-type"), reply, datetime.now(UTC))
        if not self.files.take(record.size):
            logger.error("call %s is not captured: too many bytes wait to be written", event_id)
            return
        self.files.write(event_id, f"{request.endpoint}/{VARIANT}", record.at, record.size, record.line)
