"""The errors that the server itself answers for a handler. Source: contracts/lmi.md sections 1.6 and 1.7."""

from __future__ import annotations

import json

from handlers.contracts.lmi.errors import FAILED_DEPENDENCY, JSON, handler_failure
from handlers.contracts.protocol import Reply


def is_status(code: int) -> bool:
    """Whether a handler may answer with the code."""
    return 200 <= code <= 599


def invalid_status(code: int) -> Reply:
    """E3, for an output with a status that HTTP does not have."""
    return Reply(FAILED_DEPENDENCY, JSON, handler_failure(f"Invalid status code: {code}"))


def batch_failure(code: int, message: str = "Batch inference failed") -> bytes:
    """E4: a whole rolling batch has failed."""
    text = json.dumps(message, ensure_ascii=False)
    return (
        f'{{"code":{code},"message":{text},"properties":{{}},"content":{{"keys":[],"values":[]}},"cancelled":false}}'
    ).encode()
