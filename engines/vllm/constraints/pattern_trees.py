r"""Reads the patterns of JSON schemas into trees.

A pattern is an ECMA-262 expression. The client may have written it for the flag `u`, or for the rules that browsers
apply without this flag. Some patterns have another meaning in Rust or Python than in the standard. Such a pattern is
accepted only if the client certainly means the standard's meaning. Otherwise the pattern is refused.

Character classes are the same as in llguidance: `\d` and `\w` are ASCII, `\s` is Unicode, and `.` is any character
except the newline.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_Ranges = tuple[tuple[int, int], ...]  # Sorted ranges of code points, including both ends.

LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)


class BeyondError(Exception):
    """The meaning of the pattern is uncertain, or the pattern is too large to rewrite."""


@dataclass(frozen=True, slots=True)
class Characters:
    """Matches one of these characters."""

    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class Property:
    r"""A class with `\p{...}`, whose characters this module does not know."""

    text: str


@dataclass(frozen=True, slots=True)
class Edge:
    """An assertion about the characters before and after a position."""

    kind: str  # `^`, `$`, `b` or `B`


@dataclass(frozen=True, slots=True)
class Chain:
    """Parts that follow one another."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Alternative parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part that repeats."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Look:
    """A look-ahead or a look-behind."""

    part: Node
    behind: bool
    negated: bool


Node = Characters | Property | Edge | Chain | Either | Repeat | Look


