"""The calls that changed adapters, in order: each replica carries all of them out, those that start later too."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote

_PATH = re.compile(rb"(?:/models/(?P<model>[^/]+))?/adapters(?:/(?P<name>[^/]+)(?P<update>/update)?)?")
_VLLM = {b"/v1/load_lora_adapter", b"/v1/unload_lora_adapter"}


@dataclass(frozen=True, slots=True)
class Change:
    """A call of the management API that changed an adapter."""

    method: str
    target: bytes
    """Path and query, as they were sent."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @property
    def adapter(self) -> tuple[str, str]:
        """The names of its model, "" where the path has none, and of the adapter."""
        path, _, query = self.target.partition(b"?")
        found = _PATH.fullmatch(path)
        model, name = found.group("model", "name") if found is not None else (None, None)
        if name is None:
            fields = dict(parse_qsl(query.decode("latin-1")))
            with contextlib.suppress(ValueError):  # the query has it all
                fields |= json.loads(self.body)
            return (model or b"").decode(), str(fields.get("lora_name") or fields.get("name"))
        return (model or b"").decode(), unquote(name.decode())

    @property
    def supersedes(self) -> bool:
        """Whether nothing of what was done to the adapter before matters any more."""
        path = _PATH.fullmatch(self.target.partition(b"?")[0])
        return path is None or not path["update"]


def changes_adapters(method: str, path: bytes) -> bool:
    """Tell whether a call is one of those."""
    return method in ("POST", "DELETE") and (path in _VLLM or _PATH.fullmatch(path) is not None)


@dataclass
class Changes:
    """All changes that still matter, by their numbers: in an actor, for all replicas, and each replica's own copy."""

    last: int = 0
    _changes: dict[int, Change] = field(default_factory=dict)

    def add(self, change: Change, number: int | None = None) -> int:
        """Add a change, as the next or with the number that it has elsewhere; return its number."""
        if change.supersedes:
            adapter = change.adapter
            self._changes = {known: old for known, old in self._changes.items() if old.adapter != adapter}
        self.last = self.last + 1 if number is None else number
        self._changes[self.last] = change
        return self.last

    def since(self, number: int) -> tuple[int, list[tuple[int, Change]]]:
        """Return the last number, and the changes after the one with this number."""
        return self.last, [(known, change) for known, change in self._changes.items() if known > number]

    def restore(self, last: int, changes: list[tuple[int, Change]]) -> None:
        """Take over what a replica has, after the process that had all of them was lost."""
        if self.last < last:
            self.last, self._changes = last, dict(changes)
