"""Checks the forms in which OpenAI's clients send audio files for transcription or translation."""

from __future__ import annotations

from engines.errors import InvalidParameter, InvalidRequest
from handlers.contract import Call, adapter_header, media_type
from handlers.parsing.forms import MAX_FIELDS, MULTIPART

SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
_MIB = 1 << 20
# The separators of a URL-encoded form, which cannot have a file. vLLM splits the form on the event loop.
_SEPARATORS = (b"&", b";")
_FIELDS_MIB = 1  # The size that the form may have in addition to the file.


def check_form(call: Call, most_mib: int) -> None:
    """Check a form before vLLM reads it on the event loop.

    Args:
        call: The call.
        most_mib: The maximum size of a file.

    Raises:
        InvalidRequest: The form is too large, the form cannot have a file, or a header names an adapter.
    """
    if media_type(call.content_type) != MULTIPART and sum(map(call.body.count, _SEPARATORS)) > MAX_FIELDS:
        raise InvalidParameter("file", f"must be a file in a form of the type {MULTIPART}")
    if len(call.body) > (most_mib + _FIELDS_MIB) * _MIB:
        raise InvalidParameter("file", f"may have {most_mib} MiB (VLLM_MAX_AUDIO_CLIP_FILESIZE_MB)")
    if adapter_header(call):
        raise InvalidRequest("this route takes an adapter in the form's field `model` only")
