"""LoRA adapters, made with peft, on a real engine: registered, used by every contract, and removed over HTTP."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.live.lora import make_adapter
from tests.live.server import Server, records, serving, stopped
from tests.waiting import wait_until

PROMPTS = ("The capital of France is", "Once upon a time", "def add(a, b):", "Water boils at")
HEADER = "X-Amzn-SageMaker-Adapter-Identifier"
FORMATTER = """
from djl_python.output_formatter import TextGenerationOutput, output_formatter

@output_formatter
def loud(output: TextGenerationOutput) -> str:
    return "".join(token.text for token in output.best_sequence.tokens).upper() if output.finished else ""
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, small_options: dict[str, object]) -> Path:
    """Make the adapters `red`, `blue` and `wide`. The rank of `wide` is too large."""
    directory, model = tmp_path_factory.mktemp("made"), small_options["model_id"]
    for seed, name in enumerate(("red", "blue"), start=1):
        make_adapter(directory / name, model, seed, scale=0.9)
    make_adapter(directory / "wide", model, 3, rank=16)
    return directory


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory, made: Path, small_options: dict[str, object]) -> Iterator[Server]:
    """Start a server with the adapter `blue` beside its model, and `red` in TGI's variable LORA_ADAPTERS.

    A batch can have two adapters. Three adapters fit into memory.
    """
    directory = tmp_path_factory.mktemp("lora")
    for name in ("red", "blue"):
        place = directory / "model" / "adapters" if name == "blue" else directory
        shutil.copytree(made / name, place / name)
    options = {"max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 8}
    environment = {"LORA_ADAPTERS": f"red={directory / 'red'}"}
    with serving(directory, environment, **options, **small_options) as running:
        yield running


@pytest.fixture(scope="module")
def alone(lora: Server) -> dict[str, list[str]]:
    """Return the answers of the model and of each adapter to each prompt while nothing else runs."""
    return {name: [text(lora, prompt, name) for prompt in PROMPTS] for name in ("", "red", "blue")}


def text(server: Server, prompt: str, adapter: str | None, tokens: int = 12, **headers: str) -> str:
    document: dict[str, Any] = {"inputs": prompt, "parameters": {"max_new_tokens": tokens}}
    if adapter is not None:
        document["adapters"] = adapter
    response = server.client.post("/invocations", json=document, headers=headers)
    assert response.status_code == 200, response.text
    answer: str = response.json()["generated_text"]
    return answer


def register(server: Server, name: str, src: Path, **options: str) -> httpx.Response:
    return server.client.post("/adapters", params={"name": name, "src": str(src), **options})


def registered(server: Server) -> list[str]:
    return [adapter["name"] for adapter in server.client.get("/adapters").json()["adapters"]]


def unregister(server: Server, *names: str) -> None:
    for name in names:
        assert server.client.delete(f"/adapters/{name}").status_code == 200


def test_adapters_beside_the_model_are_there_from_the_start_and_change_what_it_says(
    lora: Server, alone: dict[str, list[str]]
) -> None:
    assert registered(lora) == ["blue", "red"]
    for texts in zip(*alone.values(), strict=True):
        assert len(set(texts)) == 3
    assert alone[""] == [text(lora, prompt, None) for prompt in PROMPTS]


def test_requests_of_one_batch_each_get_their_own_adapter(lora: Server, alone: dict[str, list[str]]) -> None:
    asked = [(name, place) for _ in range(3) for place in range(len(PROMPTS)) for name in alone]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda one: text(lora, PROMPTS[one[1]], one[0]), asked))
    assert answers == [alone[name][place] for name, place in asked]


def test_every_contract_has_its_own_way_to_name_an_adapter(lora: Server, alone: dict[str, list[str]]) -> None:
    red, prompt = alone["red"][0], PROMPTS[0]
    tgi = lora.client.post(
        "/generate", json={"inputs": prompt, "parameters": {"max_new_tokens": 12, "adapter_id": "red"}}
    )
    assert tgi.json()["generated_text"] == red
    triton = {"text_input": prompt, "temperature": 0, "max_tokens": 12, "lora_name": "red"}
    assert lora.client.post("/v2/models/model/generate", json=triton).json()["text_output"] == prompt + red
    completion = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    named = {**completion, "model": "red"}
    for path in ("/v1/completions", "/openai/v1/completions", "/invocations"):
        assert lora.client.post(path, json=named).json()["choices"][0]["text"] == red
        given = {**completion, "model": "model"}
        by_header = lora.client.post(path, json=given, headers={HEADER: "red"}).json()
        assert by_header["choices"][0]["text"] == red
        assert by_header["model"] == "red"
    several = lora.client.post("/v1/completions", json={**named, "prompt": [prompt, PROMPTS[1]]}).json()["choices"]
    assert [choice["text"] for choice in several] == alone["red"][:2]
    by_body = lora.client.post("/invocations", json={**completion, "model": "anything", "adapters": "red"}).json()
    assert by_body["choices"][0]["text"] == red


