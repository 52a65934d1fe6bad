"""The console in a real Chromium, on one server with models of several kinds: vectors, ranks, classes, and images."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.live.chromium import MISSING, PROGRAM, Page
from tests.live.pictures import encoded
from tests.live.server import Server, hosted, write_model
from tests.live.small_pooling_models import LABELS, MAX_MODEL_LEN, VECTOR_SIZE, prepare_small_encoder
from tests.live.small_vision_model import prepare_small_vision_model
from tests.live.test_console_live import UNLABELLED, WIDTH, send, state

pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason=MISSING)]

ENGINE = {"dtype": "fp32", "kv_cache_memory_bytes": 64 << 20, "max_rolling_batch_size": 8}
QUERY = "capital of france"
DOCUMENTS = ["paris", "a dog runs", "the weather is good"]
PIXELS = 1300  # The length of the picture's sides. With 5 MB, the picture is too long for a program's argument.


@pytest.fixture(scope="module")
def models(host: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """The models by their kinds."""
    directory = tmp_path_factory.mktemp("kinds")
    weights = {
        "embedding": prepare_small_encoder(),
        "reranker": prepare_small_encoder("reranker"),
        "classifier": prepare_small_encoder("classifier"),
    }
    vision = {"model_id": prepare_small_vision_model(), "rolling_batch": "vllm", "max_model_len": 2048}
    with contextlib.ExitStack() as held:
        loaded = {}
        for kind, options in {**{kind: {"model_id": path} for kind, path in weights.items()}, "vision": vision}.items():
            model = write_model(directory / kind / "model", **ENGINE, **options)
            loaded[kind] = held.enter_context(hosted(host, model))
        yield loaded


@pytest.fixture
def refusing(shared_page: Page, models: dict[str, Server]) -> Page:
    """Reload the page. A test may send requests that the server refuses."""
    shared_page.size(1280, 900)
    shared_page.open(f"{models['vision'].url}/console")
    every = f"document.querySelectorAll('[name=model] option').length >= {len(models)}"
    shared_page.wait_for(f"document.readyState === 'complete' && {every}")
    return shared_page


@pytest.fixture
def page(refusing: Page) -> Iterator[Page]:
    yield refusing
    refusing.evaluate("0")  # Collects the last errors and warnings of the browser.
    assert not refusing.complaints


def choose(page: Page, model: Server, contract: str) -> None:
    """Choose the model, and check that the page selects this contract for it."""
    names = page.evaluate("[...document.querySelectorAll('[name=model] option')].map((one) => one.textContent)")
    page.fill("[name=model]", str(names.index(model.name)))
    assert page.evaluate("document.querySelector('[name=contract]').value") == contract


def rows(page: Page) -> list[list[str]]:
    cells = "[...row.cells].map((cell) => cell.textContent)"
    found: list[list[str]] = page.evaluate(f"[...document.querySelectorAll('.text tbody tr')].map((row) => {cells})")
    return found


def post(model: Server, path: str, **body: Any) -> Any:
    answer = model.client.post(path, json={"model": model.name, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_vectors_are_shown_with_their_cosine(page: Page, models: dict[str, Server]) -> None:
    model = models["embedding"]
    choose(page, model, "embeddings")
    assert page.text("#prompt-title") == "Text"
    page.fill("#prompt", QUERY)
    send(page)
    assert state(page) == "done", page.text(".result")
    data = post(model, "/v1/embeddings", input=[QUERY, DOCUMENTS[0]])["data"]
    first, second = (np.array(item["embedding"]) for item in data)
    assert page.text(".verdict") == f"One vector of {VECTOR_SIZE} numbers."
    ((text, size, norm, numbers),) = rows(page)
    assert (text, size, norm) == (QUERY, str(VECTOR_SIZE), "1.0000")
    assert np.allclose([float(number) for number in numbers.removesuffix(", …").split(", ")], first[:8], atol=1e-3)
    page.fill("#second", DOCUMENTS[0])
    send(page)
    verdict, _, cosine = page.text(".verdict").removesuffix(".").partition(", cosine ")
    assert verdict == f"2 vectors of {VECTOR_SIZE} numbers"
    assert math.isclose(float(cosine), first @ second, abs_tol=1e-3)
    assert page.text("#announce") == f"done: {page.text('.verdict')}"
    assert "Prompt tokens" in page.text(".figures")
    page.click(".as-python")
    assert "client.embeddings.create(" in page.text(".code")
    assert page.evaluate(UNLABELLED) == 0
    page.size(360, 740)
    assert page.evaluate(WIDTH) == 360
    page.click("#compare")
    send(page)
    assert page.text("#differences-content .verdict") == "The numbers are equal."


def test_ranks_are_shown_in_their_order(page: Page, models: dict[str, Server]) -> None:
    model = models["reranker"]
    choose(page, model, "rerank")
    page.fill("#prompt", QUERY)
    page.fill("#documents", "\n".join(DOCUMENTS) + "\n\n")
    send(page)
    assert state(page) == "done", page.text(".result")
    results = post(model, "/rerank", query=QUERY, documents=DOCUMENTS)["results"]
    shown = [(int(rank), float(score), text) for rank, score, _, text in rows(page)]
    assert [(rank, text) for rank, _, text in shown] == [
        (place, DOCUMENTS[item["index"]]) for place, item in enumerate(results, 1)
    ]
    assert np.allclose([score for _, score, _ in shown], [item["relevance_score"] for item in results], atol=1e-3)
    assert page.text(".verdict") == f"First: {shown[0][2]}"


def test_classes_are_shown_with_their_names_and_bars(page: Page, models: dict[str, Server]) -> None:
    model = models["classifier"]
    choose(page, model, "classify")
    page.fill("#prompt", QUERY)
    send(page)
    assert state(page) == "done", page.text(".result")
    (data,) = post(model, "/classify", input=QUERY)["data"]
    expected = sorted(zip(LABELS, data["probs"], strict=True), key=lambda pair: -pair[1])
    shown = rows(page)
    assert [name for name, *_ in shown] == [name for name, _ in expected]
    assert np.allclose([float(score) for _, score, _ in shown], [score for _, score in expected], atol=1e-3)
    widths = page.evaluate("[...document.querySelectorAll('.text .share')].map((one) => one.offsetWidth)")
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]


def test_a_refused_text_is_marked(refusing: Page, models: dict[str, Server]) -> None:
    choose(refusing, models["classifier"], "classify")
    refusing.fill("#prompt", "a " * (2 * MAX_MODEL_LEN))
    send(refusing)
    assert state(refusing) == "failed"
    assert refusing.text(".error-title").startswith("400")
    assert str(MAX_MODEL_LEN) in refusing.text(".error-body")
    assert refusing.evaluate("document.querySelector('[aria-invalid]').id") == "prompt"
    choose(refusing, models["embedding"], "embeddings")
    refusing.fill("[name=dimensions]", "many")
    send(refusing)
    assert refusing.evaluate("document.querySelector('[aria-invalid]').name") == "dimensions"


def test_the_prompt_and_the_contracts_are_those_of_the_model(page: Page, models: dict[str, Server]) -> None:
    visible = (
        "[...document.querySelectorAll('.prompt textarea')].filter((one) => one.offsetParent).map((one) => one.id)"
    )
    contracts = "[...document.querySelectorAll('[name=contract] option')].map((one) => one.value)"
    choose(page, models["reranker"], "rerank")
    assert page.evaluate(visible) == ["prompt", "documents"]
    assert page.evaluate(contracts) == ["rerank"]
    page.click("#compare")
    page.fill(".variant:nth-child(2) [name=model]", page.evaluate("document.querySelector('[name=model]').value"))
    choose(page, models["embedding"], "embeddings")
    assert page.evaluate(visible) == ["prompt", "second"]
    assert "of the kind embedding" in page.text(".variant:nth-child(2) .contract-hint")
    choose(page, models["vision"], "lmi")
    assert page.evaluate(visible) == ["prompt"]
    assert {"lmi", "openai", "tgi"} <= set(page.evaluate(contracts))
    page.click("#compare")
    page.evaluate("void (location.hash = '#server')")
    page.wait_for("document.querySelectorAll('#view-server .facts').length > 3")
    assert "Kindreranker" in page.text("#view-server")


def test_a_chat_takes_an_image_if_the_model_does(page: Page, models: dict[str, Server], tmp_path: Path) -> None:
    model = models["vision"]
    picture = tmp_path / "cat.bmp"
    picture.write_bytes(encoded(PIXELS, PIXELS, "BMP"))
    choose(page, model, "lmi")
    page.click("[name=mode][value=chat]")
    page.fill("[name=contract]", "openai")
    page.fill("[name=format]", "json")
    page.fill("[name=max_tokens], [name=max_completion_tokens]", "4")
    tokens = []
    for images in (0, 1):
        if images:
            page.choose_file("#messages [type=file]", picture)
            page.wait_for("document.querySelector('.image')")
            assert page.text(".image .hint").startswith("cat.bmp, ")
        send(page)
        assert state(page) == "done", page.text(".result")
        tokens.append(json.loads(page.text(".reply").partition("\n\n")[2])["usage"]["prompt_tokens"])
    assert tokens[1] > tokens[0]
    page.click("details.body summary")
    page.wait_for("document.querySelector('[name=body]').value")
    body = json.loads(page.evaluate("document.querySelector('[name=body]').value"))
    (part, text) = body["messages"][0]["content"]
    assert part["image_url"]["url"].startswith("data:image/bmp;base64,")
    assert text["type"] == "text"
    assert len(page.text(".request")) < 1000
    page.evaluate("void (navigator.clipboard.writeText = async (text) => void (window.copied = text))")
    page.click(".copy")
    page.wait_for("window.copied")
    code = page.evaluate("window.copied").encode()
    copied = subprocess.run(["bash"], input=code, capture_output=True, check=True).stdout
    assert json.loads(copied)["usage"]["prompt_tokens"] == tokens[1]
    assert page.evaluate(UNLABELLED) == 0
    page.click(".image button")
    assert '"image_url"' not in page.evaluate("document.querySelector('[name=body]').value")
