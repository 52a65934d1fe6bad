"""References within a JSON schema, and places in the schema, which are JSON pointers in URI fragments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import quote, unquote

_OLD = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")
DATA = ("enum", "const", "default", "examples")  # Keywords whose values are not schemas.


class References:
    """Resolves references within one document. It fetches no other documents."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        # In old drafts, a `$ref` replaces the keywords next to it.
        self.are_old = any(name in str(root.get("$schema")) for name in _OLD)

    def has_base(self, schema: dict[str, Any]) -> bool:
        """Return True if references within a schema are relative to the schema's `$id` instead of the document's."""
        base = schema.get("$id", schema.get("id") if self.are_old else None)
        return schema is not self._root and isinstance(base, str) and not base.startswith("#")

    def target(self, reference: str) -> tuple[str, Any] | None:
        """Return the place and the schema to which a reference points. None if they are not found in this document."""
        base, _, fragment = reference.partition("#")
        if base and base != str(self._root.get("$id") or self._root.get("id") or "").partition("#")[0]:
            return None
        pointer = unquote(fragment)
        if pointer and not pointer.startswith("/"):
            pointers = [pointer for name, pointer in self._anchors if name == unquote(fragment)]
            if len(pointers) != 1:  # The anchor does not exist, or is ambiguous.
                return None
            (pointer,) = pointers
        found: Any = self._root
        for part in pointer.split("/")[1:]:
            if isinstance(found, dict) and self.has_base(found):
                return None
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return "#" + quote(pointer, safe="/~$"), found

    @cached_property
    def _anchors(self) -> list[tuple[str, str]]:
        return list(self._anchors_below(self._root, ""))

    def _anchors_below(self, part: Any, pointer: str) -> Iterator[tuple[str, str]]:
        """Yield each anchor, and the pointer to its schema."""
        if isinstance(part, list):
            for i, each in enumerate(part):
                yield from self._anchors_below(each, f"{pointer}/{i}")
        if not isinstance(part, dict) or self.has_base(part):
            return
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            name = part.get(keyword)
            if isinstance(name, str) and (keyword.endswith("chor") or name.startswith("#")):
                yield name.lstrip("#"), pointer
        for name, each in part.items():
            if name not in DATA:
                yield from self._anchors_below(each, f"{pointer}/{_escaped(name)}")


def below(place: str, part: str | int) -> str:
    """Return the place of a part of the schema at `place`. The part is a key or an index."""
    return f"{place}/{quote(_escaped(str(part)), safe='~$')}"


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
