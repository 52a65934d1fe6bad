"""TEI's errors by the state of the model and the key, and for any body. `cases/tei_errors` has the others."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from container.api_keys import ApiKeys
from container.models.life_cycle import State
from tests.contracts.pooling_exchange import Kind, ask

PATHS = ["/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/", "/tokenize"]


async def test_a_model_that_loads_is_503() -> None:
    answer = await ask("/embed", {"inputs": "a"}, state=State.STARTING)
    assert (answer.status, answer.body) == (
        503,
        b'{"error":"unhealthy: the model \'model\' is not loaded yet","error_type":"Unhealthy"}',
    )


async def test_a_call_without_a_key_is_401_without_a_body_and_probes_need_none() -> None:
    server = {"api_keys": ApiKeys.of(["secret"])}
    for path in ("/embed", "/predict", "/rerank", "/similarity", "/tokenize", "/decode", "/"):
        answer = await ask(path, {"inputs": "a"}, server=server)
        assert (answer.status, answer.body) == (401, b""), path
    assert (await ask("/info", server=server)).status == 401
    assert [(await ask(path, server=server)).status for path in ("/", "/health", "/ping")] == [200] * 3


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
