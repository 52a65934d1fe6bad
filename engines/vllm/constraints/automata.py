"""Automata that accept the texts that begin with a match of a pattern.

`expression` removes the states of an automaton one by one (state elimination), and returns a regular expression for
these texts, or for all other texts if `complemented`.

An automaton follows all paths through a pattern's tree at once. Each state is a formula over places in the tree. A
formula is a set of alternatives, and the rest of the text must match one of them. To match an alternative, the rest
must match at all of its places (look-ahead), but not at its negative places (negative look-ahead).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, auto
from typing import NamedTuple

from engines.vllm.constraints.pattern_trees import (
    LAST,
    NOTHING,
    WORD,
    BeyondError,
    Chain,
    Characters,
    Edge,
    Either,
    Node,
    Property,
    Repeat,
    characters_of,
    class_text,
)

# The limits of one call. With them, a call takes at most about a second, and llguidance compiles the result quickly.
_MOST_READ, _MOST_WRITTEN, _MOST_NESTED = 4_096, 16_384, 55
_MOST_STATES, _MOST_STEPS, _MOST_EDGES = 512, 200_000, 512

_Formula = frozenset[frozenset[int]]  # A disjunction of conjunctions of places. A negative place must not match.
_NEVER: _Formula = frozenset()
_ALWAYS: _Formula = frozenset([frozenset()])


class Neighbour(IntEnum):
    """The character before or after a position in the text."""

    UNKNOWN = auto()
    OUTSIDE = auto()  # The position is at the beginning or the end of the text.
    IN_WORD = auto()
    NOT_IN_WORD = auto()


class _Step(NamedTuple):
    """Continues at a place after one of these characters."""

    characters: int
    place: int


class _Fork(NamedTuple):
    """Continues at any of these places."""

    places: tuple[int, ...]


class _Condition(NamedTuple):
    """Continues at a place if the anchor or the word boundary (`Edge`) matches here."""

    edge: str
    place: int


class _Ahead(NamedTuple):
    """Continues at `place` if the rest of the text matches at `sought`. If `negated`, it must not match there."""

    sought: int
    negated: bool
    place: int


class Work:
    """Counts the steps that a call may still take."""

    def __init__(self, characters: int) -> None:
        if characters > _MOST_READ:
            raise BeyondError
        self._left = _MOST_STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise BeyondError


class _Alphabet:
    """Divides the characters into classes. A pattern does not distinguish the characters of one class.

    A set of classes is an integer with a bit for each class.
    """

    def __init__(self, tree: Node) -> None:
        sets = {WORD, *_sets(tree)}
        starts = sorted({0}.union(*[(low, high + 1) for characters in sets for low, high in characters.ranges]))
        if len(starts) > _MOST_EDGES:
            raise BeyondError
        members: list[list[Characters]] = [[] for _ in starts]
        for characters in sets:
            for low, high in characters.ranges:
                for at in range(bisect_left(starts, low), bisect_left(starts, high + 1)):
                    members[at].append(characters)
        spans: dict[frozenset[Characters], list[tuple[int, int]]] = {}
        for low, after, sets_here in zip(starts, [*starts[1:], LAST + 1], members, strict=True):
            if characters_of([(low, after - 1)]).ranges:
                spans.setdefault(frozenset(sets_here), []).append((low, after - 1))
        self._classes = [characters_of(ranges) for ranges in spans.values()]
        self.bits = {
            characters: sum([1 << at for at, members_here in enumerate(spans) if characters in members_here])
            for characters in sets
        }
        self.size = len(self._classes)

    def characters(self, bits: int) -> Characters:
        return characters_of([pair for at, part in enumerate(self._classes) if bits >> at & 1 for pair in part.ranges])


def _sets(node: Node) -> Iterator[Characters]:
    if isinstance(node, Characters):
        yield node
    elif isinstance(node, Property):
        raise BeyondError
    elif isinstance(node, Chain | Either):
        for part in node.parts:
            yield from _sets(part)
    elif not isinstance(node, Edge):
        yield from _sets(node.part)


class Automaton:
    """A deterministic automaton. It accepts a text if the pattern matches the text or its beginning.

    Args:
        tree: The pattern.
        before: The character before the text.
        work: Counts the steps.
    """

    def __init__(self, tree: Node, before: Neighbour, work: Work) -> None:
        self.alphabet = _Alphabet(tree)
        self._word = self.alphabet.bits[WORD]
        self._work = work
        self._program: list[_Step | _Fork | _Condition | _Ahead] = [_Fork(())]  # Place 0 is the end of the pattern.
        self._ways: dict[tuple[int, Neighbour, Neighbour], list[tuple[int, frozenset[_Ahead]]]] = {}
        self._derivatives: dict[tuple[int, Neighbour, int], _Formula] = {}
        self.rows: list[list[int]] = []  # For each state: the next state for each class.
        self.accepting: list[bool] = []
        self._run(self._place(tree, 0), before)

    def _run(self, begin: int, before: Neighbour) -> None:
        first = (frozenset([frozenset([begin])]) if begin else _ALWAYS, before)
        states = {first: 0}
        waiting = [first]
        minds_words = any(isinstance(part, _Condition) and part.edge in "bB" for part in self._program)
        for formula, before in waiting:  # The loop appends to `waiting`.
            row = []
            for at in range(self.alphabet.size):
                after = Neighbour.IN_WORD if minds_words and self._word >> at & 1 else Neighbour.NOT_IN_WORD
                following = (self._derivative(formula, before, at), after)
                if following not in states:
                    if len(states) == _MOST_STATES:
                        raise BeyondError
                    states[following] = len(states)
                    waiting.append(following)
                row.append(states[following])
            self.rows.append(row)
            self.accepting.append(self._ends(formula, before))

    def _place(self, node: Node, place: int) -> int:
        """Compile a part of the tree. `place` follows this part. Return the place at which the part begins."""
        self._work.spend(1)
        if isinstance(node, Chain):
            for part in reversed(node.parts):
                place = self._place(part, place)
            return place
        if isinstance(node, Repeat):
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
        if isinstance(node, Either):
            return self._new(_Fork(tuple([self._place(part, place) for part in node.parts])))
        if isinstance(node, Characters):
            return self._new(_Step(self.alphabet.bits[node], place))
        if isinstance(node, Edge):
            return self._new(_Condition(node.kind, place))
        if isinstance(node, Property) or node.behind:
            raise BeyondError
        return self._new(_Ahead(self._place(node.part, 0), node.negated, place))

    def _new(self, part: _Step | _Fork | _Condition | _Ahead) -> int:
        self._program.append(part)
        return len(self._program) - 1

    def _from(self, place: int, before: Neighbour, behind: Neighbour) -> list[tuple[int, frozenset[_Ahead]]]:
        """Return the steps and ends that are reachable without reading a character, each with its look-aheads."""
        key = (place, before, behind)
        if key in self._ways:
            return self._ways[key]
        seen = {(place, frozenset[_Ahead]())}
        waiting = list(seen)
        ways = []
        for at, ahead in waiting:  # The loop appends to `waiting`.
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

    def _derivative(self, formula: _Formula, before: Neighbour, at: int) -> _Formula:
        """Return the formula that the text after a character of the class `at` must match."""
        return self._any(
            [
                self._all([self._after(abs(place), before, at, negated=place < 0) for place in places])
                for places in formula
            ]
        )

    def _after(self, place: int, before: Neighbour, at: int, *, negated: bool) -> _Formula:
        key = (-place if negated else place, before, at)
        if key in self._derivatives:
            return self._derivatives[key]
        if negated:
            found = self._not(self._after(place, before, at, negated=False))
        else:
            behind = Neighbour.IN_WORD if self._word >> at & 1 else Neighbour.NOT_IN_WORD
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

    def _ends(self, formula: _Formula, before: Neighbour) -> bool:
        """Return True if a text that ends in a state is accepted."""
        return any(all(self._leads_to_end(abs(place), before) == (place > 0) for place in places) for places in formula)

    def _leads_to_end(self, place: int, before: Neighbour) -> bool:
        return any(
            all(self._leads_to_end(look.sought, before) != look.negated for look in ahead)
            for end, ahead in self._from(place, before, Neighbour.OUTSIDE)
            if not end
        )

    def _any(self, formulas: Sequence[_Formula]) -> _Formula:
        """Return the disjunction. A set of places is dropped if it contains all places of another set."""
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


def _is_at(edge: str, before: Neighbour, behind: Neighbour) -> bool:
    if edge == "$":
        return behind == Neighbour.OUTSIDE
    if before == Neighbour.UNKNOWN:
        raise BeyondError
    if edge == "^":
        return before == Neighbour.OUTSIDE
    return ((before == Neighbour.IN_WORD) != (behind == Neighbour.IN_WORD)) == (edge == "b")


def expression(automaton: Automaton, work: Work, *, complemented: bool = False, backwards: bool = False) -> str:
    """Return an expression for the texts that an automaton accepts, or for all other texts.

    Args:
        automaton: The automaton.
        work: Counts the steps.
        complemented: Whether the expression is for all other texts.
        backwards: Whether the automaton reads texts backwards.
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
            graph.connect_by(before, after, class_text(automaton.alphabet.characters(bits)))
    for state in ends:
        graph.connect(state, _Graph.END, "")
    if alive:
        graph.connect(_Graph.BEGIN, 0, "")
    text = graph.reduced(alive)
    if text is None:
        return class_text(NOTHING)
    nested = deepest = 0
    for character in text:
        nested += (character == "(") - (character == ")")
        deepest = max(deepest, nested)
    if len(text) > _MOST_WRITTEN or deepest > _MOST_NESTED:
        raise BeyondError
    return text


