"""SageMaker's header for the adapter of a call, which all routes on `/invocations` and OpenAI's take.

Source: contracts/sagemaker_hosting.md section 6; contracts/lmi.md section 9.4.
"""

from __future__ import annotations

from djl_python.input_parser import SAGEMAKER_ADAPTER_IDENTIFIER_HEADER
from handlers.contracts.protocol import Call

_HEADER = SAGEMAKER_ADAPTER_IDENTIFIER_HEADER.lower()


def adapter_header(call: Call) -> str | None:
    """What the header names; None if there is none. The last of several counts; an empty one is the model itself."""
    return next((value.strip() for name, value in reversed(call.headers) if name.lower() == _HEADER), None)
