"""vLLM's error object, which its own routes, happy_vllm's newer ones and LMI's asynchronous schema all show."""

from __future__ import annotations

import msgspec


def error_body(message: str, kind: str, code: int, parameter: str | None = None) -> bytes:
    """The object, byte for byte. `kind`: such as "BadRequestError"."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": parameter, "code": code}})
