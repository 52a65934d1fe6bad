"""Reads fields of a table (of a TOML file, with the command line laid over it) and says what is wrong with each."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from container.settings.properties import quoted


class Table:
    """Values that are taken one by one; a value that is wrong becomes a problem and counts as absent."""

    def __init__(
        self, values: Mapping[str, Any], path: str, problems: list[str], origins: Mapping[str, str] | None = None
    ) -> None:
        """`path` comes before keys in messages ("autoscaling."); `origins` says where a full path comes from."""
        self._values = values
        self._path = path
        self._problems = problems
        self._origins = origins or {}
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return self._values.get(key) is not None

    def refuse(self, key: str, expected: str) -> None:
        """Note that the value of `key` is wrong, or missing."""
        path = self._path + _printable(key)
        origin = f" ({self._origins[path]})" if path in self._origins else ""
        if key not in self:
            self._problems.append(f"{path}: missing; expected {expected}")
            return
        value = self._values[key]
        shown = quoted(key, value) if isinstance(value, str) else quoted(key, repr(value))
        self._problems.append(f"{path} is {shown}{origin}; expected {expected}")

    def text(self, key: str, expected: str = "text", pattern: str = r"\S.*") -> str | None:
        """Text that matches as a whole."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, str) and re.fullmatch(pattern, value) and value.isprintable():
            return value
        self.refuse(key, expected)
        return None

    def required_text(self, key: str, expected: str, pattern: str = r"\S.*") -> str:
        """Text that must be there; empty if it is not, which is a problem then."""
        if self._values.get(key) is None:
            self._taken.add(key)
            self.refuse(key, expected)
            return ""
        return self.text(key, expected, pattern) or ""

    def choice(self, key: str, choices: tuple[str, ...]) -> str | None:
        """One of some words."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, str) and value in choices:
            return value
        self.refuse(key, "one of " + ", ".join(choices))
        return None

    def integer(self, key: str, minimum: int, maximum: int | None = None) -> int | None:
        """A whole number in a range, both ends included."""
        value = self._take(key)
        if value is None:
            return None
        whole = isinstance(value, int) and not isinstance(value, bool)
        if whole and value >= minimum and (maximum is None or value <= maximum):
            return int(value)
        self.refuse(key, f"a whole number {_range(minimum, maximum)}")
        return None

    def number(self, key: str, above: float) -> float | None:
        """A finite number greater than `above`."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > above:
            return float(value)
        self.refuse(key, f"a number above {above:g}")
        return None

    def boolean(self, key: str) -> bool | None:
        """true or false."""
        value = self._take(key)
        if value is None or isinstance(value, bool):
            return value
        self.refuse(key, "true or false")
        return None

    def texts(self, key: str, expected: str, pattern: str, most: int) -> tuple[str, ...]:
        """A list of texts, each of which matches."""
        value = self._take(key)
        if value is None:
            return ()
        if (
            isinstance(value, list)
            and 0 < len(value) <= most
            and all(isinstance(item, str) and re.fullmatch(pattern, item) for item in value)
        ):
            return tuple(value)
        self.refuse(key, f"a list of 1 to {most}: {expected}")
        return ()

    def pairs(self, key: str, name: str, most: int) -> dict[str, str]:
        """A table of texts whose keys match `name`; numbers and truth values are written as a file would have them."""
        value = self._take(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or len(value) > most:
            self.refuse(key, f"a table of at most {most} entries")
            return {}
        found: dict[str, str] = {}
        inner = Table(value, f"{self._path}{key}.", self._problems, self._origins)
        for entry, item in value.items():
            text = _as_text(item)
            if text is None or not re.fullmatch(name, entry):
                inner.refuse(entry, f"a name like {name} and a text, number, true or false")
            else:
                found[entry] = text
        return found

    def table(self, key: str) -> Table | None:
        """A table within this one."""
        value = self._take(key)
        if value is None:
            return None
        if isinstance(value, Mapping):
            return Table(value, f"{self._path}{key}.", self._problems, self._origins)
        self.refuse(key, "a table")
        return None

    def tables(self, key: str, most: int) -> tuple[Table, ...]:
        """A list of tables."""
        value = self._take(key)
        if value is None:
            return ()
        if isinstance(value, list) and 0 < len(value) <= most and all(isinstance(item, Mapping) for item in value):
            return tuple(
                Table(item, f"{self._path}{key}[{index}].", self._problems) for index, item in enumerate(value)
            )
        self.refuse(key, f"a list of 1 to {most} tables")
        return ()

    def finish(self) -> None:
        """Refuse keys that nothing has taken."""
        for key in self._values:
            if key not in self._taken:
                origin = self._origins.get(self._path + key)
                where = f" ({origin})" if origin else ""
                known = ", ".join(sorted(self._taken))
                self._problems.append(
                    f"{self._path}{_printable(key)}{where}: there is no such field; there are {known}"
                )

    def _take(self, key: str) -> Any:
        self._taken.add(key)
        return self._values.get(key)


def _as_text(value: object) -> str | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if "\x00" not in value else None
    return str(value) if isinstance(value, int | float) else None


def _printable(key: str) -> str:
    return key if key.isprintable() else ascii(key)


def _range(minimum: int, maximum: int | None) -> str:
    return f"from {minimum} on" if maximum is None else f"from {minimum} to {maximum}"
