"""Answers of pooling models: a vector is written as JSON when it comes, and not with all others at the end."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from engines.pooling import PoolingModel
from engines.request import TokenDelta
from handlers.answers.pooled_answer import PooledAnswer
from handlers.lmi.vectors.contracts import pooling_contract
from handlers.openai.embeddings import EmbeddingsContract
from handlers.tei.answer import SparseVectors, Vectors
from tests.contracts.exchange import MODEL, call
from tests.settings import configured

_EMBEDDING = PoolingModel(kind="embedding", task="embed", tasks=frozenset({"embed"}), vector_size=2)


def _lmi(vector_format: Literal["djl", "vllm"]) -> PooledAnswer:
    config = configured(MODEL, vector_format=vector_format)
    answer = pooling_contract(config, _EMBEDDING).parse(call({"inputs": ["a", "b"]})).answer
    assert isinstance(answer, PooledAnswer)
    return answer


def _openai(encoding: str) -> PooledAnswer:
    contract = EmbeddingsContract("m", lambda name: True, ())
    exchange = contract.parse(call({"input": ["a", "b"], "encoding_format": encoding}), "/v1/embeddings")
    assert exchange is not None
    assert isinstance(exchange.answer, PooledAnswer)
    return exchange.answer


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(_lmi("vllm"), b"[[0.5, 0.25], [3.0, 4.0]]\n", id="LMI's vLLM handler"),
        pytest.param(_lmi("djl"), b"[[0.5,0.25],[3.0,4.0]]", id="DJL"),
        pytest.param(Vectors(2, 2), b"[[0.5,0.25],[3.0,4.0]]", id="TEI"),
        pytest.param(SparseVectors(2, 2), b'[{"index":0,"value":0.5},{"index":1,"value":0.25}]', id="TEI, sparse"),
        pytest.param(_openai("float"), b'"embedding":[0.5,0.25]', id="OpenAI"),
        pytest.param(_openai("base64"), b'"embedding":"AAAAPwAAgD4="', id="OpenAI, base64"),
    ],
)
def test_a_vector_is_written_when_it_comes(answer: PooledAnswer, expected: bytes) -> None:
    first = np.array([0.5, 0.25], np.float32)
    assert answer.feed(0, TokenDelta("", last=True, numbers=first)) == b""
    first[:] = 0
    assert expected in answer.feed(1, TokenDelta("", last=True, numbers=np.array([3, 4], np.float32)))
