"""TEI's contract with the real engine: its numbers agree with transformers', and TEI's clients can use it.

One server has all models. It starts with an encoder, and the other models are loaded later. Calls to the other models
name their model in the body or in SageMaker's attributes.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.live.server import START_SECONDS, Server, write_model
from tests.live.small_pooling_models import LABELS, MAX_MODEL_LEN, VECTOR_SIZE, prepare_small_encoder

ATTRIBUTES = "X-Amzn-SageMaker-Custom-Attributes"
TEXTS = ["The capital of France is Paris.", "A dog runs fast in the rain!", "deep machine learning"]
LONG = "the river runs " * 100
PROMPTS = {"query": "query : ", "passage": "passage : "}
OPTIONS = {"rolling_batch": "vllm", "dtype": "fp32"}
AT_A_TIME = 4


@pytest.fixture(scope="module")
def tei(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("tei")
    encoder = shutil.copytree(prepare_small_encoder(), directory / "weights")
    (encoder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    model = write_model(directory / "encoder", model_id=encoder, max_rolling_batch_size=AT_A_TIME, **OPTIONS)
    with Server(model, directory / "server.log", {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, name="encoder") as server:
        server.client.timeout = httpx.Timeout(START_SECONDS)
        yield server


@contextlib.contextmanager
def beside(server: Server, name: str, directory: Path) -> Iterator[str]:
    """Load a model into the server."""
    answer = server.client.post("/models", json={"model_name": name, "url": str(directory)})
    assert answer.status_code == 200, answer.text + server.log_text()[-4000:]
    server.give_way()
    try:
        yield name
    finally:
        server.client.delete(f"/models/{name}")


@pytest.fixture(scope="module")
def reranker(tei: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("reranker") / "model"
    with beside(tei, "reranker", write_model(directory, model_id=prepare_small_encoder("reranker"), **OPTIONS)) as name:
        yield name


@pytest.fixture(scope="module")
def classifier(tei: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("classifier") / "model"
    model = write_model(directory, model_id=prepare_small_encoder("classifier"), **OPTIONS)
    with beside(tei, "classifier", model) as name:
        yield name


class Reference:
    """The encoder and its tokenizer, loaded with transformers."""

    def __init__(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(prepare_small_encoder())
        self.model = AutoModel.from_pretrained(prepare_small_encoder()).eval()

    def states(self, text: str, *, special: bool = True, side: str = "right") -> Any:
        """Return the vectors of all tokens."""
        import torch

        self.tokenizer.truncation_side = side
        found = self.tokenizer(
            text, return_tensors="pt", truncation=True, max_length=MAX_MODEL_LEN, add_special_tokens=special
        )
        with torch.no_grad():
            return self.model(**found).last_hidden_state[0].numpy()

    def vector(self, text: str, **options: Any) -> Any:
        """Return the vector of the first token."""
        return self.states(text, **options)[0]


@pytest.fixture(scope="module")
def encoder_reference() -> Reference:
    return Reference()


def post(server: Server, path: str, document: dict[str, Any], status: int = 200) -> Any:
    answer = server.client.post(path, json=document)
    assert answer.status_code == status, answer.text
    return answer.json()


def near(number: float | str) -> Any:
    """Return an object that equals numbers near this one. The last digits depend on the texts in the engine's batch."""
    return pytest.approx(float(number), abs=1e-5)


def cosine(one: Any, other: Any) -> float:
    one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))


def test_vectors_are_those_of_transformers(tei: Server, encoder_reference: Reference) -> None:
    vectors = post(tei, "/embed", {"inputs": TEXTS})
    expected = [encoder_reference.vector(text) for text in TEXTS]
    assert cosine(expected[0], expected[1]) < 0.99
    for vector, other in zip(vectors, expected, strict=True):
        assert cosine(vector, other) > 0.9999
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)
    raw = post(tei, "/embed", {"inputs": TEXTS[0], "normalize": False})
    assert raw == [pytest.approx(expected[0].tolist(), abs=1e-3)]
    cut = post(tei, "/embed", {"inputs": TEXTS, "dimensions": 16})
    for vector, other in zip(cut, expected, strict=True):
        assert len(vector) == 16
        assert cosine(vector, other[:16]) > 0.9999
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-4)


