"""The requests of Triton's generate extension (`embedding_request`) and of KServe's `/infer` for vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.pooling import Pooling
from tests.contracts.pooling_exchange import ask

MODEL = "/v2/models/model"
TENSOR = {"name": "input_text", "shape": [2], "datatype": "BYTES", "data": ["deep", "fun"]}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "document", "prompts"),
    [
        (
            "generate",
            {"text_input": "unused", "embedding_request": json.dumps({"input": "deep learning"})},
            ["deep learning"],
        ),
        ("infer", {"inputs": [TENSOR]}, ["deep", "fun"]),
    ],
)
async def test_each_text_is_a_request(path: str, document: dict[str, Any], prompts: list[str]) -> None:
    answer = await ask(f"{MODEL}/{path}", document)
    assert [(request.prompt, request.pooling) for request in answer.seen] == [
        (prompt, Pooling(task="embed")) for prompt in prompts
    ]
