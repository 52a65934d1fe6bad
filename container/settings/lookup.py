"""Looks up the values of settings in their sources, and records the source of each."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from container.settings.values import HIDDEN, Value
from container.sources.download import RemoteModels
from engines.settings.declaration import PREFIX, Setting, declared
from engines.settings.parsers import Scalar, T
from handlers.custom.settings import MAX_WORKERS, MIN_WORKERS

C = TypeVar("C")
DEFAULT = "default"  # The source of a default value.
# Unknown names are errors, unless this variable is true.
ALLOW_UNKNOWN = "SERVING_ALLOW_UNKNOWN_SETTINGS"
# The lowest similarity (difflib's ratio) with which a known name is suggested. It is higher for short names, because
# a short name resembles many other names.
_ALIKE, _SHORT_ALIKE, _SHORT = 0.8, 0.88, 5


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One line of the report on settings."""

    name: str
    value: Scalar | None
    source: str  # "default", or the place where the value was given, such as "environment: OPTION_DTYPE".
    note: str = ""


@dataclass(slots=True)
class Lookup:
    """Looks up the values of settings, and collects the report's entries, warnings and problems."""

    entries: list[SettingEntry] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    allows_unknown: bool = False  # Whether unknown names cause only warnings.

    def value(
        self, setting: Setting[T], layer: Mapping[str, Value], variables: Mapping[str, Value] = MappingProxyType({})
    ) -> T | None:
        """Return the value of a setting. Its keys in `layer` come first, then its variables, then its default.

        Return None if the setting has no value. If the value is invalid, add it to `problems` and return None.
        """
        given = [(key, layer[key]) for key in setting.keys if key in layer]
        given = given or [(setting.key, variables[name]) for name in setting.variables if name in variables][:1]
        if not given:
            text = setting.default
            if setting.shows_default:
                shown = None if text is None else setting.parser.shown(text)
                self.entries.append(SettingEntry(setting.key, shown, DEFAULT))
            return None if text is None else setting.parser(text)
        parsed = [self._parse(setting, key, text) for key, text in given]
        if None in parsed:
            return None
        (key, first), value = given[0], parsed[0]
        for (other_key, other), other_value in zip(given[1:], parsed[1:], strict=True):
            if other_value == value:
                continue
            if not setting.first_counts:
                self.problems.append(
                    f"{first.describe(key)}, but {other.describe(other_key)}; both are the same option: "
                    "give one of them"
                )
                return None
            self.warnings.append(f"{other_key} ({other.source}) is ignored: {first.describe(key)}")
        self.entries.append(SettingEntry(setting.key, setting.parser.shown(first.text), first.source))
        return value

    def read(
        self,
        group: type[C],
        layer: Mapping[str, Value],
        variables: Mapping[str, Value] = MappingProxyType({}),
        only: Collection[str] | None = None,
        **others: Any,
    ) -> C:
        """Return the settings that a dataclass declares. A field without a valid value gets its default.

        Args:
            group: The dataclass.
            layer: See `value`.
            variables: See `value`.
            only: The fields to read. None to read all fields.
            **others: Values of fields that are not read.
        """
        values = {
            name: self.value(setting, layer, variables)
            for name, setting in declared(group).items()
            if name not in others and (only is None or name in only)
        }
        return group(**{name: value for name, value in values.items() if value is not None}, **others)

    def ignore(self, key: str, value: Value, reason: str) -> None:
        """Record a value that has no effect, and add a warning."""
        self.warnings.append(f"{key} ({value.source}) is ignored: {reason}")
        self.entries.append(SettingEntry(key, value.text, value.source, f"ignored: {reason}"))

    def unknown(self, key: str, value: Value, meant: str = "", *, stops: bool = True) -> None:
        """Add a problem for an unknown name, or a warning if unknown names are allowed.

        Args:
            key: The name.
            value: The value of the setting. It is never shown, because the key may be the misspelled name of a secret.
            meant: The known name that is probably meant.
            stops: Whether to add a problem, so that the start fails. If not, a warning is added.
        """
        hint = f"did you mean {meant}?" if meant else "docs/configuration.md has all names"
        if self.allows_unknown or not stops:
            self.ignore(key, replace(value, text=HIDDEN), f"there is no such setting; {hint}")
        else:
            self.problems.append(
                f"{key} ({value.place}): there is no such setting; {hint} ({ALLOW_UNKNOWN}=true makes this a warning)"
            )

    def replace(self, entry: SettingEntry) -> None:
        self.entries = [entry if other.name == entry.name else other for other in self.entries]

    def _parse(self, setting: Setting[T], key: str, given: Value) -> T | None:
        try:
            value = setting.parser(given.text)
        except ValueError:
            self.problems.append(f"{given.describe(key)}; allowed: {setting.allowed}{_example(setting, given.text)}")
            return None
        if setting.serves is not None and value not in setting.serves:
            self.problems.append(
                f"{given.describe(key)}: not served by this version of Slipway; {setting.advice} "
                f"(served: {setting.allowed})"
            )
            return None
        return value


def _example(setting: Setting[Any], text: str) -> str:
    """Return the end of an error message. It names the value that is probably meant, or an example."""
    completed = [word for word in setting.parser.words if word.startswith(text.strip().lower())]
    if meant := completed[0] if len(completed) == 1 else closest(text.strip().lower(), setting.parser.words, 0.6):
        return f"; did you mean {meant}?"
    return f"; for example {setting.default}" if (setting.default or "").isdigit() else ""


def closest(name: str, known: Iterable[str], likeness: float | None = None) -> str:
    """Return the known name that is most similar to `name`, without regard to `option.`. Empty if none is similar."""
    prefixed, bare = name.startswith(PREFIX), name.removeprefix(PREFIX).lower()
    # If two known names differ only in the prefix, `by_name` keeps the last. The names are ordered so that the last has
    # the prefix if and only if `name` has it.
    ordered = sorted(known, key=lambda key: (key.startswith(PREFIX) == prefixed, key))
    by_name = {key.removeprefix(PREFIX).lower(): key for key in ordered}
    least = likeness or (_ALIKE if len(bare) > _SHORT else _SHORT_ALIKE)
    return next((by_name[found] for found in difflib.get_close_matches(bare, by_name, 1, least)), "")


@dataclass(frozen=True, slots=True)
class Sources:
    """The texts of all settings by key. Each text is from the source that takes precedence."""

    model_dir: Path
    has_model_dir: bool  # If False, `model_dir` is the default directory, because none was found.
    variables: Mapping[str, Value]
    server: Mapping[str, Value]
    model: dict[str, Value]
    # The model's keys from serving.properties, the environment and the management API, for the secure mode.
    given: Mapping[str, Value]
    empty: tuple[str, ...]  # The keys in serving.properties that have no value. They count as unset.
    remote: RemoteModels  # The models on S3 that the settings name.
    gpus: int
    one_model: bool  # Whether the server starts with this model only.
    lookup: Lookup

    def value(self, setting: Setting[T]) -> T | None:
        return self.lookup.value(setting, self.model, self.variables)

    def read(self, group: type[C], only: Collection[str] | None = None, **others: Any) -> C:
        return self.lookup.read(group, self.model, self.variables, only, **others)

    def workers(self) -> dict[str, Value]:
        """Return the model's settings. Worker counts with the prefix `gpu.` or `cpu.` replace counts without it."""
        device = "gpu" if self.gpus else "cpu"
        keys = (MIN_WORKERS.key, MAX_WORKERS.key)
        return self.model | {key: self.model[own] for key in keys if (own := f"{device}.{key}") in self.model}
