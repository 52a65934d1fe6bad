r"""Rewrites regular expressions and grammars for llguidance.

llguidance reads expressions in Rust's syntax, in which `\d`, `\w` and `\s` are Unicode classes. Clients mean the ASCII
classes `\d` and `\w` of ECMA-262, which vLLM's default back end also uses. For example, clients read the answer with
`Number(...)`, or check it with `^\d+$`. Both fail if the answer has digits that are not ASCII. So all three classes
are replaced by their ASCII characters, also `\s`, although ECMA-262 counts further characters as white space. Classes
such as `\p{Nd}` stay unchanged.

With the flag `i`, ASCII letters match only ASCII letters, as in ECMA-262 and in vLLM's default back end. By Unicode's
rules, `k` would also match the Kelvin sign, and `s` would also match the long s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

_Ranges = tuple[tuple[int, int], ...]  # Ranges of code points, including both ends.

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
_BRIDGES = (0x17F, 0x212A)  # The long s and the Kelvin sign, which Unicode case folding maps to ASCII letters.
_FOLDED = frozenset("kKsS").union(map(chr, _BRIDGES))
_HYPHEN: _Ranges = ((0x2D, 0x2D),)
_DEEPEST = 250  # The maximum depth of nested classes, as in regex-syntax, the parser of Rust's expressions.

_ESCAPE = re.compile(
    r"\\(?:[pP]\s*(?:\{[^}]{0,99}\}|.)|[xuU]\{[^}]{0,9}\}|x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL
)
_HEX = re.compile(r"\\[xuU]\{?([0-9A-Fa-f]{1,8})\}?").fullmatch
_GROUP = re.compile(r"\?(?:P?<(?![=!])[^>]{0,99}>|(?P<flags>[A-Za-z-]*)(?P<end>[:)])|<?[=!])")
_POSIX = re.compile(rf"\[:(\^?)({'|'.join(_SETS)}):\]")
_SPACE = re.compile(r"(?:[^\S\x1c-\x1f]|#[^\n]*)+")  # Ignored under the flag `x`.
_PLAIN = re.compile(r"[^\\\[()#\skKsS\u017f\u212a]+")
_OPERATOR = re.compile("&&|--|~~")


def ascii_expression(expression: str, flags: str = "") -> str:
    r"""Return an expression with ASCII characters instead of `\d`, `\w` and `\s`.

    An invalid expression stays invalid, so that the back end reports the reason.

    Args:
        expression: The expression, in Rust's syntax.
        flags: The flags that are set at the start of the expression.

    Raises:
        ValueError: The expression is nested too deeply.
    """
    return _Expression(expression, flags).rewritten()


class _Expression:
    """Reads an expression from left to right, in the same steps as regex-syntax."""

    def __init__(self, text: str, flags: str) -> None:
        self._text, self._at = text, 0
        self._flags = frozenset(flags)
        self._outer: list[frozenset[str]] = []  # For each open group: the flags outside of the group.

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
        return r"\z" if character == r"\Z" else character  # Python's `\Z` is `\z` in Rust.

    def _group(self) -> str:
        """Read the kind and the flags of a group. The `(` has been read."""
        self._skip()
        kind = self._next(_GROUP)
        flags = self._flags
        if kind is not None and kind["end"]:
            on, _, off = kind["flags"].partition("-")
            flags = flags.union(on).difference(off)
        if kind is None or kind["end"] != ")":  # `(?i)` opens no group.
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
        """Read a character, a range or an escape in a class. A hyphen next to an escaped class is literal."""
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
        """Return a class of these parts. A part is a set of ranges, or text that stays unchanged."""
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
        """Skip white space and comments if the flag `x` is set. Return the next position."""
        if "x" in self._flags:
            self._next(_SPACE)
        return self._at


def _named(escape: str) -> _Ranges | None:
    if len(escape) != 2 or escape[0] != "\\" or (name := _PERL.get(escape[1].lower())) is None:
        return None
    return _SETS[name] if escape[1].islower() else _complement(_SETS[name])


def _code(character: str) -> int | None:
    """Return the code point of a character or an escape. None if an escape does not stand for one character."""
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
    """Return a class for the flag `i`. This function folds the case of ASCII letters. The back end folds all others."""
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
    """Return ranges in the notation of a class, without the brackets around the class."""
    written = [[_shown(edge) for edge in dict.fromkeys(pair)] for pair in ranges]
    return "".join(["-".join(edges) for edges in written])


def _shown(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


# The parts of a Lark grammar for which llguidance's lexer has separate rules.
_OF_LARK = re.compile(
    r"""(?P<string>"(?:\\.|[^"\\\n])*"i?)
    | /(?P<expression>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*)
    | (?:\#|//)[^\n]*
    | <[^<>\s]+>""",
    re.VERBOSE,
)
_MARK = "%llguidance {}"  # Tells llguidance that a grammar is in Lark.
# Two patterns: the first definition of a GBNF grammar, and a part of such a grammar.
_IS_GBNF = re.compile(r"(?:\s|(?:#|//)[^\r\n]*+)*+[\w-]++\s*+::=").match
_OF_GBNF = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\r\n]*|(?P<name>[\w-]+)(?P<defined>\s*::=)?', re.DOTALL
)


def grammar_for_guidance(grammar: str) -> str:
    """Return a grammar in a form whose dialect llguidance recognizes: Lark or GBNF.

    llguidance takes a grammar for Lark if a line begins with `start:`. But a GBNF grammar with a rule `start` may have
    such a line, and a Lark grammar may begin with `?start:`. In Lark, `ascii_expression` also rewrites the expressions.

    Raises:
        ValueError: An expression in the grammar is nested too deeply.
    """
    if _IS_GBNF(grammar):
        names = {found["name"] for found in _OF_GBNF.finditer(grammar)}
        unused = "0" * max(map(len, filter(None, names)))  # Makes the new name of `start` longer than any other.
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
