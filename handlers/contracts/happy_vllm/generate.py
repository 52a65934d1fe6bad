"""happy_vllm's generating routes, `/v1/generate` and `/v1/generate_stream`.

Source: happy_vllm_generate, Deprecated generating endpoints; contracts/happy_vllm.md sections 2 to 4.
"""

from __future__ import annotations

from handlers.contracts.happy_vllm.answer import StreamAnswer, WholeAnswer
from handlers.contracts.happy_vllm.body import document
from handlers.contracts.happy_vllm.errors import refuse, refused
from handlers.contracts.happy_vllm.request import read_generation
from handlers.contracts.protocol import Call, Exchange, Reply
from handlers.errors import InvalidParameter, RequestError


class HappyVllmContract:
    """One of the two routes; they differ in the answer alone."""

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream

    def parse(self, call: Call) -> Exchange:
        """See `Contract.parse`."""
        values = document(call)
        try:
            generation = read_generation(values)
        except InvalidParameter as error:
            raise refused(refuse(error), error.message) from None
        requests = (generation.request(call.request_id, self._stream),)
        if not self._stream:
            return Exchange(requests, WholeAnswer(generation))
        answer = StreamAnswer(generation)
        return Exchange(requests, answer, cumulative=answer)

    def refusal(self, error: RequestError) -> Reply:
        """See `Contract.refusal`."""
        return refuse(error)
