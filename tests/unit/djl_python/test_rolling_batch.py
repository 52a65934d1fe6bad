from __future__ import annotations

import json
from typing import Any

import pytest

from djl_python import Input, Output, huggingface
from djl_python.input_parser import parse_input_with_formatter, parse_lmi_default_request_rolling_batch
from djl_python.properties_manager.properties import Properties
from djl_python.request import Request
from djl_python.request_io import TextInput, Token
from djl_python.rolling_batch.rolling_batch import (
    FAILURE,
    Results,
    RollingBatch,
    filter_unused_generation_params,
    stop_on_any_exception,
)
from djl_python.test_model import TestHandler, create_concurrent_batch_request, decode_encoded_output_binary
from djl_python.utils import get_input_details, rolling_batch_inference


class Spelling(RollingBatch):
    """A rolling batch that repeats the prompt, one letter at each step. It fails at the letter `!`."""

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


@pytest.mark.parametrize(
    "body", [[], "x", {}, {"inputs": ""}, {"inputs": ["a"]}, {"inputs": None}, {"inputs": "a", "parameters": "x"}]
)
def test_a_body_that_is_no_lmi_request_is_refused(body: Any) -> None:
    with pytest.raises(ValueError, match=r"'inputs'|'parameters'"):
        parse_lmi_default_request_rolling_batch(body)


def test_stream_in_the_body_wins_over_the_parameters() -> None:
    body = {"inputs": "a", "parameters": {"stream": True, "top_k": 1}, "stream": False}
    assert parse_lmi_default_request_rolling_batch(body) == ("a", {"stream": False, "top_k": 1})


class Service:
    """A handler that runs a rolling batch, as LMI's handlers do."""

    def __init__(self, **properties: Any) -> None:
        configs = Properties(**{"model_dir": "/m", **properties})
        self.rolling_batch = Spelling(configs.model_id_or_path, configs)
        self.arguments: dict[str, Any] = {"configs": configs, "tokenizer": None}
        self.arguments |= {"rolling_batch": self.rolling_batch, "adapter_registry": {"red": "the red one"}}

    def __call__(self, inputs: Input) -> Output:
        parsed = parse_input_with_formatter(inputs, **self.arguments)
        return rolling_batch_inference(parsed, inputs, Output(), self.rolling_batch)

    def parsed(self, *bodies: Any, **properties: str) -> list[Request]:
        parsed = parse_input_with_formatter(
            create_concurrent_batch_request(list(bodies), [properties] * len(bodies)), **self.arguments
        )
        assert not parsed.errors, parsed.errors
        for request in parsed.requests:
            assert request.parameters.pop("seed").isdigit()
        return parsed.requests


def test_a_handler_after_lmis_pattern_serves_each_step_of_its_own_rolling_batch() -> None:
    service = Service(rolling_batch="auto", max_rolling_batch_size="4", unknown="x")
    first = create_concurrent_batch_request([{"inputs": "ab"}, {"inputs": 5}], [{"requestId": "r0"}])
    good, bad = chunks(service(first))
    assert (good["last"], good["request_id"]) == ("False", "r0")
    assert (bad["last"], bad["code"], bad["error"].partition(".")[0]) == ("True", "424", "Input Parsing failed")
    (second,) = chunks(service(create_concurrent_batch_request([b""])))
    assert (second["last"], second["data"]) == ("True", '{"generated_text": "ab"}')
    assert [request.id for request in service.parsed({"inputs": "c"}, {"inputs": "d"})] == [1, 2]


def test_a_new_request_without_a_body_fails_alone() -> None:
    service = Service(rolling_batch="auto")
    (first,) = chunks(service(create_concurrent_batch_request([{"inputs": "ab"}])))
    assert first["last"] == "False"
    known, empty = chunks(service(create_concurrent_batch_request([b"", b""])))
    assert (known["last"], known["data"]) == ("True", '{"generated_text": "ab"}')
    assert (empty["last"], empty["code"]) == ("True", "424")


