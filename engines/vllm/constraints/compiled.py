"""The grammars that the engine process has compiled: each once for all requests that have it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engines.vllm.internals import GuidanceGrammar

GRAMMARS = 32
CHARACTERS = 1 << 20  # Of all specifications. A grammar takes up to forty times the memory of its specification.
# Requests that share a grammar, one after another or at the same time. They share what llguidance works out while it
# follows their texts, for which it has a limit. A few texts stay far below it.
REQUESTS = 16


class _Compiled:
    """A grammar that no request advances, and the number of its copies."""

    def __init__(self, grammar: GuidanceGrammar) -> None:
        self._grammar = grammar
        self.copies = 0

    def copy(self) -> GuidanceGrammar:
        self.copies += 1
        return replace(self._grammar, ll_matcher=self._grammar.ll_matcher.deep_copy())


class CompiledGrammars:
    """Keeps the grammars that were used last. Several threads of the engine process compile grammars."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[Any, str], _Compiled] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def grammar(self, kind: Any, specification: str, compile_it: Callable[[], GuidanceGrammar]) -> GuidanceGrammar:
        """Return the grammar for a request.

        Args:
            kind: What the specification is, by vLLM's name.
            specification: The text of the constraint.
            compile_it: Compiles it.
        """
        key = (kind, specification)
        with self._lock:
            known = self._known.get(key)
            if known is not None and known.copies < REQUESTS:
                self._known.move_to_end(key)
                return known.copy()
        compiled = _Compiled(compile_it())
        with self._lock:
            self._forget(key)
            self._known[key] = compiled
            self._characters += len(specification)
            while len(self._known) > GRAMMARS or self._characters > CHARACTERS:
                self._forget(next(iter(self._known)))
            return compiled.copy()

    def _forget(self, key: tuple[Any, str]) -> None:
        if self._known.pop(key, None) is not None:
            self._characters -= len(key[1])