def characters_of(ranges: Iterable[tuple[int, int]]) -> Characters:
    """Return the set of the characters in these ranges, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for begin, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if begin > end:
                continue
            if merged and begin <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
    return Characters(tuple(merged))


def one(code: int) -> Characters:
    """Return the set of one character."""
    return characters_of([(code, code)])


def _others(characters: Characters) -> Characters:
    edges = [0, *[edge for low, high in characters.ranges for edge in (low, high + 1)], LAST + 1]
    return characters_of([(low, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high])


NOTHING = Characters(())
_ANY = _others(NOTHING)
_NOT_NEWLINE = _others(one(0x0A))
_DIGIT = characters_of([(0x30, 0x39)])
WORD = characters_of([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = characters_of(
    (ord(pair[0]), ord(pair[-1]))
    for pair in ("\t\r", " ", "\x85", "\xa0", "\u1680", "\u2000\u200a", "\u2028\u2029", "\u202f", "\u205f", "\u3000")
)
_CLASSES = {"d": _DIGIT, "w": WORD, "s": _SPACE}
_CLASSES |= {name.upper(): _others(characters) for name, characters in _CLASSES.items()}
_CONTROLS = dict(zip("tnvfr", "\t\n\v\f\r", strict=True))
BEGIN, END = Edge("^"), Edge("$")
ANYTHING = Repeat(_ANY, 0, None)
_NAMED = {_ANY: "(?s:.)", _NOT_NEWLINE: ".", NOTHING: rf"[^\x{{0}}-\x{{{LAST:x}}}]"}

_QUANTIFIER = re.compile(r"(?:([*+?])|\{([0-9]{1,5})(?:(,)([0-9]{0,5}))?\})\??")
_LIKE_QUANTIFIER = re.compile(r"[*+?]|\{[0-9]*,?[0-9]*\}")
_GROUP = re.compile(r"\?(?:(?P<name>P?<[A-Za-z_$][A-Za-z0-9_$]{0,99}>)|:|(?P<look><?[=!]))")
_ESCAPE = re.compile(
    r"""\\(?:(?P<class>[dDwWsS])
    | (?P<edge>[bB])
    | (?P<control>[tnvfr])
    | x(?P<two>[0-9A-Fa-f]{2})
    | u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})
    | u(?P<four>[0-9A-Fa-f]{4})
    | u\{(?P<code>[0-9A-Fa-f]{1,6})\}
    | c(?P<letter>[A-Za-z])
    | (?P<null>0)(?![0-9])
    | (?P<property>[pP]\{[^{}\\]{1,99}\})
    | (?P<itself>[^0-9A-Za-z]))""",
    re.VERBOSE | re.DOTALL,
)


class Parser:
    """Reads a pattern from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        # Whether the pattern must be rewritten, because llguidance would refuse or misread a part of it.
        self.differs = False

    def read(self) -> Node:
        tree = self._either()
        if self._at < len(self._text):
            raise BeyondError
        return tree

    def _either(self) -> Node:
        branches = [self._sequence()]
        while self._next_is("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while self._text[self._at : self._at + 1] not in ("", "|", ")"):
            part = self._repeated()
            parts += (isinstance(part, Chain) and part.parts) or [part]
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self) -> Node:
        part = self._part()
        if isinstance(part, Property):
            self.differs, part = True, Property(rf"[{part.text}&&[^\x{{0}}]]")
        elif isinstance(part, Characters) and part != quotable(part):
            self.differs = True
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            return part
        self._at = found.end()
        sign, least, comma, most = found.groups()
        if isinstance(part, Look | Edge) or _LIKE_QUANTIFIER.match(self._text, self._at):
            raise BeyondError
        if sign:
            return Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        repeat = Repeat(part, int(least), int(most) if most else None if comma else int(least))
        if repeat.most is not None and repeat.least > repeat.most:
            raise BeyondError
        return repeat

    def _part(self) -> Node:
        if _LIKE_QUANTIFIER.match(self._text, self._at):
            raise BeyondError
        character = self._text[self._at]
        if character == "\\":
            return self._escape(in_class=False)
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character in "^$":
            return Edge(character)
        if character == ".":
            return _NOT_NEWLINE
        if character == "]":  # In another syntax, this may be the end of a class.
            raise BeyondError
        self.differs |= character == "{"
        return _known(ord(character))

    def _group(self) -> Node:
        """Read a group. The `(` has been read."""
        kind = _GROUP.match(self._text, self._at)
        if kind is not None:
            self._at = kind.end()
            self.differs |= kind["name"] is not None  # llguidance may interpret a group's name.
        part = self._either()
        if not self._next_is(")"):
            raise BeyondError
        if kind is None or kind["look"] is None:
            return part
        return Look(part, behind=kind["look"][0] == "<", negated=kind["look"][-1] == "!")

    def _class(self) -> Node:
        """Read a class. The `[` has been read."""
        begun, differed = self._at - 1, self.differs
        negated = self._next_is("^")
        if self._next_is("]"):
            if "]" in self._text[self._at :]:  # In other syntaxes, this `]` is a literal, and the class ends later.
                raise BeyondError
            self.differs = True
            return _ANY if negated else NOTHING
        ranges: list[tuple[int, int]] = []
        has_property = False
        while not self._next_is("]"):
            low = self._item()
            high: Node = low
            if self._next_is("-"):
                if self._text.startswith("]", self._at):
                    self._at -= 1
                else:
                    high = self._item()
            if isinstance(low, Characters) and isinstance(high, Characters):
                ranges += self._range(low, high)
            elif low is high:
                has_property = True
            else:
                raise BeyondError
        if has_property:
            if self.differs != differed:
                raise BeyondError
            return Property(self._text[begun : self._at])
        return _others(characters_of(ranges)) if negated else characters_of(ranges)

    def _range(self, low: Characters, high: Characters) -> _Ranges:
        """Return the characters of `low-high` in a class. `low` or `high` may itself be a class, as in `\\d-z`."""
        if low is high:
            return low.ranges
        begin, end = low.ranges[0][0], high.ranges[0][0]
        if not (_is_one(low) and _is_one(high)):  # A hyphen next to an escaped class is literal.
            self.differs |= _is_one(low)
            return (*low.ranges, (0x2D, 0x2D), *high.ranges)
        if begin > end:
            raise BeyondError
        return ((begin, end),)

    def _item(self) -> Node:
        """Read a character or an escape in a class."""
        character = self._text[self._at : self._at + 1]
        if character in ("", "["):  # In other syntaxes, `[` begins a nested class.
            if not character or self._text.startswith(("[:", "[.", "[="), self._at):
                raise BeyondError
            self.differs = True
        if character == "\\":
            return self._escape(in_class=True)
        self.differs |= self._text.startswith(("&&", "--", "~~"), self._at)
        self._at += 1
        return _known(ord(character))

    def _escape(self, *, in_class: bool) -> Node:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            raise BeyondError
        self._at = found.end()
        kind = found.lastgroup or ""
        value = found[kind]
        if kind == "class":
            return _CLASSES[value]
        if kind == "property":
            return Property(found[0])
        if kind == "edge" and not in_class:
            return Edge(value)
        if kind == "edge" and value == "B":
            raise BeyondError
        if kind in ("edge", "letter", "null", "low"):
            self.differs = True
        if kind == "itself":
            self.differs |= not value.isascii() or value in "<>"
            return _known(ord(value))
        if kind == "control":
            return one(ord(_CONTROLS[value]))
        if kind == "letter":
            return one(ord(value) % 32)
        if kind in ("edge", "null"):
            return one(8 if kind == "edge" else 0)
        code = int(value, 16)
        if kind == "low":
            code = 0x10000 + (int(found["high"], 16) - 0xD800) * 0x400 + code - 0xDC00
        return _known(code)

    def _next_is(self, character: str) -> bool:
        if found := self._text.startswith(character, self._at):
            self._at += 1
        return found


