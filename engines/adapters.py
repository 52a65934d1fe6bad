"""The adapters of one model. They are registered, updated and unregistered by name.

An `AdapterHost` loads them. The host is an engine, or the workers of a custom handler.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from engines.errors import (
    SHOWN,
    AdapterConflict,
    AdapterError,
    AdapterFailed,
    AdapterTaken,
    InvalidParameter,
    InvalidRequest,
    UnknownAdapter,
)

logger = logging.getLogger(__name__)

ON_HUB = "hf://"  # Settings may name an adapter on the hub: `hf://owner/name` or `hf://owner/name@revision`.
DIRECTORY = "adapters"  # A model's subdirectory for its own adapters. Each adapter has its own directory.

# `.` and `..` are not allowed, because clients resolve them in a URL. Such an adapter could never be removed.
_NAME = re.compile(r"(?!\.{1,2}\Z)[^/\x00-\x1f\x7f]{1,200}")
_DECLARED_NAME = re.compile(r"[^\x00-\x1f\x7f]{1,200}")  # A name in the settings, which may be an id on the hub.
_SCHEME = re.compile(r"file:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)  # Java writes `file:/directory`.
_ON_S3 = re.compile(r"s3://", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOrder:
    """A client's command to register or to update an adapter. A field is None if the client does not give it."""

    name: str
    # A directory, or an `s3://` URL. A relative directory is below the model's directory. If the host interprets `src`
    # (`AdapterHost.reads_src`), every value that the host accepts is allowed.
    src: str | None = None
    preload: bool | None = None  # Whether to load the adapter now instead of with its first request.
    pin: bool | None = None  # Whether to keep the adapter in memory.
    alias: str = ""  # The adapter's name in messages.
    options: Mapping[str, str] = field(default_factory=dict)  # All other parameters, for a custom handler.


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A registered adapter."""

    name: str
    src: str  # The given directory or URL.
    path: Path  # The adapter's directory. It need not exist if the host interprets `src`.
    id: int  # At least 1, and unique among all present and former adapters of the model.
    preload: bool = True
    pin: bool = False
    alias: str = ""
    options: Mapping[str, str] = field(default_factory=dict)


class AdapterHost(Protocol):
    """Loads the adapters of one model.

    Methods return the message for the client; "" means the usual message. A method that raises AdapterError has changed
    nothing.
    """

    # Whether the host itself interprets `src`. If so, an update can change `src`. Otherwise the host needs a directory.
    reads_src: bool

    async def register(self, adapter: Adapter) -> str:
        """Make an adapter usable. It replaces a former adapter of the same name."""

    async def update(self, adapter: Adapter) -> str: ...

    async def unregister(self, adapter: Adapter) -> str:
        """Refuse new requests for the adapter, and release it when its last request has ended."""

    async def stop(self) -> None: ...


class AdapterDownloads(Protocol):
    """Downloads adapters from S3 or from the hub."""

    async def fetch(self, url: str) -> Path:
        """Download an adapter from `s3://` or `hf://`, and return its directory.

        Raises:
            InvalidParameter: `url` does not exist, or cannot be read.
            AdapterFailed: The download has failed.
        """


class AdapterRegistry:
    """The registered adapters. Not thread-safe.

    A change that has begun is completed even if the client that asked for it disconnects.
    """

    def __init__(
        self,
        host: AdapterHost,
        model_dir: Path,
        reserved: Collection[str] = (),
        faults: Callable[[Path], Sequence[str]] | None = None,
        downloads: AdapterDownloads | None = None,
    ) -> None:
        """Create the adapter registry.

        Args:
            reserved: The model's own names, which no adapter may have.
            faults: A function that returns the reasons why a directory is not allowed. The function may block.
            downloads: The object that downloads adapters. None: adapters on S3 are refused.
        """
        self._host, self._model_dir, self._reserved = host, model_dir, frozenset(reserved)
        self._faults, self._downloads = faults, downloads
        self._adapters: dict[str, Adapter] = {}
        self._ids = itertools.count(1)
        # The changes in progress. Each change reserves an adapter name until it has ended.
        self._orders: dict[asyncio.Task[str], str] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._adapters

    def all(self) -> tuple[Adapter, ...]:
        return tuple(self._adapters.values())

    def get(self, name: str, alias: str = "") -> Adapter:
        """Return the adapter of this name.

        Args:
            alias: The adapter's name in messages.

        Raises:
            UnknownAdapter: No adapter has this name.
        """
        if (adapter := self._adapters.get(name)) is None:
            raise UnknownAdapter(alias or name)
        return adapter

    async def preload(self, model_dirs: Sequence[Path], declared: Mapping[str, str] = MappingProxyType({})) -> None:
        """Register the adapters in `adapters/` below these directories, and the adapters that the settings declare.

        Args:
            model_dirs: The directories. If two directories have an adapter of the same name, the adapter in the first
                directory is used.
            declared: The `src` of each adapter in the settings, by the adapter's name. These adapters take precedence
                over adapters of the same name in the directories.

        Raises AdapterError, InvalidRequest: an adapter is unusable or not allowed. The message names the adapter.
        """
        found: dict[str, str] = {}
        for directory in model_dirs:
            found = await asyncio.to_thread(_adapter_directories, directory) | found
        for name, src in (found | dict(declared)).items():
            try:
                if src.startswith(ON_HUB) and self._downloads is not None:
                    src = str(await self._downloads.fetch(src))
                await self.register(AdapterOrder(name=name, src=src), declared=name in declared)
            except (AdapterError, InvalidRequest) as error:
                place = src if name in declared else os.path.dirname(src)
                reason = f"the adapter {name} of {place} cannot be registered: {error.message}"
                raise AdapterFailed(reason) if isinstance(error, AdapterError) else InvalidRequest(reason) from None

    async def register(self, order: AdapterOrder, *, replacing: bool = False, declared: bool = False) -> str:
        """Make an adapter usable.

        Returns the host's message, or "".

        Args:
            replacing: Whether the new adapter may replace an adapter of the same name. Running requests of the old
                adapter are completed. Fields other than `src` that `order` does not give keep their old values.
            declared: Whether the settings name the adapter. If so, its name may have slashes.

        Raises:
            AdapterError: The adapter cannot be registered. Everything stays as it was.
            InvalidRequest: `src` does not exist, or its directory is not allowed.
        """
        path = self._path(order.src or "")
        if not (_DECLARED_NAME if declared else _NAME).fullmatch(order.name):
            raise AdapterConflict(
                "name must have 1 to 200 characters, none of them a slash or a control character, and not be . or ..; "
                f"got {order.name[:SHOWN]!r}"
            )
        if order.name in self._reserved:
            raise AdapterConflict(f"the name {order.name!r} is the model's own")
        if (former := self._adapters.get(order.name)) is not None:
            if not replacing:
                raise AdapterTaken(order.name)
            order = replace(
                order,
                preload=former.preload if order.preload is None else order.preload,
                pin=former.pin if order.pin is None else order.pin,
                alias=order.alias or former.alias,
                options={**former.options, **order.options},
            )
        adapter = Adapter(
            name=order.name,
            src=order.src or "",
            path=path,
            id=next(self._ids),
            preload=order.preload is not False,
            pin=bool(order.pin),
            alias=order.alias,
            options=order.options,
        )
        _check_pin(adapter)
        self._check_free(order.name)
        return await self._complete(self._register(adapter), busy=order.name)

    async def update(self, order: AdapterOrder) -> str:
        """Change an adapter's `preload`, `pin` and options. If the host reads `src`, the update can also change `src`.

        Returns the host's message, or "".

        Raises:
            UnknownAdapter: No adapter has this name.
            AdapterError: The adapter cannot be changed. Everything stays as it was.
            InvalidRequest: The adapter's new directory is not allowed.
        """
        adapter = self.get(order.name, order.alias)
        src = adapter.src if order.src is None else order.src
        if src != adapter.src and not self._host.reads_src:
            raise AdapterFailed(
                f"src of a registered adapter cannot be changed: it is {adapter.src!r}; unregister it first"
            )
        if adapter.pin and order.pin is False:
            shown = order.alias or order.name
            raise AdapterFailed(f"the adapter {shown!r} is pinned, which cannot be undone; unregister it first")
        changed = replace(
            adapter,
            src=src,
            path=adapter.path if src == adapter.src else self._path(src),
            preload=adapter.preload if order.preload is None else order.preload,
            pin=adapter.pin if order.pin is None else order.pin,
            alias=order.alias or adapter.alias,
            options={**adapter.options, **order.options},
        )
        _check_pin(changed)
        self._check_free(order.name)
        return await self._complete(self._update(changed), busy=order.name)

    async def unregister(self, name: str, alias: str = "") -> str:
        """Remove an adapter. New requests for it are refused at once, and its running requests are completed.

        Returns the host's message, or "".

        Raises:
            UnknownAdapter: No adapter has this name.
            AdapterError: A custom handler refuses the removal. The adapter stays registered.
        """
        adapter = self.get(name, alias)
        self._check_free(name)
        del self._adapters[name]  # Removed at once, so that no other change finds it.
        return await self._complete(self._unregister(adapter, alias or adapter.alias))

    async def stop(self) -> None:
        for task in self._orders:
            task.cancel()
        await asyncio.gather(*self._orders, return_exceptions=True)
        await self._host.stop()

    async def _register(self, adapter: Adapter) -> str:
        if self._is_remote(adapter.src) and self._downloads is not None:
            adapter = replace(adapter, path=await self._downloads.fetch(adapter.src))
        await self._check_faults(adapter.path)
        message = await self._host.register(adapter)
        self._adapters[adapter.name] = adapter
        logger.info("adapter %s registered from %s", adapter.name, adapter.src)
        return message

    async def _check_faults(self, path: Path) -> None:
        if self._faults is not None and (faults := await asyncio.to_thread(self._faults, path)):
            raise InvalidRequest("; ".join(faults))

    async def _update(self, adapter: Adapter) -> str:
        await self._check_faults(adapter.path)
        message = await self._host.update(adapter)
        self._adapters[adapter.name] = adapter
        return message

    async def _unregister(self, adapter: Adapter, alias: str) -> str:
        try:
            message = await self._host.unregister(replace(adapter, alias=alias))
        except AdapterError:
            self._adapters.setdefault(adapter.name, adapter)
            raise
        logger.info("adapter %s unregistered", adapter.name)
        return message

    def _check_free(self, name: str) -> None:
        if name in self._orders.values():
            raise AdapterConflict(f"another order for the adapter {name!r} is being carried out; try again")

    async def _complete(self, work: Coroutine[Any, Any, str], busy: str = "") -> str:
        """Run a change to its end, even if the waiting task is cancelled. The name `busy` is reserved until then."""
        task = asyncio.create_task(work)
        self._orders[task] = busy

        def ended(_: object) -> None:
            del self._orders[task]
            if not task.cancelled():
                task.exception()  # Mark the exception as retrieved, because the client may have disconnected.

        task.add_done_callback(ended)
        return await asyncio.shield(task)

    def _is_remote(self, src: str) -> bool:
        return not self._host.reads_src and _ON_S3.match(src) is not None

    def _path(self, src: str) -> Path:
        """Return the local directory for `src`. The directory may not exist.

        Raises:
            InvalidParameter: The host needs a directory, and `src` is a URL that does not name one.
        """
        if self._is_remote(src) and self._downloads is not None:
            return Path()  # A placeholder until `_register` downloads the adapter.
        path = _file_path(src) if _SCHEME.match(src) else src
        if path is None and not self._host.reads_src:
            wanted = "a directory of this machine, or s3://bucket/prefix/"
            raise InvalidParameter("src", f"must be {wanted}; got {src[:SHOWN]!r}")
        if "\0" in (path or src):
            raise InvalidParameter("src", "must have no null character")
        return self._model_dir / (path or src)


def _file_path(text: str) -> str | None:
    """Return the path of a `file:` URL on this machine; None for any other URL."""
    try:
        url = urlsplit(text)
    except ValueError:
        return None
    return unquote(url.path) if url.scheme.lower() == "file" and url.netloc in ("", "localhost") else None


def _check_pin(adapter: Adapter) -> None:
    if adapter.pin and not adapter.preload:
        raise AdapterFailed("pin is true and preload false: an adapter that stays in memory must be loaded")


def _adapter_directories(model_dir: Path) -> dict[str, str]:
    directory = model_dir / DIRECTORY
    if not directory.is_dir():
        return {}
    return {
        path.name: str(path) for path in sorted(directory.iterdir()) if path.is_dir() and not path.name.startswith(".")
    }
