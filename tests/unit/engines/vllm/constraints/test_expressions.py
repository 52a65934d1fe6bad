"""Classes of regular expressions, and dialects of grammars. llguidance matches the rewritten texts."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="llguidance is not installed")

import llguidance

from engines.vllm.constraints.expressions import ascii_expression, grammar_for_guidance
from tests.python_calls import python_calls
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

KELVIN, LONG_S, DIGIT = "\u212a", "\u017f", "\u0967"
TOKENS = byte_tokens()


def matcher(kind: Any, text: str) -> Any:
    return llguidance.LLMatcher(TOKENS, llguidance.grammar_from(kind, text), log_level=0)


def accepts(kind: str, text: str, answer: str) -> bool:
    found = matcher(kind, text)
    assert not found.get_error(), (text, found.get_error())
    tokens = list(answer.encode())
    return bool(found.try_consume_tokens(tokens) == len(tokens) and found.is_accepting())


@pytest.mark.parametrize(
    ("expression", "matching", "others"),
    [
        (r"\d{2}", ["11"], [DIGIT * 2]),
        (r"[\d]{2}", ["11"], [DIGIT * 2]),
        (r"\w{2}", ["a_"], ["éé"]),
        (r"\s{2}", [" \t", "\n\v"], ["\u205f\u205f", "\u00a0\u00a0"]),
        (r"\D{2}", [DIGIT * 2, "éé"], ["11"]),
        (r"\W{2}", ["éé", "--"], ["ab"]),
        (r"\S", ["\u205f", "a"], [" "]),
        (r"[^\d]", ["é", DIGIT], ["1"]),
        (r"[^\D]", ["1"], [DIGIT, "a"]),
        (r"[^\W_]+", ["aB1"], ["_", "é"]),
        (r"[\s\S]*", ["aé \n"], []),
        (r"[+-]?\d+(\.\d+)?", ["-12.5", "+1"], [DIGIT, "1."]),
        (r"[\w.-]+@[\w.-]+", ["a.b-c@d.e"], ["é@a"]),
        (r"\\d", [r"\d"], ["1", "\\1"]),
        (r"[\\d]", ["\\", "d"], ["1"]),
        (r"\p{Nd}", ["1", DIGIT], ["a"]),
        (r"[\p{Nd}x]", [DIGIT, "x"], ["a"]),
        (r"[[:digit:]]", ["1"], [DIGIT]),
        (r"[[:^digit:]]", ["a", DIGIT], ["1"]),
        (r"[^[:word:]]", ["é"], ["a"]),
        (r".", ["é", DIGIT], ["\n"]),
        # A hyphen next to a class such as `\d` stands for itself.
        (r"[\d-a]", ["-", "1", "a"], ["b"]),
        (r"[a-\d]", ["-", "1", "a"], ["b"]),
        (r"[+-\D]", ["-", "+", ",", "a"], ["1"]),
        (r"[\w-.]", ["-", ".", "a"], ["é", "`"]),
        (r"[-\w]", ["-", "a"], ["é"]),
        (r"[!-[]", ["A", "["], ["]"]),
        (r"[]\d]", ["]", "1"], [DIGIT]),
        (r"[^]\d]", ["a", DIGIT], ["]", "1"]),
        # Classes within classes, and operations.
        (r"[[\d]_]", ["1", "_"], [DIGIT]),
        (r"[^[\d]_]", [DIGIT], ["1", "_"]),
        (r"[\w--a]", ["b"], ["a", "é"]),
        (r"[\w&&[^\d]]", ["b"], ["1", "é"]),
        (r"[\w~~a]", ["b"], ["a", "é"]),
        # Flags.
        (r"(?u)\d", ["1"], [DIGIT]),
        (r"(?-u:\d){2}", ["11"], [DIGIT * 2]),
        ("(?x) \\d # [ \\d ( \n b", ["1b"], [DIGIT + "b"]),
        (r"(?x)[ \d _ ]", ["1", "_"], [" ", DIGIT]),
        (r"(?is)\d.", ["1\n"], [DIGIT + "\n"]),
        (r"(?P<kks>\d)", ["1"], [DIGIT]),
        # With `i`, ASCII letters match only ASCII letters.
        (r"(?i)k", ["k", "K"], [KELVIN]),
        (r"(?i)\x6b", ["k", "K"], [KELVIN]),
        (rf"(?i){KELVIN}", [KELVIN], ["k"]),
        (r"(?i)select", ["sELECT"], [LONG_S + "elect"]),
        (r"(?i)[a-z]", ["k", "K", "S"], [KELVIN, LONG_S, "1"]),
        (r"(?i)[^a-z]", ["1", "é", KELVIN], ["k", "S"]),
        (r"(?i)[[:alpha:]]", ["k", "S"], [KELVIN, LONG_S]),
        (r"(?i)\w", ["k", "_", "1"], [KELVIN, LONG_S]),
        (r"(?i)\W", ["é", "-", KELVIN], ["k", "S"]),
        (r"(?i)[\W]", ["é", "-", KELVIN], ["k", "S"]),
        (r"(?i)[^\W_]", ["k", "S", "1"], ["_", KELVIN, LONG_S, "é"]),
        (r"(?i)[\w.é]", ["é", "É", "k", "."], [KELVIN, LONG_S]),
        (r"(?i)[^\w.é]", ["-", "ä"], ["é", "É", "k", "."]),
        (r"(?i)[\u2100-\u2200]", [KELVIN], ["k"]),
        (r"(?i)[\W&&[^x]]", ["é", "-"], ["k", "s", "x"]),
        (r"(?i)é[à-ü]", ["éÉ"], ["e1"]),
        (r"(?i:a\w)\w", ["AB_"], ["ab" + KELVIN]),
        (r"(?i)(?-i:k)s", ["ks", "kS"], ["KS", "k" + LONG_S]),
        (r"((?i)k)k", ["Kk"], ["KK", KELVIN + "k"]),
        # The anchors at both ends have no effect, because an expression matches the whole text.
        (r"^ab$", ["ab"], []),
        (r"\Aab\Z", ["ab"], []),
        (r"\Aab\z", ["ab"], []),
    ],
)
def test_the_classes_of_an_expression_are_ascii(expression: str, matching: list[str], others: list[str]) -> None:
    written = ascii_expression(expression)
    assert [text for text in matching if not accepts("regex", written, text)] == []
    assert [text for text in others if accepts("regex", written, text)] == []


@pytest.mark.parametrize(
    "expression",
    ["(", "[", "[a", "a{2", "(?", "[[", "[z-a]", "(?i", "(?i)[z-a]", r"\b", r"\Bx", r"a\Zb", r"[\b]", "(?P<", "(?=a)"],
)
def test_what_cannot_be_followed_is_left_for_the_back_end_to_refuse(expression: str) -> None:
    assert matcher("regex", ascii_expression(expression)).get_error()


def test_classes_that_are_nested_too_deeply_are_refused() -> None:
    with pytest.raises(ValueError):
        ascii_expression("[" * 100_000)


@pytest.mark.parametrize("part", [r"\d", r"[\w", "(?i)k", r"\p{", "(?P<", "(", "#", "[a-", "\n# a"])
def test_the_work_for_an_expression_or_a_grammar_is_in_proportion_to_its_length(part: str) -> None:
    def read_all(text: str) -> None:
        for read in (ascii_expression, grammar_for_guidance):
            try:
                read(text)
            except ValueError:
                assert part == r"[\w" or part == "[a-"

    half, whole = (python_calls(partial(read_all, part * (length // len(part)))) for length in (20_000, 40_000))
    assert whole < 2.1 * half
    assert whole < 10 * 40_000


@pytest.mark.parametrize(
    ("grammar", "matching", "others"),
    [
        # Lark.
        ('start: "a"\n', ["a"], ["b"]),
        ('?start: "a"\n', ["a"], ["b"]),
        ('!start: "a"\n', ["a"], []),
        ('  ?start : "a" -> one\n | B\n  B: "b"', ["a", "b"], []),
        ('// a ::= b\n# c ::= d\n\n?start: "a"\n', ["a"], []),
        ('?start: A\r\nA: "a"\r\n', ["a"], []),
        ('A: "a"\n?start: A', ["a"], []),
        ('?start: "::="\n', ["::="], []),
        ("%import common.WS\n%ignore WS\n%import common.INT -> N\n?start: N N\n", ["1 2"], [DIGIT]),
        ('%llguidance {}\n?start: "a"\n', ["a"], []),
        ("start: /\\d{4}/\n", ["1234"], [DIGIT * 4]),
        ("?start: A\nA: /[\\d\\/]+/ | B\nB: /x/", ["1/2"], [DIGIT]),
        ("start: A\nA: /\\w # c/x\n", ["a"], ["é"]),
        ('?start: "/\\\\d/" /\\d/ // /\\d/\n', ["/\\d/1"], [f"/\\d/{DIGIT}"]),
        ("start: A\nA: /(?s:.*)/ & ~/\\d/\n", [DIGIT, "a"], ["1"]),
        ("start: %lark {\nstart: /\\d/\n}\n", ["1"], [DIGIT]),
        ('start: a "!"\na[lazy]: /\\d*x/\n', ["12x!"], [f"{DIGIT}x!"]),
        ('start: a\na[suffix="k"i]: /[a-z]*/\n', ["abK"], [f"ab{KELVIN}"]),
        ('start: /k/i "s"i\n', ["Ks", "kS"], [f"{KELVIN}s", f"k{LONG_S}"]),
        ('start: "k\\n\\u00e9/"i\n', ["K\né/", "k\nÉ/"], [f"{KELVIN}\né/"]),
        ('start: %json {"type": "string", "pattern": "^\\\\d/k$"}\n', ['"1/k"'], [f'"{DIGIT}/k"']),
        # GBNF.
        ('root ::= "a"\n', ["a"], []),
        ('# c\r\n\r\nroot ::= part\r\npart ::= [^"\\\\]+\r\n', ["abc"], ['"']),
        ('root ::= start\nstart ::= "a"\n', ["a"], []),
        ('root\n::= "start" start\nstart ::= [start:]+ | "start"\n', ["startstart", "startrats:"], ["start"]),
        ('root ::= Start start-it # start\nStart ::= "x"\nstart-it ::= "y"', ["xy"], ["x"]),
    ],
)
def test_a_grammar_is_read_in_its_dialect(grammar: str, matching: list[str], others: list[str]) -> None:
    written = grammar_for_guidance(grammar)
    assert [text for text in matching if not accepts("grammar", written, text)] == []
    assert [text for text in others if accepts("grammar", written, text)] == []


def test_the_places_in_errors_are_those_of_the_clients_grammar() -> None:
    error = matcher("grammar", grammar_for_guidance('?start: A\nA.2: "a"\n')).get_error()
    assert error.startswith("at 2(6): priority not supported")
