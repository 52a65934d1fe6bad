"""Patches of how vLLM loads the images, sounds and videos of prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from vllm.renderers.chat_utils import AsyncMultiModalItemTracker

from engines.vllm.internals import module_of


def patch_sounds() -> None:
    """Have sounds resampled by soxr, and read without torchcodec, of which PyPI has no CPU build.

    torchaudio, vLLM's choice, takes gigabytes of memory for a rate such as 44101 Hz. soundfile and PyAV decode sounds;
    vLLM would log a warning for each.
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
    """Replace the ids that clients give their media. vLLM's caches find media by them, and have no salt.

    Args:
        rename: Takes an id, and returns the one that takes its place. It runs in the task of the call.
    """

    def resolve(items: dict[str, list[tuple[Any, str | None]]], *others: Any) -> Any:
        renamed = {
            kind: [(data, None if uuid is None else rename(uuid)) for data, uuid in some]
            for kind, some in items.items()
        }
        return _resolve_items(renamed, *others)

    _trackers._resolve_items = resolve


def drop_two_frames(error: BaseException) -> None:
    """Drop the frames of the caller and of the function of vLLM that it called from an error's traceback.

    That function has a variable that holds the error: a reference cycle, with the variables of both frames.
    """
    if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error.__traceback__ = error.__traceback__.tb_next.tb_next


def free_loaded_media() -> None:
    """Have vLLM forget the sources of a prompt's media when they are loaded, or one of them cannot be loaded.

    Its tracker of a prompt's media would stay in a reference cycle, with the media in the body of the request.
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
    """Send media with each request, so that any copy can take it.

    By default vLLM leaves media out that it sent before. It sends all where several front ends share an engine.
    """
    engine_args._api_process_count = 2
