"""TEI's errors: their statuses, kinds and texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.api_keys import ApiKeys
from container.models.life_cycle import State
from tests.contracts.pooling_exchange import Kind, ask

pytestmark = pytest.mark.asyncio
INVALID = "Input validation error: "


def error(message: str, kind: str) -> bytes:
    return json.dumps({"error": message, "error_type": kind}, separators=(",", ":"), ensure_ascii=False).encode()


PATHS = ["/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/", "/tokenize"]


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_are_no_json_get_plain_text(path: str) -> None:
    # /tokenize is TEI's only if the body has `inputs`.
    wrong = b'{"inputs": [' if path != "/tokenize" else b'{"inputs": "a"} x'
    answer = await ask(path, content=wrong, headers={"content-type": "application/json"})
    if path == "/tokenize":
        assert answer.status == 501  # Not readable, so not TEI's.
        return
    assert (answer.status, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert answer.body.startswith(b"Failed to parse the request body as JSON: ")


@pytest.mark.parametrize("path", [*PATHS, "/rerank"])
async def test_bodies_without_their_content_type_get_plain_text(path: str) -> None:
    answer = await ask(path, content=b'{"inputs": "a", "texts": []}')
    assert answer.status == 415
    assert answer.body == b"Expected request with `Content-Type: application/json`"
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_model_that_loads_is_503_and_another_method_405() -> None:
    answer = await ask("/embed", {"inputs": "a"}, state=State.STARTING)
    assert (answer.status, answer.body) == (503, error("unhealthy: the model 'model' is not loaded yet", "Unhealthy"))
    answer = await ask("/embed")
    assert (answer.status, answer.body, answer.headers["allow"]) == (405, b"", "POST")


async def test_a_call_without_a_key_is_401_without_a_body_and_probes_need_none() -> None:
    server = {"api_keys": ApiKeys.of(["secret"])}
    for path in ("/embed", "/predict", "/rerank", "/similarity", "/tokenize", "/decode", "/"):
        answer = await ask(path, {"inputs": "a"}, server=server)
        assert (answer.status, answer.body) == (401, b""), path
    assert (await ask("/info", server=server)).status == 401
    assert [(await ask(path, server=server)).status for path in ("/", "/health", "/ping")] == [200] * 3


async def test_a_body_over_the_limit_is_413_in_plain_text() -> None:
    answer = await ask("/embed", {"inputs": "a" * 100}, server={"max_request_size": 50})
    assert (answer.status, answer.body) == (413, b"Failed to buffer the request body: length limit exceeded")


async def test_other_contracts_refuse_a_model_that_pools_in_their_own_form() -> None:
    refusal = "the model is of the kind embedding; it generates no text"
    tgi = await ask("/generate", {"inputs": "a"})
    assert (tgi.status, tgi.body) == (422, error(INVALID + refusal, "validation"))
    happy = await ask("/v1/generate", {"prompt": "a"})
    assert (happy.status, refusal in happy.body.decode()) == (422, True)
    triton = await ask("/v2/models/model/generate", {"text_input": "a"})
    assert triton.status == 400
    assert triton.body.startswith(b'{"error":')


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = (
    *("inputs", "query", "texts", "truncate", "truncation_direction", "prompt_name", "normalize", "dimensions", "ids"),
    *("raw_scores", "return_text", "parameters", "add_special_tokens"),
)
TEXTS = st.text(max_size=5) | st.lists(st.text(max_size=5) | st.lists(st.integers(0, 20), max_size=3), max_size=3)


@given(
    path=st.sampled_from([*PATHS, "/rerank", "/invocations"]),
    kind=st.sampled_from(["embedding", "sparse", "reranker", "classifier", "generating"]),
    document=st.dictionaries(st.sampled_from(FIELDS), JSON | TEXTS, max_size=5),
)
async def test_any_body_gets_an_answer_or_a_refusal_of_the_client(
    path: str, kind: Kind, document: dict[str, Any]
) -> None:
    numbers = {"reranker": [(1,)], "classifier": [(1, 2, 3)]}.get(kind, [(0.5, 0.5, 0.5, 0.5)])
    answer = await ask(
        path,
        content=json.dumps(document).encode(),
        headers={"content-type": "application/json"},
        kind=kind,
        numbers=numbers,
    )
    assert answer.status in (200, 400, 422, 424, 501)
    assert b"internal" not in answer.body
