"""The grammars that the engine process keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import llguidance

from engines.vllm.constraints import compiled
from engines.vllm.constraints.compiled import CompiledGrammars
from tests.unit.engines.vllm.constraints.byte_tokens import byte_tokens

TOKENS = byte_tokens()


@dataclass
class Grammar:
    """A stand-in for vLLM's grammar."""

    ll_matcher: Any
    terminated: bool = False


class Compiler:
    """Counts what it compiles."""

    def __init__(self) -> None:
        self.grammars = CompiledGrammars()
        self.texts: list[str] = []

    def grammar(self, expression: str, kind: str = "regex") -> Any:
        def compile_it() -> Any:
            self.texts.append(expression)
            return Grammar(llguidance.LLMatcher(TOKENS, llguidance.grammar_from("regex", expression)))

        return self.grammars.grammar(kind, expression, compile_it)


def takes(grammar: Any, text: str) -> bool:
    taken: bool = grammar.ll_matcher.consume_tokens(list(text.encode()))
    return taken


def test_a_grammar_is_compiled_once_and_each_request_follows_its_own_text() -> None:
    compiler = Compiler()
    first, second = compiler.grammar("ab|cd"), compiler.grammar("ab|cd")
    first.terminated = True
    assert takes(first, "a")
    assert takes(second, "cd")
    assert takes(first, "b")
    third = compiler.grammar("ab|cd")
    assert takes(third, "ab")
    assert not third.terminated
    assert compiler.texts == ["ab|cd"]


def test_another_text_or_kind_is_another_grammar() -> None:
    compiler = Compiler()
    for expression, kind in (("a", "regex"), ("b", "regex"), ("a", "lark")):
        assert takes(compiler.grammar(expression, kind), expression)
    assert compiler.texts == ["a", "b", "a"]


def test_so_many_requests_share_a_grammar_and_no_more() -> None:
    compiler = Compiler()
    for _ in range(2 * compiled.REQUESTS + 1):
        compiler.grammar("a")
    assert compiler.texts == ["a"] * 3


def test_the_grammars_that_were_used_last_are_kept() -> None:
    compiler = Compiler()
    names = [f"a{index}" for index in range(compiled.GRAMMARS)]
    for expression in (*names, names[0], "new", names[0], names[1]):
        compiler.grammar(expression)
    assert compiler.texts == [*names, "new", names[1]]


def test_long_texts_take_the_place_of_others() -> None:
    compiler = Compiler()
    long = "a" * (compiled.CHARACTERS // 2)
    for expression in ("b", long, long + "a", long + "a"):
        compiler.grammar(expression)
    assert compiler.texts == ["b", long, long + "a"]
    compiler.grammar("b")
    assert compiler.texts[3:] == ["b"]


def test_what_is_too_long_to_be_kept_is_compiled_for_each_request() -> None:
    compiler = Compiler()
    expression = "(" + "a" * compiled.CHARACTERS + ")?b"
    assert takes(compiler.grammar(expression), "b")
    assert takes(compiler.grammar(expression), "b")
    assert compiler.texts == [expression] * 2
