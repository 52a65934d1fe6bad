"""A cache of parsed parameters for each contract, because clients send the same parameters again and again."""

from __future__ import annotations

from typing import TypeVar

_MOST, _LONGEST = 1000, 500  # The maximum numbers of entries, and of bytes in an entry's key.

T = TypeVar("T")


class ParameterMemo(dict[bytes, T]):
    """Maps encoded parameters to the results of parsing them. A memo belongs to one contract of one loaded model."""

    def keep(self, key: bytes, parsed: T) -> T:
        """Cache the result of parsing, unless the parameters are long. Return the result."""
        if len(key) <= _LONGEST:
            if len(self) >= _MOST:
                self.clear()
            self[key] = parsed
        return parsed
