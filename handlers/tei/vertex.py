"""TEI's route /vertex for Google's Vertex AI: several bodies of the other routes in one. It has none of TEI's headers.

Source: TEI's router 1.9, `src/http/server.rs`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import msgspec

from engines.request import GenerationRequest, TokenDelta
from handlers.route_declarations import ContractSetting
from handlers.tei.answer import TeiAnswer
from handlers.tei.body import RerankBody
from handlers.tei.contracts import Parsed, PredictContract, RerankContract, TeiContract, contract_of_kind
from handlers.tei.errors import TeiRefusal, empty


class VertexBody(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /vertex."""

    instances: list[Any]


class VertexContract(TeiContract):
    """/vertex: `instances` with `texts` are bodies of /rerank. The model's kind decides about the others."""

    shape = VertexBody

    def __init__(self, setting: ContractSetting) -> None:
        super().__init__(setting)
        self._ranks, route = RerankContract(setting), contract_of_kind(setting)
        self._route = PredictContract(setting) if isinstance(route, RerankContract) else route

    def requests_and_answer(self, body: VertexBody) -> Parsed:
        if not body.instances:
            raise empty("instances", prefixed=False)
        requests: list[GenerationRequest] = []
        answers: list[TeiAnswer] = []
        ends: list[int] = []
        for instance in body.instances:
            further, answer = self._parsed(instance)
            requests += further
            answers.append(answer)
            ends.append(len(requests))
        return requests, _VertexAnswer(answers, ends)

    def _parsed(self, instance: Any) -> Parsed:
        try:
            return self._ranks.requests_and_answer(msgspec.convert(instance, RerankBody))
        except msgspec.ValidationError:
            pass  # It is another route's.
        try:
            return self._route.requests_and_answer(msgspec.convert(instance, self._route.shape))
        except msgspec.ValidationError as error:
            raise TeiRefusal("Validation", str(error)) from None


class _VertexAnswer(TeiAnswer):
    def __init__(self, answers: Sequence[TeiAnswer], ends: Sequence[int]) -> None:
        """Create the answer.

        Args:
            answers: The answer of each instance.
            ends: For each instance the number of prompts up to its end.
        """
        super().__init__(ends[-1], 0)
        self._answers, self._ends = answers, ends

    def counts_and_times(self) -> tuple[tuple[str, str], ...]:
        return ()

    def feed(self, prompt: int, delta: TokenDelta) -> bytes:
        delta.numbers = self._answers[bisect_right(self._ends, prompt)].part(delta.numbers)
        return super().feed(prompt, delta)

    def content(self, parts: Sequence[Any]) -> Any:
        places = zip(self._answers, (0, *self._ends), self._ends, strict=False)
        return {"predictions": [answer.content(parts[start:end]) for answer, start, end in places]}
