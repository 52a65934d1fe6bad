"""JSON schemas, rewritten for llguidance.

llguidance refuses a whole schema for one keyword that it does not know. So a schema is rewritten first: what says
nothing is left out, and what can be expressed in other keywords is expressed in them. The rest is not held: the caller
gets its places and decides. `KEYWORDS` says what is done with each keyword, and why.

A rewritten schema never allows more than the schema does, apart from the places that are named.

Source: JSON Schema, drafts 4 to 2020-12; llguidance, `docs/json_schema.md` and `parser/src/json`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import quote, unquote

from engines.vllm.constraints import formats, patterns

MAX_CHARACTERS = 1 << 17  # Of a schema without what says nothing.
WHOLE = "#"  # The place of a schema of which nothing is held but its type.
# The most schemas that rewriting may add, and the most that may replace one keyword.
_MOST_ADDED, _MOST_ALTERNATIVES = 2048, 128
_MOST_BRANCHES = 48  # Of a `oneOf`. Each pair is compared.
_MOST_PLACES = 64  # That are named. A schema with more parts that are not held names these.
_NO_SCHEMA, _TOO_DEEP = "it must be a JSON schema, which is a JSON object", "it is nested too deeply"

_Schema = bool | dict[str, Any]
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_EVERY = frozenset(_TYPES)
# llguidance's options for writing JSON, which stand in the schema in the place of the client's.
_FLEXIBLE = {"whitespace_flexible": True}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# Keywords beside which an object is not closed: they say what further members it may have.
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties", "dependentSchemas")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef", "not")
_OLD = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")  # `$ref` replaces the keywords beside it.
# llguidance reads bounds as doubles, and those of integers as 64 bits.
_LARGEST_BOUND = math.nextafter(2.0**63, 0.0)


def for_guidance(text: str, fault: Callable[[str], str], *, compact: bool) -> tuple[str, tuple[str, ...], str]:
    """Rewrite a schema.

    Args:
        text: The schema.
        fault: Returns llguidance's complaint about a schema; "" if there is none.
        compact: The JSON has no white space.

    Returns:
        The schema for llguidance; the places of its parts that are not held, as URI fragments; and llguidance's
        complaint, if the place is `WHOLE`, or if no text is allowed by the whole schema.

    Raises:
        ValueError: It is no JSON schema, nested too deeply, or too long.
    """
    try:
        root = json.loads(text, parse_constant=_refused)
        if not isinstance(root, dict):
            raise ValueError(_NO_SCHEMA)
        options = {"x-guidance": _COMPACT if compact else _FLEXIBLE}
        begun, complaint, empty = time.process_time(), "", ""
        for way in _WAYS:
            if complaint and time.process_time() > begun + _SECONDS:
                break
            rewriter = _Rewriter(root, fault, way, closed=way.closed and '"allOf"' not in text)
            written = json.dumps(rewriter.document() | options, separators=(",", ":"))
            complaint = (
                fault(written) if len(written) <= MAX_CHARACTERS else f"it has more than {MAX_CHARACTERS} characters"
            )
            if not complaint:
                return written, tuple(itertools.islice(rewriter.not_held, _MOST_PLACES)), empty
            empty = empty or complaint * _is_empty(complaint)
        types = _types(root) or (frozenset({"object"}) if "properties" in root else _EVERY)
        return json.dumps({"type": _written(types)} | options), (WHOLE,), complaint
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise ValueError(_NO_SCHEMA) from None


def _refused(_: str) -> None:
    raise ValueError(_NO_SCHEMA)


class _Way(NamedTuple):
    """A way to rewrite a schema. The next one is taken if llguidance refuses what the last one has made."""

    careful: bool = False  # Parts are tried out alone.
    loose: bool = False  # Keywords that other keywords have to express are not held.
    closed: bool = True  # Objects are closed.


_WAYS = (
    _Way(),
    _Way(careful=True),
    _Way(careful=True, closed=False),
    _Way(careful=True, loose=True),
    _Way(careful=True, loose=True, closed=False),
)
_SECONDS = 0.6  # Of processor time, after which nothing more is compared or tried out.


@dataclass(slots=True)
class _Node:
    """One schema while it is rewritten."""

    given: dict[str, Any]
    place: str
    types: frozenset[str]
    closed: bool  # An object has only the members that are named.
    exact: bool  # It is a condition: no text is excluded that the standard allows.
    out: dict[str, Any] = field(default_factory=dict)
    also: list[_Schema] = field(default_factory=list)  # Further schemas that have to hold.

    def add(self, *schemas: _Schema) -> None:
        """Add schemas that have to hold as well. Their place among the keywords decides on the order of members."""
        self.out["allOf"] = self.also
        self.also += schemas


class _Rewriter:
    """Rewrites one document."""

    def __init__(self, root: dict[str, Any], fault: Callable[[str], str], way: _Way, *, closed: bool) -> None:
        self._root, self._fault, self._way, self._closed = root, fault, way, closed
        self._end = time.process_time() + _SECONDS
        self._old = any(name in str(root.get("$schema")) for name in _OLD)
        self._definitions: dict[str, _Schema] = {}  # By name. While one is being rewritten: its type.
        self._open: set[str] = set()  # The names of those.
        self._names: dict[tuple[str, bool, bool], str] = {}
        self._anchors: dict[str, str] | None = None  # Pointers by anchor.
        self._left = _MOST_ADDED
        self._negated: list[str] = []  # References that are being negated.
        self._sound: dict[str, bool] = {}  # Fragments that llguidance takes.
        self.not_held: dict[str, None] = {}  # Places, in order.

    def document(self) -> dict[str, Any]:
        """Return the rewritten document."""
        schema = self.schema(self._root, "#", self._closed)
        if schema is False:
            schema = {"enum": []}
        return ({} if schema is True else schema) | self._with_definitions()

    def _with_definitions(self) -> dict[str, Any]:
        return {"$defs": self._definitions} if self._definitions else {}

    def schema(self, given: Any, place: str, closed: bool, *, exact: bool = False) -> _Schema:
        """Return a schema that allows no text that the given one does not, apart from what is not held."""
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise ValueError(f"a schema must be an object or a boolean, at {place}")
        if self._old and isinstance(given.get("$ref"), str):
            given = {"$ref": given["$ref"]}
        node = _Node(given, place, _types(given) or _EVERY, closed, exact)
        if isinstance(given.get("properties"), dict) and "type" not in given and not exact:
            # By the standard `{"properties": ...}` allows any number or text as well, which nobody means.
            node.types = frozenset({"object"})
        if node.types != _EVERY:
            node.out["type"] = _written_types(node.types)
        for keyword, value in given.items():
            rule = KEYWORDS.get(keyword)
            if rule is None or rule.rewrite is None or not (rule.types & node.types):
                continue  # says nothing
            before = dict(node.out), list(node.also)
            held = rule.rewrite(self, node, keyword, value)
            if self._way.loose and keyword in _EXPRESSED and before != (node.out, node.also):
                node.out, node.also[:], held = *before, False
            if not held:
                self._leave(node, keyword)
        if self._is_closed(node):
            node.out["additionalProperties"] = False
        return self._joined(node)

    def _leave(self, node: _Node, keyword: str) -> None:
        """Note that a keyword is not held."""
        self.not_held[_below(node.place, keyword)] = None

    @staticmethod
    def _is_closed(node: _Node) -> bool:
        """Return True if an object that names its members has no others.

        By the standard it may have any. A model that may add some seldom stops, and vLLM's usual back end does not
        allow them either. Schemas that are combined with others stay open, and those that need others.
        """
        given, named = node.given, node.given.get("properties")
        if not node.closed or node.exact or not isinstance(named, dict) or any(word in given for word in _COMBINED):
            return False
        if given.get("patternProperties"):
            return True
        least = given.get("minProperties", 0)
        return named.keys() >= set(_strings(given.get("required"))) and not (_is_number(least) and least > len(named))

    def _joined(self, node: _Node) -> _Schema:
        """Return a node's schema with the further ones that have to hold."""
        also = [part for part in node.also if part is not True and part != {}]
        if False in also or not node.types:
            return False
        if self._way.careful and (len(also) > 1 or node.out.keys() - {"allOf"}):
            # llguidance does not combine a schema that refers to itself with others.
            for part in also:
                if not self._leads_back(part):
                    continue
                for keyword in node.given:
                    if keyword != "$ref" and (rule := KEYWORDS.get(keyword)) is not None and rule.rewrite is not None:
                        self._leave(node, keyword)
                return part
        out: dict[str, Any] = {}
        for keyword, value in node.out.items():
            if keyword != "allOf":
                out[keyword] = value
            elif len(also) == 1 and _can_be_merged(also[0], node.out):
                out |= also[0]
            elif also:
                out[keyword] = also
        return out or True

    def _leads_back(self, schema: _Schema) -> bool:
        """Return True if a schema refers to one of which it is a part."""
        if isinstance(schema, bool):
            return False
        if str(schema.get("$ref")).rpartition("/")[2] in self._open:
            return True
        return any(self._leads_back(part) for word in ("allOf", "anyOf") for part in schema.get(word, ()))

    @property
    def _late(self) -> bool:
        return time.process_time() > self._end

    def _spend(self, count: int) -> bool:
        """Return True if rewriting may add so many schemas."""
        if count > _MOST_ALTERNATIVES or count > self._left or self._late:
            return False
        self._left -= count
        return True

    @contextlib.contextmanager
    def _silent(self) -> Iterator[dict[str, None]]:
        """Do not note what is not held in the block. Yields what would have been noted."""
        kept, self.not_held = self.not_held, {}
        try:
            yield self.not_held
        finally:
            self.not_held = kept

    def _takes(self, fragment: dict[str, Any]) -> bool:
        """Return True if llguidance takes a part alone. It is asked if it has refused the whole."""
        if not self._way.careful:
            return True
        text = json.dumps(fragment)
        if text not in self._sound:
            complaint = self._fault(text)
            self._sound[text] = not complaint or complaint.startswith("Unsatisfiable")
        return self._sound[text]

    # Keywords. Each returns False if it is not held.

    def _type(self, _node: _Node, _: str, value: Any) -> bool:
        names = value if isinstance(value, list) else [value]
        return bool(names) and all(isinstance(name, str) and name in (*_TYPES, "any") for name in names)

    def _enum(self, node: _Node, keyword: str, value: Any) -> bool:
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list):
            return False
        kept = [_plain(each) for each in values if _type_of(each) in node.types or _is_whole(each)]
        if not all(map(_is_exact, kept)):
            return False
        if "enum" in node.out:  # `const` beside `enum`
            node.add({"enum": kept})
        else:
            node.out["enum"] = kept
        return True

    def _number(self, node: _Node, keyword: str, value: Any) -> bool:
        if keyword.startswith("exclusive") and isinstance(value, bool):  # of draft 4, beside `minimum` or `maximum`
            return True
        if not _is_number(value):
            return False
        least = keyword in ("minimum", "exclusiveMinimum")
        if abs(value) >= sys.float_info.max and (value < 0) is least:
            return True  # a number cannot be beyond it
        if abs(value) > _LARGEST_BOUND and (value < 0) is not least:
            return False
        other = "exclusive" + keyword[0].upper() + keyword[1:]
        if keyword == other or node.given.get(other) is True:
            keyword = other
        bound = _plain(_inward(value, up=least))
        if not self._takes({"type": "number", keyword: bound}):
            return False
        node.out[keyword] = bound
        return True

    def _multiple(self, node: _Node, keyword: str, value: Any) -> bool:
        if not _is_number(value) or value <= 0 or not _is_exact(value):
            return False
        if not self._takes({"type": "number", "multipleOf": value}):
            return False
        node.out[keyword] = _plain(value)
        return True

    def _size(self, node: _Node, keyword: str, value: Any) -> bool:
        if not _is_size(value):
            return False
        node.out[keyword] = int(value)
        return True

    def _pattern(self, node: _Node, _: str, value: Any) -> bool:
        held = self._patterns(value)
        if held is None:
            return False
        node.out["pattern"] = held[0]
        if len(held) > 1:
            node.add(*[{"type": _written(node.types), "pattern": each} for each in held[1:]])
        return True

    def _patterns(self, value: Any, *, single: bool = False) -> tuple[str, ...] | None:
        """Return expressions that mean the same together, or a `single` one. None if llguidance has none."""
        if not isinstance(value, str):
            return None
        parts = patterns.without_look_around(value, single=single)
        if parts is not None:
            return parts
        return (value,) if self._takes({"type": "string", "pattern": value}) else None

    def _format(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, str):
            return True
        if (expression := formats.EXPRESSIONS.get(value)) is not None:
            node.add({"type": _written(node.types), "pattern": f"^(?:{expression})$"})
        elif formats.is_known(value):
            node.out[keyword] = value
        return True

    def _items(self, node: _Node, keyword: str, value: Any) -> bool:
        given, place = node.given, _below(node.place, keyword)
        if keyword == "additionalItems":
            if isinstance(given.get("items"), list):
                node.out["items"] = self._part(node, value, place)
            return True
        if not isinstance(value, list):
            node.out["items"] = self._part(node, value, place)
            return True
        node.out["prefixItems"] = [self._part(node, each, _below(place, i)) for i, each in enumerate(value)]
        return True

    def _unique(self, node: _Node, _: str, value: Any) -> bool:
        if value is False:
            return True
        most = node.given.get("maxItems", math.inf)
        if value is not True or (_is_number(most) and most <= 1):
            return value is True
        given = node.given.get("items", True)
        if "prefixItems" in node.given or isinstance(given, list):
            return False
        with self._silent():
            values = _values(self._referred(self.schema(given, "", closed=False)), 4)
        if values is None:
            return False
        choices = [
            list(each)
            for count in range(len(values) + 1)
            if node.given.get("minItems", 0) <= count <= most
            for each in itertools.permutations(values, count)
        ]
        if not self._spend(len(choices)):
            return False
        others = _others(node, "array")
        node.add({"anyOf": [*others, {"enum": choices}]})
        return True

    def _contains(self, node: _Node, _: str, value: Any) -> bool:
        least, most = node.given.get("minContains", 1), node.given.get("maxItems", math.inf)
        if "maxContains" in node.given or not _is_number(least) or least > 1:
            return False
        if least == 0:
            return True
        if not _is_number(most) or not most < 8 or not self._spend(max(int(most), 1)):
            return False
        part = self._part(node, value, _below(node.place, "contains"))
        places = [{"type": "array", "prefixItems": [True] * i + [part], "minItems": i + 1} for i in range(int(most))]
        node.add(_any([*_others(node, "array"), *places]))
        return True

    def _part(self, node: _Node, given: Any, place: str) -> _Schema:
        """Return a schema below a node, of a member or an item."""
        return self.schema(given, place, node.closed, exact=node.exact)

    def _properties(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        place = _below(node.place, keyword)
        node.out[keyword] = {name: self._part(node, each, _below(place, name)) for name, each in value.items()}
        return True

    def _required(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        if value:
            node.out[keyword] = _strings(value)
        return len(_strings(value)) == len(value)

    def _pattern_properties(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        place = _below(node.place, keyword)
        members = {name: self._part(node, each, _below(place, name)) for name, each in value.items()}
        names = {name: self._patterns(name, single=True) for name in members}
        held = {own[0]: members[name] for name, own in names.items() if own is not None}
        if len(held) == len(members) and self._takes({"patternProperties": dict.fromkeys(held, True)}):
            node.out[keyword] = held
            return True
        # Any member whose name matches may have any value.
        if None in names.values():
            node.out["additionalProperties"] = True
        else:
            node.out[keyword] = {"|".join([f"(?:{name})" for name in held]): True}
        return False

    def _additional(self, node: _Node, keyword: str, value: Any) -> bool:
        if keyword not in node.out:
            node.out[keyword] = self._part(node, value, _below(node.place, keyword))
        return True

    def _names_of_members(self, node: _Node, _: str, value: Any) -> bool:
        """`propertyNames`: its expression becomes one of `patternProperties`, beside which nothing is allowed."""
        with self._silent() as left:
            names = self.schema(value, "", closed=False, exact=True)
        if left or self._leads_back(names):
            return False
        names = self._referred(names)
        if isinstance(names, dict) and "enum" not in names and "string" not in (_types(names) or _EVERY):
            names = False
        if isinstance(names, bool) or names.keys() <= {"type"}:
            if names is False:
                node.add({"type": _written(node.types), "maxProperties": 0})
            return True
        others = _others(node, "object")
        if (allowed := _values(names, 1024)) is not None:
            only: dict[str, Any] = {"properties": {name: True for name in allowed if isinstance(name, str)}}
        else:
            expression = self._name_expression(names)
            if expression is None:
                return False
            only = {"patternProperties": {expression: True}}
        node.add(_any([*others, {"type": "object", **only, "additionalProperties": False}]))
        return True

    def _name_expression(self, names: dict[str, Any]) -> str | None:
        """Return one expression of the texts that a rewritten schema allows. None if there is none."""
        parts = [{word: each for word, each in names.items() if word != "allOf"}, *names.get("allOf", ())]
        expressions: list[str] = []
        for part in parts:
            if not isinstance(part, dict) or part.keys() - _OF_NAMES or "string" not in (_types(part) or _EVERY):
                return None
            if "pattern" in part:
                expressions.append(part["pattern"])
            if part.keys() & {"minLength", "maxLength"}:
                expressions.append(rf"^[\s\S]{{{part.get('minLength', 0)},{part.get('maxLength', '')}}}$")
        if len(expressions) == 1:
            return expressions[0]
        both = "".join([rf"(?=[\s\S]*(?:{each}))" for each in expressions])
        found = patterns.without_look_around(f"^{both}", single=True)
        return None if found is None else found[0]

    def _member_count(self, node: _Node, keyword: str, value: Any) -> bool:
        """`minProperties` and `maxProperties`, which llguidance counts only where no member is optional."""
        if not _is_size(value):
            return False
        given, count = node.given, int(value)
        named = given["properties"] if isinstance(given.get("properties"), dict) else {}
        required = set(_strings(given.get("required")))
        optional = [name for name in named if name not in required]
        if keyword == "minProperties" and count <= len(required):
            return True
        if not optional:
            node.out[keyword] = count
            return True
        closed = given.get("additionalProperties") is False or self._is_closed(node)
        further = not closed or bool(given.get("patternProperties"))
        rest = count - len(required)
        if keyword == "maxProperties":
            if not further and rest >= len(optional):
                return True
            if further or rest < 0 or not self._spend(math.comb(len(optional), rest)):
                return False
            chosen = itertools.combinations(optional, len(optional) - rest)
            kept: list[_Schema] = [{"properties": dict.fromkeys(names, False)} for names in chosen]
        else:
            if (rest > 1 and further) or not self._spend(math.comb(len(optional), rest) + 1):
                return False
            kept = [{"required": list(names)} for names in itertools.combinations(optional, rest)]
            if further:
                kept.append({"properties": dict.fromkeys(optional, False), "minProperties": count})
        others = _others(node, "object")
        node.add(_any([*others, *[{"type": "object", **each} for each in kept if isinstance(each, dict)]]))
        return True

    def _dependent(self, node: _Node, keyword: str, value: Any) -> bool:
        """`dependentRequired`, `dependentSchemas`, `dependencies`: a member is missing, or something holds."""
        if not isinstance(value, dict):
            return False
        if not self._spend(1 << min(len(value), 30)):  # they multiply
            return False
        place = _below(node.place, keyword)
        for name, needed in value.items():
            held: _Schema
            if isinstance(needed, str):  # of draft 3
                needed = [needed]
            if isinstance(needed, list):
                held = {"type": _written_types(node.types), "required": _strings(needed)} if needed else True
            else:
                held = self.schema(needed, _below(place, name), closed=False, exact=node.exact)
            if held is not True:
                node.add(_any([{"type": _written_types(node.types), "properties": {name: False}}, held]))
        return True

    def _if(self, node: _Node, _: str, value: Any) -> bool:
        given, branches = node.given, []
        then, otherwise = given.get("then", True), given.get("else", True)
        if then is True and otherwise is True:
            return True
        against = self.negation(value, node.types)
        if against is None or not self._spend(2):
            return False
        condition = self.schema(value, _below(node.place, "if"), closed=False, exact=True)
        if then is not False:
            held = self.schema(then, _below(node.place, "then"), closed=False, exact=node.exact)
            branches.append(_all([condition, held]))
        if otherwise is not False:
            held = self.schema(otherwise, _below(node.place, "else"), closed=False, exact=node.exact)
            branches.append(_all([against, held]))
        node.add(_any(branches))
        return True

    def _not(self, node: _Node, _: str, value: Any) -> bool:
        against = self.negation(value, node.types)
        if against is not None:
            node.add(against)
        return against is not None

    def _all_of(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        place = _below(node.place, keyword)
        node.add(*[self._part(node, each, _below(place, i)) for i, each in enumerate(value)])
        return True

    def _any_of(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        place, closed = _below(node.place, keyword), node.closed and not isinstance(node.given.get("properties"), dict)
        held = [self.schema(each, _below(place, i), closed, exact=node.exact) for i, each in enumerate(value)]
        if keyword == "anyOf" or len(value) < 2:
            node.add(_any(held))
            return True
        needed = frozenset(_strings(node.given.get("required")))
        exclusive = None if self._way.loose else self._exclusive(value, held, node.types, needed)
        node.add(_any(held if exclusive is None else exclusive))
        return exclusive is not None

    def _exclusive(
        self, given: Sequence[Any], held: Sequence[_Schema], types: frozenset[str], needed: frozenset[str]
    ) -> Sequence[_Schema] | None:
        """Return the branches of a `oneOf`, each without what another allows as well. None if that is not expressed.

        Args:
            given: The branches, as the client wrote them.
            held: The same, rewritten.
            types: The types of which the value can be.
            needed: The members that an object has in any case.
        """
        if len(given) > _MOST_BRANCHES or self._late:
            return None
        with self._silent():
            plain = [self.schema(each, "", closed=False, exact=True) for each in given]
        branches: list[_Schema] = []
        for i, branch in enumerate(held):
            parts = [branch]
            for j, other in enumerate(plain):
                if i == j or self._apart(branch, other, needed):
                    continue
                against = self.negation(given[j], types)
                if against is None or not self._spend(1):
                    return None
                parts.append(against)
            branches.append(_all(parts))
        return branches

    def _apart(self, one: _Schema, other: _Schema, needed: frozenset[str]) -> bool:
        """Return True if no text is allowed by both."""
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        if self._differ(one, other, needed):
            return True
        if self._late:
            return False
        return _is_empty(self._fault(json.dumps({"allOf": [one, other]} | self._with_definitions())))

    def _differ(self, one: _Schema, other: _Schema, needed: frozenset[str] = frozenset(), depth: int = 4) -> bool:
        """Return True if a look at types, values and required members shows that no text is allowed by both."""
        one, other = self._referred(one), self._referred(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        types = [_with_integers(_kinds(each)) for each in (one, other)]
        if not types[0] & types[1]:
            return True
        if types[0] & types[1] == {"object"} and depth:
            members = [each.get("properties", {}) for each in (one, other)]
            shared = members[0].keys() & members[1].keys()
            shared &= {*needed, *one.get("required", ()), *other.get("required", ())}
            return any(self._differ(members[0][name], members[1][name], depth=depth - 1) for name in shared)
        values = [_values(each, 256) for each in (one, other)]
        return None not in values and not [value for value in values[0] or () if value in (values[1] or ())]

    def _referred(self, schema: _Schema) -> _Schema:
        """Return the schema to which one refers that has nothing but a reference."""
        for _ in range(8):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return schema

    def _evaluated(self, node: _Node, keyword: str, value: Any) -> bool:
        """`unevaluatedProperties` and `unevaluatedItems`: like the additional ones, if nothing is combined."""
        further = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
        if value is True or value == {} or (further in node.given and not isinstance(node.given[further], list)):
            return True
        if isinstance(node.given.get("items"), list) and "additionalItems" in node.given and further == "items":
            return True
        if any(word in node.given for word in (*_APPLICATORS, "contains")):
            return self._evaluated_members(node, value) if further == "additionalProperties" else False
        node.out[further] = self._part(node, value, _below(node.place, keyword))
        return True

    def _evaluated_members(self, node: _Node, value: Any) -> bool:
        """`unevaluatedProperties` beside `allOf` and `$ref`: all that these name is evaluated."""
        names: dict[str, _Schema] = {}
        expressions: dict[str, _Schema] = {}
        waiting: list[Any] = [{key: each for key, each in node.given.items() if key != "unevaluatedProperties"}]
        for _ in range(64):
            if not waiting:
                break
            schema = waiting.pop()
            if isinstance(schema, bool):
                continue
            if not isinstance(schema, dict) or any(word in schema for word in _APPLICATORS if word not in _CERTAIN):
                return False
            if not all(isinstance(schema.get(word, kind()), kind) for word, kind in _SHAPES):
                return False
            if schema.get("additionalProperties", False) is not False or "unevaluatedProperties" in schema:
                return False
            names |= dict.fromkeys(schema.get("properties", {}), True)
            expressions |= dict.fromkeys(schema.get("patternProperties", {}), True)
            waiting += schema.get("allOf", [])
            if isinstance(schema.get("$ref"), str):
                target = self._target(schema["$ref"])
                if target is None:
                    return False
                waiting.append(target[1])
        if waiting or any(self._patterns(each) is None for each in expressions):
            return False
        only: dict[str, Any] = {"type": "object", "properties": names}
        if expressions:
            only["patternProperties"] = expressions
        only["additionalProperties"] = self._part(node, value, _below(node.place, "unevaluatedProperties"))
        node.add(_any([*_others(node, "object"), only]))
        return True

    # References.

    def _reference(self, node: _Node, _: str, value: Any) -> bool:
        found = self._target(value)
        if found is None:
            return False
        pointer, target = found
        name = self._names.get((pointer, node.closed, node.exact))
        if name is None:
            name = self._names[pointer, node.closed, node.exact] = str(len(self._definitions))
            types = _types(target) if isinstance(target, dict) else None
            self._definitions[name] = {"type": _written_types(types or _EVERY)}
            self._open.add(name)
            self._definitions[name] = self._possible(self.schema(target, pointer, node.closed, exact=node.exact))
            self._open.remove(name)
        held = self._definitions[name]
        node.add(held if isinstance(held, bool) else {"$ref": f"#/$defs/{name}"})
        return True

    def _possible(self, schema: _Schema) -> _Schema:
        """Return a definition; False if no text is allowed by it, which llguidance refuses even if it is not needed."""
        if not self._way.careful or isinstance(schema, bool):
            return schema
        complaint = self._fault(json.dumps({"allOf": [schema]} | self._with_definitions()))
        return not _is_empty(complaint) and schema

    def _target(self, reference: Any) -> tuple[str, Any] | None:
        """Return the place of a reference in this document, and what is there. None if it is elsewhere."""
        if not isinstance(reference, str):
            return None
        base, _, fragment = reference.partition("#")
        own = str(self._root.get("$id") or self._root.get("id") or "").partition("#")[0]
        if base and base != own:
            return None
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if self._anchors is None:
                self._anchors = {}
                for name, pointer in _anchors(self._root, ""):
                    self._anchors[name] = "" if name in self._anchors else pointer  # which one is meant is not known
            if not (pointer := self._anchors.get(fragment, "")):
                return None
            fragment = pointer
        found: Any = self._root
        for part in fragment.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(part)] if isinstance(found, list) else found[part]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
        return "#" + quote(fragment, safe="/~"), found

    # Negation.

    def negation(self, given: Any, types: frozenset[str] = _EVERY) -> _Schema | None:
        """Return a schema that allows what the given one does not. None if it is not expressed.

        Args:
            given: The schema, as the client wrote it.
            types: The types of which the value can be.
        """
        if isinstance(given, bool):
            return not given
        if not isinstance(given, dict) or self._late:
            return None
        if self._old and isinstance(given.get("$ref"), str):
            given = {"$ref": given["$ref"]}
        kept = _types(given)
        alternatives: list[_Schema] = []
        if kept is not None:
            rest = _with_integers(types) - _with_integers(kept)
            if "integer" in kept and "number" in rest and "number" not in kept:
                return None  # numbers that are no integers
            alternatives += [{"type": kind} for kind in _written(rest)]
            types = types & _with_integers(kept) or types
        for keyword, value in given.items():
            rule = KEYWORDS.get(keyword)
            if rule is None or rule.rewrite is None or keyword == "type" or not (rule.types & types):
                continue
            against = self._against(keyword, value, given, types)
            if against is None:
                return None
            alternatives += against
        return _any(alternatives) if self._spend(max(len(alternatives), 1)) else None

    def _against(
        self, keyword: str, value: Any, given: Mapping[str, Any], types: frozenset[str]
    ) -> Sequence[_Schema] | None:
        """Return schemas of which one holds where a keyword does not. None if that is not expressed."""
        match keyword:
            case "enum" | "const":
                return _none_of(value if keyword == "enum" else [value], types)
            case "pattern":
                against = patterns.complement(value) if isinstance(value, str) else None
                return None if against is None else [{"type": "string", "pattern": against}]
            case "minLength" | "minItems" | "minProperties" | "maxLength" | "maxItems" | "maxProperties":
                return _other_size(keyword, value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                if not _is_number(value) or not _is_exact(value) or abs(value) > _LARGEST_BOUND:
                    return None
                if isinstance(given.get("exclusiveMinimum"), bool) or isinstance(given.get("exclusiveMaximum"), bool):
                    return None
                return [{"type": "number", _OPPOSITES[keyword]: _plain(value)}]
            case "required":
                if not isinstance(value, list) or len(_strings(value)) < len(value):
                    return None
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return self._against_properties(value)
            case "not":
                with self._silent() as left:
                    held = self.schema(value, "", closed=False, exact=True)
                return None if left else [held]
            case "allOf":
                parts = [self.negation(each, types) for each in value] if isinstance(value, list) else [None]
                return None if None in parts else [part for part in parts if part is not None]
            case "anyOf":
                parts = [self.negation(each, types) for each in value] if isinstance(value, list) else [None]
                return None if None in parts else [_all([part for part in parts if part is not None])]
            case "$ref":
                found = self._target(value)
                if found is None or found[0] in self._negated:
                    return None
                self._negated.append(found[0])
                against_target = self.negation(found[1], types)
                self._negated.pop()
                return None if against_target is None else [against_target]
            case "format":
                return None if isinstance(value, str) and formats.is_known(value) else []
            case "uniqueItems":
                return [] if value is False else None
            case "items" | "additionalProperties" | "patternProperties":
                return [] if value is True or value == {} else None
        return None

    def _against_properties(self, value: Any) -> Sequence[_Schema] | None:
        if not isinstance(value, dict):
            return None
        found: list[_Schema] = []
        for name, each in value.items():
            against = self.negation(each)
            if against is None:
                return None
            if against is not False:
                found.append({"type": "object", "properties": {name: against}, "required": [name]})
        return found


_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}
# Keywords whose meaning depends on each other.
_NEIGHBOURS = frozenset({"properties", "patternProperties", "additionalProperties", "prefixItems", "items"})
_SHAPES = (("properties", dict), ("patternProperties", dict), ("allOf", list))
_OF_NAMES = frozenset({"type", "pattern", "minLength", "maxLength"})
_CERTAIN = frozenset({"$ref", "allOf"})  # Applicators that hold in any case.


def _other_size(keyword: str, value: Any) -> Sequence[_Schema] | None:
    """Return what holds where a limit on a size does not."""
    if not _is_size(value):
        return None
    kind = _SIZED[keyword[3:]]
    if keyword.startswith("max"):
        return [{"type": kind, f"min{keyword[3:]}": int(value) + 1}]
    return [{"type": kind, f"max{keyword[3:]}": int(value) - 1}] if value > 0 else []


def _none_of(values: Any, types: frozenset[str]) -> Sequence[_Schema] | None:
    """Return schemas of which one allows each value that is not among some. None if that is not expressed."""
    if not isinstance(values, list) or not all(map(_is_exact, values)):
        return None
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault("number" if _is_number(value) else _type_of(value), []).append(_plain(value))
    found: list[_Schema] = []
    for kind in _written(types):
        excluded = by_type.get("number" if kind == "integer" else kind, [])
        if not excluded:
            found.append({"type": kind})
        elif kind == "string":
            if (expression := patterns.none_of(excluded)) is None:
                return None
            found.append({"type": "string", "pattern": expression})
        elif kind == "boolean":
            found += [{"enum": [value]} for value in (True, False) if value not in excluded]
        elif kind in ("number", "integer"):
            edges = sorted({edge for edge in excluded if kind == "number" or isinstance(edge, int)})
            if len(edges) > 16:
                return None
            for low, high in itertools.pairwise([None, *edges, None]):
                if kind == "integer" and low is not None and high == low + 1:
                    continue
                between = {"exclusiveMinimum": low, "exclusiveMaximum": high}
                found.append({"type": kind} | {name: edge for name, edge in between.items() if edge is not None})
        elif kind != "null":
            return None
    return found


def _can_be_merged(part: _Schema, out: Mapping[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Return True if the keywords of two schemas mean the same in one."""
    if isinstance(part, bool) or part.keys() & out.keys():
        return False
    return not (part.keys() & _NEIGHBOURS and out.keys() & _NEIGHBOURS)


def _is_empty(complaint: str) -> bool:
    """Return True if llguidance says that no text is allowed by the root of a schema."""
    return complaint.startswith("Unsatisfiable") and "while processing" not in complaint


def _any(schemas: Sequence[_Schema]) -> _Schema:
    """Return a schema that holds where one of some does."""
    kept = [each for each in schemas if each is not False]
    if True in kept or any(each == {} for each in kept):
        return True
    return kept[0] if len(kept) == 1 else {"anyOf": kept} if kept else False


def _all(schemas: Sequence[_Schema]) -> _Schema:
    """Return a schema that holds where all of some do."""
    kept = [each for each in schemas if each is not True and each != {}]
    if False in kept:
        return False
    return kept[0] if len(kept) == 1 else {"allOf": kept} if kept else True


def _types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names; None if it names none."""
    given = schema.get("type")
    names = given if isinstance(given, list) else [given]
    if given is None or not all(isinstance(name, str) and name in _EVERY for name in names):
        return None
    return frozenset(names) or None


def _others(node: _Node, kind: str) -> list[_Schema]:
    """Return schemas of the other types that a node may have."""
    return [{"type": name} for name in _written(node.types - {kind})]


def _with_integers(types: frozenset[str]) -> frozenset[str]:
    return types | {"integer"} if "number" in types else types


def _written(types: frozenset[str]) -> list[str]:
    """Return types in a fixed order. A number may be an integer."""
    return [name for name in _TYPES if name in types and not (name == "integer" and "number" in types)]


def _written_types(types: frozenset[str]) -> str | list[str]:
    written = _written(types)
    return written[0] if len(written) == 1 else written


def _kinds(schema: dict[str, Any]) -> frozenset[str]:
    """Return the types that a rewritten schema allows."""
    kinds = _types(schema) or _EVERY
    return kinds & _with_integers(frozenset(map(_type_of, schema["enum"]))) if "enum" in schema else kinds


def _values(schema: _Schema, most: int) -> Sequence[Any] | None:
    """Return all values that a rewritten schema allows; None if it may allow others, or more than that."""
    if not isinstance(schema, dict):
        return None
    values: list[Any]
    if "enum" in schema:
        values = schema["enum"]
    elif (kinds := _types(schema)) is not None and kinds <= {"boolean", "null"}:
        values = [value for value in (None, False, True) if _type_of(value) in kinds]
    else:
        return None
    return values if len(values) <= most else None


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_whole(value) and 0 <= value < 1 << 63


def _is_whole(value: Any) -> bool:
    return _is_number(value) and value == int(value)


def _is_exact(value: Any) -> bool:
    """Return True if llguidance, which reads numbers as doubles, reads a value as it is."""
    if isinstance(value, list):
        return all(map(_is_exact, value))
    if isinstance(value, dict):
        return all(map(_is_exact, value.values()))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or (abs(value) <= _LARGEST_BOUND and int(float(value)) == value)


def _inward(value: float, *, up: bool) -> float:
    """Return a bound that a double can hold, and that allows no more."""
    value = min(max(value, -_LARGEST_BOUND), _LARGEST_BOUND)
    near = float(value)
    if near == value:
        return value
    return math.nextafter(near, math.inf if up else -math.inf) if (near < value) is up else near


def _plain(value: Any) -> Any:
    """Return a value whose whole numbers are integers."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _strings(value: Any) -> list[str]:
    return [each for each in dict.fromkeys(value) if isinstance(each, str)] if isinstance(value, list) else []


def _below(place: str, part: str | int) -> str:
    """Return the place of a part, as a URI fragment."""
    name = str(part).replace("~", "~0").replace("/", "~1")
    return f"{place}/{quote(name, safe='~$')}"


def _anchors(schema: Any, pointer: str) -> Iterator[tuple[str, str]]:
    """Yield the names of places in a document, each with its pointer."""
    if isinstance(schema, list):
        for i, each in enumerate(schema):
            yield from _anchors(each, f"{pointer}/{i}")
    if not isinstance(schema, dict):
        return
    for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
        name = schema.get(keyword)
        if isinstance(name, str) and (keyword.endswith("chor") or name.startswith("#")):
            yield name.lstrip("#"), pointer
    for name, each in schema.items():
        if name not in ("enum", "const", "default", "examples"):
            yield from _anchors(each, f"{pointer}/{name.replace('~', '~0').replace('/', '~1')}")


class Keyword(NamedTuple):
    """What is done with a keyword."""

    what: str
    why: str = ""
    rewrite: Callable[[_Rewriter, _Node, str, Any], bool] | None = None  # None: it says nothing.
    types: frozenset[str] = _EVERY  # The types of values about which it says something.


_STRING, _ARRAY, _OBJECT = frozenset({"string"}), frozenset({"array"}), frozenset({"object"})
_NUMBER = frozenset({"number", "integer"})
_HELD = "held"
# Keywords that other keywords express.
_EXPRESSED = frozenset(
    {
        *(
            "uniqueItems",
            "contains",
            "propertyNames",
            "minProperties",
            "maxProperties",
            "if",
            "not",
        ),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    }
)

KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(_HELD, "", _Rewriter._type),
    "enum": Keyword(_HELD, "not with integers that no double has", _Rewriter._enum),
    "const": Keyword(_HELD, "not with integers that no double has", _Rewriter._enum),
    "minimum": Keyword(
        _HELD, "rounded inward to 64 bits; left out beyond the largest double", _Rewriter._number, _NUMBER
    ),
    "maximum": Keyword(_HELD, "as `minimum`", _Rewriter._number, _NUMBER),
    "exclusiveMinimum": Keyword(_HELD, "as `minimum`", _Rewriter._number, _NUMBER),
    "exclusiveMaximum": Keyword(_HELD, "as `minimum`", _Rewriter._number, _NUMBER),
    "multipleOf": Keyword(_HELD, "", _Rewriter._multiple, _NUMBER),
    "minLength": Keyword(_HELD, "", _Rewriter._size, _STRING),
    "maxLength": Keyword(_HELD, "", _Rewriter._size, _STRING),
    "pattern": Keyword(_HELD, "look-arounds if they can be written without", _Rewriter._pattern, _STRING),
    "format": Keyword(_HELD, "unknown ones say nothing", _Rewriter._format, _STRING),
    "items": Keyword(_HELD, "", _Rewriter._items, _ARRAY),
    "prefixItems": Keyword(_HELD, "", _Rewriter._items, _ARRAY),
    "additionalItems": Keyword("as `items`", "", _Rewriter._items, _ARRAY),
    "minItems": Keyword(_HELD, "", _Rewriter._size, _ARRAY),
    "maxItems": Keyword(_HELD, "", _Rewriter._size, _ARRAY),
    "uniqueItems": Keyword("the orders of up to 4 values", "others need a memory", _Rewriter._unique, _ARRAY),
    "contains": Keyword("the places of up to 7 items", "others need a memory", _Rewriter._contains, _ARRAY),
    "properties": Keyword(_HELD, "", _Rewriter._properties, _OBJECT),
    "required": Keyword(_HELD, "", _Rewriter._required, _OBJECT),
    "patternProperties": Keyword(_HELD, "not if two may match one name", _Rewriter._pattern_properties, _OBJECT),
    "additionalProperties": Keyword(_HELD, "", _Rewriter._additional, _OBJECT),
    "propertyNames": Keyword("as `patternProperties` or `properties`", "", _Rewriter._names_of_members, _OBJECT),
    "minProperties": Keyword("the choices of members", "", _Rewriter._member_count, _OBJECT),
    "maxProperties": Keyword("the choices of members", "", _Rewriter._member_count, _OBJECT),
    "dependentRequired": Keyword("the member is missing, or it holds", "", _Rewriter._dependent, _OBJECT),
    "dependentSchemas": Keyword("the member is missing, or it holds", "", _Rewriter._dependent, _OBJECT),
    "dependencies": Keyword("the member is missing, or it holds", "", _Rewriter._dependent, _OBJECT),
    "if": Keyword("`then`, or `not` and `else`", "", _Rewriter._if),
    "not": Keyword("the opposite", "", _Rewriter._not),
    "allOf": Keyword(_HELD, "", _Rewriter._all_of),
    "anyOf": Keyword(_HELD, "", _Rewriter._any_of),
    "oneOf": Keyword("`anyOf` of branches that exclude each other", "", _Rewriter._any_of),
    "unevaluatedProperties": Keyword("as `additionalProperties`", "", _Rewriter._evaluated, _OBJECT),
    "unevaluatedItems": Keyword("as `items`", "", _Rewriter._evaluated, _ARRAY),
    "$ref": Keyword(_HELD, "within the document", _Rewriter._reference),
    "$dynamicRef": Keyword("as `$ref`", "", _Rewriter._reference),
    "$recursiveRef": Keyword("as `$ref`", "", _Rewriter._reference),
}
