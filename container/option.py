"""What a setting is: its names, what is allowed, what is served, where its value goes."""

from __future__ import annotations

from dataclasses import dataclass

from container.option_parsers import Parser, Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One key of serving.properties, with its prefix if it has one."""

    key: str
    parser: Parser
    meaning: str
    default: str = ""
    """The text that would give the default; empty: no value."""
    aliases: tuple[str, ...] = ()
    """Other keys for the same; two of them with different values are an error, unless `first_counts`."""
    first_counts: bool = False
    """Of the key and its aliases the first that is given counts, with a warning."""
    variables: tuple[str, ...] = ()
    """Environment variables that count when neither key nor alias is given."""
    field: str | None = None
    """The field of `ModelSettings` or `ServerSettings` that takes the value."""
    argument: str | None = None
    """The engine argument that takes the value as text."""
    serves: frozenset[Scalar] | None = None
    """The values that Slipway serves; None: all that the parser allows. Others are refused at start."""
    advice: str = ""
    """What to do instead of a value that is not served."""
    remark: str = ""
    """A warning that goes with any value but those in `quiet`."""
    quiet: frozenset[str] = frozenset()
    """Texts, in lower case, that need no remark."""

    @property
    def ignored(self) -> bool:
        """Whether the value goes nowhere."""
        return self.field is None and self.argument is None

    @property
    def allowed(self) -> str:
        """What may be given, in words."""
        if self.serves is None:
            return self.parser.allowed
        return ", ".join(sorted(_word(value) for value in self.serves)) or "nothing"


def _word(value: Scalar) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
