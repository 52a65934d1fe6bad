"""LMI's rolling batch over real HTTP, with the real engine."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from handlers.all_contracts import CONTRACTS
from handlers.route_declarations import GenerationRoute
from tests.live.prompts import MAX_NEW_TOKENS, PROMPTS
from tests.live.server import Server, records
from tests.live.small_model import MAX_MODEL_LEN, stop_within

GREEDY = {"max_new_tokens": MAX_NEW_TOKENS}


def ask_all(server: Server, **parameters: Any) -> dict[str, httpx.Response]:
    """Send all PROMPTS at the same time, and return the answers."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = pool.map(lambda prompt: server.invoke(prompt, **GREEDY, **parameters), PROMPTS)
        return dict(zip(PROMPTS, answers, strict=True))


@pytest.fixture(scope="module")
def streams(sample_server: Server) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a stream for each of PROMPTS."""
    return {prompt: records(answer.text) for prompt, answer in ask_all(sample_server, stream=True).items()}


@pytest.fixture(scope="module")
def expected(bare_texts: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return the text that bare vLLM gives for each of PROMPTS."""
    return {prompt: bare_texts[prompt]["text"] for prompt in PROMPTS}


def test_every_format_gives_the_text_that_bare_vllm_gives(
    sample_server: Server, streams: dict[str, list[dict[str, Any]]], expected: dict[str, str]
) -> None:
    whole, sse = ask_all(sample_server), ask_all(sample_server, output_formatter="sse")
    assert {prompt: answer.json()["generated_text"] for prompt, answer in whole.items()} == expected
    assert {prompt: records(answer.text)[-1]["generated_text"] for prompt, answer in sse.items()} == expected
    assert {prompt: stream[-1]["generated_text"] for prompt, stream in streams.items()} == expected


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_texts_of_a_streams_tokens_joined_are_its_generated_text(
    streams: dict[str, list[dict[str, Any]]], bare_texts: dict[str, dict[str, Any]], prompt: str
) -> None:
    stream = streams[prompt]
    texts = [record["token"]["text"] for record in stream]
    assert "".join(texts) == stream[-1]["generated_text"]
    assert not any("\ufffd" in text for text in texts)
    assert [record["token"]["id"] for record in stream] == bare_texts[prompt]["ids"]
    assert all(record["token"]["log_prob"] <= 0 for record in stream)


@pytest.mark.slow
def test_requests_with_the_same_parameters_have_the_room_that_their_own_prompts_leave(sample_server: Server) -> None:
    parameters = {"max_new_tokens": 4, "ignore_eos_token": True, "details": True}
    prompts = [" hello" * count for count in (1022, 3, 1021)]  # " hello" is one token, and the context has 1024
    counts = [sample_server.invoke(prompt, **parameters).json()["details"]["generated_tokens"] for prompt in prompts]
    assert counts == [2, 4, 3]


@pytest.mark.parametrize(
    "parameters",
    [
        {"allowed_token_ids": [5, 6, 7]},
        {"logit_bias": {"5": 100}},
        {"bad_words": ["a", "e"]},
        {"seed": 7, "do_sample": True, "temperature": 1.5},
        {"stop": ["q" * 200, "z" * 200]},
    ],
    ids=lambda parameters: next(iter(parameters)),
)
def test_a_request_gets_the_same_answer_when_its_parameters_are_known(
    server: Server, parameters: dict[str, Any]
) -> None:
    asked = {"max_new_tokens": 8, "details": True, "ignore_eos_token": True, **parameters}
    first, second = (server.invoke("Deep learning is", **asked).json() for _ in range(2))
    assert first == second
    ids = {token["id"] for token in second["details"]["tokens"]}
    if "allowed_token_ids" in parameters:
        assert ids <= {5, 6, 7}
    if "logit_bias" in parameters:
        assert ids == {5}


def test_tokens_that_the_model_lacks_are_refused_with_known_parameters(server: Server) -> None:
    def status(prompt: list[int]) -> int:
        asked = {"prompt": prompt, "max_tokens": 3, "top_p": 0.9}
        return server.client.post("/v1/completions", json=asked).status_code

    assert [status([5, 6]), status([5, 10**7]), status([6, 7])] == [200, 400, 200]


