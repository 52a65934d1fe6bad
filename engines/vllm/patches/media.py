"""Patches of vLLM's functions that load the images, audio and videos of prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from vllm.renderers.chat_utils import AsyncMultiModalItemTracker

from engines.vllm.internals import module_of


def patch_sounds() -> None:
    """Resample audio with soxr, and silence vLLM's warnings about torchcodec, which has no CPU build on PyPI.

    vLLM would resample with torchaudio, which uses gigabytes of memory for a rate such as 44101 Hz. If torchcodec is
    missing, vLLM decodes audio with soundfile and PyAV. vLLM would then log a warning for each file.
    """
    from vllm.multimodal.parse import MultiModalDataParser

    MultiModalDataParser.__init__.__kwdefaults__["audio_resample_method"] = "soxr"
    if find_spec("torchcodec") is None:
        logging.getLogger("vllm.multimodal.media.audio").addFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


_trackers: Any = module_of("_resolve_items")
_resolve_items = _trackers._resolve_items
_load_media = AsyncMultiModalItemTracker.resolve_items


def patch_media_ids(rename: Callable[[str], str]) -> None:
    """Replace the ids that clients give their media.

    vLLM's caches look media up by these ids alone, without a salt. So a client could get another client's media.

    Args:
        rename: Returns the new id for a client's id. It runs in the task of the call.
    """

    def resolve(items: dict[str, list[tuple[Any, str | None]]], *others: Any) -> Any:
        renamed = {
            kind: [(data, None if uuid is None else rename(uuid)) for data, uuid in some]
            for kind, some in items.items()
        }
        return _resolve_items(renamed, *others)

    _trackers._resolve_items = resolve


def drop_two_frames(error: BaseException) -> None:
    """Drop two frames from an error's traceback: the frame of the caller, and the frame of the called vLLM function.

    A variable of this vLLM function holds the error. Together with the traceback, this is a reference cycle, which
    keeps the variables of both frames in memory.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next.tb_next


def free_loaded_media() -> None:
    """Make vLLM forget the sources of a prompt's media when the media are loaded, or when loading fails.

    Otherwise a reference cycle would keep vLLM's tracker in memory, together with the media in the request's body.
    """

    async def resolve(self: AsyncMultiModalItemTracker) -> Any:
        try:
            return await _load_media(self)
        except Exception as error:
            drop_two_frames(error)
            raise
        finally:
            self._items_by_modality.clear()

    AsyncMultiModalItemTracker.resolve_items = resolve


def send_whole_media(engine_args: Any) -> None:
    """Send the media with each request, so that any copy can answer it.

    By default, vLLM omits media that it has sent before. It omits nothing if several front ends share an engine. So
    this function makes vLLM assume two front ends.
    """
    engine_args._api_process_count = 2
