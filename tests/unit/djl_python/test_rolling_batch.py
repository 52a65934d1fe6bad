from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python import Input, Output, huggingface
from djl_python.request import Request
from djl_python.request_io import TextInput, Token
from djl_python.rolling_batch.rolling_batch import (
    FAILURE,
    Results,
    RollingBatch,
    parse_rolling_batch_request,
    stop_on_any_exception,
)
from djl_python.test_model import TestHandler, create_concurrent_batch_request, decode_encoded_output_binary


class Spelling(RollingBatch):
    """Generates the prompt again, a letter at each step; the letter `!` is a failure of the engine."""

    def __init__(self, model: str, properties: Any) -> None:
        super().__init__(properties)
        self.seeds: list[Any] = []

    @stop_on_any_exception
    def inference(self, new_requests: list[Request]) -> Results:
        self.add_new_requests(new_requests)
        self.seeds += [request.parameters["seed"] for request in new_requests]
        for request in self.active_requests:
            at = len(request.request_output.best_sequence.tokens)
            letter, last = request.input_text[at], at == len(request.input_text) - 1
            if letter == "!":
                raise RuntimeError("the engine died")
            request.set_next_token(Token(at, letter, -0.5), last, "length" if last else None)
        return self.postprocess_results()


@pytest.fixture
def handler(monkeypatch: pytest.MonkeyPatch) -> TestHandler:
    monkeypatch.setattr(huggingface, "get_rolling_batch_class_from_str", lambda name: Spelling)
    monkeypatch.setattr(huggingface, "_service", huggingface.HuggingFaceService())
    made = TestHandler(huggingface)
    made.serving_properties = {"model_id": "none", "rolling_batch": "auto"}
    return made


def test_each_request_gets_its_own_text_in_its_own_form(handler: TestHandler) -> None:
    inputs = [{"inputs": "abc"}, {"inputs": "xy", "stream": True}]
    texts = handler.inference_rolling_batch(inputs)
    assert texts[0] == '{"generated_text": "abc"}'
    assert [json.loads(line)["token"]["text"] for line in texts[1].splitlines()] == ["x", "y"]
    batch = huggingface._service.rolling_batch
    assert isinstance(batch, Spelling)
    assert all(seed.isdigit() for seed in batch.seeds)


def test_tgi_clients_get_their_own_form(handler: TestHandler) -> None:
    handler.serving_properties["tgi_compat"] = "true"
    texts = handler.inference_rolling_batch([{"inputs": "ab"}, {"inputs": "ab", "stream": True}])
    assert json.loads(texts[0])[0]["details"]["generated_tokens"] == 2
    assert texts[1].count("data: ") == 2


def test_a_failure_of_the_engine_ends_all_requests_with_an_error(handler: TestHandler) -> None:
    texts = handler.inference_rolling_batch([{"inputs": "a!"}, {"inputs": "xyz", "stream": True}])
    assert json.loads(texts[0])["details"]["finish_reason"] == "error"
    assert json.loads(texts[1].splitlines()[-1])["token"]["error_msg"] == FAILURE
    assert handler.inference_rolling_batch([{"inputs": "b"}])[0] == '{"generated_text": "b"}'


def chunks(output: Output | None) -> list[dict[str, str]]:
    assert output is not None
    return [decode_encoded_output_binary(value) for value in output.content.values]


def test_a_request_that_cannot_be_parsed_fails_alone(handler: TestHandler) -> None:
    bodies = [{"inputs": "abc"}, {"inputs": 5}, {"inputs": "xyz", "parameters": []}]
    output = handler.inference(create_concurrent_batch_request(bodies, [{"requestId": "r0"}]))
    assert output is not None
    good, bad, other = chunks(output)
    assert (good["last"], good["request_id"]) == ("False", "r0")
    assert (bad["last"], bad["code"], bad["data"]) == ("True", "424", "")
    assert bad["error"] == "Input Parsing failed. The 'inputs' field must be a string that is not empty"
    assert other["last"] == "False"
    assert output.get_property("batch_1_Content-Type") == "application/json"
    assert output.get_property("batch_0_requestId") == "r0"


def test_a_reset_drops_all_requests(handler: TestHandler) -> None:
    handler.inference(create_concurrent_batch_request([{"inputs": "abc"}]))
    batch = huggingface._service.rolling_batch
    assert batch is not None
    assert len(batch.active_requests) == 1
    request = create_concurrent_batch_request([{"inputs": "xy"}])
    request.properties["reset_rollingbatch"] = "true"
    assert len(chunks(handler.inference(request))) == 1
    assert [each.input_text for each in batch.active_requests] == ["xy"]


def test_custom_formatters_of_the_model_are_used(handler: TestHandler) -> None:
    def parse(item: Input, **kwargs: Any) -> TextInput:
        assert {"configs", "tokenizer", "rolling_batch"} <= kwargs.keys()
        return TextInput(input_text=item.get_as_json()["text"], parameters={"stream": True})

    def shout(token: Token, first: bool, last: bool, details: Any, text: str, id: int) -> str:
        return token.text.upper()

    handler.serving_properties |= {"input_formatter": parse, "output_formatter": shout}
    assert handler.inference_rolling_batch([{"text": "abc"}]) == {0: "ABC"}


def test_a_request_whose_error_utf_8_cannot_hold_fails_alone(handler: TestHandler) -> None:
    def parse(item: Input, **kwargs: Any) -> TextInput:
        text = item.get_as_json()["text"]
        if text != "abc":
            raise ValueError(text)
        return TextInput(input_text=text)

    handler.serving_properties |= {"input_formatter": parse}
    good, bad = chunks(handler.inference(create_concurrent_batch_request([{"text": "abc"}, b'{"text": "no \\ud800"}'])))
    assert "error" not in good
    assert bad["error"] == "Input Parsing failed. no ?"


def test_without_a_class_for_it_a_rolling_batch_is_refused() -> None:
    service = huggingface.HuggingFaceService()
    with pytest.raises(ValueError, match="runs in the server's engine"):
        service.initialize({"model_id": "none", "rolling_batch": "vllm"})


def request(body: Any) -> Input:
    made = Input()
    made.content.add("data", json.dumps(body).encode())
    return made


@pytest.mark.parametrize(
    "body", [[], "x", {}, {"inputs": ""}, {"inputs": ["a"]}, {"inputs": None}, {"inputs": "a", "parameters": "x"}]
)
def test_a_body_that_is_no_lmi_request_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match=r"'inputs'|'parameters'"):
        parse_rolling_batch_request(request(body), {})


def test_stream_in_the_body_wins_over_the_parameters() -> None:
    body = {"inputs": "a", "parameters": {"stream": True, "top_k": 1}, "stream": False, "adapters": "x"}
    parsed = parse_rolling_batch_request(request(body), {"output_formatter": "sse", "tgi_compat": "TRUE"})
    assert parsed.parameters == {"stream": False, "top_k": 1}
    assert (parsed.adapters, parsed.output_formatter, parsed.tgi_compat) == ("x", "sse", True)