def test_every_token_has_its_vector(tei: Server, encoder_reference: Reference) -> None:
    texts = post(tei, "/embed_all", {"inputs": TEXTS})
    for vectors, text in zip(texts, TEXTS, strict=True):
        expected = encoder_reference.states(text)
        assert len(vectors) == len(expected)
        assert min(cosine(vector, other) for vector, other in zip(vectors, expected, strict=True)) > 0.9999


@pytest.mark.parametrize("direction", ["Left", "right"])
def test_a_long_text_is_cut_on_either_side_or_refused(
    tei: Server, encoder_reference: Reference, direction: str
) -> None:
    text = f"dog {'a ' * 200} cat"
    (vector,) = post(tei, "/embed", {"inputs": text, "truncation_direction": direction})
    assert cosine(vector, encoder_reference.vector(text, side=direction.lower())) > 0.9999
    refused = post(tei, "/embed", {"inputs": text, "truncate": False}, 422)
    tokens = len(encoder_reference.tokenizer(text).input_ids)
    assert refused == {
        "error": f"Input validation error: `inputs` must have less than {MAX_MODEL_LEN} tokens. Given: {tokens}",
        "error_type": "Validation",
    }


def test_ids_and_named_prompts(tei: Server, encoder_reference: Reference) -> None:
    ids = encoder_reference.tokenizer("deep learning", add_special_tokens=False).input_ids
    vectors = post(tei, "/embed", {"inputs": [ids, "deep learning"]})
    assert cosine(vectors[0], encoder_reference.vector("deep learning", special=False)) > 0.9999
    assert cosine(vectors[1], encoder_reference.vector("deep learning")) > 0.9999
    assert cosine(*vectors) < 0.9999
    (vector,) = post(tei, "/embed", {"inputs": "deep learning", "prompt_name": "query"})
    assert cosine(vector, encoder_reference.vector("query : deep learning")) > 0.9999


def test_similarity_tokens_and_texts(tei: Server, encoder_reference: Reference) -> None:
    vectors = [encoder_reference.vector(text) for text in TEXTS]
    similar = post(tei, "/similarity", {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}})
    assert similar == pytest.approx([cosine(vectors[0], other) for other in vectors[1:]], abs=1e-4)
    (tokens,) = post(tei, "/tokenize", {"inputs": TEXTS[0]})
    assert [token["id"] for token in tokens] == encoder_reference.tokenizer(TEXTS[0]).input_ids
    assert (tokens[0]["text"], tokens[0]["start"], tokens[-1]["special"]) == ("[CLS]", None, True)
    assert (tokens[2]["text"], tokens[2]["start"], tokens[2]["stop"]) == ("capital", 4, 11)
    assert post(tei, "/decode", {"ids": [token["id"] for token in tokens]}) == ["the capital of france is paris."]


def test_headers_tell_the_time_in_the_engines_queue(tei: Server) -> None:
    headers = tei.client.post("/embed", json={"inputs": [f"{i} {LONG}"[:200] for i in range(8 * AT_A_TIME)]}).headers
    total, *parts = (int(headers[f"x-{name}-time"]) for name in ("total", "tokenization", "queue", "inference"))
    assert min(parts) >= 0
    assert parts[1] > 0, "the texts of the last steps waited for those before"
    assert total - 2 <= sum(parts) <= total


def test_a_refused_text_ends_the_others_of_its_batch(tei: Server) -> None:
    post(tei, "/embed", {"inputs": [*TEXTS, LONG], "truncate": False}, 422)
    tei.wait_for_metric("slipway_engine_running", 0)
    assert len(post(tei, "/embed", {"inputs": TEXTS})) == 3


