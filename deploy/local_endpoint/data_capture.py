"""Data capture: a record of each call, in SageMaker's JSON lines.

Source: "Capture data from real-time endpoint" in the SageMaker developer guide.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
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


def _line(event_id: str, at: datetime, request: ContainerRequest, reply_type: str, reply: bytes) -> bytes:
    """Return the record of a call that succeeded."""
    metadata: dict[str, Any] = {"eventId": event_id}
    if inference_id := value_of(request.headers, INFERENCE_ID):
        metadata["inferenceId"] = inference_id
    if attributes := value_of(request.headers, CUSTOM_ATTRIBUTES):
        metadata["customAttributes"] = [attributes]
    if request.path != _DEFAULT_PATH:  # SageMaker captures only /invocations, so its records have no `path`.
        metadata["path"] = request.path
    metadata["inferenceTime"] = f"{at:%Y-%m-%dT%H:%M:%SZ}"
    record = {
        "captureData": {
            "endpointInput": _data("INPUT", value_of(request.headers, b"content-type"), request.body),
            "endpointOutput": _data("OUTPUT", reply_type, reply),
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
        at, size = datetime.now(UTC), len(request.body) + len(reply)
        if not self.files.take(size):
            logger.error("call %s is not captured: too many bytes wait to be written", event_id)
            return
        line = functools.partial(_line, event_id, at, request, value_of(headers, b"content-type"), reply)
        self.files.write(event_id, f"{request.endpoint}/{VARIANT}", at, size, line)
