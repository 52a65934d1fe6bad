r"""Patterns of JSON schemas that llguidance does not take, as others that it takes.

A pattern is an expression of ECMA-262 that is found somewhere in a text. llguidance reads it in Rust's syntax, and has
no look-around, no word boundary, no `^` and `$` inside an expression, and no complement. All of these are regular: an
automaton holds them, and an automaton can be written as an expression.

1. `_Parser` reads a pattern into a tree. What it does not know for certain, it does not read.
2. `_Automaton` follows all ways through the tree at once. Its states are formulas: the places of which one has to lead
   on, together with those that must lead on (look-ahead) and must not (negative look-ahead).
3. `_expression` removes one state after another, until an expression is left.

The classes are those that llguidance reads: `\d` and `\w` are ASCII, `\s` is Unicode's, `.` is all but the newline.
The characters of a class may lose NUL, see `_quotable`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

_Ranges = tuple[tuple[int, int], ...]  # Of code points, in order; both ends belong to a range.

# The bounds of one call: about a second at most, and what llguidance compiles in no time.
_MOST_READ, _MOST_WRITTEN, _MOST_NESTED = 4_096, 16_384, 55
_MOST_STATES, _MOST_STEPS, _MOST_EDGES = 512, 200_000, 512

_LAST, _SURROGATES = 0x10FFFF, (0xD800, 0xDFFF)


class _BeyondError(Exception):
    """The pattern cannot be read for certain, or is too large to rewrite."""


def complement(pattern: str) -> str | None:
    """Return a pattern that is found in exactly the texts in which this one is not. None if there is none in bounds."""
    try:
        return _one_pattern(_Parser(pattern).read(), _Work(len(pattern)), complemented=True)
    except (_BeyondError, RecursionError):
        return None


def none_of(words: Collection[str]) -> str | None:
    """Return a pattern that is found in all texts but these. None if there is none within bounds."""
    length = sum(map(len, words))
    literals = [_Sequence(tuple([_one(ord(character)) for character in word])) for word in words]
    try:
        return _one_pattern(_Sequence((_BEGIN, _Either(tuple(literals)), _END)), _Work(length), complemented=True)
    except (_BeyondError, RecursionError):
        return None


def without_look_around(pattern: str, *, single: bool = False) -> tuple[str, ...] | None:
    """Return patterns, all of which are found in exactly the texts in which this one is.

    llguidance takes them and reads them as ECMA-262 does. A pattern that it takes and reads so is returned as it is.

    Args:
        pattern: The pattern.
        single: Return one pattern.

    Returns:
        None if this module cannot read the pattern, or finds none within bounds. If it has no look-around, llguidance
        may still take it.
    """
    try:
        parser = _Parser(pattern)
        tree = parser.read()
        if _is_plain(tree):
            return (_text(tree) if parser.differs else pattern,)
        found = _patterns(tree, _Work(len(pattern)))
        return (_one_pattern(tree, _Work(len(pattern))),) if single and len(found) > 1 else tuple(found)
    except (_BeyondError, RecursionError):
        return None


# The tree of a pattern.


@dataclass(frozen=True, slots=True)
class _Set:
    ranges: _Ranges


@dataclass(frozen=True, slots=True)
class _Property:
    r"""A class with `\p{...}`, whose characters are not known here."""

    text: str


@dataclass(frozen=True, slots=True)
class _Edge:
    kind: str  # `^`, `$`, `b` or `B`


@dataclass(frozen=True, slots=True)
class _Sequence:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    parts: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class _Look:
    part: _Node
    behind: bool
    negated: bool


_Node = _Set | _Property | _Edge | _Sequence | _Either | _Repeat | _Look


def _set(ranges: Iterable[tuple[int, int]]) -> _Set:
    """Return a set of characters. Surrogates are none."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        for begin, end in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if begin > end:
                continue
            if merged and begin <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((begin, end))
    return _Set(tuple(merged))


def _one(code: int) -> _Set:
    return _set([(code, code)])


