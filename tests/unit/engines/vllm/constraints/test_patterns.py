"""Patterns with look-around, and complements of patterns. llguidance matches the rewritten patterns."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from functools import partial

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import llguidance
from hypothesis import example, given
from hypothesis import strategies as st

from engines.vllm.constraints.patterns import complement, none_of, without_look_around
from tests.python_calls import python_calls
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = byte_tokens()
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"  # of zod 4
NAME, WITH_PROPERTY = r"^(?!-)(?!.*--)[a-z-]+(?<!-)$", r"^(?!foo$)\p{L}+$"
HOST = r"^(?!.*://)(?=.{1,255}$)((.{1,63}\.){1,127}(?![0-9]*$)[a-z0-9-]+\.?)$"


def found(patterns: Iterable[str], texts: Iterable[str]) -> list[str]:
    """Return those of the texts in which llguidance finds all patterns."""
    schema = {"type": "string", "allOf": [{"pattern": pattern} for pattern in patterns]}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(TOKENS, grammar, log_level=0)
    if "Regex is empty" in matcher.get_error():
        return []
    assert not matcher.get_error(), (schema, matcher.get_error())
    taken = []
    for text in texts:
        matcher.reset()
        tokens = list(json.dumps(text, ensure_ascii=False).encode())
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            taken.append(text)
    return taken


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        # Look-around at the beginning.
        (EMAIL, ["a.b+c@d-e.org", "a@b.co"], [".a@b.co", "a..b@c.de", "a@b", "a.@b.co", "a@b.co\n"]),
        (r"^(?=.*[A-Z])(?=.*\d).{8,}$", ["Abcdefg1", "1234567X"], ["abcdefg1", "Abcdefgh", "Abcdef1"]),
        (r"^(?!foo$|bar$).+$", ["fo", "foo1", "bars"], ["foo", "bar", ""]),
        (r"^(?!foo)", ["", "fo", "bar\nfoo"], ["foo", "foobar"]),
        (NAME, ["a", "a-b"], ["-a", "a-", "a--b", ""]),
        (r"^(?=[^=]+$)(?!\s+$)(.|\n)+$", ["a b", " a\n"], ["a=b", " \n", ""]),
        (r"^(?!.*\/)^(.*[^.]+.*)$", ["a.b"], ["a/b", "..", ""]),
        (r"^(?=a(?!b))[a-z]+$", ["ac", "a"], ["ab", "b"]),
        (WITH_PROPERTY, ["fo", "éß"], ["foo", "1", ""]),
        # Look-around in the middle and at the end.
        (r"^((?!x).)*$", ["", "abc"], ["x", "abxc"]),
        (r"^((?!mode)(?!Mode).)*$", ["mod", "m ode"], ["mode", "a Mode b"]),
        (r"^[a-z]+(?!-)[a-z-]+$", ["ab-", "ab-c", "abc"], ["a-", "-"]),
        (r"^([\da-z](?:(?!.*--)[\da-z-]*[\da-z])?)$", ["a", "a-b"], ["a--b", "a-", ""]),
        (HOST, ["example.com", "1.2.a"], ["example.1", "a://b.c", "com"]),
        (r"foo(?=\.(yaml|json))", ["foo.yaml", "a foo.json b"], ["foo", "foo.xml"]),
        (r"(?=.*a)(?=.*b)", ["ab", "cba"], ["a", "b\na"]),
        (r"^(?!a)b|^(?!c)d$", ["bx", "d"], ["ab", "dx"]),
        (r"^a(?=b)(?!c)", ["ab"], ["ac", "a"]),
        # Behind.
        (r"^[a-z-]+(?<!-)$", ["a", "a-b"], ["a-", "-", ""]),
        (r"^.*(?<=\.js|\.ts)$", ["a.js", ".ts"], ["js", "a.jsx"]),
        (r"(?<!a)b", ["b", "cb", "abb"], ["ab", "a"]),
        # Anchors inside a pattern, and word boundaries.
        (r"^([^,]+(,|$)){3,}$", ["a,b,c", "a,b,c,"], ["a,b", ",a,b,c"]),
        (r"^(a$|b)c?$", ["a", "b", "bc"], ["ac"]),
        (r"^$[a-z]*$", [""], ["a"]),
        (r"a$b|c", ["c"], ["ab", "a"]),
        (r"()^a(?:)*", ["ab"], ["ba"]),
        (r"\bfoo\b", ["foo", "a foo.", "é foo é", "éfooé"], ["afoo", "foo1", "foo_"]),
        (r"^a\Bb\B", ["abc"], ["ab", "a b"]),
        (r"^.{1,256}[a-z]{1,6}\b([-a-z]*)$", ["xab", "xab-"], ["x", "x_"]),
        # Syntax that Rust writes in another way.
        (r"^\cJ\0[\b]\/\-$", [], ["cJ0b/-"]),
        (r"^\cJ[\b]$", ["\n\b"], ["J\b"]),
        (r"^\ud83d\ude00[^]$", ["\U0001f600x", "\U0001f600\n"], ["\U0001f600"]),
        (r"{project}\.{name}", ["{project}.{name}"], ["project"]),
        (r"^\<.+\>$", ["<a>"], ["a", "<>"]),
        (r"^[[&&x]$", ["[", "&", "x"], ["a"]),
        (r"^[a-z--]$", ["a", "-"], ["&"]),
        (r"^[!-\d]$", ["!", "-", "1"], ["#"]),
        (r"^[\w-.]$", ["a", "-", "."], ["/"]),
        (r"^(?<stop>a)(?<a>b)|(?<a>c)$", ["ab", "abx", "c", "xc"], ["a", "b"]),
        # Characters that llguidance writes differently in JSON.
        ('^[^"]$', ["a", "\\", "\n"], ['"']),
        (r"^[^\\]$", ["a", '"', "\n"], ["\\"]),
        (r"^[^\s\\/:*?]+$", ["a", '"', "\x01"], ["\\", "a\\b"]),
        (r"^\P{P}$", ["a", "\n"], ['"', "\\"]),
        (r"^[^\p{L}\\]$", ["1", "\n"], ["a", "\\"]),
        (r"^(?!a)[^\"]$", ["b", "\\"], ['"', "a"]),
    ],
)
@pytest.mark.parametrize("single", [False, True])
def test_a_pattern_is_written_without_look_around(
    pattern: str, matching: list[str], others: list[str], single: bool
) -> None:
    written = without_look_around(pattern, single=single)
    if single and pattern in (HOST, NAME, WITH_PROPERTY):  # These need more than one pattern.
        assert written is None
        return
    assert written is not None
    assert found(written, matching + others) == matching
    assert len(written) == 1 or not single


@pytest.mark.parametrize("pattern", ["", "^a$", r"\d+", r"^[\w.-]+\/\S*$", "^(a|b)+c{2,3}?$|^$", r"^[^a]\W.$", "(?:x)"])
def test_a_pattern_that_llguidance_takes_stays(pattern: str) -> None:
    assert without_look_around(pattern) == (pattern,)


UNKNOWN = [
    r"(a)\1", r"(?<n>a)\k<n>", "(?i)a", "(?i:a)", "a++", "*", "a{2}{3}", "a{,3}", "a{3,2}", "(", ")", "(?", "[",
    "[z-a]", r"\A", r"\z", r"\a", r"\_\e", r"\u{110000}", r"\ud83d", "[[:alpha:]]", "[]a]", "[^]a]", "a]", r"[\B]",
    "\\", "^*", "(?=a)*", r"[\p{L}-z]", r"(?=\p{L})\b", "(?<=a)(?=b)", "\ud800", "{1}", "{}",
]  # fmt: skip


@pytest.mark.parametrize("pattern", UNKNOWN)
def test_what_is_not_known_for_certain_is_not_rewritten(pattern: str) -> None:
    assert without_look_around(pattern) is None
    assert complement(pattern) is None


COMPLEMENTED = [
    "", "^$", "foo", "^foo$", r"^\.", r"\d", "^.{3,}$", "^(foo|bar)$", '^[^"]*$', r"\\", "^(?!a)", r"\bfoo\b",
]  # fmt: skip


@pytest.mark.parametrize("pattern", COMPLEMENTED)
def test_a_simple_pattern_has_a_complement(pattern: str) -> None:
    texts = ["", "foo", "foo_", "a foo", "f\noo", "bar", "ab", "ab\nc", ".", "a.", "1", "\u0967", "\n", '"', "\\"]
    written = complement(pattern)
    assert written is not None
    assert found([written], texts) == [text for text in texts if not python(pattern).search(text)]


HOSTILE = [
    "(a|b)*a(a|b){12}$x", ".*a.{20}$x", "^((?!a.{10}b).)*$", r"(\b\w+\b.*){20}x$", "((a?){50}){50}$x", "(?=a{99999})b",
    "^(.{1,99999}){9999}\\b", "(?=a)" * 20_000, "^" + "(?!.*a)" * 500, "(?!" * 20_000, "(?!" * 400 + ")" * 400,
    "(" * 100_000, "[" * 40_000, "(?:" * 95 + "a" + "*)" * 95 + "(?=b)", "[^\\w]" * 8_000 + "$a",
    "a?" * 2_000 + "(?!b)",    "((?!a)|(?=b)|(?!c))*" * 20 + "x", "(?=.*[a-c])(?=.*[b-d])" * 30 + "(?!.*x.*y.*z)" * 20,
    "".join([f"(?=.*{character})" for character in "abcdefghijklmnopqrst"]),
    "^(?!" + "".join([chr(0x4E00 + 2 * at) for at in range(2_000)]) + ")", "|".join(["^a(?=b)"] * 10_000),
]  # fmt: skip


@pytest.mark.parametrize("pattern", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_pattern_takes_little_work(pattern: str) -> None:
    for rewrite in (complement, partial(without_look_around, single=True)):  # Without `single`, there is less to do.
        assert python_calls(partial(rewrite, pattern)) < 1_500_000  # about one second


@pytest.mark.parametrize("words", [["a" * 100_000], [chr(0x4E00 + 2 * at) for at in range(5_000)], ["x" * 70]])
def test_words_beyond_the_bounds(words: list[str]) -> None:
    assert none_of(words) is None


# Any patterns, against Python.


IN_PYTHON = {"$": r"\Z", r"\B": r"(?!\b)"}  # `$` matches only at the very end. `\B` also matches an empty text.


def python(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\.|\$", lambda part: IN_PYTHON.get(part[0], part[0]), pattern), re.ASCII)


CHARACTERS = 'ab"\\- \n'
UNICODE = "_é\u0967\U0001f600"
LITERALS = st.sampled_from([re.escape(character) for character in CHARACTERS])
CLASSES = st.sampled_from(
    [".", r"\w", r"\W", r"\d", "[^a]", "[ab]", r"[^\"]", r"[^\\b]", r"[^\w\n]", r"[a-b \-]", "[!-a]"]
)
PLAIN = st.recursive(
    LITERALS | CLASSES,
    lambda parts: st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"])).map(
            lambda it: f"(?:{it[0]}){it[1]}"
        ),
    ),
    max_leaves=6,
)
LOOKS = st.one_of(
    st.tuples(st.sampled_from(["(?=", "(?!"]), PLAIN, st.sampled_from(["", "$"])).map(lambda it: "".join(it) + ")"),
    st.tuples(st.sampled_from(["(?<=", "(?<!"]), LITERALS | CLASSES).map(lambda it: "".join(it) + ")"),
    st.sampled_from(["^", "$", r"\b", r"\B"]),
)
PATTERNS = st.tuples(
    st.sampled_from(["", "^", "^", "^(?!", "(?:"]), st.lists(PLAIN | LOOKS, max_size=5), st.sampled_from(["", "$"])
).map(lambda it: it[0] + "".join(it[1]) + ")" * it[0].count("(") + it[2])
TEXTS = st.lists(st.text(CHARACTERS + UNICODE, max_size=7), min_size=1, max_size=12)


@given(PATTERNS | PLAIN, TEXTS)
def test_what_is_written_is_found_where_python_finds_the_pattern(pattern: str, texts: list[str]) -> None:
    expected = [text for text in texts if python(pattern).search(text)]
    for single in (False, True):
        written = without_look_around(pattern, single=single)
        assert written is None or found(written, texts) == expected


@given(PATTERNS | PLAIN, TEXTS)
def test_a_complement_is_found_where_python_does_not_find_the_pattern(pattern: str, texts: list[str]) -> None:
    written = complement(pattern)
    assert written is None or found([written], texts) == [text for text in texts if not python(pattern).search(text)]


@given(st.lists(st.text(CHARACTERS + UNICODE, max_size=5), max_size=8), TEXTS)
@example(["".join(random.Random(seed).sample("abcdefghij", 6)) for seed in range(60)], [""])
def test_none_of_any_words(words: list[str], texts: list[str]) -> None:
    written = none_of(words)
    assert written is not None
    texts += [*words, *[word[:-1] for word in words], *[word + "a" for word in words]]
    assert found([written], texts) == [text for text in texts if text not in words]


@given(st.sets(st.integers(0, 0x81), max_size=10), st.booleans())
def test_a_class_has_its_characters_and_no_others(codes: set[int], negated: bool) -> None:
    shown = "".join([rf"\x{code:02x}" for code in codes]) or "é"
    pattern = f"^[{'^' * negated}{shown}]$"
    written = without_look_around(pattern)
    assert written is not None
    # NUL is left out because it may be missing, and DEL because JSON has two forms of it.
    characters = [chr(code) for code in range(1, 0x7F)]
    assert found(written, characters) == [text for text in characters if (ord(text) in codes) != negated]


@given(st.text(r"ab()[]{}^$\?*+|.-,=!<>:dwb1u0c&~", max_size=20))
def test_any_text_is_rewritten_so_that_llguidance_takes_it_or_not_at_all(text: str) -> None:
    for written in (without_look_around(text), complement(text)):
        if written is not None:
            found([written] if isinstance(written, str) else written, ["a"])
