from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_python import Input, Output
from djl_python.encode_decode import decode
from djl_python.huggingface import HuggingFaceService
from djl_python.np_util import from_nd_list
from djl_python.properties_manager.hf_properties import HuggingFaceProperties
from djl_python.request_io import TextInput
from djl_python.test_model import create_concurrent_batch_request, create_json_request
from tests.unit.djl_python.tiny_models import save_model

pytest.importorskip("torch", reason="torch is not installed")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM")


def service(model: str, **properties: Any) -> HuggingFaceService:
    made = HuggingFaceService()
    made.initialize({"model_id": model, "device_id": "-1"} | properties)
    return made


@pytest.fixture(scope="module")
def generation(llama: str) -> HuggingFaceService:
    return service(llama)


def ask(handler: HuggingFaceService, body: Any, **properties: str) -> Output:
    request = create_json_request(body)
    request.properties |= properties
    return handler.inference(request)


def text(output: Output, key: str | None = None) -> str:
    value: bytes = output.content.get(key) if key else output.content.value_at(0)
    return value.decode()


def reference(handler: HuggingFaceService, prompt: str, **parameters: Any) -> str:
    encoded = handler.tokenizer(prompt, return_tensors="pt")
    encoded.pop("token_type_ids", None)
    tokens = handler.model.generate(**encoded, pad_token_id=1, **parameters)
    return str(handler.tokenizer.decode(tokens[0], skip_special_tokens=True))


GREEDY = {"max_new_tokens": 5, "do_sample": False}


def test_one_prompt_is_answered_in_a_list_with_the_prompt_in_front(generation: HuggingFaceService) -> None:
    output = ask(generation, {"inputs": "the quick", "parameters": GREEDY})
    expected = reference(generation, "the quick", **GREEDY)
    assert expected.startswith("the quick ")
    assert text(output) == f'[\n  {{\n    "generated_text":"{expected}"\n  }}\n]'
    assert output.get_property("content-type") == "application/json"


def test_prompts_of_different_length_are_answered_in_order_as_each_alone(generation: HuggingFaceService) -> None:
    prompts = ["the quick brown fox jumps", "a", "who is it"]
    output = ask(generation, {"inputs": prompts, "parameters": GREEDY | {"details": True, "stream": True}})
    expected = [{"generated_text": reference(generation, prompt, **GREEDY)} for prompt in prompts]
    assert json.loads(text(output)) == expected


def test_requests_of_a_batch_run_together_and_are_answered_apart(generation: HuggingFaceService) -> None:
    bodies = [{"inputs": "the", "parameters": GREEDY}, {"inputs": ["a", "dog"], "parameters": GREEDY}]
    output = generation.inference(create_concurrent_batch_request(bodies))
    assert output.content.keys == ["batch_0.data", "batch_1.data"]
    answers = [json.loads(value) for value in output.content.values]
    assert answers[0] == [{"generated_text": reference(generation, "the", **GREEDY)}]
    assert [each["generated_text"].split()[0] for each in answers[1]] == ["a", "dog"]


def test_a_wrong_request_of_a_batch_fails_alone(generation: HuggingFaceService) -> None:
    bodies = [{"inputs": "the", "parameters": GREEDY}, {"inputs": 5}, {"inputs": "a", "parameters": GREEDY}]
    output = generation.inference(create_concurrent_batch_request(bodies))
    answers = [json.loads(value) for value in output.content.values]
    assert [type(answer) for answer in answers] == [list, dict, list]
    assert answers[1] == {
        "code": 424,
        "message": "invoke handler failure",
        "error": "Input Parsing failed. The 'inputs' field must be a string or a list of strings",
    }


def test_a_single_wrong_request_has_status_424(generation: HuggingFaceService) -> None:
    broken = Input()
    broken.content.add("data", b"{")
    output = generation.inference(broken)
    assert output.code == 424
    assert json.loads(text(output))["error"].startswith("Input Parsing failed. The body is not JSON")


def test_a_batch_with_different_parameters_is_refused(generation: HuggingFaceService) -> None:
    bodies = [{"inputs": "the"}, {"inputs": "a", "parameters": GREEDY}]
    with pytest.raises(ValueError, match="must have the same parameters"):
        generation.inference(create_concurrent_batch_request(bodies))


def test_a_parameter_that_the_model_does_not_know_is_an_error(generation: HuggingFaceService) -> None:
    with pytest.raises(ValueError, match="no_such"):
        ask(generation, {"inputs": "the", "parameters": {"no_such": 1}})


def test_the_answer_has_the_form_that_the_client_accepts(generation: HuggingFaceService) -> None:
    body = {"inputs": "the", "parameters": GREEDY}
    assert text(ask(generation, body, Accept="text/csv")).startswith("generated_text\r\nthe ")
    assert ask(generation, body, Accept="*/*").get_property("Content-Type") == "application/json"
    with pytest.raises(ValueError, match="NDList cannot hold"):
        ask(generation, body, Accept="tensor/ndlist")


def test_stop_strings_of_the_model_end_the_text(llama: str, generation: HuggingFaceService) -> None:
    whole = reference(generation, "the", **GREEDY).split()
    stopping = service(llama, stop_sequence=json.dumps([whole[2]]))
    stopped = json.loads(text(ask(stopping, {"inputs": "the", "parameters": GREEDY})))[0]["generated_text"]
    assert stopped.split() == whole[: whole.index(whole[2], 1) + 1]