def test_openais_client_chats_with_an_adapter_that_the_list_of_models_names(lora: Server) -> None:
    with openai.OpenAI(base_url=f"{lora.url}/v1", api_key="-", max_retries=0) as client:
        assert {model.id for model in client.models.list()} == {"model", "red", "blue"}
        assert client.models.retrieve("red").id == "red"

        def chat(model: str) -> str | None:
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Say hello to everybody."}]}]
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12, temperature=0)
            assert answer.model == model
            return answer.choices[0].message.content

        assert len({chat("model"), chat("red"), chat("blue")}) == 3
        with pytest.raises(openai.NotFoundError, match="green"):
            chat("green")


def test_an_adapter_whose_files_are_gone_is_refused_in_the_words_of_each_contract(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    shutil.copytree(made / "red", tmp_path / "gone")
    assert register(lora, "gone", tmp_path / "gone", preload="false").status_code == 200
    shutil.rmtree(tmp_path / "gone")

    chat = {"model": "gone", "messages": [{"role": "user", "content": "x"}]}
    calls: list[tuple[str, int, dict[str, Any]]] = [
        ("/invocations", 424, {"inputs": "x", "adapters": "gone", "stream": True}),
        ("/invocations", 424, chat),
        ("/generate", 422, {"inputs": "x", "parameters": {"adapter_id": "gone"}}),
        ("/v2/models/model/generate", 400, {"text_input": "x", "lora_name": "gone"}),
        ("/v1/chat/completions", 400, chat),
        ("/v1/completions", 400, {"model": "gone", "prompt": ["x", "y"]}),
    ]
    for path, status, document in calls:
        response = lora.client.post(path, json=document)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        message = error["message"] if isinstance(error, dict) else error
        assert "the adapter 'gone' cannot be loaded: " in message
        assert "there is no directory" in message
    assert text(lora, PROMPTS[0], "red") == alone["red"][0]
    unregister(lora, "gone")


def test_adapters_that_torch_has_saved_are_served(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    import torch
    from safetensors.torch import load_file

    shutil.copytree(made / "red", tmp_path / "saved")
    weights = tmp_path / "saved" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    assert register(lora, "saved", tmp_path / "saved").status_code == 200
    assert text(lora, PROMPTS[0], "saved") == alone["red"][0]
    unregister(lora, "saved")


def test_adapters_come_and_go_under_traffic_and_no_request_is_lost(
    lora: Server, made: Path, alone: dict[str, list[str]]
) -> None:
    stop = threading.Event()

    def crowd(number: int) -> int:
        name, place = ("", "red", "blue")[number % 3], number % len(PROMPTS)
        document = {"inputs": PROMPTS[place], "parameters": {"max_new_tokens": 12}, "adapters": name, "stream": True}
        done = 0
        while not stop.is_set():
            response = lora.client.post("/invocations", json=document)
            assert response.status_code == 200, response.text
            lines = records(response.text)
            assert "".join(line["token"]["text"] for line in lines) == alone[name][place]
            assert lines[-1]["generated_text"] == alone[name][place]
            done += 1
        return done

    with ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(crowd, number) for number in range(6)]
        try:
            for turn in range(4):
                like = ("red", "blue")[turn % 2]
                assert register(lora, "guest", made / like).status_code == 200
                assert text(lora, PROMPTS[0], "guest") == alone[like][0]
                unregister(lora, "guest")
        finally:
            stop.set()
        assert all(client.result() for client in clients)
    assert registered(lora) == ["blue", "red"]


def test_a_request_that_runs_keeps_its_adapter_while_new_ones_do_not_get_it_any_more(
    lora: Server, made: Path, alone: dict[str, list[str]]
) -> None:
    assert register(lora, "guest", made / "red").status_code == 200
    before = lora.metric("slipway_generations_total")
    with ThreadPoolExecutor(2) as pool:
        with stopped(lora.engine_process()):  # The request runs until all else is done.
            running = pool.submit(text, lora, PROMPTS[1], "guest")
            wait_until(lambda: lora.metric("slipway_generations_total") > before)
            deleted = pool.submit(lora.client.delete, "/adapters/guest")
            wait_until(lambda: "guest" not in registered(lora))
            refused = lora.client.post("/invocations", json={"inputs": "x", "adapters": "guest"})
            assert (refused.status_code, refused.json()["code"]) == (424, 424)
            assert register(lora, "guest", made / "blue", preload="false").status_code == 200
            assert not deleted.done()
        assert running.result() == alone["red"][1]
        assert deleted.result().status_code == 200
    assert text(lora, PROMPTS[1], "guest") == alone["blue"][1]
    unregister(lora, "guest")


def test_more_adapters_than_fit_into_memory_take_turns(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    names = [f"guest{number}" for number in range(5)]
    for number, name in enumerate(names):
        shutil.copytree(made / ("red", "blue")[number % 2], tmp_path / name)
        assert register(lora, name, tmp_path / name, preload=str(number < 2).lower()).status_code == 200
    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda name: text(lora, PROMPTS[0], name), names * 2))
    assert answers == [alone[("red", "blue")[number % 2]][0] for number in range(5)] * 2
    for name in names:
        shutil.rmtree(tmp_path / name)
    assert text(lora, PROMPTS[0], "red") == alone["red"][0]
    statuses = set()
    for name in names:
        response = lora.client.post("/invocations", json={"inputs": "x", "adapters": name})
        statuses.add(response.status_code)
        assert response.status_code == 200 or "no directory" in response.json()["error"]
    assert 424 in statuses, "every adapter was in memory; the test has not seen one that has to be read again"
    unregister(lora, *names)
    assert text(lora, PROMPTS[0], "blue") == alone["blue"][0]


