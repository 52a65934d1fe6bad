"""The handler of `/invocations` for a pooling model. It finds the contract of each body, and passes the call to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import msgspec

from engines.errors import UnknownAdapter
from engines.pooling import PoolingModel
from handlers.contract import JSON, Call, ContractError, Handler, ReplyWriter, Running, adapter_header
from handlers.djl_errors import unknown_adapter
from handlers.openai.handler import OpenAIHandler
from handlers.parsing.json_limits import JsonDecoder, off_the_loop

_split = JsonDecoder(dict[str, msgspec.Raw]).decode
_MARKS = (b'"input"', b'"messages"', b'"documents"', b'"text_1"', b'"data_1"', b'"queries"', b'"texts"', b'"inputs"')
_PATHS_OF_INPUT = {"embedding": "/v1/embeddings", "reranker": "/classify", "classifier": "/classify"}
_SCORED = ("text_1", "data_1", "queries")


class PoolingInvocations:
    """Passes each call to the handler for the kind of its body."""

    def __init__(
        self,
        lmi: Handler,
        openai: OpenAIHandler | None,
        model: PoolingModel,
        ranks: Handler | None = None,
        similarity: Handler | None = None,
    ) -> None:
        """Create the handler.

        Args:
            lmi: Answers LMI's bodies.
            openai: Answers the bodies of vLLM's routes. None if the engine is not vLLM.
            model: The model.
            ranks: Answers bodies with `query` and `texts`. If None, LMI's contract answers them.
            similarity: Answers bodies whose `inputs` has a source sentence. If None, LMI's contract answers them.
        """
        self._lmi, self._openai, self._ranks, self._similarity = lmi, openai, ranks, similarity
        self._path_of_input = _PATHS_OF_INPUT.get(model.kind, "/pooling")

    async def handle(self, call: Call, writer: ReplyWriter) -> Running | None:
        fields = await off_the_loop(call.body, _fields, call.body)
        if self._openai is not None and (path := self._path(fields)) is not None:
            if call.explanation is not None:
                call.explanation.way = path
                call.explanation.because.append(f"the fields of the body are those of {path}")
            return await self._begin(self._openai, path, fields, call, writer)
        if self._ranks is not None and "texts" in fields:
            return await self._ranks.handle(call, writer)
        inputs = bytes(fields.get("inputs", b""))
        if self._similarity is not None and inputs.startswith(b"{") and b'"source_sentence"' in inputs:
            return await self._similarity.handle(call, writer)
        return await self._lmi.handle(call, writer)

    def _path(self, fields: Mapping[str, msgspec.Raw]) -> str | None:
        """Return the path of the vLLM route that accepts a body, or None if there is no such route."""
        if "inputs" in fields:
            return None
        if "documents" in fields and "query" in fields:
            return "/rerank"
        if any(name in fields for name in _SCORED):
            return "/score"
        return self._path_of_input if "input" in fields or "messages" in fields else None

    async def _begin(
        self, openai: OpenAIHandler, path: str, fields: Mapping[str, msgspec.Raw], call: Call, writer: ReplyWriter
    ) -> Running | None:
        try:
            return await openai.begin(
                replace(call, method="POST", content_type=JSON, query=(), fields=fields),
                writer,
                path,
                any_model=True,
                adapter=adapter_header(call),
            )
        except UnknownAdapter as error:
            raise ContractError(unknown_adapter(error), error.message) from None


def _fields(body: bytes) -> Mapping[str, msgspec.Raw]:
    """Return the fields of a body, or no fields if the body can only be LMI's."""
    if not any(mark in body for mark in _MARKS):
        return {}
    try:
        return _split(body)
    except msgspec.DecodeError:
        return {}  # LMI's contract reports the error.