def test_a_custom_input_formatter_makes_the_request(llama: str) -> None:
    def parse(item: Input, **kwargs: Any) -> TextInput:
        return TextInput(input_text=decode(item, "application/json")["question"], parameters=dict(GREEDY))

    handler = service(llama, input_formatter=parse)
    assert "the dog" in text(ask(handler, {"question": "the dog"}))


@pytest.mark.parametrize("mode", ["true", "huggingface"])
def test_a_stream_has_a_line_for_each_step(llama: str, mode: str) -> None:
    output = ask(
        service(llama, enable_streaming=mode), {"inputs": ["the", "a dog"], "parameters": {"max_new_tokens": 3}}
    )
    assert output.get_property("Content-Type") == "application/jsonlines"
    lines = [json.loads(chunk)["outputs"] for chunk in output.stream_chunks()]
    assert 1 <= len(lines) <= 4
    assert all(len(line) == 2 for line in lines)
    assert (lines[0] == ["the", "a dog"]) == (mode == "huggingface")


def test_streaming_takes_one_request(llama: str) -> None:
    handler = service(llama, enable_streaming="true")
    with pytest.raises(NotImplementedError, match="Dynamic batch not supported"):
        handler.inference(create_concurrent_batch_request([{"inputs": "a"}, {"inputs": "the"}]))
    with pytest.raises(ValueError, match="cannot enable streaming"):
        service(llama, enable_streaming="true", batch_size="2")


def test_text_to_text_answers_without_the_prompt(tmp_path: Path) -> None:
    handler = service(save_model(tmp_path, "T5ForConditionalGeneration"))
    answers = json.loads(text(ask(handler, {"inputs": ["the fox", "a"], "parameters": GREEDY})))
    assert [answer["generated_text"] for answer in answers] == [
        reference(handler, prompt, **GREEDY) for prompt in ("the fox", "a")
    ]


def test_a_classifier_answers_as_transformers_does(tmp_path: Path) -> None:
    handler = service(save_model(tmp_path, "BertForSequenceClassification"))
    answer = json.loads(text(ask(handler, {"inputs": ["the fox", "a dog"], "parameters": {"top_k": 2}})))
    assert [[each["label"] for each in labels] for labels in answer] == [
        [each["label"] for each in labels] for labels in handler.hf_pipeline(["the fox", "a dog"], top_k=2)
    ]
    batch = handler.inference(create_concurrent_batch_request([{"inputs": "the"}, {"inputs": 5}, {"inputs": "a"}]))
    answers = [json.loads(value) for value in batch.content.values]
    assert [isinstance(each, dict) for each in answers] == [False, True, False]
    assert answers[1]["code"] == 424


def test_masked_words_are_filled(tmp_path: Path) -> None:
    handler = service(save_model(tmp_path, "BertForMaskedLM"))
    answer = json.loads(text(ask(handler, {"inputs": "the <mask> fox", "parameters": {"top_k": 3}})))
    assert len(answer) == 3
    assert {"score", "token", "token_str", "sequence"} <= answer[0].keys()


def test_features_come_as_arrays_where_those_are_accepted(tmp_path: Path) -> None:
    handler = service(save_model(tmp_path, "BertModel"), task="feature-extraction")
    output = ask(handler, {"inputs": "the fox"}, Accept="tensor/ndlist")
    assert from_nd_list(output.content.value_at(0))[0].shape == (1, 2, 16)


def test_a_task_that_is_not_known_is_refused(llama: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown task 'multiple-choice'"):
        service(llama, task="multiple-choice")
    with pytest.raises(ValueError, match=r"'BertModel' is not known; option\.task"):
        service(save_model(tmp_path, "BertModel"))


def test_settings_are_read_from_properties() -> None:
    properties = {"model_dir": "/m", "data_type": "bf16", "trust_remote_code": "TRUE", "device_map": "auto"}
    properties |= {"stop_sequence": "['a', b]", "rolling_batch": "disable", "revision": "main"}
    settings = HuggingFaceProperties(**properties)
    assert (settings.model_id_or_path, settings.device, settings.revision) == ("/m", "cpu", "main")
    assert settings.trust_remote_code
    assert settings.stop_sequence == ("a", "b")
    assert settings.loading == {"dtype": "bfloat16", "device_map": "auto"}
    assert settings.kwargs == settings.loading | {"trust_remote_code": True, "revision": "main"}


def test_bits_make_a_quantization_that_needs_a_device_map() -> None:
    for properties in ({"quantize": "bitsandbytes8"}, {"load_in_8bit": "true"}):
        loading = HuggingFaceProperties(**{"model_id": "m", "device_map": "auto", **properties}).loading
        assert loading["quantization_config"].load_in_8bit is True
    with pytest.raises(ValueError, match="needs device_map"):
        _ = HuggingFaceProperties.model_validate({"model_id": "m", "quantize": "bitsandbytes4"}).loading


@pytest.mark.parametrize(
    ("properties", "wrong"),
    [
        ({}, "model_id_or_path"),
        ({"model_id": "m", "dtype": "int3"}, "dtype"),
        ({"model_id": "m", "quantize": "awq"}, "quantize"),
        ({"model_id": "m", "trust_remote_code": "maybe"}, "trust_remote_code"),
        ({"model_id": "m", "stop_sequence": "[1]"}, "stop_sequence"),
        ({"model_id": "m", "enable_streaming": "always"}, "enable_streaming"),
    ],
)
def test_a_property_with_a_wrong_value_is_named(properties: dict[str, str], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        HuggingFaceProperties(**properties)
