"""TEI's errors: their statuses, kinds and texts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from container.api_keys import ApiKeys
from container.models.life_cycle import State
from engines.errors import EngineDead, EngineFault, InvalidRequest, RequestError
from tests.contracts.pooling_exchange import Kind, ask

pytestmark = pytest.mark.asyncio
INVALID = "Input validation error: "
EMPTY = f"{INVALID}`inputs` cannot be empty"
TOO_LONG = f"{INVALID}`inputs` must have less than 8 tokens. Given: 12"
TOO_MANY = "batch size 33 > maximum allowed batch size 32"
LONG = "deep " * 10


def error(message: str, kind: str) -> bytes:
    return json.dumps({"error": message, "error_type": kind}, separators=(",", ":"), ensure_ascii=False).encode()


def similar(source: str, *sentences: str, **parameters: Any) -> dict[str, Any]:
    return {"inputs": {"source_sentence": source, "sentences": list(sentences)}, "parameters": parameters}


@pytest.mark.parametrize(
    ("path", "document", "kind", "status", "message", "error_type"),
    [
        ("/embed", {"inputs": ""}, "embedding", 400, EMPTY, "Empty"),
        ("/embed", {"inputs": []}, "embedding", 400, EMPTY, "Empty"),
        ("/embed", {"inputs": ["a", ""]}, "embedding", 400, EMPTY, "Empty"),
        ("/embed", {"inputs": [[4], []]}, "embedding", 400, EMPTY, "Empty"),
        ("/embed_all", {"inputs": ""}, "embedding", 400, EMPTY, "Empty"),
        ("/embed_sparse", {"inputs": ""}, "sparse", 400, EMPTY, "Empty"),
        ("/predict", {"inputs": ""}, "classifier", 400, EMPTY, "Empty"),
        ("/predict", {"inputs": [["a"], ["", ""]]}, "classifier", 400, EMPTY, "Empty"),
        ("/rerank", {"query": "", "texts": [""]}, "reranker", 400, EMPTY, "Empty"),
        ("/rerank", {"query": "a", "texts": []}, "reranker", 400, "`texts` cannot be empty", "Empty"),
        ("/similarity", similar("a"), "embedding", 400, "`inputs.sentences` cannot be empty", "Empty"),
        ("/similarity", similar("", "a"), "embedding", 400, EMPTY, "Empty"),
        ("/tokenize", {"inputs": []}, "embedding", 400, "`inputs` cannot be empty", "Empty"),
        ("/tokenize", {"inputs": ["a", ""]}, "embedding", 400, EMPTY, "Empty"),
        ("/decode", {"ids": []}, "embedding", 400, f"{INVALID}`input_ids` cannot be empty", "Empty"),
        ("/decode", {"ids": [[4], []]}, "embedding", 400, f"{INVALID}`input_ids` cannot be empty", "Empty"),
        ("/embed", {"inputs": LONG, "truncate": False}, "embedding", 422, TOO_LONG, "Validation"),
        ("/embed_all", {"inputs": LONG, "truncate": False}, "embedding", 422, TOO_LONG, "Validation"),
        ("/predict", {"inputs": LONG, "truncate": False}, "classifier", 422, TOO_LONG, "Validation"),
        (
            "/rerank",
            {"query": "a", "texts": [LONG], "truncate": False},
            "reranker",
            422,
            f"{INVALID}`inputs` must have less than 8 tokens. Given: 14",
            "Validation",
        ),
        ("/similarity", similar("a", LONG, truncate=False), "embedding", 422, TOO_LONG, "Validation"),
        (
            "/embed",
            {"inputs": "x" * 2001, "truncate": False},
            "embedding",
            422,
            f"{INVALID}`inputs` must have less than 2000 characters. Given: 2001",
            "Validation",
        ),
        (
            "/tokenize",
            {"inputs": "x" * 2001},
            "embedding",
            422,
            f"{INVALID}`inputs` must have less than 2000 characters. Given: 2001",
            "Validation",
        ),
        ("/embed", {"inputs": ["a"] * 33}, "embedding", 422, TOO_MANY, "Validation"),
        ("/embed_all", {"inputs": ["a"] * 33}, "embedding", 422, TOO_MANY, "Validation"),
        ("/predict", {"inputs": [["a"]] * 33}, "classifier", 422, TOO_MANY, "Validation"),
        ("/rerank", {"query": "a", "texts": ["a"] * 33}, "reranker", 422, TOO_MANY, "Validation"),
        # The source sentence counts.
        ("/similarity", similar("a", *["a"] * 32), "embedding", 422, TOO_MANY, "Validation"),
        ("/tokenize", {"inputs": ["a"] * 33}, "embedding", 422, TOO_MANY, "Validation"),
        ("/decode", {"ids": [[4]] * 33}, "embedding", 422, TOO_MANY, "Validation"),
        (
            "/embed",
            {"inputs": "a", "dimensions": 0},
            "embedding",
            422,
            f"{INVALID}`dimensions` should be positive",
            "Validation",
        ),
        (
            "/embed",
            {"inputs": "a", "dimensions": 5},
            "embedding",
            422,
            f"{INVALID}`dimensions` should be smaller than the maximum embedding dimension.",
            "Validation",
        ),
        *(
            (
                path,
                {"inputs": "a", "prompt_name": "quest"},
                "embedding",
                422,
                f"{INVALID}`default-prompt-name` is set to `quest` but it was not found in the Sentence Transformers "
                'prompts. Available prompts: ["query", "document"]',
                "Validation",
            )
            for path in ("/embed", "/embed_all", "/tokenize")
        ),
        (
            "/tokenize",
            {"inputs": "a", "prompt_name": "query"},
            "reranker",
            422,
            f"{INVALID}`default-prompt-name` is set to `query` but no prompts were found in the Sentence Transformers "
            "configuration",
            "Validation",
        ),
    ],
)
async def test_a_wrong_text_or_field_is_refused_in_teis_words(
    path: str, document: dict[str, Any], kind: Kind, status: int, message: str, error_type: str
) -> None:
    answer = await ask(path, document, kind)
    assert (answer.status, answer.body) == (status, error(message, error_type))
    assert answer.headers["content-type"] == "application/json"


NOT_EMBEDDING = "Backend error: Model is not an embedding model"
NOT_SPARSE = "Backend error: Model is not an embedding model with SPLADE pooling"
NOT_RERANKER = "Backend error: model is not a re-ranker model"
NOT_CLASSIFIER = "Backend error: Model is not a classifier model"


@pytest.mark.parametrize(
    ("path", "kinds", "message"),
    [
        ("/embed", ("reranker", "classifier", "generating"), NOT_EMBEDDING),
        ("/embed_all", ("reranker", "classifier", "generating"), NOT_EMBEDDING),
        ("/similarity", ("reranker", "classifier", "generating"), NOT_EMBEDDING),
        ("/embed_sparse", ("embedding", "reranker", "classifier", "generating"), NOT_SPARSE),
        ("/rerank", ("embedding", "sparse", "classifier", "generating"), NOT_RERANKER),
        ("/predict", ("embedding", "sparse", "generating"), NOT_CLASSIFIER),
        ("/embed", ("sparse",), "Backend error: `normalize` is not available for SPLADE models"),
        ("/embed_all", ("sparse",), "Backend error: `embed_all` is not available for SPLADE models"),
    ],
)
async def test_a_model_of_another_kind_says_so(path: str, kinds: tuple[Kind, ...], message: str) -> None:
    document = similar("a", "b") if path == "/similarity" else {"inputs": "a", "query": "a", "texts": ["b"]}
    for kind in kinds:
        answer = await ask(path, document, kind)
        assert (answer.status, answer.body) == (424, error(message, "Backend")), kind


async def test_the_limit_of_a_batch_is_a_setting() -> None:
    assert (await ask("/embed", {"inputs": ["a"] * 2}, max_client_batch_size=2)).status == 200
    answer = await ask("/embed", {"inputs": ["a"] * 3}, max_client_batch_size=2)
    assert answer.body == error("batch size 3 > maximum allowed batch size 2", "Validation")


PATHS = ["/embed", "/embed_all", "/embed_sparse", "/predict", "/similarity", "/decode", "/", "/tokenize"]
TARGET = "Failed to deserialize the JSON body into the target type: "
INPUTS = "inputs: expected a text, token ids, or a list of texts and lists of token ids"
PAIRS = (
    "inputs: expected a string, a pair of strings [string, string] or a batch of mixed strings and pairs [[string], "
    "[string, string], ...]"
)


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


@pytest.mark.parametrize(
    ("path", "document", "kind", "reason"),
    [
        ("/embed", {}, "embedding", "Object missing required field `inputs`"),
        ("/embed", {"inputs": ["a", 1]}, "embedding", INPUTS),
        ("/embed", {"inputs": [1.5]}, "embedding", "inputs[0]: Expected `int | str | array`, got `float`"),
        ("/embed", {"inputs": "a", "normalize": None}, "embedding", "normalize: Expected `bool`, got `null`"),
        ("/embed", {"inputs": "a", "dimensions": -1}, "embedding", "dimensions: Expected `int` >= 0"),
        ("/embed", {"inputs": "a", "truncate": 1}, "embedding", "truncate: Expected `bool | null`, got `int`"),
        ("/embed", {"inputs": [-1]}, "embedding", "inputs[0]: Expected `int` >= 0"),
        ("/embed", [], "embedding", "Expected `object`, got `array`"),
        (
            "/embed",
            {"inputs": "a", "truncation_direction": "up"},
            "embedding",
            "truncation_direction: Invalid enum value 'up'",
        ),
        ("/predict", {"inputs": []}, "classifier", PAIRS),
        ("/predict", {"inputs": ["a", "b", "c"]}, "classifier", PAIRS),
        ("/predict", {"inputs": [["a"], "b"]}, "classifier", PAIRS),
        ("/predict", {"inputs": [["a", "b", "c"]]}, "classifier", PAIRS),
        ("/predict", {"inputs": [[]]}, "classifier", PAIRS),
        ("/rerank", {"texts": ["a"]}, "reranker", "Object missing required field `query`"),
        ("/rerank", {"query": "a", "texts": "a"}, "reranker", "texts: Expected `array`, got `str`"),
        ("/similarity", {"inputs": "a"}, "embedding", "inputs: Expected `object`, got `str`"),
        ("/tokenize", {"inputs": 1}, "embedding", "inputs: Expected `str | array`, got `int`"),
        ("/decode", {"ids": [1, [2]]}, "embedding", "ids: expected token ids, or lists of token ids"),
    ],
)
async def test_bodies_of_another_shape_get_plain_text(path: str, document: Any, kind: Kind, reason: str) -> None:
    answer = await ask(path, document, kind)
    assert (answer.status, answer.body.decode()) == (422, TARGET + reason)
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("failure", "status", "body"),
    [
        (EngineFault(), 424, error(f"Backend error: {EngineFault().message}", "Backend")),
        (EngineDead(), 424, error(f"Backend error: {EngineDead().message}", "Backend")),
        (InvalidRequest("no"), 422, error(f"{INVALID}no", "Validation")),
    ],
)
async def test_errors_of_the_engine_have_teis_form(failure: RequestError, status: int, body: bytes) -> None:
    answer = await ask("/embed", {"inputs": "a"}, failure=failure)
    assert (answer.status, answer.body) == (status, body)


async def test_a_full_queue_is_429() -> None:
    for document in ({"inputs": "a"}, {"inputs": ["a", "b"]}):
        answer = await ask("/embed", document, places=0)
        assert (answer.status, answer.body) == (429, error("Model is overloaded", "Overloaded"))


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


async def test_unknown_fields_are_ignored_unless_parameters_are_strict() -> None:
    document = {"inputs": "a", "encoding_format": "float"}
    assert (await ask("/embed", document)).status == 200
    answer = await ask("/embed", document, strict_parameters=True)
    message = f"{INVALID}`encoding_format` is not known to this server (option.strict_parameters is on)"
    assert (answer.status, answer.body) == (422, error(message, "Validation"))


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
