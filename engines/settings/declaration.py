"""The declaration of a setting: its names, parser, default and meaning, in one place.

The default of a field declares a setting: `max_best_of: int = setting("option.max_best_of", ...)`. The part of Slipway
that uses a setting (an engine, a contract or the server) declares it. `container.settings` reads the values from their
sources. The tables in docs/configuration.md are made from the declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, Generic, overload

from engines.settings.parsers import Parser, Scalar, T

PREFIX = "option."
_SETTING = "setting"


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A setting of a model, or of the server."""

    key: str  # The key in serving.properties, including the prefix `option.` if it has one.
    parser: Parser[T]
    default: str | None = None  # The default value as text, which the parser reads. None: no default.
    _: KW_ONLY
    doc: str = ""  # The setting's meaning, in Markdown, for a table of the documentation.
    # Other keys for this setting. It is an error if the keys have different values, unless `first_counts` is set.
    aliases: tuple[str, ...] = ()
    # If the key and its aliases have different values, the first one counts, and a warning names the others.
    first_counts: bool = False
    variables: tuple[str, ...] = ()  # Environment variables that are read if neither the key nor an alias is given.
    shows_default: bool = True  # Whether reports show the setting even if it is not given.
    # The values that the server supports. The server does not start with any other value. None: all values.
    serves: frozenset[Scalar] | None = None
    advice: str = ""  # The advice for values that the server does not support.

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *self.aliases)

    @property
    def name(self) -> str:
        return self.key.removeprefix(PREFIX)

    @property
    def allowed(self) -> str:
        if self.serves is None:
            return self.parser.allowed
        words = (str(value).lower() if isinstance(value, bool) else str(value) for value in self.serves)
        return ", ".join(sorted(words)) or "nothing"

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata for a dataclass field. The field has the setting's value."""
        return {_SETTING: self}


def refused(key: str, parser: Parser[T], serves: tuple[Scalar, ...], advice: str) -> Setting[T]:
    """Return a setting of LMI. The server does not start if the value is not in `serves`."""
    return Setting(key, parser, shows_default=False, serves=frozenset(serves), advice=advice)


@overload
def setting(key: str, parser: Parser[T], default: str, *, doc: str, **more: Any) -> T: ...
@overload
def setting(key: str, parser: Parser[T], *, unset: T, doc: str, **more: Any) -> T: ...
@overload
def setting(key: str, parser: Parser[T], *, doc: str, **more: Any) -> T | None: ...
def setting(key: str, parser: Parser[Any], default: str | None = None, *, unset: Any = None, **more: Any) -> Any:
    """Return the default of a dataclass field whose value is a setting.

    Args:
        key: As in `Setting`.
        parser: As in `Setting`.
        default: As in `Setting`.
        unset: The field's value if the setting has no default and is not given.
        **more: Other fields of `Setting`.
    """
    value = unset if default is None else parser(default)
    return field(default=value, metadata=Setting(key, parser, default, **more).metadata)


def declared(group: type) -> dict[str, Setting[Any]]:
    """Return the settings of a dataclass by the names of its fields."""
    return {each.name: each.metadata[_SETTING] for each in fields(group) if _SETTING in each.metadata}
