r"""Regular expressions and grammars, as llguidance has to get them.

llguidance reads expressions in Rust's syntax, where `\d`, `\w` and `\s` are classes of Unicode. Clients mean the
classes of ECMA-262, which are ASCII and which vLLM's default back end has: they read the text with `Number(...)` or
`^\d+$`. So the classes are replaced by their characters. `\p{Nd}` and the like stay.

Under the flag `i`, ASCII letters match ASCII letters alone, as in ECMA-262 and in that back end. By Unicode `k` matches
the Kelvin sign and `s` the long s, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

_Ranges = tuple[tuple[int, int], ...]  # Of code points; both ends belong to a range.

_ASCII, _LAST = 0x7F, 0x10FFFF
_NOT_ASCII = (_ASCII + 1, _LAST)
_SETS: dict[str, _Ranges] = {
    name: tuple([(ord(pair[0]), ord(pair[-1])) for pair in pairs])
    for name, pairs in {
        "alnum": ("09", "AZ", "az"),
        "alpha": ("AZ", "az"),
        "ascii": ("\0\x7f",),
        "blank": ("\t", " "),
        "cntrl": ("\0\x1f", "\x7f"),
        "digit": ("09",),
        "graph": ("!~",),
        "lower": ("az",),
        "print": (" ~",),
        "punct": ("!/", ":@", "[`", "{~"),
        "space": ("\t\r", " "),
        "upper": ("AZ",),
        "word": ("09", "AZ", "_", "az"),
        "xdigit": ("09", "AF", "af"),
    }.items()
}
_PERL = {"d": "digit", "s": "space", "w": "word"}
_CONTROLS = dict(zip("afnrtv", "\a\f\n\r\t\v", strict=True))
_BRIDGES = (0x17F, 0x212A)  # The long s and the Kelvin sign: Unicode's other forms of ASCII letters.
_FOLDED = frozenset("kKsS").union(map(chr, _BRIDGES))
_HYPHEN: _Ranges = ((0x2D, 0x2D),)
_DEEPEST = 250  # Classes within classes. regex-syntax has the same limit.

_ESCAPE = re.compile(
    r"\\(?:[pP]\s*(?:\{[^}]{0,99}\}|.)|[xuU]\{[^}]{0,9}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL
)
_HEX = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]{1,8})\}?").fullmatch
_GROUP = re.compile(r"\?(?:P?<(?![=!])[^>]{0,99}>|(?P<flags>[A-Za-z-]*)(?P<end>[:)])|<?[=!])")
_POSIX = re.compile(rf"\[:(\^?)({'|'.join(_SETS)}):\]")
_SPACE = re.compile(r"(?:[^\S\x1c-\x1f]|#[^\n]*)+")  # Nothing, under the flag `x`.
_PLAIN = re.compile(r"[^\\\[()#\skKsS\u017f\u212a]+")
_OPERATOR = re.compile("&&|--|~~")


def ascii_expression(expression: str, flags: str = "") -> str:
    r"""Return an expression whose `\d`, `\w` and `\s` are ASCII.

    A wrong expression stays wrong, so that the back end says why.

    Args:
        expression: In Rust's syntax.
        flags: The flags that are on at its start.

    Raises:
        ValueError: It is nested too deeply.
    """
    return _Expression(expression, flags).rewritten()


class _Expression:
    """An expression that is read from left to right, in the steps of regex-syntax."""

    def __init__(self, text: str, flags: str) -> None:
        self._text, self._at = text, 0
        self._flags = frozenset(flags)
        self._outer: list[frozenset[str]] = []  # The flags around each open group.

    def rewritten(self) -> str:
        parts: list[str] = []
        while self._skip() < len(self._text):
            parts.append(self._part())
        return "".join(parts)

    def _part(self) -> str:
        if plain := self._next(_PLAIN):
            return plain[0]
        character = self._character()
        if character == "[":
            return self._class()
        if character == "(":
            return "(" + self._group()
        if character == ")" and self._outer:
            self._flags = self._outer.pop()
        if (ranges := _named(character)) is not None:
            return self._written([ranges])
        if "i" in self._flags and (code := _code(character)) is not None and chr(code) in _FOLDED:
            return self._written([((code, code),)])
        return r"\z" if character == r"\Z" else character  # Python's name, and Rust's.

    def _group(self) -> str:
        """Read the kind of a group, and the flags in it or after it. The `(` has been read."""
        self._skip()
        kind = self._next(_GROUP)
        flags = self._flags
        if kind is not None and kind["end"]:
            on, _, off = kind["flags"].partition("-")
            flags = flags.union(on).difference(off)
        if kind is None or kind["end"] != ")":  # not `(?i)`
            self._outer.append(self._flags)
        self._flags = flags
        return kind[0] if kind is not None else ""

    def _class(self, depth: int = 1) -> str:
        """Read a class. The `[` has been read."""
        if depth > _DEEPEST:
            raise ValueError("the expression is nested too deeply")
        begun = self._at - 1
        negated = self._next_is("^")
        parts: list[_Ranges | str] = []
        while self._next_is("-"):
            parts.append(_HYPHEN)
        if not parts and self._next_is("]"):
            parts.append(_single("]"))
        while not self._next_is("]"):
            if self._at == len(self._text):
                return self._text[begun:]
            if posix := self._next(_POSIX):
                parts.append(_complement(_SETS[posix[2]]) if posix[1] else _SETS[posix[2]])
            elif self._next_is("["):
                parts.append(self._class(depth + 1))
            elif operator := self._next(_OPERATOR):
                parts.append(operator[0])
            else:
                parts += self._item()
        return self._written(parts, negated=negated, nested=depth > 1)

    def _item(self) -> list[_Ranges | str]:
        """Read a character, a range or an escape in a class. A hyphen beside an escape's class is a hyphen."""
        first = self._character()
        begun = self._skip()
        if not self._next_is("-") or self._text[self._skip() : self._at + 1] in ("", "]", "-"):
            self._at = begun
            return [_single(first)]
        after = self._at
        low, high = _code(first), _code(self._character())
        if low is not None and high is not None:
            return [((low, high),)]
        self._at = after
        return [_single(first), _HYPHEN]

    def _written(self, parts: Sequence[_Ranges | str], *, negated: bool = False, nested: bool = False) -> str:
        """Return a class of these parts: characters, and texts that stay."""
        folds = "i" in self._flags
        if folds and not nested and not any(isinstance(part, str) and part[0] in "[&-~" for part in parts):
            return _folded(parts, negated=negated)
        texts = [part if isinstance(part, str) else _text(_without_bridges(part) if folds else part) for part in parts]
        return f"[{'^' * negated}{''.join(texts)}]"

    def _character(self) -> str:
        """Read one character or escape."""
        escape = self._next(_ESCAPE)
        if escape is not None:
            return escape[0]
        self._at += 1
        return self._text[self._at - 1]

    def _next(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if found := pattern.match(self._text, self._at):
            self._at = found.end()
        return found

    def _next_is(self, character: str) -> bool:
        if found := self._text.startswith(character, self._skip()):
            self._at += 1
        return found

    def _skip(self) -> int:
        """Drop white space and comments under the flag `x`. Returns the place of what follows."""
        if "x" in self._flags:
            self._next(_SPACE)
        return self._at


def _named(escape: str) -> _Ranges | None:
    if len(escape) != 2 or escape[0] != "\\" or (name := _PERL.get(escape[1].lower())) is None:
        return None
    return _SETS[name] if escape[1].islower() else _complement(_SETS[name])


def _code(character: str) -> int | None:
    """Return the code point that a character or an escape stands for. None if it is another escape."""
    if len(character) == 1:
        return ord(character)
    if found := _HEX(character):
        code = int(found[1], 16)
        return code if code <= _LAST else None
    escaped = character[1:]
    if escaped in _CONTROLS:
        return ord(_CONTROLS[escaped])
    return ord(escaped) if len(escaped) == 1 and escaped.isascii() and not escaped.isalnum() else None


def _single(character: str) -> _Ranges | str:
    if (ranges := _named(character)) is not None:
        return ranges
    return character if (code := _code(character)) is None else ((code, code),)


def _complement(ranges: _Ranges) -> _Ranges:
    edges = [0, *[edge for low, high in ranges for edge in (low, high + 1)], _LAST + 1]
    return tuple([(low, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high])


def _without_bridges(ranges: _Ranges) -> _Ranges:
    for bridge in _BRIDGES:
        halves = [((low, bridge - 1), (bridge + 1, high)) for low, high in ranges if low <= bridge <= high]
        kept = [(low, high) for low, high in ranges if not low <= bridge <= high]
        ranges = (*kept, *[half for pair in halves for half in pair if half[0] <= half[1]])
    return ranges


def _folded(parts: Sequence[_Ranges | str], *, negated: bool) -> str:
    """Return a class under the flag `i`. Letters of ASCII are folded here, all others by the back end."""
    exact: list[tuple[int, int]] = []
    others: list[str] = []
    for part in parts:
        if isinstance(part, str):
            others.append(part)
            continue
        for low, high in part:
            rest = max(low, _ASCII + 1), high
            if low <= _ASCII:
                exact.append((low, min(high, _ASCII)) if low <= high else (low, high))
            if rest == _NOT_ASCII:
                exact.append(rest)
            elif rest[0] <= high:
                exact += [(bridge, bridge) for bridge in _BRIDGES if low <= bridge <= high]
                others.append(_text(_without_bridges((rest,))))
    for low, high in exact.copy():
        for first, last, shift in ((0x41, 0x5A, 0x20), (0x61, 0x7A, -0x20)):
            if (begin := max(low, first)) <= (end := min(high, last)):
                exact.append((begin + shift, end + shift))
    inside, outside = _text(exact), "".join(others)
    if not outside:
        return f"(?-i:[{'^' * negated}{inside}])"
    if negated:
        return f"[^{inside}{outside}]"
    return f"(?:(?-i:[{inside}])|[{outside}])" if inside else f"[{outside}]"


def _text(ranges: Iterable[tuple[int, int]]) -> str:
    """Return ranges as a class has them between its brackets."""
    written = [[_shown(edge) for edge in dict.fromkeys(pair)] for pair in ranges]
    return "".join(["-".join(edges) for edges in written])


def _shown(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


# The parts of a Lark grammar in which other characters have another meaning, by llguidance's lexer.
_OF_LARK = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)
    | /(?P<expression>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    | (?:\#|//)[^\n]*
    | <[^<>\s]+>""",
    re.VERBOSE,
)
_MARK = "%llguidance {}"  # llguidance takes a grammar with it for Lark.
# GBNF: the first definition, and the parts.
_IS_GBNF = re.compile(r"(?:\s|(?:#|//)[^\r\n]*+)*+[\w-]++\s*+::=").match
_OF_GBNF = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*|(?P<name>[\w-]+)(?P<defined>\s*::=)?', re.DOTALL
)


def grammar_for_guidance(grammar: str) -> str:
    """Return a grammar that llguidance reads in the dialect that it has, with ASCII classes.

    By itself llguidance takes a grammar for Lark if a line begins with `start:`. So does GBNF with a rule `start`, and
    a grammar in Lark may begin with `?start:`.

    Raises:
        ValueError: An expression is nested too deeply.
    """
    if _IS_GBNF(grammar):
        names = {found["name"] for found in _OF_GBNF.finditer(grammar)}
        unused = "0" * max(map(len, filter(None, names)))  # The beginning of a name.
        return _OF_GBNF.sub(lambda part: _gbnf_part(part, unused), grammar)
    return f"{_OF_LARK.sub(_lark_part, grammar)}\n{_MARK}\n"


def _lark_part(part: re.Match[str]) -> str:
    expression, flags, string = part["expression"], part["flags"], part["string"]
    if expression is not None:
        return f"/{ascii_expression(expression, flags)}/{flags}"
    if string is None or string[-1] != "i" or _FOLDED.isdisjoint(string[1:-2]):
        return part[0]
    try:
        characters = json.loads(string[:-1])
    except ValueError:
        return part[0]
    literal = "".join([_shown(ord(character)) for character in characters])
    return f"/{ascii_expression(literal, 'i')}/i"


def _gbnf_part(part: re.Match[str], unused: str) -> str:
    name = part["name"]
    if name is None:
        return part[0]
    return (f"r{unused}-{name}" if name.lower() == "start" else name) + (" ::=" if part["defined"] else "")