def test_characters_that_span_tokens_come_whole(streams: dict[str, list[dict[str, Any]]]) -> None:
    stream = streams[PROMPTS[-1]]
    texts = [record["token"]["text"] for record in stream]
    assert "" in texts, "no token of this answer was part of a character; the test needs another prompt"
    assert any(ord(character) > 0xFFFF for character in stream[-1]["generated_text"])


def test_prefill_holds_the_prompts_tokens(server: Server) -> None:
    parameters = {"details": True, "decoder_input_details": True, "max_new_tokens": 1}
    prefill = server.invoke("The capital of 日本 is", **parameters).json()["details"]["prefill"]
    assert "".join(token["text"] for token in prefill) == "The capital of 日本 is"
    assert prefill[0]["log_prob"] is None
    assert all(token["log_prob"] < 0 for token in prefill[1:])


def test_top_tokens_hold_the_chosen_token_first_when_greedy(server: Server) -> None:
    details = server.invoke("Hello", details=True, top_n_tokens=3, max_new_tokens=4).json()["details"]
    assert [len(top) for top in details["top_tokens"]] == [3, 3, 3, 3]
    assert [top[0]["id"] for top in details["top_tokens"]] == [token["id"] for token in details["tokens"]]


def test_a_stop_sequence_ends_the_text_before_it(server: Server) -> None:
    free = server.invoke("Count: one two three", max_new_tokens=12).json()["generated_text"]
    stop = stop_within(free)
    for stream in (False, True):
        body = server.invoke(
            "Count: one two three", stream=stream, max_new_tokens=12, stop_sequences=[stop], details=True
        )
        answer = records(body.text)[-1] if stream else body.json()
        assert answer["generated_text"] == free[: free.index(stop)]
        assert answer["details"]["finish_reason"] == "stop_sequence"
        tokens = [record["token"] for record in records(body.text)] if stream else answer["details"]["tokens"]
        assert "".join(token["text"] for token in tokens) == answer["generated_text"]
    parameters = {"max_new_tokens": 12, "stop_sequences": [stop], "include_stop_str_in_output": True}
    assert server.invoke("Count: one two three", **parameters).json()["generated_text"].endswith(stop)


def test_the_models_end_token_ends_the_text_unless_ignored(sample_server: Server) -> None:
    chat = "<|im_start|>user\nSay only: yes<|im_end|>\n<|im_start|>assistant\n"
    answer = sample_server.invoke(chat, max_new_tokens=60, details=True).json()
    last = answer["details"]["tokens"][-1]
    assert answer["details"]["finish_reason"] == "eos_token"
    assert (last["text"], last["special_token"]) == ("", True)
    longer = {"max_new_tokens": answer["details"]["generated_tokens"] + 2, "ignore_eos_token": True}
    ignored = sample_server.invoke(chat, **longer, details=True).json()["details"]
    assert (ignored["finish_reason"], ignored["generated_tokens"]) == ("length", longer["max_new_tokens"])
    shown = sample_server.invoke(chat, **longer, skip_special_tokens=False).json()
    assert "<|im_end|>" in shown["generated_text"]


def test_a_seed_gives_the_same_sample_alone_and_in_a_crowd(server: Server) -> None:
    def sample(seed: int) -> str:
        text: str = server.invoke("Once", do_sample=True, seed=seed, max_new_tokens=12).json()["generated_text"]
        return text

    alone = [sample(seed) for seed in range(4)]
    with ThreadPoolExecutor(12) as pool:
        crowd = list(pool.map(sample, [0, 1, 2, 3, *range(10, 18)]))
    assert crowd[:4] == alone
    assert len(set(crowd)) > 4


def test_typical_sampling_narrows_the_choice(sample_server: Server) -> None:
    def texts(**parameters: object) -> set[str]:
        common = {"do_sample": True, "max_new_tokens": 1, **parameters}
        return {sample_server.invoke("Once", seed=seed, **common).json()["generated_text"] for seed in range(12)}

    assert len(texts(typical_p=0.001)) == 1
    assert len(texts()) > 3