def test_bedrocks_requests_have_their_own_schema() -> None:
    service = Service(bedrock_compat="true")
    (request,) = service.parsed({"prompt": "a", "max_gen_len": 2, "temperature": 0})
    assert (request.input_text, request.parameters["max_new_tokens"]) == ("a", 2)
    assert "do_sample" not in request.parameters
    streaming = {"X-Amzn-SageMaker-Forwarded-Api": "InvokeEndpointWithResponseStream"}
    (streamed,) = service.parsed({"prompt": "a"}, **streaming)
    assert streamed.request_input.parameters["output_formatter"] == "3p_stream"
    assert streamed.parameters == {"temperature": 0.5, "top_p": 0.9, "max_new_tokens": 512, "do_sample": True} | {
        "return_full_text": True
    }


def test_a_request_gets_what_the_registry_has_of_its_adapter() -> None:
    service = Service(enable_lora="true")
    assert service.parsed({"inputs": "a", "adapters": "red"})[0].adapter == "the red one"
    assert service.parsed({"inputs": "a"}, **{"X-Amzn-SageMaker-Adapter-Identifier": "red"})[0].adapter == "the red one"
    assert service.parsed({"inputs": "a"})[0].adapter is None
    for named, why in (("nope", "Adapter nope is not registered"), (["red", "red"], "Number of adapters")):
        inputs = create_concurrent_batch_request([{"inputs": "a", "adapters": named}])
        assert why in parse_input_with_formatter(inputs, **service.arguments).errors[0]


def test_the_details_of_a_dynamic_batch() -> None:
    configs = Properties.model_validate({"model_id": "m", "rolling_batch": "disable"})
    bodies = [{"inputs": "a", "parameters": {"k": 1}}, {"inputs": "x", "parameters": 5}]
    bodies.append({"inputs": ["b", "c"], "parameters": {"k": 1}})
    parsed = parse_input_with_formatter(create_concurrent_batch_request(bodies), configs=configs)
    assert list(parsed.errors) == [1]
    details = get_input_details(parsed.requests, parsed.errors, parsed.batch)
    assert details == (["a", "b", "c"], [1, 0, 2], {"k": 1}, None)


def test_properties_are_those_of_the_model_and_may_be_extended() -> None:
    class More(Properties):
        beams: int = 1

    given = {"model_id": "m", "model_dir": "/d", "batch_size": "2", "tgi_compat": "true", "beams": "4", "more": "x"}
    more = More.model_validate(given)
    assert (more.model_id_or_path, more.batch_size, more.tgi_compat, more.beams) == ("m", 2, True, 4)
    some = Properties.model_validate({"model_dir": "/d", "enable_streaming": "TRUE"})
    assert (some.model_id_or_path, some.enable_streaming.value) == ("/d", "true")
    streams = {"rolling_batch": "disable", "enable_streaming": "true", "batch_size": "2"}
    for wrong, why in (
        ({"tensor_parallel_degree": "two"}, "tensor_parallel_degree"),
        ({"rolling_batch": "nope"}, "rolling_batch"),
        ({"model_dir": None}, "model_id_or_path"),
        (streams, "cannot enable streaming for dynamic batching"),
    ):
        with pytest.raises(ValueError, match=why):
            Properties(**{"model_dir": "/d", **wrong})


def test_parameters_that_a_backend_lacks_may_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    assert filter_unused_generation_params({"a": 1, "b": 2}, {"a"}, "mine") == {"a": 1, "b": 2}
    assert "mine with rolling batch does not support the parameters b" in caplog.text
    assert filter_unused_generation_params({"a": 1, "b": 2}, {"a"}, "mine", remove_unused_params=True) == {"a": 1}


def test_a_stop_word_is_looked_for_at_the_end_of_the_sequence() -> None:
    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "".join(map(chr, ids))

    stop = huggingface.StopWord(Letters(), "END")
    assert stop([list(b"the END")], None)
    assert not stop([list(b"END of")], None)
