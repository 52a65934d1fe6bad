"""Corrects the record that vLLM's renderer keeps of the media in the engine process.

The renderer omits the data of an image from a prompt if an earlier prompt had the image. But the engine may lack the
earlier prompt: the prompt was refused, its client has left, or the prompt arrives later. With this module, the renderer
omits the data only after the engine has received a prompt with this image.

The module relies on these private names of vLLM, which are in the table of `engines.vllm.internals`:

- `renderer.mm_processor_cache` is a `LruKeyReplicatedSenderCache`, unless options choose another cache. It has a record
  of each item in earlier prompts, in the order of the engine's cache. `get_and_update_item(item, hash)` returns the
  part of a prompt for an item. Only one thread calls it.
- `mm_hashes` of a prompt has the hashes of its media.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from typing import Any

from vllm.multimodal.cache.base import MultiModalProcessorCacheItemMetadata
from vllm.multimodal.cache.lru import LruKeyReplicatedSenderCache
from vllm.v1.engine.async_llm import AsyncLLM

_MOST_BYTES = 512 << 20  # The limit on `_unsent`. Refused prompts leave their data in it.


class SentMedia:
    """Tells one engine's renderer which media the engine has. It replaces the renderer's own record."""

    def __init__(self, llm: AsyncLLM) -> None:
        cache = llm.renderer.mm_processor_cache
        self._cache = cache if isinstance(cache, LruKeyReplicatedSenderCache) else None
        # Media data and sizes, keyed by hash. The renderer's thread adds entries, and the event loop removes them.
        self._unsent: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        if self._cache is not None:
            self._cache.get_and_update_item = self._item

    def engine_got(self, prompt: Any) -> None:
        """Record that the engine has received a prompt and its media."""
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
        # Media whose data are dropped count as sent, as in vLLM.
        while sum(size for _, size in tuple(self._unsent.values())) > _MOST_BYTES:
            with contextlib.suppress(KeyError):  # The event loop has just removed the last entry.
                self._unsent.popitem(last=False)
        return item
