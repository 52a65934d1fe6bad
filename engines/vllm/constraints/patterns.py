"""Replaces the patterns of JSON schemas with patterns that llguidance supports.

A text matches a pattern if the pattern is found anywhere in the text. llguidance does not support look-around, word
boundaries, complements, or `^` and `$` inside an expression. All of these are regular: an automaton can express them,
and the automaton can be written as an expression.

The equivalences below may not hold for texts with NUL, because some character classes lose NUL (see
`pattern_trees.quotable`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engines.vllm.constraints.automata import Automaton, Neighbour, Work, expression
from engines.vllm.constraints.pattern_trees import (
    ANYTHING,
    BEGIN,
    END,
    BeyondError,
    Chain,
    Either,
    Look,
    Node,
    Parser,
    is_look,
    is_plain,
    looks_behind,
    one,
    parts_of,
    reversed_tree,
    rust_text,
)


def complement(pattern: str) -> str | None:
    """Return a pattern for exactly the texts in which the given pattern is not found; None if it would be too large."""
    try:
        return _one_pattern(Parser(pattern).read(), Work(len(pattern)), complemented=True)
    except (BeyondError, RecursionError):
        return None


def none_of(words: Collection[str]) -> str | None:
    """Return a pattern that is found in all texts except these words; None if it would be too large."""
    length = sum(map(len, words))
    literals = [Chain(tuple([one(ord(character)) for character in word])) for word in words]
    try:
        return _one_pattern(Chain((BEGIN, Either(tuple(literals)), END)), Work(length), complemented=True)
    except (BeyondError, RecursionError):
        return None


def all_but(words: Iterable[str], others: Iterable[str]) -> str | None:
    """Return a pattern for all texts except two kinds: `words`, and texts in which one of `others` is found."""
    excluded = [rf"[\s\S]*(?:{other})" for other in others]
    excluded += ["".join([f"\\u{{{ord(character):x}}}" for character in word]) + "$" for word in words]
    found = without_look_around(f"^{''.join([f'(?!{each})' for each in excluded])}[\\s\\S]*$", single=True)
    return None if found is None else found[0]


def without_look_around(pattern: str, *, single: bool = False) -> tuple[str, ...] | None:
    """Return patterns that llguidance supports. A text matches all of them if and only if it matches `pattern`.

    llguidance reads the returned patterns as ECMA-262 does. If this also holds for the given pattern, it is returned
    unchanged.

    Args:
        pattern: The pattern.
        single: Whether to return only one pattern.

    Returns:
        The patterns. None if this module cannot read the pattern, or if the result would be too large.
    """
    try:
        parser = Parser(pattern)
        tree = parser.read()
        if is_plain(tree):
            return (rust_text(tree) if parser.differs else pattern,)
        found = _patterns(tree, Work(len(pattern)))
        return (_one_pattern(tree, Work(len(pattern))),) if single and len(found) > 1 else tuple(found)
    except (BeyondError, RecursionError):
        return None


def _patterns(tree: Node, work: Work) -> list[str]:
    """Return plain patterns that together are equivalent to a tree.

    Look-aheads at the start and look-behinds at the end become separate patterns.
    """
    parts = list(parts_of(tree))
    found: list[str] = []
    while parts[:1] == [BEGIN] and len(parts) > 1 and is_look(parts[1], behind=False):
        found += _look_patterns(parts.pop(1), work)
    while parts[-1:] == [END] and len(parts) > 1 and is_look(parts[-2], behind=True):
        found += _look_patterns(parts.pop(-2), work)
    rest = Chain(tuple(parts))
    if is_plain(rest):
        return [*found, rust_text(rest)] if len(parts) > 1 or not found else found
    first = next(at for at, part in enumerate(parts) if not is_plain(part, first=at == 0, last=False))
    for at in range(first, max(first - 3, int(parts[0] == BEGIN)), -1):
        before = Chain(tuple(parts[:at]))
        try:
            automaton = Automaton(Chain(tuple(parts[at:])), Neighbour.UNKNOWN, work)
        except BeyondError:
            continue
        return [*found, f"{rust_text(before)}(?:{expression(automaton, work)})$"]
    return [*found, _one_pattern(rest, work)]


def _look_patterns(look: Node, work: Work) -> list[str]:
    """Return the patterns for a look-around at the beginning or the end of the text."""
    assert isinstance(look, Look)
    sought = Chain((*parts_of(look.part), END) if look.behind else (BEGIN, *parts_of(look.part)))
    return [_one_pattern(sought, work, complemented=True)] if look.negated else _patterns(sought, work)


def _one_pattern(tree: Node, work: Work, *, complemented: bool = False) -> str:
    backwards = looks_behind(tree)
    if backwards:
        tree = reversed_tree(tree)
    branches = tree.parts if isinstance(tree, Either) else (tree,)
    anchored: list[Node] = []
    others: list[Node] = []
    for branch in branches:
        (anchored if parts_of(branch)[:1] == (BEGIN,) else others).append(branch)
    found = Either((*anchored, Chain((ANYTHING, Either(tuple(others))))))
    automaton = Automaton(found, Neighbour.OUTSIDE, work)
    return f"^(?:{expression(automaton, work, complemented=complemented, backwards=backwards)})$"