@pytest.mark.slow
def test_sparse_vectors_are_those_of_a_splade_model(tei: Server, encoder_reference: Reference, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertForMaskedLM

    weights = shutil.copytree(prepare_small_encoder(), tmp_path / "weights")
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig.from_pretrained(weights)).eval()
    for name, parameter in model.named_parameters():
        if "word_embeddings" in name or "encoder" in name:
            parameter.data.mul_(8)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, weights / "model.safetensors")
    config = json.loads((weights / "config.json").read_text())
    (weights / "config.json").write_text(json.dumps(config | {"architectures": ["BertSpladeSparseEmbeddingModel"]}))
    found = encoder_reference.tokenizer(TEXTS[0], return_tensors="pt")
    with torch.no_grad():
        logits = model(**found).logits[0]
    expected = torch.log1p(torch.relu(logits)).max(dim=0).values.numpy()
    assert 0 < np.count_nonzero(expected) < len(expected)
    with beside(tei, "sparse", write_model(tmp_path / "sparse", model_id=weights, **OPTIONS)):
        (values,) = post(tei, "/embed_sparse", {"model": "sparse", "inputs": TEXTS[0]})
        refused = post(tei, "/embed", {"model": "sparse", "inputs": TEXTS[0]}, 424)
    assert [value["index"] for value in values] == np.flatnonzero(expected).tolist()
    assert [value["value"] for value in values] == pytest.approx(expected[expected != 0].tolist(), abs=1e-3)
    assert refused["error"] == "Backend error: `normalize` is not available for SPLADE models"


# Clients


def test_huggingface_hub(tei: Server, encoder_reference: Reference, classifier: str) -> None:
    from huggingface_hub import InferenceClient
    from huggingface_hub.errors import HfHubHTTPError

    client = InferenceClient()
    vectors = client.feature_extraction(TEXTS[0], model=f"{tei.url}/embed", truncate=True, truncation_direction="Right")
    assert cosine(vectors[0], encoder_reference.vector(TEXTS[0])) > 0.9999
    options = {"normalize": False, "prompt_name": "query", "dimensions": 16, "encoding_format": "float"}
    vectors = client.feature_extraction("deep learning", model=f"{tei.url}/", **options)
    assert vectors[0].tolist() == pytest.approx(
        encoder_reference.vector("query : deep learning")[:16].tolist(), abs=1e-3
    )
    similar = client.sentence_similarity(TEXTS[0], TEXTS[1:], model=f"{tei.url}/similarity")
    assert similar == pytest.approx(
        [cosine(encoder_reference.vector(TEXTS[0]), encoder_reference.vector(text)) for text in TEXTS[1:]], abs=1e-4
    )
    with pytest.raises(HfHubHTTPError, match="prompts"):
        client.feature_extraction("a", model=f"{tei.url}/embed", prompt_name="unknown")
    through = InferenceClient(headers={ATTRIBUTES: "route=/predict"})
    best: Any = through.text_classification(TEXTS[1], model=f"{tei.url}/invocations?model_name={classifier}")
    labels = post(tei, "/predict", {"model": classifier, "inputs": TEXTS[1]})
    assert {label["label"] for label in labels} == set(LABELS)
    assert sum(label["score"] for label in labels) == near(1)
    assert (best.label, best.score) == (labels[0]["label"], near(labels[0]["score"]))  # The client reads one label.


def test_litellm(tei: Server, encoder_reference: Reference, reranker: str) -> None:
    import litellm

    expected = [encoder_reference.vector(text) for text in TEXTS]
    for model, base, options in (
        ("huggingface/tei", f"{tei.url}/embed", {"input_type": "embed"}),
        ("openai/encoder", tei.url, {"api_key": "none", "encoding_format": "float"}),  # It calls /embeddings.
        ("triton/encoder", f"{tei.url}/v2/models/encoder/infer", {}),
    ):
        found = litellm.embedding(model=model, input=TEXTS, api_base=base, **options)
        assert len(found.data) == 3, model
        for item, other in zip(found.data, expected, strict=True):
            assert len(item["embedding"]) == VECTOR_SIZE
            assert cosine(item["embedding"], other) > 0.9999, model
    # LiteLLM adds the path /rerank to an address without it. For a server with one model, the address needs no
    # parameters.
    base = f"{tei.url}/invocations?model_name={reranker}&path=/rerank"
    ranked = litellm.rerank(model="huggingface/tei", query="dog", documents=TEXTS, api_base=base, return_documents=True)
    ranks = post(tei, "/rerank", {"model": reranker, "query": "dog", "texts": TEXTS})
    assert ranked.results is not None
    assert [(result["index"], result["relevance_score"]) for result in ranked.results] == [
        (rank["index"], near(rank["score"])) for rank in ranks
    ]
