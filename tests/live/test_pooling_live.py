"""Vectors, scores and classes from the real engine, through all contracts that have them, except for TEI's."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings
from pydantic import SecretStr

from tests.live.bare_transformers import Job, numbers_of_transformers
from tests.live.lora import make_adapter
from tests.live.server import Server, hosted, stopped, write_model
from tests.live.small_model import prepare_small_model
from tests.live.small_pooling_models import LABELS, MAX_MODEL_LEN, VECTOR_SIZE, prepare_small_encoder
from tests.waiting import wait_until

TEXTS = ["the capital of france", "paris is a large city ?", "a dog runs", "zebra"]
PROMPTS = {"query": "query : ", "passage": "passage : "}
PAIRS = [["capital of france", text] for text in ("paris", "a dog runs", "the weather is good")]
TOO_LONG = "a " * (2 * MAX_MODEL_LEN)
ENGINE = {"dtype": "fp32", "kv_cache_memory_bytes": 64 << 20, "max_rolling_batch_size": 32}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


def load(host: Server, directory: Path, name: str, model: Path, properties: str = "", **options: object) -> Any:
    written = write_model(directory / name / "model", model_id=model, **ENGINE, **options)
    with (written / "serving.properties").open("a") as file:
        file.write(properties + "\n")
    return hosted(host, written)


@pytest.fixture(scope="module")
def encoder(host: Server, directory: Path) -> Iterator[Server]:
    with load(host, directory, "encoder", prepare_small_encoder()) as model:
        yield model


@pytest.fixture(scope="module")
def reranker(host: Server, directory: Path) -> Iterator[Server]:
    with load(host, directory, "reranker", prepare_small_encoder("reranker")) as model:
        yield model


@pytest.fixture(scope="module")
def classifier(host: Server, directory: Path) -> Iterator[Server]:
    with load(host, directory, "classifier", prepare_small_encoder("classifier")) as model:
        yield model


@pytest.fixture(scope="module")
def colbert(host: Server, directory: Path) -> Iterator[Server]:
    with load(host, directory, "colbert", prepare_small_encoder("colbert")) as model:
        yield model


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """The vectors, scores and classes of all models, computed by transformers."""
    encoder, classifier = prepare_small_encoder(), prepare_small_encoder("classifier")
    return numbers_of_transformers(
        vectors=Job(encoder, TEXTS),
        means=Job(encoder, [prompt + TEXTS[0] for prompt in PROMPTS.values()], "mean"),
        decoder=Job(prepare_small_model(), TEXTS, "mean"),
        pairs=Job(prepare_small_encoder("reranker"), PAIRS, "head"),
        classes=Job(classifier, TEXTS, "head"),
        tokens=Job(prepare_small_encoder("colbert"), TEXTS, "tokens"),
    )


@pytest.fixture(scope="module")
def vectors(expected: dict[str, list[list[float]]]) -> list[list[float]]:
    return expected["vectors"]


def post(model: Server, path: str, body: object, **headers: str) -> Any:
    """Send a body, and return the reply's document.

    The status has to be 200. On OpenAI's routes, the body names the model.
    """
    if isinstance(body, dict) and path != "/invocations":
        body = {"model": model.name, **body}
    answer = model.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()


def assert_close(given: Any, expected: Any) -> None:
    """Check that the vectors have the same direction, and the length 1."""
    given, expected = np.array(given, dtype=float), np.array(expected, dtype=float)
    assert given.shape == expected.shape
    assert np.abs(np.linalg.norm(given, axis=-1) - 1).max() < 1e-5
    assert (given * expected).sum(-1).min() > 0.9999


def embeddings(document: Any) -> list[Any]:
    assert [item["index"] for item in document["data"]] == list(range(len(document["data"])))
    return [item["embedding"] for item in document["data"]]


WITH_MESSAGES = ("/v1/embeddings", "/pooling", "/classify", "/tokenize")
PICTURE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PARTS: tuple[Any, ...] = (
    PICTURE,
    {"type": "input_image", "image_url": PICTURE["image_url"]["url"]},
    {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AA=="}},
    {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,AA=="}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    {"type": "image_url", "image_url": None, "uuid": "x"},
    {"type": "image_embeds", "image_embeds": "AA=="},
    {"type": "file", "file": {"file_data": "AA=="}},
    {"type": "refusal", "refusal": 5},
    {"type": "thinking"},
    {"type": "unknown"},
    {"type": None},
    None,
    5,
)
"""Parts of a message that text models refuse."""


def test_parts_that_a_model_of_texts_does_not_take_are_the_clients_fault(
    encoder: Server, reranker: Server, classifier: Server, colbert: Server
) -> None:
    for model, part in itertools.product((encoder, reranker, classifier, colbert), PARTS):
        content = {"content": [part]}
        calls: list[tuple[str, dict[str, Any]]] = [
            *((path, {"messages": [{"role": "user", **content}]}) for path in WITH_MESSAGES),
            *((path, {"text_1": "a", "text_2": content}) for path in ("/score", "/v1/score")),
            *((path, {"query": content, "documents": ["a"]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
            ("/v2/embed", {"inputs": [content]}),
            ("/v2/embed", {"images": [PICTURE["image_url"]["url"]]}),
        ]
        for path, body in calls:
            answer = model.client.post(path, json={"model": model.name, **body})
            assert answer.status_code in (400, 404), f"{path} {part}: {answer.text}"
            assert "ContextVar" not in answer.text


# Vectors


def test_vectors_are_those_of_transformers(encoder: Server, vectors: list[list[float]]) -> None:
    assert_close(post(encoder, "/invocations", {"inputs": TEXTS}), vectors)
    assert_close(post(encoder, "/invocations", TEXTS), vectors)
    assert_close(embeddings(post(encoder, "/v1/embeddings", {"input": TEXTS})), vectors)
    assert_close(embeddings(post(encoder, "/invocations", {"input": TEXTS})), vectors)
    assert_close(post(encoder, "/v2/embed", {"texts": TEXTS})["embeddings"]["float"], vectors)


def test_a_text_that_is_too_long_is_cut_or_refused(encoder: Server) -> None:
    longest = "a " * (MAX_MODEL_LEN - 2)
    cut, whole = (post(encoder, "/invocations", {"inputs": text}) for text in (TOO_LONG, longest))
    assert_close(cut, whole)
    refused = encoder.client.post("/invocations", json={"inputs": TOO_LONG, "truncate": False})
    assert refused.status_code == 400
    assert f"the prompt has {2 * MAX_MODEL_LEN + 2} tokens" in refused.json()["message"]
    refused = encoder.client.post("/v1/embeddings", json={"model": encoder.name, "input": ["a", TOO_LONG]})
    assert refused.status_code == 400
    assert refused.json()["error"]["type"] == "BadRequestError"
    assert str(MAX_MODEL_LEN) in refused.json()["error"]["message"]


def test_a_text_of_a_megabyte_is_cut_before_it_is_tokenized(encoder: Server) -> None:
    assert len(post(encoder, "/invocations", {"inputs": "a" * (1 << 20)})) == VECTOR_SIZE


@pytest.mark.parametrize(
    "fields",
    [
        {"input": TEXTS[0]},
        {"input": TEXTS},
        {"input": [5, 6, 7]},
        {"input": [[5, 6], [7]], "encoding_format": "base64"},
        {"input": TEXTS, "user": "me", "use_activation": False},
    ],
)
def test_the_fast_way_has_the_bytes_of_vllms_front_end(encoder: Server, fields: dict[str, Any]) -> None:
    def answer(**headers: str) -> str:
        found = encoder.client.post("/v1/embeddings", json={**fields, "model": encoder.name}, headers=headers)
        assert found.status_code == 200, found.text
        return re.sub(r'"id":"embd-[^"]*"|"created":\d+', "", found.text)

    by_vllm = answer(**{"x-session-id": "1"})  # Slipway's contract leaves calls with this header to vLLM.
    assert answer() == by_vllm


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"input": []}, 400, "at least one prompt"),
        ({"input": [99999]}, 400, "99999"),
        ({"input": "a", "dimensions": 8}, 400, "Matryoshka"),
        ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
        ({"input": "a", "normalize": True}, 400, "use_activation"),
    ],
)
def test_openais_clients_get_vllms_errors(encoder: Server, fields: dict[str, Any], status: int, text: str) -> None:
    answer = encoder.client.post("/v1/embeddings", json={"model": encoder.name, **fields})
    assert answer.status_code == status
    assert text in answer.json()["error"]["message"]


def test_openais_client_reads_base64(encoder: Server, vectors: list[list[float]]) -> None:
    client = openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none")
    found = client.embeddings.create(model=encoder.name, input=TEXTS)
    assert_close([item.embedding for item in found.data], vectors)
    assert found.usage.prompt_tokens == found.usage.total_tokens > 0
    raw = post(encoder, "/v1/embeddings", {"input": TEXTS[0], "encoding_format": "base64"})
    (encoded,) = embeddings(raw)
    assert_close(np.frombuffer(base64.b64decode(encoded), "<f4"), vectors[0])


def test_langchain_and_litellm_get_vectors(encoder: Server, vectors: list[list[float]]) -> None:
    chain = OpenAIEmbeddings(
        model=encoder.name,
        base_url=f"{encoder.url}/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,  # Otherwise LangChain sends token ids of OpenAI's own tokenizer.
    )
    assert_close(chain.embed_documents(TEXTS), vectors)
    found = litellm.embedding(
        model=f"openai/{encoder.name}",
        input=TEXTS,
        api_base=f"{encoder.url}/v1",
        api_key="none",
        encoding_format="float",
    )
    assert_close([item["embedding"] for item in found.data], vectors)


def test_an_embedding_model_scores_by_the_cosine(encoder: Server, vectors: list[list[float]]) -> None:
    ranks = post(encoder, "/rerank", {"query": TEXTS[0], "documents": TEXTS[1:]})["results"]
    expected = np.array(vectors[1:]) @ np.array(vectors[0])
    assert [item["index"] for item in ranks] == list(np.argsort(-expected))
    for item in ranks:
        assert math.isclose(item["relevance_score"], expected[item["index"]], abs_tol=1e-4)
    (score,) = post(encoder, "/invocations", {"text_1": TEXTS[0], "text_2": TEXTS[1]})["data"]
    assert math.isclose(score["score"], expected[0], abs_tol=1e-4)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/invocations", {"inputs": TEXTS}, 503),
        ("/embed", {"inputs": TEXTS}, 424),
        ("/v1/embeddings", {"input": TEXTS}, 504),
        ("/pooling", {"input": TEXTS}, 504),
        ("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}, 504),
    ],
)
def test_vectors_and_scores_have_a_deadline(encoder: Server, path: str, body: dict[str, Any], status: int) -> None:
    headers = {"X-Amzn-SageMaker-Custom-Attributes": f"route={path}; deadline=0.0001"}
    answer = encoder.client.post("/invocations", json=body | {"model": encoder.name}, headers=headers)
    assert answer.status_code == status, answer.text
    assert "the call had no answer at its deadline" in answer.text
    wait_until(lambda: encoder.metric("slipway_engine_running") == 0)


def test_an_embedding_model_generates_no_text(encoder: Server) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert encoder.client.post(path, json={"model": encoder.name, "prompt": "a", "messages": []}).status_code == 404


def test_a_generating_model_makes_no_vectors(server: Server) -> None:
    for path in ("/v1/embeddings", "/pooling", "/rerank"):
        assert server.client.post(path, json={"input": "a"}).status_code == 404


@pytest.mark.slow
def test_settings_decide_about_the_pooling_the_length_and_the_prompt(
    host: Server, directory: Path, expected: dict[str, list[list[float]]]
) -> None:
    """DJL's engines take the mean of the tokens if the model's files do not define the pooling."""
    weights = shutil.copytree(prepare_small_encoder(), directory / "prompts")
    (weights / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    options = {"normalize": "false", "default_prompt_name": "passage"}
    with load(host, directory, "rust", weights, "engine=Rust", **options) as rust:
        for path, prompt in itertools.product(("/invocations", "/embed"), PROMPTS):
            named = {} if prompt == "passage" else {"prompt_name": prompt}
            (vector,) = np.atleast_2d(post(rust, path, {"inputs": TEXTS[0], **named}))
            length = np.linalg.norm(vector)
            assert math.isclose(length, 1.0, abs_tol=0.01) == (path == "/embed")
            assert_close(vector / length, expected["means"][list(PROMPTS).index(prompt)])


# A vector for each token


def test_late_interaction_scores_by_the_sum_of_the_best_matches(
    colbert: Server, expected: dict[str, list[Any]]
) -> None:
    pooled = post(colbert, "/pooling", {"input": TEXTS})["data"]
    for item, tokens in zip(pooled, expected["tokens"], strict=True):
        assert_close(item["data"], tokens)
    query, *documents = (np.array(tokens) for tokens in expected["tokens"])
    right = [(query @ document.T).max(-1).sum() for document in documents]
    scores = post(colbert, "/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})["data"]
    assert np.allclose([item["score"] for item in scores], right, atol=1e-3)
    asked = {"query": TEXTS[0], "documents": TEXTS[1:]}
    for path in ("/rerank", "/invocations"):
        ranks = post(colbert, path, asked)["results"]
        assert [item["index"] for item in ranks] == list(np.argsort(-np.array(right)))
        assert np.allclose([item["relevance_score"] for item in ranks], sorted(right, reverse=True), atol=1e-3)
    (tokens,) = post(colbert, "/invocations", {"input": TEXTS[3]})["data"]
    assert_close(tokens["data"], expected["tokens"][3])


# Scores


def test_scores_of_pairs_are_those_of_transformers(reranker: Server, expected: dict[str, list[list[float]]]) -> None:
    right = [1 / (1 + math.exp(-logit)) for (logit,) in expected["pairs"]]
    pairs = [{"text": first, "text_pair": second} for first, second in PAIRS]
    given = post(reranker, "/invocations", pairs)
    assert np.allclose(given, [[score] for score in right], atol=1e-4)
    assert np.allclose(post(reranker, "/invocations", pairs[0]), right[:1], atol=1e-4)
    keyed = {"key": PAIRS[0][0], "value": PAIRS[0][1]}
    assert np.allclose(post(reranker, "/invocations", keyed), right[:1], atol=1e-4)
    documents = [second for _, second in PAIRS]
    ranks = post(reranker, "/v1/rerank", {"query": PAIRS[0][0], "documents": documents, "top_n": 2})["results"]
    assert [item["index"] for item in ranks] == list(np.argsort(-np.array(right)))[:2]
    scores = post(reranker, "/score", {"text_1": PAIRS[0][0], "text_2": documents})["data"]
    assert np.allclose([item["score"] for item in scores], right, atol=1e-4)


def test_pairs_that_are_too_long_are_cut_longest_first(reranker: Server) -> None:
    (score,) = post(reranker, "/invocations", {"text": "a dog", "text_pair": TOO_LONG})
    cut = "a " * (MAX_MODEL_LEN - 3 - 2)
    assert np.allclose(score, post(reranker, "/invocations", {"text": "a dog", "text_pair": cut}), atol=1e-4)


# Classes


def test_classes_are_those_of_transformers(classifier: Server, expected: dict[str, list[list[float]]]) -> None:
    logits = np.array(expected["classes"])
    right = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    best = [LABELS[number] for number in right.argmax(-1)]
    assert len(set(best)) > 1, "the model of the test gives all texts the same class"
    answer = classifier.client.post("/invocations", json={"inputs": TEXTS})
    assert [item["label"] for item in answer.json()] == best
    assert np.allclose([item["score"] for item in answer.json()], right.max(-1), atol=1e-4)
    assert answer.text == json.dumps(answer.json(), indent=2, separators=(",", ":"))
    every = post(classifier, "/invocations", {"inputs": TEXTS[0], "parameters": {"top_k": None}})
    assert {item["label"]: round(item["score"], 3) for item in every[0]} == {
        label: round(float(score), 3) for label, score in zip(LABELS, right[0], strict=True)
    }
    raw = post(classifier, "/invocations", {"inputs": TEXTS[0], "parameters": {"function_to_apply": "none"}})
    assert math.isclose(raw[0]["score"], logits[0].max(), abs_tol=1e-4)
    data = post(classifier, "/classify", {"input": TEXTS})["data"]
    assert np.allclose([item["probs"] for item in data], right, atol=1e-4)


# Limits, and the end of the engine


def test_a_client_that_leaves_ends_its_prompts(encoder: Server) -> None:
    begun, aborted = map(encoder.metric, ("slipway_generations_total", "slipway_generations_aborted_total"))
    with stopped(encoder.engine_process()):  # A paused engine cannot finish before the client leaves.
        with encoder.send(f"/invocations?model_name={encoder.name}", {"inputs": TEXTS}):
            wait_until(lambda: encoder.metric("slipway_generations_total") > begun)
        wait_until(lambda: encoder.metric("slipway_generations_aborted_total") > aborted)
    encoder.wait_for_metric("slipway_engine_running", 0)
    assert len(post(encoder, "/invocations", {"inputs": TEXTS})) == len(TEXTS)


# A decoder as an embedding model, with an adapter


@pytest.fixture(scope="module")
def decoder(host: Server, directory: Path) -> Iterator[Server]:
    make_adapter(directory / "decoder" / "model" / "adapters" / "other", prepare_small_model(), seed=7)
    options = {"task": "text-embedding", "pooling": "mean", "max_model_len": 512, "enable_prefix_caching": "true"}
    lora = {"enable_lora": "true", "max_loras": 2}
    with load(host, directory, "decoder", prepare_small_model(), **options, **lora) as model:
        yield model


def test_a_decoder_makes_vectors(decoder: Server, expected: dict[str, list[list[float]]]) -> None:
    assert_close(post(decoder, "/invocations", {"inputs": TEXTS}), expected["decoder"])
    assert_close(embeddings(post(decoder, "/v1/embeddings", {"input": TEXTS})), expected["decoder"])
    assert decoder.client.get("/v1/models").json()["data"][0]["id"]


def test_an_adapter_changes_the_vector(decoder: Server) -> None:
    own, other = (post(decoder, "/invocations", {"inputs": TEXTS[0], **named}) for named in ({}, {"adapters": "other"}))
    assert np.dot(own, other) < 0.999
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "other"}
    assert_close(post(decoder, "/invocations", {"inputs": TEXTS[0]}, **header), other)
    named = {"input": TEXTS[0], "model": "other"}
    for by_vllm in ({}, {"x-session-id": "1"}):
        assert_close(embeddings(post(decoder, "/v1/embeddings", named, **by_vllm)), [other])
    unknown = decoder.client.post("/invocations", json={"inputs": "a", "adapters": "none"})
    assert unknown.status_code == 424


def test_the_metrics_count_vectors(decoder: Server) -> None:
    counts = ("slipway_generations_finished_total", "slipway_queue_seconds_count", "slipway_prompt_tokens_total")
    finished, queued, tokens = map(decoder.metric, counts)
    waited = decoder.metric("slipway_queue_seconds_sum")
    post(decoder, "/invocations", {"inputs": TEXTS[:2]})
    post(decoder, "/rerank", {"query": TEXTS[0], "documents": TEXTS[2:3]})
    assert decoder.metric("slipway_generations_finished_total") == finished + 4
    assert decoder.metric("slipway_queue_seconds_count") == queued + 4
    assert decoder.metric("slipway_queue_seconds_sum") > waited
    assert decoder.metric("slipway_prompt_tokens_total") > tokens
    assert "vllm:request_success_total" in decoder.client.get("/metrics").text
