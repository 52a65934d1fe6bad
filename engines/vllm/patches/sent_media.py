"""Media that the engine process has, as vLLM's renderer knows them.

The renderer leaves the data of an image out of a prompt if it was in an earlier prompt. But the earlier prompt may have
been refused, its client may have left, or it may go to the engine later. Here every prompt contains the data until the
engine has received one of these prompts.

`engines.vllm.internals` has the names of vLLM on which the module relies. They mean:

- `renderer.mm_processor_cache` is a `LruKeyReplicatedSenderCache`, unless options choose another cache. It has records
  of the items in earlier prompts, in the order of the engine's own cache. `get_and_update_item(item, hash)` returns the
  part of a prompt for an item. One thread calls it.
- A prompt has its hashes in `mm_hashes`.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from typing import Any

from vllm.multimodal.cache.base import MultiModalProcessorCacheItemMetadata
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.v1.engine.async_llm import AsyncLLM

_MOST_BYTES = 512 << 20  # Of data that wait. Prompts that were refused leave theirs here.


class SentMedia:
    """Tells one engine's renderer which media the engine has, in place of the renderer's own record."""

    def __init__(self, llm: AsyncLLM) -> None:
        cache = llm.renderer.mm_processor_cache
        self._cache = cache if isinstance(cache, LruKeyReplicatedSenderCache) else None
        # Data and their size, by their hashes. The renderer's thread adds to it, and the event loop takes away.
        self._unsent: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        if self._cache is not None:
            self._cache.get_and_update_item = self._item

    def engine_got(self, prompt: Any) -> None:
        """Note that the engine has got a prompt, and the media in it."""
        if self._cache is not None:
            for media_hash in itertools.chain.from_iterable((prompt.get("mm_hashes") or {}).values()):
                self._unsent.pop(media_hash, None)

    def _item(self, item: Any, media_hash: str) -> Any:
        assert self._cache is not None
        if (known := self._cache._cache.get(media_hash)) is not None:
            return self._unsent.get(media_hash, (None, 0))[0], known.prompt_updates
        assert item is not None
        record = MultiModalProcessorCacheItemMetadata(*item)
        self._cache.cache_if_fits(self._cache._cache, media_hash, record)
        self._unsent[media_hash] = item[0], record.item_size
        self._drop_oldest()
        return item

    def _drop_oldest(self) -> None:
        """Keep the data below the limit. Media whose data are dropped count as sent, as in vLLM."""
        while sum(size for _, size in tuple(self._unsent.values())) > _MOST_BYTES:
            with contextlib.suppress(KeyError):  # The event loop has taken the last one.
                self._unsent.popitem(last=False)
