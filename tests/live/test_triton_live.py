"""Triton's generate extension over real HTTP, with the real engines.

The clients are a plain HTTP client, Triton's own client and LiteLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tritonclient.http import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tests.live.server import Server, records

PATH = "/v2/models/model/generate"
PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 6}
SEVERAL = "generate expects model to produce exactly 1 response"


def generate(server: Server, document: dict[str, Any], path: str = PATH, status: int = 200) -> Any:
    response = server.client.post(path, json={"text_input": PROMPT} | document)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()


def events(server: Server, document: dict[str, Any]) -> list[dict[str, Any]]:
    response = server.client.post(PATH + "_stream", json={"text_input": PROMPT} | document)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return records(response.text)


@pytest.fixture(scope="module")
def completion(server: Server) -> str:
    """Return the greedy answer of LMI's contract to the same prompt."""
    text: str = server.invoke(PROMPT, max_new_tokens=6).json()["generated_text"]
    return text


@pytest.fixture
def triton(server: Server) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        yield client


def test_the_specifications_curl_call_is_answered(server: Server) -> None:
    body = '{"id": "42", "text_input": "client input", "parameters": {"stream": false, "temperature": 0}}'
    headers = {"content-type": "application/x-www-form-urlencoded"}
    response = server.client.post(PATH, content=body, headers=headers)
    assert response.status_code == 200
    document = response.json()
    assert list(document) == ["id", "model_name", "model_version", "text_output"]
    assert (document["id"], document["model_name"], document["model_version"]) == ("42", "model", "1")
    assert document["text_output"].startswith("client input")
    assert len(document["text_output"]) > len("client input")


def test_the_routes_and_forms_give_one_text(server: Server, completion: str) -> None:
    assert generate(server, GREEDY)["text_output"] == PROMPT + completion
    versioned = "/v2/models/model/versions/1/generate"
    assert generate(server, {"parameters": GREEDY}, versioned)["text_output"] == PROMPT + completion
    assert generate(server, GREEDY | {"exclude_input_in_output": True})["text_output"] == completion
    tensorrt_llm = {"max_tokens": 6, "bad_words": "", "stop_words": ""}
    assert generate(server, tensorrt_llm)["text_output"] == completion
    (event,) = events(server, GREEDY)
    assert event["text_output"] == PROMPT + completion
    stream = events(server, {"parameters": GREEDY | {"stream": True}})
    assert "".join(one["text_output"] for one in stream) == completion
    assert len(stream) > 1


def test_all_outputs_are_there_and_agree(server: Server, completion: str) -> None:
    asked: dict[str, Any] = dict.fromkeys(
        (
            "return_finish_reason",
            "return_cumulative_logprob",
            "return_logprobs",
            "return_num_input_tokens",
            "return_num_output_tokens",
        ),
        True,
    )
    whole = generate(server, GREEDY | asked | {"logprobs": 2})
    assert (whole["finish_reason"], whole["num_input_tokens"], whole["num_output_tokens"]) == ("length", 5, 6)
    tokens = json.loads(whole["logprobs"])
    assert [len(token) for token in tokens] == [2] * 6, "greedy tokens are the first of two"
    chosen = [next(iter(token.values())) for token in tokens]
    assert [one["rank"] for one in chosen] == [1] * 6
    assert "".join(one["decoded_token"] for one in chosen) == completion
    assert whole["cumulative_logprob"] == pytest.approx(sum(one["logprob"] for one in chosen), abs=1e-4)
    stream = events(server, GREEDY | asked | {"logprobs": 2, "stream": True})
    assert [one["finish_reason"] for one in stream] == ["None"] * (len(stream) - 1) + ["length"]
    assert sum(one["num_output_tokens"] for one in stream) == 6
    assert {one["num_input_tokens"] for one in stream} == {5}
    assert stream[-1]["cumulative_logprob"] == pytest.approx(whole["cumulative_logprob"], abs=1e-4)
    assert [token.keys() for one in stream for token in json.loads(one["logprobs"])] == [t.keys() for t in tokens]


def test_tensorrt_llms_log_probs_agree_with_the_text(server: Server) -> None:
    answer = generate(server, {"max_tokens": 6, "stop_words": "", "return_log_probs": True})
    assert list(answer) == ["cum_log_probs", "model_name", "model_version", "output_log_probs", "text_output"]
    assert len(answer["output_log_probs"]) == 6
    assert answer["cum_log_probs"] == pytest.approx(sum(answer["output_log_probs"]), abs=1e-4)


def test_generate_with_stream_wants_exactly_one_response(server: Server, completion: str) -> None:
    assert SEVERAL in generate(server, GREEDY | {"stream": True}, status=400)["error"]
    one = generate(server, {"stream": True, "max_tokens": 1, "temperature": 0})["text_output"]
    assert one
    assert completion.startswith(one)
    # The refused request has been removed from the engine.
    server.wait_for_metric("slipway_engine_running", 0)
    assert generate(server, GREEDY)["text_output"] == PROMPT + completion


def test_tritons_own_client_finds_the_server_and_its_model(triton: InferenceServerClient) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready("model")
    assert triton.is_model_ready("model", "1")
    assert not triton.is_model_ready("nope")
    assert not triton.is_model_ready("model", "2")
    assert triton.get_server_metadata()["name"] == "triton"
    assert triton.get_model_metadata("model")["inputs"][0]["name"] == "text_input"
    assert triton.get_model_config("model", "1")["model_transaction_policy"] == {"decoupled": True}
    assert triton.get_model_repository_index() == [{"name": "model", "version": "1", "state": "READY"}]
    triton.load_model("model")
    with pytest.raises(InferenceServerException, match="unload is not supported"):
        triton.unload_model("model")
    with pytest.raises(InferenceServerException, match="Request for unknown model: 'nope' is not found"):
        triton.get_model_metadata("nope")


def test_tritons_own_client_counts_calls(server: Server, triton: InferenceServerClient) -> None:
    (before,) = triton.get_inference_statistics()["model_stats"]
    generate(server, GREEDY)
    generate(server, GREEDY | {"stream": True}, status=400)
    (after,) = triton.get_inference_statistics("model", "1")["model_stats"]
    assert after["inference_count"] == before["inference_count"] + 1
    for outcome in ("success", "fail"):
        was, now = before["inference_stats"][outcome], after["inference_stats"][outcome]
        assert now["count"] == was["count"] + 1
        assert now["ns"] > was["ns"]
    assert after["last_inference"] >= before["last_inference"]


def test_litellms_triton_provider_reads_answers_and_streams(
    server: Server, completion: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm
    from litellm.exceptions import APIConnectionError

    call = {
        "model": "triton/model",
        "api_base": server.url + PATH,
        "api_key": "none",
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 6,
        "top_k": 1,
    }
    assert litellm.completion(**call).choices[0].message.content == PROMPT + completion
    stream = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **call)]
    assert "".join(stream) == completion
    with pytest.raises(APIConnectionError, match="max_tokens"):
        litellm.completion(**call | {"max_tokens": 0})
