"""Checks the forms in which OpenAI's clients send audio files to be transcribed or translated."""

from __future__ import annotations

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import Call, adapter_header, media_type
from handlers.parsing.forms import MAX_FIELDS, MULTIPART

SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
_MIB = 1 << 20
_SEPARATORS = (b"&", b";")  # The separators of a form that cannot have a file. Each takes time on the event loop.
_FIELDS_MIB = 1  # The room for the form's fields other than the file.


def check_form(call: Call, most_mib: int) -> None:
    """Check a form before vLLM reads it on the event loop.

    Args:
        call: The call.
        most_mib: The size of the largest file.

    Raises:
        InvalidRequest: The form is too large or cannot have a file, or an adapter is named outside the form.
    """
    if media_type(call.content_type) != MULTIPART and sum(map(call.body.count, _SEPARATORS)) > MAX_FIELDS:
        raise InvalidParameter("file", f"must be a file in a form of the type {MULTIPART}")
    if len(call.body) > (most_mib + _FIELDS_MIB) * _MIB:
        raise InvalidParameter("file", f"may have {most_mib} MiB (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)")
    if adapter_header(call):
        raise InvalidRequest("this route takes an adapter in the form's field `model` only")
