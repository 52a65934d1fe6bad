"""Rewrites JSON schemas for llguidance.

llguidance refuses a whole schema if it does not support one of the keywords. So a schema is rewritten first: keywords
without effect are removed, and keywords that other keywords can express are replaced. All other unsupported keywords
are left out, so they are not enforced. The caller gets their places, and decides whether to refuse the schema.
`KEYWORDS` says how each keyword is treated, and why.

A place is the position of a keyword in the client's schema. It is a JSON pointer in a URI fragment: `#/items/contains`.
Apart from the keywords that are not enforced, a rewritten schema never allows more than the original schema.

Source: JSON Schema, drafts 4 to 2020-12; llguidance, `docs/json_schema.md` and `parser/src/json`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

from engines.vllm.constraints import formats, patterns
from engines.vllm.constraints.schema_references import References, below
from engines.vllm.constraints.schema_values import (
    EVERY,
    LARGEST_BOUND,
    TYPES,
    Schema,
    all_of,
    allowed_types,
    allowed_values,
    any_of,
    bound_of,
    distinct,
    is_exact,
    is_number,
    is_size,
    is_whole,
    named_types,
    plain,
    strings,
    type_names,
    type_of,
    type_value,
    with_integers,
)

_MAX_CHARACTERS = 1 << 17  # The maximum length of a rewritten schema.
# The place of the whole schema. It is returned if only the type of the schema is enforced, or instead of all further
# places if there are too many (`_shown`).
WHOLE = "#"
# Limits on the number of schemas that rewriting adds: in total, and for one keyword. Each position of the item that
# `contains` requires counts as one schema, plus one for each 64 characters of the item's schema.
_MOST_ADDED, _MOST_ALTERNATIVES, _CHARACTERS_OF_A_SCHEMA = 2048, 128, 64
_MOST_BRANCHES = 48  # The maximum number of branches of a `oneOf`. Each pair of branches is compared.
_MOST_PLACES, _MOST_PLACE_CHARACTERS = 64, 8192  # The limits on the number and the total length of returned places.
_NO_SCHEMA, _TOO_DEEP = "it must be a JSON schema, which is a JSON object", "it is nested too deeply"
_SURROGATE = "it must not hold half of a surrogate pair"

# llguidance's options for the white space of JSON (`x-guidance` in a schema). They replace the client's options.
_FLEXIBLE = {"whitespace_flexible": True}
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
# A schema with one of these keywords is not closed (`_is_closed`), because the keyword may define further members.
_COMBINED = ("anyOf", "oneOf", "$ref", "if", "unevaluatedProperties", "additionalProperties", "dependentSchemas")
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "dependencies", "$dynamicRef", "not")


def for_guidance(text: str, fault: Callable[[str], str], *, compact: bool) -> tuple[str, tuple[str, ...], str]:
    """Rewrite a schema.

    Args:
        text: The schema.
        fault: Returns llguidance's error for a schema; "" if llguidance accepts the schema.
        compact: Whether the JSON has no white space.

    Returns:
        The schema for llguidance; the places of the keywords that are not enforced; and an error. The error is ""
        except in two cases: only the type of the schema is enforced, or no text satisfies the whole schema.

    Raises:
        ValueError: The text is not a JSON schema, has half of a surrogate pair, or is nested too deeply.
    """
    root = _read(text)
    options = {"x-guidance": _COMPACT if compact else _FLEXIBLE}
    spent, complaint, empty = 0, "", ""
    try:
        for way in _WAYS:
            if spent > (2 * _MOST_WORK if way.loose else _MOST_WORK):
                continue
            rewriter = _Rewriter(root, fault, way, closed=way.closed and '"allOf"' not in text)
            written = json.dumps(rewriter.document() | options, separators=(",", ":"), ensure_ascii=False)
            too_long = f"it has more than {_MAX_CHARACTERS} characters" if len(written) > _MAX_CHARACTERS else ""
            complaint = too_long or fault(written)
            if not complaint:
                return written, _shown(rewriter.not_held), empty
            if not way.closed and not way.loose and _is_empty(complaint):
                empty = complaint
            spent += rewriter.work + _WORK_OF_COMPILING * len(written)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    types = named_types(root) or (frozenset({"object"}) if "properties" in root else EVERY)
    return json.dumps({"type": type_names(types)} | options), (WHOLE,), complaint


def _read(text: str) -> dict[str, Any]:
    """Parse a schema.

    Raises:
        ValueError: The text is not a JSON schema.
    """
    try:
        root = json.loads(text, parse_constant=_refused)
        json.dumps(root, ensure_ascii=False).encode()  # An escape may stand for half of a surrogate pair.
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except UnicodeEncodeError:
        raise ValueError(_SURROGATE) from None
    except ValueError:  # Also raised for a number with thousands of digits.
        raise ValueError(_NO_SCHEMA) from None
    if not isinstance(root, dict):
        raise ValueError(_NO_SCHEMA)
    return root


def _refused(_: str) -> None:
    raise ValueError(_NO_SCHEMA)


def _shown(places: Iterable[str]) -> tuple[str, ...]:
    """Return the places to show to the client. If they are too many or too long, `WHOLE` stands for the rest."""
    shown: list[str] = []
    room = _MOST_PLACE_CHARACTERS
    for place in places:
        room -= len(place)
        if room < 0 or len(shown) == _MOST_PLACES - 1:
            return (*shown, WHOLE)
        shown.append(place)
    return tuple(shown)


class _Way(NamedTuple):
    """A way to rewrite a schema. If llguidance refuses the result, the next way is tried."""

    careful: bool = True  # Whether llguidance first tests fragments of the schema, to leave out only refused fragments.
    loose: bool = False  # If True, the keywords of `_EXPRESSED` are not enforced.
    closed: bool = True  # Whether objects are closed (`_is_closed`).
    sealed: bool = True  # Whether member names that are not in the schema have only one spelling (`_seal`).


_WAYS = (
    _Way(careful=False),
    _Way(),
    _Way(sealed=False),
    _Way(closed=False),
    _Way(loose=True),
    _Way(loose=True, closed=False, sealed=False),
)
# Work is counted in characters that llguidance reads, and other work is converted to such characters. Beyond
# `_MOST_WORK`, schemas are no longer compared, and only the loose ways are tried. Work is limited instead of time, so
# that all servers enforce the same parts of a schema.
_MOST_WORK, _WORK_OF_A_SCHEMA, _WORK_OF_COMPILING = 1_000_000, 20, 8


@dataclass(slots=True)
class _Node:
    """A schema that is being rewritten."""

    given: dict[str, Any]
    place: str
    types: frozenset[str]
    closed: bool  # Whether objects may be closed (`_is_closed`).
    exact: bool  # If True, the schema is a condition: it must not exclude any text that the standard allows.
    out: dict[str, Any] = field(default_factory=dict)
    # Further schemas that must also hold, each with the keyword from which it comes.
    also: list[tuple[str, Schema]] = field(default_factory=list)
    keyword: str = ""  # The keyword that is being rewritten.
    # The number of keywords in `out` when the first schema was added to `also`. These keywords are written before
    # `allOf`, and later keywords after it, because the order of the keywords decides the order of an object's members.
    also_at: int = 0

    def add(self, *schemas: Schema) -> None:
        """Add schemas that must also hold."""
        if not self.also:
            self.also_at = len(self.out)
        self.also += [(self.keyword, schema) for schema in schemas]


class _Rewriter:
    """Rewrites one document."""

    def __init__(self, root: dict[str, Any], fault: Callable[[str], str], way: _Way, *, closed: bool) -> None:
        self._root, self._fault, self._way, self._closed = root, fault, way, closed
        self.work = 0
        self._references = References(root)
        # The definitions by name. A definition that is still being rewritten has only its type.
        self._definitions: dict[str, Schema] = {}
        self._open: set[str] = set()  # The names of the definitions that are being rewritten.
        self._left_of: dict[str, dict[str, None]] = {}  # For each definition: the places that are not enforced.
        self._foreign = 0  # The number of enclosing schemas whose `$id` changes the meaning of references.
        self._names: dict[tuple[str, bool, bool], str] = {}
        self._left = _MOST_ADDED
        self._negated: list[str] = []  # References that are being negated.
        self._sound: dict[str, bool] = {}  # For each tested fragment: whether llguidance accepts it.
        self.not_held: dict[str, None] = {}  # The places that are not enforced, in order.

    def document(self) -> dict[str, Any]:
        schema = self.schema(self._root, "#", self._closed)
        return self._with_definitions({"enum": []} if schema is False else {} if schema is True else schema)

    def _with_definitions(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Return a schema with the definitions that it needs."""
        needed: dict[str, Schema] = {}
        waiting = [schema]
        while waiting:
            for name in _references(waiting.pop()):
                if name not in needed:
                    needed[name] = definition = self._definitions[name]
                    waiting += [definition] if isinstance(definition, dict) else []
        return {**schema, "$defs": needed} if needed else schema

    def _complaint(self, schema: dict[str, Any]) -> str:
        text = json.dumps(self._with_definitions(schema))
        self.work += len(text)
        return self._fault(text)

    def schema(self, given: Any, place: str, closed: bool, *, exact: bool = False) -> Schema:
        """Rewrite a schema. If every keyword is enforced, the result allows no text that the original forbids."""
        if isinstance(given, bool):
            return given
        if not isinstance(given, dict):
            raise ValueError(f"a schema must be an object or a boolean, at {place}")
        self.work += _WORK_OF_A_SCHEMA
        if self._references.has_base(given):
            self._foreign += 1
            try:
                return self._node_schema(given, place, closed, exact=exact)
            finally:
                self._foreign -= 1
        return self._node_schema(given, place, closed, exact=exact)

    def _node_schema(self, given: dict[str, Any], place: str, closed: bool, *, exact: bool) -> Schema:
        if self._references.are_old and isinstance(given.get("$ref"), str):
            given = {"$ref": given["$ref"]}
        node = _Node(given, place, named_types(given) or EVERY, closed, exact)
        if isinstance(given.get("properties"), dict) and "type" not in given and not exact:
            # By the standard, `{"properties": ...}` also allows any number or text. Users expect an object.
            node.types = frozenset({"object"})
        if node.types != EVERY:
            node.out["type"] = type_value(node.types)
        for keyword, value in given.items():
            rule = KEYWORDS.get(keyword)
            if rule is None or not rule.types & node.types:
                continue  # The keyword has no effect.
            node.keyword = keyword
            before = dict(node.out), list(node.also)
            held = rule.rewrite(self, node, keyword, value)
            if self._way.loose and keyword in _EXPRESSED and before != (node.out, node.also):
                node.out, node.also, held = *before, False
            if not held:
                self._leave(node, keyword)
        if self._is_closed(node):
            node.out["additionalProperties"] = False
        elif "object" in node.types and not exact:
            self._seal(node)
        return self._joined(node)

    def _seal(self, node: _Node) -> None:
        """Allow only one spelling of each member name that is not in the schema.

        llguidance compares the names of members by their bytes, and allows any escapes in the names of further members.
        So with `{"\\u0061": 1}`, the value of the member `a` would evade the schema of `a`. llguidance allows no such
        escapes in names that must match a pattern, so the names of further members get a pattern.
        """
        out, further = node.out, node.out.get("additionalProperties", True)
        if further is False or not (node.also or out.keys() & _OF_OBJECTS):
            return
        if any(self._is_sealed(part) for _, part in node.also):
            return
        if not self._way.sealed:
            self._leave(node, "additionalProperties" if "additionalProperties" in out else "properties")
            return
        if "patternProperties" in out:
            besides = patterns.all_but(out.get("properties", ()), out["patternProperties"])
            if besides is None:
                self._leave(node, "patternProperties")
                return
            out["patternProperties"] = {**out["patternProperties"], besides: further}
        elif further is True or not out.keys() & {"properties", "required"}:
            out["patternProperties"] = {_ANY_NAME: further}
        else:
            node.keyword = "additionalProperties"
            node.add({"patternProperties": {_ANY_NAME: True}, "additionalProperties": False})
            return
        out["additionalProperties"] = False

    def _leave(self, node: _Node, keyword: str) -> None:
        """Record that a keyword is not enforced."""
        self.not_held[below(node.place, keyword)] = None

    @staticmethod
    def _is_closed(node: _Node) -> bool:
        """Return True if an object may have only the members that its schema names.

        By the standard, an object may have any further members. But a model that may add members seldom stops adding
        them, and vLLM's default back end does not allow them either. A schema stays open if it is combined with other
        schemas, or if it requires members that it does not name.
        """
        given, named = node.given, node.given.get("properties")
        if not node.closed or node.exact or not isinstance(named, dict) or any(word in given for word in _COMBINED):
            return False
        if given.get("patternProperties"):
            return True
        least = given.get("minProperties", 0)
        return named.keys() >= set(strings(given.get("required"))) and not (is_number(least) and least > len(named))

    def _joined(self, node: _Node) -> Schema:
        """Return a node's schema, joined with the further schemas that must also hold."""
        also = [(keyword, part) for keyword, part in node.also if part is not True and part != {}]
        parts = [part for _, part in also]
        if False in parts or not node.types:
            return False
        if self._way.careful and (len(also) > 1 or node.out):
            # llguidance cannot combine a schema that refers to itself with other schemas. So only this one is enforced.
            for origin, part in also:
                if self._leads_back(part):
                    for keyword in [word for word in node.given if word in KEYWORDS and word != origin]:
                        self._leave(node, keyword)
                    return part
        first = [*node.out][: node.also_at]
        members = {word: node.out[word] for word in _MEMBERS if word in node.out}
        first_of_members = next((word for word in node.out if word in members), None)
        before: dict[str, Any] = {}
        after: dict[str, Any] = {}
        for keyword, value in node.out.items():
            # llguidance relates the keywords of `_MEMBERS` only if no combining keyword (`allOf`) separates them.
            if keyword == first_of_members:
                (before if keyword in first else after).update(members)
            elif keyword not in members:
                (before if keyword in first else after)[keyword] = value
        if len(parts) == 1 and _can_be_merged(parts[0], node.out):
            return {**before, **parts[0], **after}
        return {**before, **({"allOf": parts} if parts else {}), **after} or True

    def _is_sealed(self, schema: Schema, around: frozenset[str] = frozenset()) -> bool:
        """Return True if a schema allows only one spelling of each member name.

        Args:
            schema: The schema.
            around: The names of the definitions that were followed to reach the schema.
        """
        if isinstance(schema, bool):
            return not schema
        if schema.get("additionalProperties") is False or "object" not in allowed_types(schema):
            return True
        name = str(schema.get("$ref")).rpartition("/")[2]
        if name in self._definitions:
            return name in self._open | around or self._is_sealed(self._definitions[name], around | {name})
        if any(self._is_sealed(part, around) for part in schema.get("allOf", ())):
            return True
        return "anyOf" in schema and all(self._is_sealed(part, around) for part in schema["anyOf"])

    def _leads_back(self, schema: Schema) -> bool:
        """Return True if a schema refers to a definition that contains it."""
        if isinstance(schema, bool):
            return False
        if str(schema.get("$ref")).rpartition("/")[2] in self._open:
            return True
        return any(self._leads_back(part) for word in ("allOf", "anyOf") for part in schema.get(word, ()))

    @property
    def _late(self) -> bool:
        return self.work > _MOST_WORK

    def _spend(self, count: int) -> bool:
        """Return True if rewriting may add this number of schemas. If so, count them as added."""
        if count > _MOST_ALTERNATIVES or count > self._left or self._late:
            return False
        self._left -= count
        return True

    @contextlib.contextmanager
    def _silent(self) -> Iterator[dict[str, None]]:
        """Record the places that the `with` block does not enforce in the yielded dict, and not in `not_held`."""
        kept, self.not_held = self.not_held, {}
        try:
            yield self.not_held
        finally:
            self.not_held = kept

    def _takes(self, fragment: dict[str, Any]) -> bool:
        """Return True if llguidance accepts a fragment, or if fragments are not tested (`_Way.careful`)."""
        if not self._way.careful:
            return True
        text = json.dumps(fragment)
        if text not in self._sound:
            complaint = self._complaint(fragment)
            self._sound[text] = not complaint or complaint.startswith("Unsatisfiable")
        return self._sound[text]

    # Keywords. Each function returns False if the keyword is not enforced.

    def _type(self, _node: _Node, _: str, value: Any) -> bool:
        names = value if isinstance(value, list) else [value]
        return bool(names) and all(isinstance(name, str) and name in (*TYPES, "any") for name in names)

    def _enum(self, node: _Node, keyword: str, value: Any) -> bool:
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list):
            return False
        kept = distinct([plain(each) for each in values if type_of(each) in node.types or is_whole(each)])
        if not all(map(is_exact, kept)):
            return False
        if "enum" in node.out:  # The schema has both `const` and `enum`.
            node.add({"enum": kept})
        else:
            node.out["enum"] = kept
        return True

    def _number(self, node: _Node, keyword: str, value: Any) -> bool:
        if keyword.startswith("exclusive") and isinstance(value, bool):  # In draft 4, a flag of `minimum` or `maximum`.
            return True
        if not is_number(value):
            return False
        least = keyword in ("minimum", "exclusiveMinimum")
        if abs(value) >= sys.float_info.max and (value < 0) is least:
            return True  # No number exceeds this bound.
        if abs(value) > LARGEST_BOUND and (value < 0) is not least:
            return False
        exclusive = keyword.startswith("exclusive") or node.given.get(f"exclusive{keyword.title()}") is True
        bound = bound_of(value, least=least, exclusive=exclusive, whole="number" not in node.types)
        if (node.exact and value not in bound.values()) or not self._takes({"type": "number", **bound}):
            return False
        if bound.keys() & node.out.keys():
            node.add(bound)
        else:
            node.out |= bound
        return True

    def _multiple(self, node: _Node, keyword: str, value: Any) -> bool:
        if not is_number(value) or value <= 0 or not is_exact(value):
            return False
        if not self._takes({"type": "number", "multipleOf": value}):
            return False
        node.out[keyword] = plain(value)
        return True

    def _size(self, node: _Node, keyword: str, value: Any) -> bool:
        if not is_size(value):
            return False
        node.out[keyword] = int(value)
        return True

    def _pattern(self, node: _Node, _: str, value: Any) -> bool:
        held = patterns.without_look_around(value) if isinstance(value, str) else None
        if held is None:
            return False
        node.out["pattern"] = held[0]
        if len(held) > 1:
            node.add(*[{"type": type_names(node.types), "pattern": each} for each in held[1:]])
        return True

    def _format(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, str):
            return True
        if (expression := formats.EXPRESSIONS.get(value)) is not None:
            node.add({"type": type_names(node.types), "pattern": f"^(?:{expression})$"})
        elif formats.is_known(value):
            node.out[keyword] = value
        return True

    def _items(self, node: _Node, keyword: str, value: Any) -> bool:
        given, place = node.given, below(node.place, keyword)
        if keyword == "additionalItems":
            if isinstance(given.get("items"), list):
                node.out["items"] = self._part(node, value, place)
            return True
        if not isinstance(value, list):
            node.out["items"] = self._part(node, value, place)
            return True
        node.out["prefixItems"] = [self._part(node, each, below(place, i)) for i, each in enumerate(value)]
        return True

    def _unique(self, node: _Node, _: str, value: Any) -> bool:
        if value is False:
            return True
        most = node.given.get("maxItems", math.inf)
        if value is not True or (is_number(most) and most <= 1):
            return value is True
        given, least = node.given.get("items", True), node.given.get("minItems", 0)
        if "prefixItems" in node.given or isinstance(given, list) or not is_size(least) or self._late:
            return False
        with self._silent():
            values = allowed_values(self._referred(self.schema(given, "", closed=False)), 4)
        if values is None:
            return False
        choices = [
            list(each)
            for count in range(len(values) + 1)
            if least <= count <= most
            for each in itertools.permutations(values, count)
        ]
        if not self._spend(len(choices)):
            return False
        node.add({"anyOf": [*_others(node, "array"), {"enum": choices}]})
        return True

    def _contains(self, node: _Node, _: str, value: Any) -> bool:
        least, most = node.given.get("minContains", 1), node.given.get("maxItems", math.inf)
        if "maxContains" in node.given or not is_number(least) or least > 1:
            return False
        if least == 0:
            return True
        if not is_number(most) or not most < 8:
            return False
        part = self._part(node, value, below(node.place, "contains"))
        if not self._spend(int(most) * (1 + len(json.dumps(part)) // _CHARACTERS_OF_A_SCHEMA)):
            return False
        places = [{"type": "array", "prefixItems": [True] * i + [part], "minItems": i + 1} for i in range(int(most))]
        node.add(any_of([*_others(node, "array"), *places]))
        return True

    def _part(self, node: _Node, given: Any, place: str) -> Schema:
        """Rewrite the schema of a member or of an item."""
        return self.schema(given, place, node.closed, exact=node.exact)

    def _properties(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        place = below(node.place, keyword)
        node.out[keyword] = {name: self._part(node, each, below(place, name)) for name, each in value.items()}
        return True

    def _required(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        if value:
            node.out[keyword] = strings(value)
        return all(isinstance(name, str) for name in value)

    def _pattern_properties(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        place = below(node.place, keyword)
        members = {name: self._part(node, each, below(place, name)) for name, each in value.items()}
        universal = _EVERY_NAME if node.given.get("additionalProperties") is False else _EVERY_NAME | _NEARLY_EVERY_NAME
        if len(members) == 1 and universal.issuperset(members):
            node.out[keyword] = {_ANY_NAME: next(iter(members.values()))}
            node.out["additionalProperties"] = False
            return True
        names = {name: patterns.without_look_around(name, single=True) for name in members}
        held = {own[0]: members[name] for name, own in names.items() if own is not None}
        if len(held) == len(members) and self._takes({"patternProperties": dict.fromkeys(held, True)}):
            node.out[keyword] = held
            return True
        # The patterns' schemas are not enforced: members with matching names may have any value. If a pattern cannot be
        # rewritten, all other members that `properties` does not name may have any value, too.
        if None in names.values():
            node.out["additionalProperties"] = True
        else:
            node.out[keyword] = {"|".join([f"(?:{name})" for name in held]): True}
        return False

    def _additional(self, node: _Node, keyword: str, value: Any) -> bool:
        if keyword not in node.out:
            node.out[keyword] = self._part(node, value, below(node.place, keyword))
        return True

    def _names_of_members(self, node: _Node, _: str, value: Any) -> bool:
        """`propertyNames`: replace it by `properties` or `patternProperties`, which allow only matching names."""
        if self._late:
            return False
        with self._silent() as left:
            names = self.schema(value, "", closed=False, exact=True)
        if left or self._leads_back(names):
            return False
        names = self._referred(names)
        if isinstance(names, dict) and "enum" not in names and "string" not in (named_types(names) or EVERY):
            names = False
        if isinstance(names, bool) or names.keys() <= {"type"}:
            if names is False:
                node.add({"type": type_names(node.types), "maxProperties": 0})
            return True
        if names.keys() <= {"type", "enum"} and (allowed := allowed_values(names, 1024)) is not None:
            only: dict[str, Any] = {"properties": {name: True for name in allowed if isinstance(name, str)}}
        else:
            expression = self._name_expression(names)
            if expression is None:
                return False
            only = {"patternProperties": {expression: True}}
        node.add(any_of([*_others(node, "object"), {"type": "object", **only, "additionalProperties": False}]))
        return True

    def _name_expression(self, names: dict[str, Any]) -> str | None:
        """Return a regular expression for the names that a rewritten `propertyNames` allows, or None if that fails."""
        parts = [{word: each for word, each in names.items() if word != "allOf"}, *names.get("allOf", ())]
        expressions: list[str] = []
        for part in parts:
            if not isinstance(part, dict) or part.keys() - _OF_NAMES or "string" not in (named_types(part) or EVERY):
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
        """`minProperties` and `maxProperties`, which llguidance supports only if no member is optional."""
        if not is_size(value):
            return False
        given, count = node.given, int(value)
        named = given["properties"] if isinstance(given.get("properties"), dict) else {}
        required = set(strings(given.get("required")))
        optional = [name for name in named if name not in required]
        if keyword == "minProperties" and count <= len(required):
            return True
        closed = given.get("additionalProperties") is False or self._is_closed(node)
        further, rest = not closed or bool(given.get("patternProperties")), count - len(required)
        if keyword == "minProperties" and rest > 1 and further:
            return False  # llguidance counts a repeated name twice.
        if not optional:
            node.out[keyword] = count
            return True
        if keyword == "maxProperties":
            if not further and rest >= len(optional):
                return True
            if further or rest < 0 or not self._spend(math.comb(len(optional), rest)):
                return False
            chosen = itertools.combinations(optional, len(optional) - rest)
            kept: list[dict[str, Any]] = [{"properties": dict.fromkeys(names, False)} for names in chosen]
        else:
            if not self._spend(math.comb(len(optional), rest) + 1):
                return False
            kept = [{"required": list(names)} for names in itertools.combinations(optional, rest)]
            if further:
                kept.append({"properties": dict.fromkeys(optional, False), "minProperties": count})
        node.add(any_of([*_others(node, "object"), *[{"type": "object", **each} for each in kept]]))
        return True

    def _dependent(self, node: _Node, keyword: str, value: Any) -> bool:
        """`dependentRequired` and similar keywords: a condition must hold if a member is present."""
        if not isinstance(value, dict):
            return False
        if not self._spend(1 << min(len(value), 30)):  # Each member doubles the number of combinations.
            return False
        place = below(node.place, keyword)
        for name, needed in value.items():
            held: Schema
            if isinstance(needed, str):  # Draft 3.
                needed = [needed]
            if isinstance(needed, list):
                held = {"type": type_value(node.types), "required": strings(needed)} if needed else True
            else:
                held = self.schema(needed, below(place, name), closed=False, exact=node.exact)
            if held is not True:
                node.add(any_of([{"type": type_value(node.types), "properties": {name: False}}, held]))
        return True

    def _if(self, node: _Node, _: str, value: Any) -> bool:
        given, branches = node.given, []
        then, otherwise = given.get("then", True), given.get("else", True)
        if then is True and otherwise is True:
            return True
        against = self.negation(value, node.types)
        if against is None or not self._spend(2):
            return False
        condition = self.schema(value, below(node.place, "if"), closed=False, exact=True)
        if then is not False:
            held = self.schema(then, below(node.place, "then"), closed=False, exact=node.exact)
            branches.append(all_of([condition, held]))
        if otherwise is not False:
            held = self.schema(otherwise, below(node.place, "else"), closed=False, exact=node.exact)
            branches.append(all_of([against, held]))
        node.add(any_of(branches))
        return True

    def _not(self, node: _Node, _: str, value: Any) -> bool:
        against = self.negation(value, node.types)
        if against is not None:
            node.add(against)
        return against is not None

    def _all_of(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        place = below(node.place, keyword)
        node.add(*[self._part(node, each, below(place, i)) for i, each in enumerate(value)])
        return True

    def _any_of(self, node: _Node, keyword: str, value: Any) -> bool:
        if not isinstance(value, list):
            return False
        place, closed = below(node.place, keyword), node.closed and not isinstance(node.given.get("properties"), dict)
        held = [self.schema(each, below(place, i), closed, exact=node.exact) for i, each in enumerate(value)]
        if keyword == "anyOf" or len(value) < 2:
            node.add(any_of(held))
            return True
        needed = frozenset(strings(node.given.get("required")))
        exclusive = None if self._way.loose else self._exclusive(value, held, node.types, needed)
        node.add(any_of(held if exclusive is None else exclusive))
        return exclusive is not None

    def _exclusive(
        self, given: Sequence[Any], held: Sequence[Schema], types: frozenset[str], needed: frozenset[str]
    ) -> Sequence[Schema] | None:
        """Make the branches of a `oneOf` mutually exclusive, and return them. None if that is not possible.

        Args:
            given: The branches, as the client wrote them.
            held: The same branches, rewritten.
            types: The possible types of the value.
            needed: The names of the required members.
        """
        if len(given) > _MOST_BRANCHES or self._late:
            return None
        with self._silent():
            plain = [self.schema(each, "", closed=False, exact=True) for each in given]
        branches: list[Schema] = []
        for i, branch in enumerate(held):
            parts = [branch]
            for j, other in enumerate(plain):
                if i == j or self._apart(branch, other, needed):
                    continue
                against = self.negation(given[j], types)
                if against is None or not self._spend(1):
                    return None
                parts.append(against)
            branches.append(all_of(parts))
        return branches

    def _apart(self, one: Schema, other: Schema, needed: frozenset[str]) -> bool:
        """Return True if no text satisfies both schemas."""
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        if self._differ(one, other, needed):
            return True
        if self._late:
            return False
        return _is_empty(self._complaint({"allOf": [one, other]}))

    def _differ(self, one: Schema, other: Schema, needed: frozenset[str] = frozenset(), depth: int = 4) -> bool:
        """Return True if types, values and required members alone show that no text satisfies both schemas."""
        one, other = self._referred(one), self._referred(other)
        if isinstance(one, bool) or isinstance(other, bool):
            return one is False or other is False
        types = [with_integers(allowed_types(each)) for each in (one, other)]
        if not types[0] & types[1]:
            return True
        if types[0] & types[1] == {"object"} and depth:
            members = [each.get("properties", {}) for each in (one, other)]
            shared = members[0].keys() & members[1].keys()
            shared &= {*needed, *one.get("required", ()), *other.get("required", ())}
            return any(self._differ(members[0][name], members[1][name], depth=depth - 1) for name in shared)
        values = [allowed_values(each, 256) for each in (one, other)]
        return None not in values and not [value for value in values[0] or () if value in (values[1] or ())]

    def _referred(self, schema: Schema) -> Schema:
        """If a schema is only a reference, return its definition. Otherwise return the schema itself."""
        for _ in range(8):
            if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
                break
            schema = self._definitions[schema["$ref"].rpartition("/")[2]]
        return schema

    def _evaluated(self, node: _Node, keyword: str, value: Any) -> bool:
        """`unevaluatedProperties` or `unevaluatedItems`.

        If the node combines no schemas, these keywords mean the same as `additionalProperties` or `items`.
        """
        further = "additionalProperties" if keyword == "unevaluatedProperties" else "items"
        if value is True or value == {} or (further in node.given and not isinstance(node.given[further], list)):
            return True
        if isinstance(node.given.get("items"), list) and "additionalItems" in node.given and further == "items":
            return True
        if any(word in node.given for word in (*_APPLICATORS, "contains")):
            return self._evaluated_members(node, value) if further == "additionalProperties" else False
        node.out[further] = self._part(node, value, below(node.place, keyword))
        return True

    def _evaluated_members(self, node: _Node, value: Any) -> bool:
        """`unevaluatedProperties` next to `allOf` and `$ref`: all members that these schemas name are evaluated."""
        names: dict[str, Schema] = {}
        expressions: dict[str, Schema] = {}
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
        if waiting or any(patterns.without_look_around(each) is None for each in expressions):
            return False
        only: dict[str, Any] = {"type": "object", "properties": names}
        if expressions:
            only["patternProperties"] = expressions
        only["additionalProperties"] = self._part(node, value, below(node.place, "unevaluatedProperties"))
        node.add(any_of([*_others(node, "object"), only]))
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
            types = named_types(target) if isinstance(target, dict) else None
            self._definitions[name] = {"type": type_value(types or EVERY)}
            self._open.add(name)
            with self._silent() as self._left_of[name]:
                self._definitions[name] = self._possible(self.schema(target, pointer, node.closed, exact=node.exact))
            self._open.remove(name)
        self.not_held |= self._left_of[name]
        held = self._definitions[name]
        node.add(held if isinstance(held, bool) else {"$ref": f"#/$defs/{name}"})
        return True

    def _possible(self, schema: Schema) -> Schema:
        """Return a definition; False if no text satisfies it.

        llguidance refuses a definition that no text satisfies, even if nothing uses it.
        """
        if not self._way.careful or isinstance(schema, bool) or self._late:
            return schema
        return not _is_empty(self._complaint({"allOf": [schema]})) and schema

    def _target(self, reference: Any) -> tuple[str, Any] | None:
        """Return the place and the schema to which a reference points; None if they are not found in this document."""
        return None if self._foreign or not isinstance(reference, str) else self._references.target(reference)

    # Negation.

    def negation(self, given: Any, types: frozenset[str] = EVERY) -> Schema | None:
        """Return a schema that allows exactly the values that the given schema refuses. None if that is not possible.

        Args:
            given: The schema, as the client wrote it.
            types: The possible types of the value.
        """
        if isinstance(given, bool):
            return not given
        if not isinstance(given, dict) or self._late or self._references.has_base(given):
            return None
        self.work += _WORK_OF_A_SCHEMA
        if self._references.are_old and isinstance(given.get("$ref"), str):
            given = {"$ref": given["$ref"]}
        kept = named_types(given)
        alternatives: list[Schema] = []
        if kept is not None:
            rest = with_integers(types) - with_integers(kept)
            if "integer" in kept and "number" in rest and "number" not in kept:
                return None  # The result would have to allow all numbers except integers.
            alternatives += [{"type": kind} for kind in type_names(rest)]
            types = types & with_integers(kept) or types
        for keyword, value in given.items():
            rule = KEYWORDS.get(keyword)
            if rule is None or keyword == "type" or not rule.types & types:
                continue
            against = self._against(keyword, value, given, types)
            if against is None:
                return None
            alternatives += against
        return any_of(alternatives) if self._spend(max(len(alternatives), 1)) else None

    def _against(
        self, keyword: str, value: Any, given: Mapping[str, Any], types: frozenset[str]
    ) -> Sequence[Schema] | None:
        """Return schemas that together allow exactly the values that a keyword refuses. None if that is impossible."""
        match keyword:
            case "enum" | "const":
                return _none_of(value if keyword == "enum" else [value], types)
            case "pattern":
                against = patterns.complement(value) if isinstance(value, str) else None
                return None if against is None else [{"type": "string", "pattern": against}]
            case "minLength" | "minItems" | "minProperties" | "maxLength" | "maxItems" | "maxProperties":
                return _other_size(keyword, value)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
                if not is_number(value) or not is_exact(value) or abs(value) > LARGEST_BOUND:
                    return None
                if isinstance(given.get("exclusiveMinimum"), bool) or isinstance(given.get("exclusiveMaximum"), bool):
                    return None
                least, exclusive = keyword in ("maximum", "exclusiveMaximum"), not keyword.startswith("exclusive")
                return [{"type": "number", **bound_of(value, least=least, exclusive=exclusive, whole=False)}]
            case "required":
                if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                    return None
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties":
                return self._against_properties(value)
            case "not":
                with self._silent() as left:
                    held = self.schema(value, "", closed=False, exact=True)
                return None if left else [held]
            case "allOf" | "anyOf":
                found = [self.negation(each, types) for each in value] if isinstance(value, list) else [None]
                parts = [part for part in found if part is not None]
                if len(parts) < len(found):
                    return None
                return parts if keyword == "allOf" else [all_of(parts)]
            case "$ref":
                target = self._target(value)
                if target is None or target[0] in self._negated:
                    return None
                self._negated.append(target[0])
                against_target = self.negation(target[1], types)
                self._negated.pop()
                return None if against_target is None else [against_target]
            case "format":
                return None if isinstance(value, str) and formats.is_known(value) else []
            case "uniqueItems":
                return [] if value is False else None
            case "items" | "additionalProperties" | "patternProperties":
                return [] if value is True or value == {} else None
        return None

    def _against_properties(self, value: Any) -> Sequence[Schema] | None:
        if not isinstance(value, dict):
            return None
        found: list[Schema] = []
        for name, each in value.items():
            against = self.negation(each)
            if against is None:
                return None
            if against is not False:
                found.append({"type": "object", "properties": {name: against}, "required": [name]})
        return found


_SIZED = {"Length": "string", "Items": "array", "Properties": "object"}
# The meaning of each of these keywords depends on the others.
_NEIGHBOURS = frozenset({"properties", "patternProperties", "additionalProperties", "prefixItems", "items"})
_SHAPES = (("properties", dict), ("patternProperties", dict), ("allOf", list))
_MEMBERS = ("properties", "patternProperties", "additionalProperties")
_OF_OBJECTS = frozenset({*_MEMBERS, "required", "minProperties", "maxProperties"})
_ANY_NAME = r"^[\s\S]*$"
_EVERY_NAME = frozenset({"", "^", ".*", "^.*", ".*$"})  # Patterns for all names.
# Patterns for nearly all names. Some of them do not match the empty name, or names with line breaks.
_NEARLY_EVERY_NAME = frozenset({"^.*$", ".", ".+", "^.+$", "^.+"})
_OF_NAMES = frozenset({"type", "pattern", "minLength", "maxLength"})
_CERTAIN = frozenset({"$ref", "allOf"})  # Applicators whose subschemas must always hold.


def _other_size(keyword: str, value: Any) -> Sequence[Schema] | None:
    """Return schemas that together allow exactly the values that violate a size limit. None if that is impossible."""
    if not is_size(value):
        return None
    kind = _SIZED[keyword[3:]]
    if keyword == "maxProperties" and value > 0:
        return None  # llguidance counts a repeated name twice.
    if keyword.startswith("max"):
        return [{"type": kind, f"min{keyword[3:]}": int(value) + 1}]
    return [{"type": kind, f"max{keyword[3:]}": int(value) - 1}] if value > 0 else []


def _none_of(values: Any, types: frozenset[str]) -> Sequence[Schema] | None:
    """Return schemas that together allow exactly the values that are not listed. None if that is impossible."""
    if not isinstance(values, list) or not all(map(is_exact, values)):
        return None
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault("number" if is_number(value) else type_of(value), []).append(plain(value))
    found: list[Schema] = []
    for kind in type_names(types):
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
                between = {"type": kind}
                for edge, least in ((low, True), (high, False)):
                    if edge is not None:
                        between |= bound_of(edge, least=least, exclusive=True, whole=kind == "integer")
                found.append(between)
        elif kind != "null":
            return None
    return found


def _references(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions to which a rewritten schema refers."""
    if isinstance(schema, dict):
        if isinstance(reference := schema.get("$ref"), str):
            yield reference.rpartition("/")[2]
        for keyword, part in schema.items():
            if keyword != "enum":
                yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _can_be_merged(part: Schema, out: Mapping[str, Any]) -> TypeGuard[dict[str, Any]]:
    """Return True if the keywords of two schemas can be joined in one schema and keep their meaning."""
    if isinstance(part, bool) or part.keys() & out.keys():
        return False
    return not (part.keys() & _NEIGHBOURS and out.keys() & _NEIGHBOURS)


def _is_empty(complaint: str) -> bool:
    """Return True if llguidance reports that no text satisfies the root of a schema."""
    return complaint.startswith("Unsatisfiable") and "while processing" not in complaint


def _others(node: _Node, kind: str) -> list[Schema]:
    """Return a schema for each type that a node may have, except `kind`."""
    return [{"type": name} for name in type_names(node.types - {kind})]


class Keyword(NamedTuple):
    """How a keyword is rewritten."""

    rewrite: Callable[[_Rewriter, _Node, str, Any], bool]  # Returns False if the keyword is not enforced.
    what: str  # Describes how the keyword is enforced, and why it is limited. docs/constraints.md shows this text.
    types: frozenset[str] = EVERY  # The types of values that the keyword restricts.


_STRING, _ARRAY, _OBJECT = frozenset({"string"}), frozenset({"array"}), frozenset({"object"})
_NUMBER = frozenset({"number", "integer"})
_HELD = "held"
_VALUES = "held, except for integers that a double cannot represent"
_BOUND = "rounded inward to a double within 64 bits; for `number`, an exclusive bound moves inward by at least 1e-9"
_LEAST = (
    "all choices of the optional members, up to 128; if unnamed members are allowed, only a minimum of up "
    "to one above the number of required members"
)
_MOST = "all choices of the optional members, up to 128; not if both optional and unnamed members are allowed"
_DEPENDS = (
    "`anyOf` of two cases: the member is missing, or its condition holds; up to 7 members, because the cases multiply"
)
# All other keywords are annotations, or belong to a keyword here (`then`, `else`, `minContains`, `$defs`, `$anchor`).
KEYWORDS: Mapping[str, Keyword] = {
    "type": Keyword(_Rewriter._type, _HELD),
    "enum": Keyword(_Rewriter._enum, _VALUES),
    "const": Keyword(_Rewriter._enum, _VALUES),
    "minimum": Keyword(_Rewriter._number, _BOUND, _NUMBER),
    "maximum": Keyword(_Rewriter._number, _BOUND, _NUMBER),
    "exclusiveMinimum": Keyword(_Rewriter._number, _BOUND, _NUMBER),
    "exclusiveMaximum": Keyword(_Rewriter._number, _BOUND, _NUMBER),
    "multipleOf": Keyword(_Rewriter._multiple, _HELD, _NUMBER),
    "minLength": Keyword(_Rewriter._size, _HELD, _STRING),
    "maxLength": Keyword(_Rewriter._size, _HELD, _STRING),
    "pattern": Keyword(
        _Rewriter._pattern, "look-arounds and `\\b` become plain patterns, if possible; no back references", _STRING
    ),
    "format": Keyword(
        _Rewriter._format, "the standard's formats, except `regex` and `idn-*`; others have no effect", _STRING
    ),
    "items": Keyword(_Rewriter._items, _HELD, _ARRAY),
    "prefixItems": Keyword(_Rewriter._items, _HELD, _ARRAY),
    "additionalItems": Keyword(_Rewriter._items, _HELD, _ARRAY),
    "minItems": Keyword(_Rewriter._size, _HELD, _ARRAY),
    "maxItems": Keyword(_Rewriter._size, _HELD, _ARRAY),
    "uniqueItems": Keyword(
        _Rewriter._unique,
        "all orders of up to 4 possible values, because a grammar cannot remember which values occurred",
        _ARRAY,
    ),
    "contains": Keyword(
        _Rewriter._contains,
        "all positions of one required item, if `maxItems` is at most 7; not with `maxContains` or a `minContains` "
        "above 1",
        _ARRAY,
    ),
    "properties": Keyword(_Rewriter._properties, _HELD, _OBJECT),
    "required": Keyword(_Rewriter._required, _HELD, _OBJECT),
    "patternProperties": Keyword(_Rewriter._pattern_properties, "held if no name can match two patterns", _OBJECT),
    "additionalProperties": Keyword(_Rewriter._additional, _HELD, _OBJECT),
    "propertyNames": Keyword(_Rewriter._names_of_members, "as `patternProperties`; an `enum` as `properties`", _OBJECT),
    "minProperties": Keyword(_Rewriter._member_count, _LEAST, _OBJECT),
    "maxProperties": Keyword(_Rewriter._member_count, _MOST, _OBJECT),
    "dependentRequired": Keyword(_Rewriter._dependent, _DEPENDS, _OBJECT),
    "dependentSchemas": Keyword(_Rewriter._dependent, _DEPENDS, _OBJECT),
    "dependencies": Keyword(_Rewriter._dependent, _DEPENDS, _OBJECT),
    "if": Keyword(_Rewriter._if, "`anyOf` of two cases: `if` with `then`, or the negation of `if` with `else`"),
    "not": Keyword(
        _Rewriter._not, "the negation, if it can be expressed; `items`, `format`, `oneOf` and others have no negation"
    ),
    "allOf": Keyword(_Rewriter._all_of, _HELD),
    "anyOf": Keyword(_Rewriter._any_of, _HELD),
    "oneOf": Keyword(
        _Rewriter._any_of,
        "`anyOf`, in which each branch is combined with the negations of the branches that it overlaps",
    ),
    "unevaluatedProperties": Keyword(
        _Rewriter._evaluated,
        "as `additionalProperties`, also with `allOf` and `$ref`; not with `anyOf`, `oneOf`, `if` and the like",
        _OBJECT,
    ),
    "unevaluatedItems": Keyword(
        _Rewriter._evaluated, "as `items`; not with `contains`, `allOf`, `anyOf`, `$ref` and the like", _ARRAY
    ),
    "$ref": Keyword(_Rewriter._reference, "references within the schema"),
    "$dynamicRef": Keyword(_Rewriter._reference, "as `$ref`, if the anchor occurs once"),
    "$recursiveRef": Keyword(_Rewriter._reference, "as `$ref`, if the anchor occurs once"),
}
# Keywords that llguidance enforces only sometimes or never. Other keywords can express them.
_EXPRESSED = frozenset(
    {
        *("uniqueItems", "contains", "propertyNames", "minProperties", "maxProperties", "if", "not"),
        *("dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems"),
    }
)