def _others(characters: _Set) -> _Set:
    edges = [0, *[edge for low, high in characters.ranges for edge in (low, high + 1)], _LAST + 1]
    return _set([(low, high - 1) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high])


_NOTHING = _Set(())
_ANY = _others(_NOTHING)
_NOT_NEWLINE = _others(_one(0x0A))
_DIGIT = _set([(0x30, 0x39)])
_WORD = _set([(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
_SPACE = _set(
    (ord(pair[0]), ord(pair[-1]))
    for pair in ("\t\r", " ", "\x85", "\xa0", "\u1680", "\u2000\u200a", "\u2028\u2029", "\u202f", "\u205f", "\u3000")
)
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CLASSES |= {name.upper(): _others(characters) for name, characters in _CLASSES.items()}
_CONTROLS = dict(zip("tnvfr", "\t\n\v\f\r", strict=True))
_BEGIN, _END = _Edge("^"), _Edge("$")
_ANYTHING = _Repeat(_ANY, 0, None)
_NAMED = {_ANY: "(?s:.)", _NOT_NEWLINE: ".", _NOTHING: rf"[^\x{{0}}-\x{{{_LAST:x}}}]"}

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


class _Parser:
    """Reads a pattern, from left to right."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self.differs = False  # llguidance refuses the text of a part that it could hold, or reads it otherwise.

    def read(self) -> _Node:
        tree = self._either()
        if self._at < len(self._text):
            raise _BeyondError
        return tree

    def _either(self) -> _Node:
        branches = [self._sequence()]
        while self._next_is("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else _Either(tuple(branches))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._text[self._at : self._at + 1] not in ("", "|", ")"):
            part = self._repeated()
            parts += (isinstance(part, _Sequence) and part.parts) or [part]
        return parts[0] if len(parts) == 1 else _Sequence(tuple(parts))

    def _repeated(self) -> _Node:
        part = self._part()
        if isinstance(part, _Property):
            self.differs, part = True, _Property(rf"[{part.text}&&[^\x{{0}}]]")
        elif isinstance(part, _Set) and part != _quotable(part):
            self.differs = True
        found = _QUANTIFIER.match(self._text, self._at)
        if found is None:
            return part
        self._at = found.end()
        sign, least, comma, most = found.groups()
        if isinstance(part, _Look | _Edge) or _LIKE_QUANTIFIER.match(self._text, self._at):
            raise _BeyondError
        if sign:
            return _Repeat(part, int(sign == "+"), 1 if sign == "?" else None)
        repeat = _Repeat(part, int(least), int(most) if most else None if comma else int(least))
        if repeat.most is not None and repeat.least > repeat.most:
            raise _BeyondError
        return repeat

    def _part(self) -> _Node:
        if _LIKE_QUANTIFIER.match(self._text, self._at):
            raise _BeyondError
        character = self._text[self._at]
        if character == "\\":
            return self._escape(in_class=False)
        self._at += 1
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character in "^$":
            return _Edge(character)
        if character == ".":
            return _NOT_NEWLINE
        if character == "]":  # Perhaps the end of a class in another syntax.
            raise _BeyondError
        self.differs |= character == "{"
        return _known(ord(character))

    def _group(self) -> _Node:
        """Read a group. The `(` has been read."""
        kind = _GROUP.match(self._text, self._at)
        if kind is not None:
            self._at = kind.end()
            self.differs |= kind["name"] is not None  # Names can mean something to llguidance.
        part = self._either()
        if not self._next_is(")"):
            raise _BeyondError
        if kind is None or kind["look"] is None:
            return part
        return _Look(part, behind=kind["look"][0] == "<", negated=kind["look"][-1] == "!")

    def _class(self) -> _Node:
        """Read a class. The `[` has been read."""
        begun, differed = self._at - 1, self.differs
        negated = self._next_is("^")
        if self._next_is("]"):
            if "]" in self._text[self._at :]:  # In other syntaxes the first bracket is a character.
                raise _BeyondError
            self.differs = True
            return _ANY if negated else _NOTHING
        ranges: list[tuple[int, int]] = []
        has_property = False
        while not self._next_is("]"):
            low = self._item()
            high: _Node = low
            if self._next_is("-"):
                if self._text.startswith("]", self._at):
                    self._at -= 1
                else:
                    high = self._item()
            if isinstance(low, _Set) and isinstance(high, _Set):
                ranges += self._range(low, high)
            elif low is high:
                has_property = True
            else:
                raise _BeyondError
        if has_property:
            if self.differs != differed:
                raise _BeyondError
            return _Property(self._text[begun : self._at])
        return _others(_set(ranges)) if negated else _set(ranges)

    def _range(self, low: _Set, high: _Set) -> _Ranges:
        """Return what a class has of two items with a hyphen between them, or of one that is both."""
        if low is high:
            return low.ranges
        begin, end = low.ranges[0][0], high.ranges[0][0]
        if not (_is_one(low) and _is_one(high)):  # A hyphen beside an escape's class is a hyphen.
            self.differs |= _is_one(low)
            return (*low.ranges, (0x2D, 0x2D), *high.ranges)
        if begin > end:
            raise _BeyondError
        return ((begin, end),)

    def _item(self) -> _Node:
        """Read a character or an escape in a class."""
        character = self._text[self._at : self._at + 1]
        if character in ("", "["):  # `[` begins a class within the class in other syntaxes.
            if not character or self._text.startswith(("[:", "[.", "[="), self._at):
                raise _BeyondError
            self.differs = True
        if character == "\\":
            return self._escape(in_class=True)
        self.differs |= self._text.startswith(("&&", "--", "~~"), self._at)
        self._at += 1
        return _known(ord(character))

    def _escape(self, *, in_class: bool) -> _Node:
        found = _ESCAPE.match(self._text, self._at)
        if found is None:
            raise _BeyondError
        self._at = found.end()
        kind = found.lastgroup or ""
        value = found[kind]
        if kind == "class":
            return _CLASSES[value]
        if kind == "property":
            return _Property(found[0])
        if kind == "edge" and not in_class:
            return _Edge(value)
        if kind == "edge" and value == "B":
            raise _BeyondError
        if kind in ("edge", "letter", "null", "low"):
            self.differs = True
        if kind == "itself":
            self.differs |= not value.isascii() or value in "<>"
            return _known(ord(value))
        if kind == "control":
            return _one(ord(_CONTROLS[value]))
        if kind == "letter":
            return _one(ord(value) % 32)
        if kind in ("edge", "null"):
            return _one(8 if kind == "edge" else 0)
        code = int(value, 16)
        if kind == "low":
            code = 0x10000 + (int(found["high"], 16) - 0xD800) * 0x400 + code - 0xDC00
        return _known(code)

    def _next_is(self, character: str) -> bool:
        if found := self._text.startswith(character, self._at):
            self._at += 1
        return found


def _known(code: int) -> _Set:
    """Return a character of a pattern. A surrogate means another thing without the flag `u`."""
    if code > _LAST or _SURROGATES[0] <= code <= _SURROGATES[1]:
        raise _BeyondError
    return _one(code)


def _is_one(characters: _Set) -> bool:
    return len(characters.ranges) == 1 and characters.ranges[0][0] == characters.ranges[0][1]


def _is_plain(node: _Node, *, first: bool = True, last: bool = True) -> bool:
    """Whether llguidance takes a part that is the first or last of its pattern."""
    if isinstance(node, _Edge):
        return (first and node.kind == "^") or (last and node.kind == "$")
    if isinstance(node, _Sequence):
        end = len(node.parts) - 1
        return all(
            _is_plain(part, first=first and at == 0, last=last and at == end) for at, part in enumerate(node.parts)
        )
    if isinstance(node, _Either):
        return all(_is_plain(part, first=first, last=last) for part in node.parts)
    if isinstance(node, _Repeat):
        return _is_plain(node.part, first=False, last=False)
    return not isinstance(node, _Look)


def _text(node: _Node) -> str:
    """Return a plain part in Rust's syntax."""
    if isinstance(node, _Set):
        return _class_text(node)
    if isinstance(node, _Property):
        return node.text
    if isinstance(node, _Edge):
        return node.kind
    if isinstance(node, _Sequence):
        return "".join([f"(?:{_text(part)})" if isinstance(part, _Either) else _text(part) for part in node.parts])
    if isinstance(node, _Either):
        return "|".join(map(_text, node.parts))
    if isinstance(node, _Look):
        raise _BeyondError
    part = _text(node.part)
    if not isinstance(node.part, _Set | _Property):
        part = f"(?:{part})"
    most = "" if node.most is None else node.most
    sign = {(0, ""): "*", (1, ""): "+", (0, 1): "?"}.get((node.least, most))
    return part + (sign or (f"{{{node.least}}}" if node.least == most else f"{{{node.least},{most}}}"))


def _quotable(characters: _Set) -> _Set:
    r"""Return a set that llguidance writes in JSON as it is: without NUL, if it lacks the quotation mark or backslash.

    In JSON these two are written as `\"` and `\\`. llguidance takes both for characters of every set that has all
    control characters, even of `[^"]`.
    """
    if not _has(characters, 0) or (_has(characters, ord('"')) and _has(characters, ord("\\"))):
        return characters
    return _set([(max(low, 1), high) for low, high in characters.ranges if high])


def _has(characters: _Set, code: int) -> bool:
    return any(low <= code <= high for low, high in characters.ranges)


def _class_text(characters: _Set) -> str:
    characters = _quotable(characters)
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


# The automaton of a pattern.

_Formula = frozenset[frozenset[int]]  # One of these sets of places all lead on. A negative place must not lead on.
_NEVER: _Formula = frozenset()
_ALWAYS: _Formula = frozenset([frozenset()])

# What is before a place, or behind it.
_UNKNOWN, _OUTSIDE, _IN_WORD, _NOT_IN_WORD = range(4)
_Neighbour = int


class _Step(NamedTuple):
    """Leads on after one of these characters."""

    characters: int
    place: int


class _Fork(NamedTuple):
    """Leads on at any of these places."""

    places: tuple[int, ...]


class _Condition(NamedTuple):
    """Leads on where this edge is."""

    edge: str
    place: int


class _Ahead(NamedTuple):
    """Leads on where what follows leads on at another place, too, or does not."""

    sought: int
    negated: bool
    place: int


class _Work:
    """What is left of the steps that a call may take."""

    def __init__(self, characters: int) -> None:
        if characters > _MOST_READ:
            raise _BeyondError
        self._left = _MOST_STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _BeyondError


class _Alphabet:
    """Classes of characters that a pattern does not tell apart. A set of classes is an integer, a bit for each."""

    def __init__(self, tree: _Node) -> None:
        sets = {_WORD, *_sets(tree)}
        starts = sorted({0}.union(*[(low, high + 1) for characters in sets for low, high in characters.ranges]))
        if len(starts) > _MOST_EDGES:
            raise _BeyondError
        members: list[list[_Set]] = [[] for _ in starts]
        for characters in sets:
            for low, high in characters.ranges:
                for at in range(bisect_left(starts, low), bisect_left(starts, high + 1)):
                    members[at].append(characters)
        spans: dict[frozenset[_Set], list[tuple[int, int]]] = {}
        for low, after, sets_here in zip(starts, [*starts[1:], _LAST + 1], members, strict=True):
            if _set([(low, after - 1)]).ranges:
                spans.setdefault(frozenset(sets_here), []).append((low, after - 1))
        self._classes = [_set(ranges) for ranges in spans.values()]
        self.bits = {
            characters: sum([1 << at for at, members_here in enumerate(spans) if characters in members_here])
            for characters in sets
        }
        self.size = len(self._classes)

    def characters(self, bits: int) -> _Set:
        return _set([pair for at, part in enumerate(self._classes) if bits >> at & 1 for pair in part.ranges])


def _sets(node: _Node) -> Iterator[_Set]:
    if isinstance(node, _Set):
        yield node
    elif isinstance(node, _Property):
        raise _BeyondError
    elif isinstance(node, _Sequence | _Either):
        for part in node.parts:
            yield from _sets(part)
    elif not isinstance(node, _Edge):
        yield from _sets(node.part)


class _Automaton:
    """A deterministic automaton of the texts that begin with a part. It reads on after the part.

    Args:
        tree: The part.
        before: What is before the text.
        work: Counts the steps.
    """

    def __init__(self, tree: _Node, before: _Neighbour, work: _Work) -> None:
        self.alphabet = _Alphabet(tree)
        self._word = self.alphabet.bits[_WORD]
        self._work = work
        self._program: list[_Step | _Fork | _Condition | _Ahead] = [_Fork(())]  # The place 0 is the end of the part.
        self._ways: dict[tuple[int, _Neighbour, _Neighbour], list[tuple[int, frozenset[_Ahead]]]] = {}
        self._derivatives: dict[tuple[int, _Neighbour, int], _Formula] = {}
        self.rows: list[list[int]] = []  # The next state of each state, for each class of characters.
        self.accepting: list[bool] = []
        self._run(self._place(tree, 0), before)

    def _run(self, begin: int, before: _Neighbour) -> None:
        first = (frozenset([frozenset([begin])]) if begin else _ALWAYS, before)
        states = {first: 0}
        waiting = [first]
        minds_words = any(isinstance(part, _Condition) and part.edge in "bB" for part in self._program)
        for formula, before in waiting:  # It grows.
            row = []
            for at in range(self.alphabet.size):
                after = _IN_WORD if minds_words and self._word >> at & 1 else _NOT_IN_WORD
                following = (self._derivative(formula, before, at), after)
                if following not in states:
                    if len(states) == _MOST_STATES:
                        raise _BeyondError
                    states[following] = len(states)
                    waiting.append(following)
                row.append(states[following])
            self.rows.append(row)
            self.accepting.append(self._ends(formula, before))

    def _place(self, node: _Node, place: int) -> int:
        """Return the place from which a part leads on to another place."""
        self._work.spend(1)
        if isinstance(node, _Sequence):
            for part in reversed(node.parts):
                place = self._place(part, place)
            return place
        if isinstance(node, _Repeat):
            if node.most is None:
                loop = self._new(_Fork(()))
                self._program[loop] = _Fork((self._place(node.part, loop), place))
                place = loop
            else:
                end = place
                for _ in range(node.most - node.least):
                    place = self._new(_Fork((self._place(node.part, place), end)))
            for _ in range(node.least):
                place = self._place(node.part, place)
            return place
        if isinstance(node, _Either):
            return self._new(_Fork(tuple([self._place(part, place) for part in node.parts])))
        if isinstance(node, _Set):
            return self._new(_Step(self.alphabet.bits[node], place))
        if isinstance(node, _Edge):
            return self._new(_Condition(node.kind, place))
        if isinstance(node, _Property) or node.behind:
            raise _BeyondError
        return self._new(_Ahead(self._place(node.part, 0), node.negated, place))

    def _new(self, part: _Step | _Fork | _Condition | _Ahead) -> int:
        self._program.append(part)
        return len(self._program) - 1

    def _from(self, place: int, before: _Neighbour, behind: _Neighbour) -> list[tuple[int, frozenset[_Ahead]]]:
        """Return the steps and ends to which a place leads without a character, each with what must hold ahead."""
        key = (place, before, behind)
        if key in self._ways:
            return self._ways[key]
        seen = {(place, frozenset[_Ahead]())}
        waiting = list(seen)
        ways = []
        for at, ahead in waiting:  # It grows.
            self._work.spend(1)
            part = self._program[at]
            if not at or isinstance(part, _Step):
                ways.append((at, ahead))
            elif isinstance(part, _Fork):
                following = [(next_place, ahead) for next_place in part.places]
                waiting += [way for way in dict.fromkeys(following) if way not in seen]
                seen.update(following)
            else:
                if isinstance(part, _Ahead):
                    way = (part.place, ahead | {part})
                elif _is_at(part.edge, before, behind):
                    way = (part.place, ahead)
                else:
                    continue
                if way not in seen:
                    seen.add(way)
                    waiting.append(way)
        self._ways[key] = ways
        return ways

    def _derivative(self, formula: _Formula, before: _Neighbour, at: int) -> _Formula:
        """Return what must lead on after a character of the class `at`."""
        return self._any(
            [
                self._all([self._after(abs(place), before, at, negated=place < 0) for place in places])
                for places in formula
            ]
        )

    def _after(self, place: int, before: _Neighbour, at: int, *, negated: bool) -> _Formula:
        key = (-place if negated else place, before, at)
        if key in self._derivatives:
            return self._derivatives[key]
        if negated:
            found = self._not(self._after(place, before, at, negated=False))
        else:
            behind = _IN_WORD if self._word >> at & 1 else _NOT_IN_WORD
            alternatives = []
            for end, ahead in self._from(place, before, behind):
                part = self._program[end]
                following = _ALWAYS
                if isinstance(part, _Step):
                    if not part.characters >> at & 1:
                        continue
                    following = frozenset([frozenset([part.place])]) if part.place else _ALWAYS
                conditions = [self._after(look.sought, before, at, negated=look.negated) for look in ahead]
                alternatives.append(self._all([following, *conditions]))
            found = self._any(alternatives)
        self._derivatives[key] = found
        return found

    def _ends(self, formula: _Formula, before: _Neighbour) -> bool:
        """Whether a text can end in a state."""
        return any(all(self._leads_to_end(abs(place), before) == (place > 0) for place in places) for places in formula)

    def _leads_to_end(self, place: int, before: _Neighbour) -> bool:
        return any(
            all(self._leads_to_end(look.sought, before) != look.negated for look in ahead)
            for end, ahead in self._from(place, before, _OUTSIDE)
            if not end
        )

    def _any(self, formulas: Sequence[_Formula]) -> _Formula:
        """Return the disjunction. A set that has all of another set's places says nothing more."""
        united = frozenset().union(*formulas)
        self._work.spend(len(united))
        if len(united) < 2 or all(len(places) == 1 for places in united):
            return united
        kept: list[frozenset[int]] = []
        for places in sorted(united, key=len):
            self._work.spend(len(kept))
            if not any(fewer <= places for fewer in kept):
                kept.append(places)
        return frozenset(kept)

    def _all(self, formulas: Iterable[_Formula]) -> _Formula:
        result = _ALWAYS
        for formula in formulas:
            if result == _ALWAYS or formula == _NEVER:
                result = formula
            elif formula != _ALWAYS:
                self._work.spend(len(result) * len(formula))
                joined = [one | other for one in result for other in formula]
                result = self._any([frozenset([sets for sets in joined if not any(-place in sets for place in sets)])])
            if not result:
                break
        return result

    def _not(self, formula: _Formula) -> _Formula:
        return self._all([frozenset([frozenset([-place]) for place in places]) for places in formula])


def _is_at(edge: str, before: _Neighbour, behind: _Neighbour) -> bool:
    if edge == "$":
        return behind == _OUTSIDE
    if before == _UNKNOWN:
        raise _BeyondError
    if edge == "^":
        return before == _OUTSIDE
    return ((before == _IN_WORD) != (behind == _IN_WORD)) == (edge == "b")


# The patterns of a tree.


def _patterns(tree: _Node, work: _Work) -> list[str]:
    """Return plain patterns that together mean a tree. What looks ahead at the beginning is a pattern of its own."""
    parts = list(_parts(tree))
    found: list[str] = []
    while parts[:1] == [_BEGIN] and len(parts) > 1 and _is_look(parts[1], behind=False):
        found += _look_patterns(parts.pop(1), work)
    while parts[-1:] == [_END] and len(parts) > 1 and _is_look(parts[-2], behind=True):
        found += _look_patterns(parts.pop(-2), work)
    rest = _Sequence(tuple(parts))
    if _is_plain(rest):
        return [*found, _text(rest)] if len(parts) > 1 or not found else found
    first = next(at for at, part in enumerate(parts) if not _is_plain(part, first=at == 0, last=False))
    for at in range(first, max(first - 3, int(parts[0] == _BEGIN)), -1):
        before = _Sequence(tuple(parts[:at]))
        try:
            automaton = _Automaton(_Sequence(tuple(parts[at:])), _UNKNOWN, work)
        except _BeyondError:
            continue
        return [*found, f"{_text(before)}(?:{_expression(automaton, work)})$"]
    return [*found, _one_pattern(rest, work)]


def _look_patterns(look: _Node, work: _Work) -> list[str]:
    """Return the patterns of a part that looks from an end of the text."""
    assert isinstance(look, _Look)
    sought = _Sequence((*_parts(look.part), _END) if look.behind else (_BEGIN, *_parts(look.part)))
    return [_one_pattern(sought, work, complemented=True)] if look.negated else _patterns(sought, work)


def _one_pattern(tree: _Node, work: _Work, *, complemented: bool = False) -> str:
    backwards = _looks_behind(tree)
    if backwards:
        tree = _reversed(tree)
    branches = tree.parts if isinstance(tree, _Either) else (tree,)
    anchored: list[_Node] = []
    others: list[_Node] = []
    for branch in branches:
        (anchored if _parts(branch)[:1] == (_BEGIN,) else others).append(branch)
    found = _Either((*anchored, _Sequence((_ANYTHING, _Either(tuple(others))))))
    automaton = _Automaton(found, _OUTSIDE, work)
    return f"^(?:{_expression(automaton, work, complemented=complemented, backwards=backwards)})$"


def _parts(node: _Node) -> tuple[_Node, ...]:
    return node.parts if isinstance(node, _Sequence) else (node,)


def _is_look(node: _Node, *, behind: bool) -> bool:
    return isinstance(node, _Look) and node.behind == behind


def _looks_behind(node: _Node) -> bool:
    if isinstance(node, _Sequence | _Either):
        return any(map(_looks_behind, node.parts))
    if isinstance(node, _Look | _Repeat):
        return _is_look(node, behind=True) or _looks_behind(node.part)
    return False


def _reversed(node: _Node) -> _Node:
    """Return a tree for texts that are read from their ends."""
    if isinstance(node, _Sequence):
        return _Sequence(tuple(map(_reversed, reversed(node.parts))))
    if isinstance(node, _Either):
        return _Either(tuple(map(_reversed, node.parts)))
    if isinstance(node, _Repeat):
        return _Repeat(_reversed(node.part), node.least, node.most)
    if isinstance(node, _Look):
        return _Look(_reversed(node.part), not node.behind, node.negated)
    if isinstance(node, _Edge):
        return {"^": _END, "$": _BEGIN}.get(node.kind, node)
    return node


# The expression of an automaton.


def _expression(automaton: _Automaton, work: _Work, *, complemented: bool = False, backwards: bool = False) -> str:
    """Return an expression for the texts that an automaton accepts, or for all others.

    Args:
        automaton: The automaton.
        work: Counts the steps.
        complemented: It is for all others.
        backwards: The automaton reads texts from their ends.
    """
    states = _merged(automaton)
    classes: dict[tuple[int, int], int] = {}
    for state, row in zip(states, automaton.rows, strict=True):
        for at, following in enumerate(row):
            pair = (state, states[following])
            classes[pair] = classes.get(pair, 0) | 1 << at
    ends = {state for at, state in enumerate(states) if automaton.accepting[at] != complemented}
    alive: set[int] = set()
    waiting = list(ends)
    while waiting:
        state = waiting.pop()
        if state not in alive:
            alive.add(state)
            waiting += [before for before, after in classes if after == state]
    graph = _Graph(work, backwards=backwards)
    for (before, after), bits in classes.items():
        if alive.issuperset((before, after)):
            graph.connect_by(before, after, _class_text(automaton.alphabet.characters(bits)))
    for state in ends:
        graph.connect(state, _Graph.END, "")
    if alive:
        graph.connect(_Graph.BEGIN, 0, "")
    text = graph.reduced(alive)
    if text is None:
        return _class_text(_NOTHING)
    nested = deepest = 0
    for character in text:
        nested += (character == "(") - (character == ")")
        deepest = max(deepest, nested)
    if len(text) > _MOST_WRITTEN or deepest > _MOST_NESTED:
        raise _BeyondError
    return text


class _Graph:
    """States, and the expressions that lead from one to another: one or more texts, any of which does."""

    BEGIN, END = -1, -2

    def __init__(self, work: _Work, *, backwards: bool) -> None:
        self._work, self._backwards = work, backwards
        self._onward: defaultdict[int, dict[int, tuple[str, ...]]] = defaultdict(dict)
        self._back: defaultdict[int, set[int]] = defaultdict(set)
        self._single = set[str]()  # Texts to which a sign can be added without a group.

    def connect(self, before: int, after: int, text: str) -> None:
        self._work.spend(1 + len(text) // 8)
        if len(text) > _MOST_WRITTEN:
            raise _BeyondError
        texts = self._onward[before].get(after, ())
        if text not in texts:
            self._onward[before][after] = (*texts, text)
            self._back[after].add(before)

    def connect_by(self, before: int, after: int, characters: str) -> None:
        self._single.add(characters)
        self.connect(before, after, characters)

    def reduced(self, states: Iterable[int]) -> str | None:
        """Remove these states. Returns what leads from the beginning to the end. None if nothing does."""
        costs = {state: self._cost(state) for state in states}
        while costs:
            cheapest = min(costs, key=costs.__getitem__)
            del costs[cheapest]
            self._work.spend(len(costs) // 8)
            costs |= {state: self._cost(state) for state in self._remove(cheapest) if state in costs}
        texts = self._onward[self.BEGIN].get(self.END)
        return None if texts is None else "|".join(texts)

    def _cost(self, state: int) -> int:
        """Return how many characters are written once more when a state is removed."""
        before = [self._onward[other][state] for other in self._back[state] if other != state]
        after = [texts for other, texts in self._onward[state].items() if other != state]
        loop = self._onward[state].get(state, ())
        inward, outward, around = [
            sum([len(text) + 4 for texts in pairs for text in texts]) for pairs in (before, after, [loop])
        ]
        return inward * (len(after) - 1) + outward * (len(before) - 1) + around * (len(before) * len(after) - 1)

    def _remove(self, state: int) -> set[int]:
        """Connect the states before and after one past it. Returns them."""
        loop = self._grouped(self._onward[state].pop(state, ()), "*")
        onward, back = self._onward.pop(state), self._back.pop(state) - {state}
        for before in back:
            inward = self._grouped(self._onward[before].pop(state))
            for after, choices in onward.items():
                texts = [inward + "+"] if loop == inward + "*" else [inward, loop]
                texts.append(self._grouped(choices))
                self.connect(before, after, "".join(reversed(texts) if self._backwards else texts))
        for after in onward:
            self._back[after].discard(state)
        return back.union(onward)

    def _grouped(self, choices: Sequence[str], sign: str = "") -> str:
        """Return choices as a part of a text, with a sign of repetition."""
        texts = [text for text in choices if text]
        if not texts:
            return ""
        if len(texts) < len(choices):
            sign = sign or "?"
        text = "|".join(texts)
        return text + sign if text in self._single or (len(texts) == 1 and not sign) else f"(?:{text}){sign}"


def _merged(automaton: _Automaton) -> list[int]:
    """Return a number for each state, the same for states from which the same texts are accepted. The first has 0."""
    groups = [int(accepting != automaton.accepting[0]) for accepting in automaton.accepting]
    while True:
        numbers: dict[tuple[int, ...], int] = {}
        finer = [
            numbers.setdefault((group, *[groups[after] for after in row]), len(numbers))
            for group, row in zip(groups, automaton.rows, strict=True)
        ]
        if len(numbers) == len(set(groups)):
            return groups
        groups = finer
