"""From layers of text to values: parses, checks, and keeps a record of what came from where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from container.masking import quoted
from container.option import Option
from container.option_parsers import Scalar
from container.properties import Value

DEFAULT = "default"
_NONE: Mapping[str, Value] = {}


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One line of the report on settings."""

    name: str
    value: Scalar | None
    source: str
    """"default", or what was written and where, such as "environment: OPTION_DTYPE"."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Given:
    key: str
    value: Value

    def __str__(self) -> str:
        return f"{self.key} is {quoted(self.key, self.value.text)} ({self.value.source})"


@dataclass(slots=True)
class Resolution:
    """Collects entries, warnings and problems while values are looked up."""

    entries: list[SettingEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value] = _NONE) -> Scalar | None:
        """The value of an option: from its keys in `layer`, else its variables, else its default.

        None where there is no value, or where it is wrong, which is then among the problems.
        """
        given = _given(option, layer, variables)
        if not given:
            return self._default(option)
        parsed = [self._parse(option, one) for one in given]
        if any(value is None for value in parsed):
            return None
        for other, value in zip(given[1:], parsed[1:], strict=True):
            if value == parsed[0]:
                continue
            if not option.first_counts:
                self.problems.append(f"{given[0]}, but {other}; both are the same option: give one of them")
                return None
            self.warnings.append(f"{other.key} ({other.value.source}) is ignored: {given[0]}")
        return self._accept(option, given[0], parsed[0])

    def ignore(self, key: str, value: Value, reason: str) -> None:
        """Record a value that goes nowhere, and warn."""
        self.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
        self.entries.append(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))

    def replace(self, entry: SettingEntry) -> None:
        """Put a better entry in the place of the one with its name."""
        self.entries = [entry if other.name == entry.name else other for other in self.entries]

    def _default(self, option: Option) -> Scalar | None:
        value = option.parser(option.default) if option.default else None
        if not option.ignored:
            self.entries.append(SettingEntry(option.key, value, DEFAULT))
        return value

    def _parse(self, option: Option, given: _Given) -> Scalar | None:
        try:
            value = option.parser(given.value.text)
        except ValueError:
            self.problems.append(f"{given}; allowed: {option.allowed}")
            return None
        if option.serves is not None and value not in option.serves:
            self.problems.append(
                f"{given}: not served by this version of Slipway; {option.advice} (served: {option.allowed})"
            )
            return None
        return value

    def _accept(self, option: Option, given: _Given, value: Scalar | None) -> Scalar | None:
        note = "" if given.value.text.strip().lower() in option.quiet else option.remark
        if note:
            self.warnings.append(f"{given}: {note}")
        self.entries.append(SettingEntry(option.key, value, given.value.source, note))
        return value


def _given(option: Option, layer: Mapping[str, Value], variables: Mapping[str, Value]) -> list[_Given]:
    given = [_Given(key, layer[key]) for key in (option.key, *option.aliases) if key in layer]
    return given or list(_from_variables(option, variables))


def _from_variables(option: Option, variables: Mapping[str, Value]) -> Iterator[_Given]:
    for name in option.variables:
        if name in variables:
            yield _Given(option.key, variables[name])
            return