class _Graph:
    """States, and the alternative expressions that lead from one state to another."""

    BEGIN, END = -1, -2

    def __init__(self, work: Work, *, backwards: bool) -> None:
        self._work, self._backwards = work, backwards
        self._onward: defaultdict[int, dict[int, tuple[str, ...]]] = defaultdict(dict)
        self._back: defaultdict[int, set[int]] = defaultdict(set)
        self._single = set[str]()  # Expressions that need no group if a quantifier follows.

    def connect(self, before: int, after: int, text: str) -> None:
        self._work.spend(1 + len(text) // 8)
        if len(text) > _MOST_WRITTEN:
            raise BeyondError
        texts = self._onward[before].get(after, ())
        if text not in texts:
            self._onward[before][after] = (*texts, text)
            self._back[after].add(before)

    def connect_by(self, before: int, after: int, characters: str) -> None:
        self._single.add(characters)
        self.connect(before, after, characters)

    def reduced(self, states: Iterable[int]) -> str | None:
        """Remove these states. Return the expression from the beginning to the end; None if there is no path."""
        costs = {state: self._cost(state) for state in states}
        while costs:
            cheapest = min(costs, key=costs.__getitem__)
            del costs[cheapest]
            self._work.spend(len(costs) // 8)
            costs |= {state: self._cost(state) for state in self._remove(cheapest) if state in costs}
        texts = self._onward[self.BEGIN].get(self.END)
        return None if texts is None else "|".join(texts)

    def _cost(self, state: int) -> int:
        """Return the number of characters by which the expressions grow if a state is removed."""
        before = [self._onward[other][state] for other in self._back[state] if other != state]
        after = [texts for other, texts in self._onward[state].items() if other != state]
        loop = self._onward[state].get(state, ())
        inward, outward, around = [
            sum([len(text) + 4 for texts in pairs for text in texts]) for pairs in (before, after, [loop])
        ]
        return inward * (len(after) - 1) + outward * (len(before) - 1) + around * (len(before) * len(after) - 1)

    def _remove(self, state: int) -> set[int]:
        """Remove a state, and connect the states before it with the states after it. Return its former neighbours."""
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
        """Join alternatives into one part of an expression, and add a quantifier to this part."""
        texts = [text for text in choices if text]
        if not texts:
            return ""
        if len(texts) < len(choices):
            sign = sign or "?"
        text = "|".join(texts)
        return text + sign if text in self._single or (len(texts) == 1 and not sign) else f"(?:{text}){sign}"


def _merged(automaton: Automaton) -> list[int]:
    """Return a number for each state. States that accept the same texts get the same number. The first state gets 0."""
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