def test_n_gives_sequences_ranked_by_probability(server: Server) -> None:
    """Each sequence has the next seed. After the largest seed comes the smallest."""
    answer = server.invoke("Once", n=3, do_sample=True, seed=2**63 - 1, max_new_tokens=6).json()
    sequences = [answer["details"], *answer["details"]["best_of_sequences"]]
    sums = [sum(token["log_prob"] for token in sequence["tokens"]) for sequence in sequences]
    assert sums == sorted(sums, reverse=True)
    assert len(sums) == 3
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == answer["generated_text"]


def test_best_of_returns_the_most_probable_of_its_candidates(server: Server) -> None:
    all_of_them = server.invoke("Once", best_of=4, do_sample=True, seed=5, max_new_tokens=6).json()
    best = server.invoke("Once", n=1, best_of=4, do_sample=True, seed=5, max_new_tokens=6).json()
    assert len(all_of_them["details"]["best_of_sequences"]) == 3
    assert best["generated_text"] == all_of_them["generated_text"]
    assert "best_of_sequences" not in best["details"]


def test_beam_search_stops_at_a_stop_sequence(server: Server) -> None:
    prompt = "The best thing about the sea is"
    free = server.invoke(prompt, num_beams=2, max_new_tokens=8).json()["generated_text"]
    stop = stop_within(free)
    answer = server.invoke(prompt, num_beams=2, max_new_tokens=8, stop_sequences=[stop]).json()
    texts = [answer["generated_text"], *(s["generated_text"] for s in answer["details"]["best_of_sequences"])]
    assert not any(stop in text for text in texts)


