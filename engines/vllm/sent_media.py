"""Media that the engine process has, as vLLM's renderer knows them.

The renderer leaves the data of an image out of a prompt if the engine has them from an earlier prompt. vLLM takes an
image as sent when it has made a prompt with it. The prompt may still be refused, its client may leave, and a later
prompt may go to the engine first. Here an image is sent when the engine has got a prompt with its data.

The module relies on these internals of vLLM, which tests/live/test_media_internals.py checks:

- `renderer.mm_processor_cache` is a `LruKeyReplicatedSenderCache`, unless options choose another cache. Its `_cache`
  has the metadata of the items that the engine has, and `get_and_update_item(item, hash)` returns what a prompt gets.
- `renderer._mm_executor` has one thread, which makes all prompts with media.
- A prompt has its hashes in `mm_hashes`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from vllm.multimodal.cache.base import MultiModalProcessorCacheItemMetadata
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache

from engines.vllm.internals import AsyncLLM

_MOST_UNSENT = 4096  # Items. An item that is forgotten is sent once more.


class SentMedia:
    """Replaces the way in which one engine's renderer learns what the engine has."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._renderer = llm.renderer
        cache: Any = llm.renderer.mm_processor_cache
        self._cache = cache if isinstance(cache, LruKeyReplicatedSenderCache) else None
        # Items of prompts that the engine has not got yet, by their hashes. For the renderer's thread alone.
        self._unsent: OrderedDict[str, Any] = OrderedDict()
        if self._cache is not None:
            self._cache.get_and_update_item = self._item

    def engine_got(self, prompt: Any) -> None:
        """Note that the engine has got a prompt, and the media in it."""
        hashes = prompt.get("mm_hashes")
        if self._cache is not None and hashes:
            self._renderer._mm_executor.submit(self._sent, tuple(itertools.chain.from_iterable(hashes.values())))

    def _item(self, item: Any, media_hash: str) -> Any:
        assert self._cache is not None
        if (known := self._cache._cache.get(media_hash)) is not None:
            return None, known.prompt_updates
        assert item is not None
        self._unsent[media_hash] = MultiModalProcessorCacheItemMetadata(*item)
        if len(self._unsent) > _MOST_UNSENT:
            self._unsent.popitem(last=False)
        return item

    def _sent(self, hashes: Iterable[str]) -> None:
        assert self._cache is not None
        for media_hash in hashes:
            if (item := self._unsent.pop(media_hash, None)) is not None:
                self._cache.cache_if_fits(self._cache._cache, media_hash, item)
