"""happy_vllm's routes on a running server."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import jsonschema
import pytest

from tests.live.server import Server
from tests.live.small_model import ENDLESS_COMPLETION, MAX_MODEL_LEN, stop_within
from tests.live.structured_answers import POOLS, SCHEMAS, SIMPLE_FORMS
from tests.waiting import wait_until

PROMPT = "The capital of France is"
AT_A_TIME = 12
GREEDY = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6}


def generate(server: Server, **document: Any) -> dict[str, Any]:
    response = server.client.post("/v1/generate", json=document)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def _post_all(server: Server, documents: list[dict[str, Any]]) -> list[httpx.Response]:
    room = asyncio.Semaphore(AT_A_TIME)

    async def post(client: httpx.AsyncClient, document: dict[str, Any]) -> httpx.Response:
        async with room:
            return await client.post("/v1/generate", json=document)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        return await asyncio.gather(*(post(client, document) for document in documents))


def generate_all(server: Server, documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    responses = asyncio.run(_post_all(server, documents))
    assert [response.text for response in responses if response.status_code != 200] == []
    return [response.json() for response in responses]


def test_a_greedy_answer_is_complete_and_counted(server: Server) -> None:
    answer = generate(server, **GREEDY)
    assert list(answer) == ["responses", "finish_reasons", "usages"]
    assert answer["responses"] == [server.invoke(PROMPT, max_new_tokens=6).json()["generated_text"]]
    assert answer["finish_reasons"] == ["length"]
    assert answer["usages"] == [{"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}]


def test_the_default_is_16_tokens_and_sampling(server: Server) -> None:
    answer = generate(server, prompt=PROMPT, ignore_eos=True, n=2)
    assert [usage["completion_tokens"] for usage in answer["usages"]] == [16, 16]
    assert answer["responses"][0] != answer["responses"][1]


def test_a_stream_has_cumulative_lines_no_content_type_and_the_plain_answer_at_its_end(server: Server) -> None:
    document = GREEDY | {"prompt_in_response": True}
    with server.client.stream("POST", "/v1/generate_stream", json=document) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert response.status_code == 200
    assert "content-type" not in response.headers
    texts = [line["responses"][0] for line in lines]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert [line["usages"][0]["completion_tokens"] for line in lines] == list(range(1, 7))
    assert {line["finish_reasons"][0] for line in lines[:-1]} == {"None"}
    assert lines[-1] == generate(server, **document)
    assert lines[-1]["prompt"] == PROMPT


def test_every_line_of_a_stream_of_several_sequences_has_them_all(server: Server) -> None:
    document = {"prompt": PROMPT, "n": 2, "max_tokens": 4, "ignore_eos": True, "seed": 1}
    with server.client.stream("POST", "/v1/generate_stream", json=document) as response:
        lines = [json.loads(line) for line in response.iter_lines()]
    assert all(len(line[name]) == 2 for line in lines for name in ("responses", "finish_reasons", "usages"))
    assert lines[-1]["finish_reasons"] == ["length", "length"]
    assert [usage["completion_tokens"] for usage in lines[-1]["usages"]] == [4, 4]


def test_beams_and_the_best_of_several_are_answered(server: Server) -> None:
    beams = generate(server, **GREEDY, use_beam_search=True, n=2, best_of=3)
    assert len(set(beams["responses"])) == 2
    assert len(generate(server, prompt=PROMPT, n=1, best_of=3, max_tokens=4, seed=5)["responses"]) == 1


def test_a_stop_string_ends_with_stop(server: Server) -> None:
    (free,) = generate(server, **GREEDY | {"max_tokens": 12})["responses"]
    stop = stop_within(free)
    answer = generate(server, **GREEDY | {"stop": stop, "max_tokens": 12})
    assert answer["responses"] == [free[: free.index(stop)]]
    assert answer["finish_reasons"] == ["stop"]


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ({}, 422),
        ({"prompt": 1}, 422),
        ({"prompt": PROMPT, "temperature": -1}, 422),
        ({"prompt": PROMPT, "unheard_of": 1}, 422),
        ({"prompt": PROMPT, "logits_processors": []}, 422),
        ({"prompt": PROMPT, "stop_token_ids": [10**9]}, 422),
        ({"prompt": "a " * (MAX_MODEL_LEN + 1)}, 422),
        ({"prompt": ""}, 422),
    ],
)
@pytest.mark.parametrize("route", ["/v1/generate", "/v1/generate_stream"])
def test_what_is_wrong_is_refused_with_a_detail(
    server: Server, route: str, document: dict[str, Any], status: int
) -> None:
    response = server.client.post(route, json=document)
    assert response.status_code == status, response.text
    assert response.json()["detail"]


def test_an_aborted_request_ends_with_abort(server: Server) -> None:
    document = ENDLESS_COMPLETION
    first, ended = threading.Event(), []

    def stream() -> None:
        with httpx.stream(
            "POST", f"{server.url}/v1/generate_stream", json=document, headers={"x-request-id": "to-abort"}, timeout=60
        ) as response:
            for line in response.iter_lines():
                first.set()
                ended.append(line)

    reading = threading.Thread(target=stream)
    reading.start()
    assert first.wait(60)
    response = server.client.post("/v1/abort_request", json={"request_id": "to-abort"})
    reading.join(60)
    assert (response.status_code, response.content) == (200, b"null")
    last = json.loads(ended[-1])
    assert last["finish_reasons"] == ["abort"]
    assert 0 < last["usages"][0]["completion_tokens"] < ENDLESS_COMPLETION["max_tokens"]


@pytest.mark.parametrize("fields", [{}, {"n": 2, "temperature": 1.0}, {"use_beam_search": True, "n": 2, "best_of": 2}])
def test_an_aborted_whole_answer_has_what_there_is_of_it(server: Server, fields: dict[str, Any]) -> None:
    document = ENDLESS_COMPLETION | fields
    generate(server, **document | {"max_tokens": 2})  # the first of its kind may take long
    with ThreadPoolExecutor() as pool:
        headers, before = {"x-request-id": "whole-to-abort"}, server.metric("slipway_generated_tokens_total")
        answer = pool.submit(server.client.post, "/v1/generate", json=document, headers=headers, timeout=60)
        wait_until(lambda: server.metric("slipway_generated_tokens_total") > before + 10)
        while not answer.done():
            server.client.post("/v1/abort_request", json={"request_id": "whole-to-abort"})
        given = answer.result()
    assert given.status_code == 200
    body = given.json()
    assert set(body["finish_reasons"]) == {"abort"}
    assert all(body["responses"])
    for usage in body["usages"]:
        assert 0 < usage["completion_tokens"] < ENDLESS_COMPLETION["max_tokens"]
        assert usage["prompt_tokens"] > 0


def test_an_answer_of_a_pool_is_one_of_it(server: Server) -> None:
    documents = [
        {"prompt": "Choose one answer:", "response_pool": pool, "max_tokens": 300, "seed": seed}
        for pool in POOLS
        for seed in (1, 2)
    ]
    for document, answer in zip(documents, generate_all(server, documents), strict=True):
        assert answer["responses"][0] in document["response_pool"]
        assert answer["finish_reasons"] == ["stop"]


def test_a_pool_whose_answer_is_longer_than_max_tokens_is_cut(server: Server) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 6
    answer = generate(server, prompt="Say it:", response_pool=[text])
    assert answer["finish_reasons"] == ["length"]
    assert text.startswith(answer["responses"][0])
    assert answer["usages"][0]["completion_tokens"] == 16


def test_an_answer_of_a_schema_is_valid(sample_server: Server) -> None:
    documents = [
        {
            "prompt": "Write JSON:",
            "json_format": schema,
            "json_format_is_json_schema": True,
            "max_tokens": 300,
            "seed": 1,
        }
        for schema in SCHEMAS
    ]
    for document, answer in zip(documents, generate_all(sample_server, documents), strict=True):
        assert answer["finish_reasons"] == ["stop"], (document, answer)
        jsonschema.validate(json.loads(answer["responses"][0]), document["json_format"])


def test_an_answer_of_a_simple_form_has_its_fields_and_types(sample_server: Server) -> None:
    documents: list[dict[str, Any]] = [
        {"prompt": "Describe Ada Lovelace as JSON.\n", "json_format": form, "max_tokens": 300, "temperature": 0}
        for form in SIMPLE_FORMS
    ]
    kinds = {"string": str, "integer": int, "boolean": bool, "number": float}
    for document, answer in zip(documents, generate_all(sample_server, documents), strict=True):
        assert answer["finish_reasons"] == ["stop"], (document, answer)
        values = json.loads(answer["responses"][0])
        assert list(values) == list(document["json_format"])
        for name, kind in document["json_format"].items():
            items = values[name] if isinstance(kind, list) else [values[name]]
            assert all(isinstance(item, kinds[kind[0] if isinstance(kind, list) else kind]) for item in items)


@pytest.mark.parametrize(
    "document",
    [
        {"json_format": {"type": "nonsense"}, "json_format_is_json_schema": True},
        {"json_format": {"$ref": "#/nowhere"}, "json_format_is_json_schema": True},
        {"guided_decoding": {"regex": "("}},
        {"structured_outputs": {"grammar": "no grammar at all"}},
    ],
)
def test_a_form_that_cannot_be_compiled_is_the_clients_error(server: Server, document: dict[str, Any]) -> None:
    response = server.client.post("/v1/generate", json={"prompt": PROMPT} | document)
    assert response.status_code == 422, response.text
    assert server.ping() == 200


def test_tokens_of_a_text_and_texts_of_tokens(server: Server) -> None:
    text = "Hey, how are you ? Fine thanks. 🤗"
    tokens = server.client.post("/v1/tokenizer", json={"text": text, "with_tokens_str": True, "vanilla": False}).json()
    assert "".join(tokens["tokens_str"]) == text
    decoded = server.client.post("/v1/decode", json={"token_ids": tokens["tokens_ids"], "vanilla": False}).json()
    assert decoded == {"decoded_string": text}
    second = server.client.post("/v2/tokenizer", json={"model": "model", "prompt": text}).json()
    assert (second["count"], second["max_model_len"]) == (tokens["tokens_nb"], MAX_MODEL_LEN)
    assert server.client.post("/v2/decode", json={"tokens": second["tokens"]}).json() == {"prompt": text}
    chat = server.client.post("/v2/tokenizer", json={"messages": [{"role": "user", "content": "Hey"}]}).json()
    assert chat["count"] > second["count"]


def test_a_megabyte_of_text_is_split(server: Server) -> None:
    text = "Hey, how are you ? I am clearly fine. " * 27_000
    response = server.client.post("/v1/split_text", json={"text": text})
    assert "".join(response.json()["split_text"]) == text


def test_technical_routes_tell_of_the_model(server: Server) -> None:
    assert server.client.get("/liveness").json() == {"alive": "ok"}
    assert server.client.get("/readiness").json() == {"ready": "ok"}
    info = server.client.get("/v1/info").json()
    assert (info["application"], info["model_name"], info["max_length"]) == ("happy_vllm", "model", MAX_MODEL_LEN)
    assert info["vllm_version"][0].isdigit()
    assert server.client.get("/v1/launch_arguments").json() == {}
    assert server.client.get("/live_metrics").json()["requests_pending"] == 0
    assert server.client.get("/v1/generate").status_code == 405