def test_a_stop_sequence_before_min_tokens_does_not_end_a_beam_later(server: Server) -> None:
    prompt = "The best thing about the sea is"
    free = server.invoke(prompt, num_beams=2, max_new_tokens=8).json()["generated_text"]
    stop = free[: len(free) // 3]
    assert free.count(stop) == 1, "the test needs another prompt"
    answer = server.invoke(prompt, num_beams=2, max_new_tokens=8, min_tokens=5, stop_sequences=[stop]).json()
    assert answer["generated_text"] == free


def test_a_beam_search_counts_as_one_prompt(server: Server) -> None:
    counted = ("slipway_generations_total", "slipway_prompt_tokens_total", "slipway_generations_finished_total")
    first_tokens, tokens = "slipway_time_to_first_token_seconds_count", "slipway_generated_tokens_total"
    before = {name: server.metric(name) for name in (*counted, first_tokens, tokens)}
    details = server.invoke("The sea is", num_beams=2, max_new_tokens=6, details=True, decoder_input_details=True)
    assert details.status_code == 200
    prompt = len(details.json()["details"]["prefill"])
    grown = {name: server.metric(name) - value for name, value in before.items()}
    assert [grown[name] for name in counted] == [1, prompt, 2]
    assert grown[first_tokens] == 1
    # One token for the prompt, and one for each of two beams in each later step. A beam that ends early has fewer.
    assert 6 <= grown[tokens] <= 11


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_beam_search_of_vllms_front_end_counts_as_one_prompt(server: Server, path: str) -> None:
    counted = ("slipway_generations_total", "slipway_generations_finished_total", "slipway_generated_tokens_total")
    before = {name: server.metric(name) for name in counted}
    body = {"prompt": "The sea is"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    beams = {"model": "model", "use_beam_search": True, "n": 2, "max_tokens": 6, "ignore_eos": True}
    answer = server.client.post(path, json=body | beams)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    assert [server.metric(name) - value for name, value in before.items()] == [1, 2, 11]


def test_beam_search_finds_the_beams_that_transformers_finds(sample_server: Server, sample_model: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = "The best thing about the sea is"
    tokenizer = AutoTokenizer.from_pretrained(sample_model)
    model = AutoModelForCausalLM.from_pretrained(sample_model, dtype=torch.float32)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False)
    expected = [tokenizer.decode(ids[inputs.input_ids.shape[1] :], skip_special_tokens=True) for ids in output]
    answer = sample_server.invoke(prompt, num_beams=3, max_new_tokens=8).json()
    others = [sequence["generated_text"] for sequence in answer["details"]["best_of_sequences"]]
    assert [answer["generated_text"], *others] == expected


def test_truncate_keeps_the_end_of_the_prompt(server: Server) -> None:
    parameters = {"truncate": 3, "details": True, "decoder_input_details": True, "max_new_tokens": 1}
    prefill = server.invoke("one two three four five", **parameters).json()["details"]["prefill"]
    assert "".join(token["text"] for token in prefill) == " three four five"


BAD = [
    ({"inputs": "x", "parameters": {"stop_token_ids": [10**9]}}, "vocabulary"),
    ({"inputs": "x", "parameters": {"logit_bias": {"999999": 1}}}, "vocabulary"),
    ({"inputs": "x", "parameters": {"top_n_tokens": 500, "details": True}}, "`top_n_tokens` must be at most"),
    ({"inputs": "x", "parameters": {"num_beams": 200}}, "`num_beams` must be at most"),
    ({"inputs": "x " * (MAX_MODEL_LEN + 1)}, "the prompt has"),
    (
        {"inputs": "x", "parameters": {"bad_words": [f"word{i} " * 60 for i in range(20)]}},
        "`bad_words` must have at most",
    ),
    ({"inputs": "x", "parameters": {"n": 32, "do_sample": True, "best_of": 33}}, "`best_of` must be at most"),
    ({"inputs": "x", "parameters": {"temperature": 3, "do_sample": True}}, "temperature"),
    ({"inputs": "x", "parameters": {"allowed_token_ids": list(range(2000))}}, "at most 1024 token ids"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_with_any_tokens_is_refused_by_its_characters(
    sample_server: Server, stream: bool
) -> None:
    response = sample_server.invoke("x " * 1_000_000, stream)
    assert response.status_code == 424
    assert "the prompt has 2000000 characters" in response.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_say_what_was_wrong_and_disturb_no_other(server: Server, stream: bool) -> None:
    expected = server.invoke("Once upon a time", max_new_tokens=40).json()
    with ThreadPoolExecutor(16) as pool:
        good = [pool.submit(server.invoke, "Once upon a time", max_new_tokens=40) for _ in range(6)]
        bad = [pool.submit(server.client.post, "/invocations", json=given | {"stream": stream}) for given, _ in BAD]
        assert [future.result().json() for future in good] == [expected] * 6
        for response, (_, message) in zip([future.result() for future in bad], BAD, strict=True):
            assert (response.status_code, response.headers["content-type"]) == (424, "application/json")
            assert message in response.json()["error"]


def test_what_the_docs_show_is_what_is_served(server: Server) -> None:
    document = json.loads(server.client.get("/openapi.json").text)
    for path, operations in document["paths"].items():
        if path.endswith(("{response_id}", "/cancel")):
            continue  # there is no stored response
        for method in operations:
            if method in ("delete", "put"):
                continue  # the call would unload or scale the model that the tests share
            if path == "/rerank":
                continue  # a text model has neither TEI's nor vLLM's route, and the body decides between them
            filled = path.replace("{model}", "model").replace("{version}", "1").replace("{id}", "model")
            body = {"inputs": "x", "parameters": {"max_new_tokens": 1}} if method == "post" else None
            status = server.client.request(method, filled, json=body).status_code
            assert status not in (404, 405, 500), f"{method} {filled}: {status}"
    of_models = [r for family in CONTRACTS for r in family.routes if isinstance(r, GenerationRoute)]
    forwarded = {route.path for route in of_models if route.contract is None}
    others = re.compile("embed|pooling|classify|score|rerank|audio")  # Models of other kinds have these routes.
    assert {path for path in forwarded if not others.search(path)} <= document["paths"].keys()
    assert "messages" in json.dumps(document["components"]["schemas"]["ChatCompletionRequest"])
    page = server.client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert not re.findall(r"(?:src|href)=.https?:", page.text), "the page must need nothing from elsewhere"
    for word in ("/invocations", "max_new_tokens", "text_input", "response_pool"):
        assert word in json.dumps(document)
