"""The memo of parameters that every contract for text has: clients send the same parameters again and again."""

from __future__ import annotations

from typing import TypeVar

_MOST, _LONGEST = 1000, 500  # Entries, and bytes of an entry's parameters.

T = TypeVar("T")


class ParameterMemo(dict[bytes, T]):
    """The results of parsing, by the encoded parameters. A memo is for one contract of one loaded model.

    A look-up costs less than parsing.
    """

    def keep(self, key: bytes, parsed: T) -> T:
        """Keep the result of parsing, unless the parameters are long. Returns the result."""
        if len(key) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[key] = parsed
        return parsed
