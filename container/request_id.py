"""The id that a request carries through logs, headers and the engine."""

from __future__ import annotations

import re
import uuid

INFERENCE_ID = b"x-amzn-sagemaker-inference-id"
"""SageMaker's header for the client's own id; it counts where the configured one is absent."""
_ACCEPTABLE = re.compile(rb"[\x21-\x7e]{1,128}").fullmatch


def request_id(header: bytes | None) -> str:
    """The client's own id if it is short visible ASCII (it is written into headers and logs), else a new UUID."""
    if header is not None and _ACCEPTABLE(header):
        return header.decode("ascii")
    return str(uuid.uuid4())