def _known(code: int) -> Characters:
    """Return the set of one character of a pattern. Surrogates are refused: their meaning depends on the flag `u`."""
    if code > LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise BeyondError
    return one(code)


def _is_one(characters: Characters) -> bool:
    return len(characters.ranges) == 1 and characters.ranges[0][0] == characters.ranges[0][1]


def is_plain(node: Node, *, first: bool = True, last: bool = True) -> bool:
    """Return True if llguidance supports a part. `first` and `last`: whether the part begins or ends its pattern."""
    if isinstance(node, Edge):
        return (first and node.kind == "^") or (last and node.kind == "$")
    if isinstance(node, Chain):
        end = len(node.parts) - 1
        return all(
            is_plain(part, first=first and at == 0, last=last and at == end) for at, part in enumerate(node.parts)
        )
    if isinstance(node, Either):
        return all(is_plain(part, first=first, last=last) for part in node.parts)
    if isinstance(node, Repeat):
        return is_plain(node.part, first=False, last=False)
    return not isinstance(node, Look)


def rust_text(node: Node) -> str:
    """Return a plain part in Rust's syntax."""
    if isinstance(node, Characters):
        return class_text(node)
    if isinstance(node, Property):
        return node.text
    if isinstance(node, Edge):
        return node.kind
    if isinstance(node, Chain):
        return "".join(
            [f"(?:{rust_text(part)})" if isinstance(part, Either) else rust_text(part) for part in node.parts]
        )
    if isinstance(node, Either):
        return "|".join(map(rust_text, node.parts))
    if isinstance(node, Look):
        raise BeyondError
    part = rust_text(node.part)
    if not isinstance(node.part, Characters | Property):
        part = f"(?:{part})"
    most = "" if node.most is None else node.most
    sign = {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((node.least, most))
    return part + (sign or (f"{{{node.least}}}" if node.least == most else f"{{{node.least},{most}}}"))


def quotable(characters: Characters) -> Characters:
    r"""Return a set that llguidance enforces correctly in JSON. A set without `"` or without `\` loses NUL.

    JSON writes these two characters as `\"` and `\\`. If a set has all control characters, llguidance allows both
    escapes, even if the set excludes the character: `[^"]` would allow `\"`. Without NUL, the set no longer has all
    control characters.
    """
    if not _has(characters, 0) or (_has(characters, ord('"')) and _has(characters, ord("\\"))):
        return characters
    return characters_of([(max(low, 1), high) for low, high in characters.ranges if high])


def _has(characters: Characters, code: int) -> bool:
    return any(low <= code <= high for low, high in characters.ranges)


def class_text(characters: Characters) -> str:
    """Return a set of characters in Rust's syntax."""
    characters = quotable(characters)
    if characters in _NAMED:
        return _NAMED[characters]
    if _is_one(characters):
        return _shown(characters.ranges[0][0])
    texts = []
    for mark, ranges in (("", characters.ranges), ("^", _others(characters).ranges)):
        pairs = ["-".join([_shown(edge) for edge in dict.fromkeys(pair)]) for pair in ranges]
        texts.append(f"[{mark}{''.join(pairs)}]")
    return min(texts, key=len)


def _shown(code: int) -> str:
    return re.escape(chr(code)) if 0x20 <= code < 0x7F else f"\\x{{{code:x}}}"


def parts_of(node: Node) -> tuple[Node, ...]:
    """Return the parts of a chain. Any other node is a single part."""
    return node.parts if isinstance(node, Chain) else (node,)


def is_look(node: Node, *, behind: bool) -> bool:
    """Return True if a node is a look-behind (`behind` is True) or a look-ahead (`behind` is False)."""
    return isinstance(node, Look) and node.behind == behind


def looks_behind(node: Node) -> bool:
    """Return True if a tree has a look-behind."""
    if isinstance(node, Chain | Either):
        return any(map(looks_behind, node.parts))
    if isinstance(node, Look | Repeat):
        return is_look(node, behind=True) or looks_behind(node.part)
    return False


def reversed_tree(node: Node) -> Node:
    """Return the tree that matches the reversed texts."""
    if isinstance(node, Chain):
        return Chain(tuple(map(reversed_tree, reversed(node.parts))))
    if isinstance(node, Either):
        return Either(tuple(map(reversed_tree, node.parts)))
    if isinstance(node, Repeat):
        return Repeat(reversed_tree(node.part), node.least, node.most)
    if isinstance(node, Look):
        return Look(reversed_tree(node.part), not node.behind, node.negated)
    if isinstance(node, Edge):
        return {"^": END, "$": BEGIN}.get(node.kind, node)
    return node