def test_an_adapter_whose_files_have_changed_is_refused_until_it_is_registered_again(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    for version in ("red", "blue"):
        shutil.copytree(made / version, tmp_path / version)
    current, others = tmp_path / "current", [f"guest{number}" for number in range(3)]
    current.symlink_to(tmp_path / "red")
    assert register(lora, "mine", current).status_code == 200
    assert text(lora, PROMPTS[0], "mine") == alone["red"][0]
    current.unlink()
    current.symlink_to(tmp_path / "blue")
    assert text(lora, PROMPTS[0], "mine") == alone["red"][0], "it is in memory"
    assert lora.client.post("/adapters/mine/update?preload=false").status_code == 200
    for name in others:  # These adapters take all places in memory.
        assert register(lora, name, made / "red").status_code == 200
    unregister(lora, *others)
    chat = {"model": "mine", "messages": [{"role": "user", "content": "x"}]}
    refusals = [
        lora.client.post("/invocations", json={"inputs": PROMPTS[0], "adapters": "mine"}),
        lora.client.post("/v1/chat/completions", json=chat),
        lora.client.post("/adapters/mine/update?preload=true"),
    ]
    assert [refused.status_code for refused in refusals] == [424, 400, 424]
    assert all("register it again" in refused.text for refused in refusals)
    body = {"lora_name": "mine", "lora_path": str(current), "load_inplace": True}
    assert lora.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert text(lora, PROMPTS[0], "mine") == alone["blue"][0]
    unregister(lora, "mine")


def test_pinned_adapters_stay_and_leave_no_room_for_more_than_there_is(
    lora: Server, made: Path, alone: dict[str, list[str]]
) -> None:
    for name in ("pinned1", "pinned2", "pinned3"):
        assert register(lora, name, made / "red", pin="true").status_code == 200
    refused = register(lora, "guest", made / "blue")
    assert (refused.status_code, refused.json()["type"]) == (507, "WlmOutOfMemoryException")
    assert "option.max_cpu_loras" in refused.json()["message"]
    assert lora.client.post("/adapters/red/update?pin=true").status_code == 507
    assert lora.client.post("/adapters/pinned1/update?pin=false").status_code == 424
    assert lora.client.post("/invocations", json={"inputs": "x", "adapters": "blue"}).status_code == 503
    body = {"lora_name": "pinned1", "lora_path": str(made / "blue"), "load_inplace": True}
    assert lora.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert text(lora, PROMPTS[0], "pinned1") == alone["blue"][0]
    assert register(lora, "guest", made / "blue").status_code == 507, "the one in its place is pinned, too"
    unregister(lora, "pinned1", "pinned2", "pinned3")
    assert text(lora, "x", "blue")
    assert registered(lora) == ["blue", "red"]


def test_what_cannot_be_loaded_is_refused_by_name_and_leaves_nothing_behind(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    for name in ("cut", "dora", "bad_model"):
        shutil.copytree(made / "red", tmp_path / name)
    weights = tmp_path / "cut" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    config = tmp_path / "dora" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"use_dora": True}))
    (tmp_path / "bad_model" / "model.py").write_text("import nonsense_that_is_not_there")
    cases = {
        tmp_path / "cut": "file not fully covered",
        tmp_path / "dora": "DoRA",
        tmp_path / "bad_model": "nonsense_that_is_not_there",
        made / "wide": "r 16 is greater than max_lora_rank 8",
    }
    for src, why in cases.items():
        response = register(lora, "guest", src)
        assert response.status_code == 424, f"{src}: {response.text}"
        assert why in response.json()["message"]
        assert "Traceback" not in response.text
        assert "Worker failed" not in response.text
    assert registered(lora) == ["blue", "red"]
    assert text(lora, PROMPTS[0], "red") == alone["red"][0]


def test_formatters_of_an_adapter_are_for_its_requests_alone(
    lora: Server, made: Path, tmp_path: Path, alone: dict[str, list[str]]
) -> None:
    (shutil.copytree(made / "red", tmp_path / "loud") / "model.py").write_text(FORMATTER)
    assert register(lora, "loud", tmp_path / "loud").status_code == 200
    document = {"inputs": PROMPTS[0], "parameters": {"max_new_tokens": 12}}
    assert lora.client.post("/invocations", json={**document, "adapters": "loud"}).text == alone["red"][0].upper()
    by_header = lora.client.post("/invocations", json=document, headers={HEADER: "loud"})
    assert by_header.text == alone["red"][0].upper()
    assert text(lora, PROMPTS[0], "red") == alone["red"][0]
    unregister(lora, "loud")
    assert lora.client.post("/invocations", json={**document, "adapters": "loud"}).status_code == 424


def test_a_beam_search_keeps_its_adapter(lora: Server) -> None:
    def beams(adapter: str) -> str:
        document = {"inputs": PROMPTS[1], "parameters": {"max_new_tokens": 6, "num_beams": 2}, "adapters": adapter}
        answer: str = lora.client.post("/invocations", json=document).json()["generated_text"]
        return answer

    assert len({beams(""), beams("red"), beams("blue")}) == 3


def test_log_probabilities_of_prompts_are_refused_where_the_engine_would_die_of_them(lora: Server) -> None:
    chat = {"model": "model", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 8}
    calls: list[tuple[str, dict[str, Any]]] = [
        ("/invocations", {"inputs": PROMPTS[0], "parameters": {"decoder_input_details": True, "details": True}}),
        ("/v1/chat/completions", chat | {"prompt_logprobs": 1}),
        ("/v1/chat/completions", chat),
        ("/invocations", {"inputs": PROMPTS[0]}),
    ] * 3
    with ThreadPoolExecutor(len(calls)) as pool:
        answers = list(pool.map(lambda call: lora.client.post(call[0], json=call[1]), calls))
    assert [answer.status_code for answer in answers] == [424, 400, 200, 200] * 3
    assert all(
        "not served with option.enable_lora=true" in answer.text for answer in answers if answer.status_code != 200
    )
    assert lora.ping() == 200


def test_an_adapter_is_explained_with_its_origin(lora: Server) -> None:
    header = {"x-amzn-sagemaker-adapter-identifier": "blue"}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    for path, body, headers, expected in (
        ("/invocations", {"inputs": "a", "adapters": "blue"}, {}, {"from": "body", "fields": ["adapters"]}),
        ("/invocations", {"inputs": "a"}, header, {"from": "header"}),
        ("/v1/chat/completions", {**chat, "model": "blue"}, {}, {"from": "body", "fields": ["model"]}),
        ("/v1/chat/completions", {**chat, "model": "blue", "unknown": 1}, {}, {"from": "body", "fields": ["model"]}),
    ):
        explained = lora.explain(path, body, **headers)
        assert explained["adapter"] == {"value": "blue", **expected}, (path, explained)
    unknown = {"inputs": "a", "adapters": "no-such-adapter"}
    refused = lora.client.post("/invocations", json=unknown)
    refusal = lora.client.post("/invocations", json=unknown, headers={"x-slipway-explain": "1"})
    assert (refusal.status_code, refusal.content) == (refused.status_code, refused.content)
    assert refused.status_code >= 400
