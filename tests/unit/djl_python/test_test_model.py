from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djl_python import Input, Output, test_model
from djl_python.test_model import TestHandler

ECHO = """
from djl_python import Output
from sibling import SUFFIX

configuration = None

def handle(inputs):
    global configuration
    if inputs.is_empty():
        configuration = inputs.get_properties()
        return None
    if inputs.get_property("stream") == "true":
        return Output().add_stream_content(iter(["a", "b"]))
    return Output().add(inputs.get_as_string() + SUFFIX).add_property("from", configuration["own"])

async def asynchronous(inputs):
    if inputs.is_empty():
        return None
    return Output().add("awaited")

async def chunks(inputs):
    from djl_python.async_utils import create_stream_chunk_output
    if inputs.is_empty():
        return
    yield create_stream_chunk_output("one", False)
    yield create_stream_chunk_output("two", True)

async def chunks_with_error(inputs):
    from djl_python.async_utils import create_stream_chunk_output
    if inputs.is_empty():
        return
    yield create_stream_chunk_output("", True, error="too long", code=424)

def wrong(inputs):
    return None if inputs.is_empty() else 5

def unready(inputs):
    return Output(507, "no memory") if inputs.is_empty() else Output()
"""


@pytest.fixture
def model_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text(ECHO)
    (tmp_path / "sibling.py").write_text("SUFFIX = '!'")
    (tmp_path / "serving.properties").write_text("# comment\nengine=Python\noption.own = a=b\noption.empty\n\n")
    yield tmp_path
    sys.modules.pop("sibling", None)


def call(handler: TestHandler, function: str, **properties: str) -> Output | None:
    request = test_model.create_text_request("hi")
    request.function_name = function
    request.properties |= properties
    return handler.inference(request)


def test_a_handler_is_initialized_once_and_called(model_dir: Path) -> None:
    handler = TestHandler("model.py", str(model_dir))
    output = call(handler, "handle")
    assert output is not None
    assert test_model.extract_output_as_string(output) == "hi!"
    assert output.get_property("from") == "a=b"
    configuration = handler.service.module.configuration
    assert configuration["model_dir"] == str(model_dir)
    assert (configuration["device_id"], configuration["engine"], configuration["empty"]) == ("-1", "Python", "")
    call(handler, "handle", own="mine")
    assert handler.service.module.configuration is configuration


def test_streamed_content_stays_a_stream(model_dir: Path) -> None:
    output = call(TestHandler("model.py", str(model_dir)), "handle", stream="true")
    assert output is not None
    assert list(output.stream_chunks()) == [b'{"outputs": "a"}\n', b'{"outputs": "b"}\n']


def test_an_async_handler_is_awaited_and_the_chunks_of_an_async_generator_are_one_stream(model_dir: Path) -> None:
    handler = TestHandler("model.py", str(model_dir))
    awaited, streamed, failed = (call(handler, name) for name in ("asynchronous", "chunks", "chunks_with_error"))
    assert awaited is not None
    assert awaited.content.values == [b"awaited"]
    assert streamed is not None
    assert list(streamed.stream_chunks()) == [b"one\n", b"two\n"]
    assert streamed.get_property("content-type") == "application/jsonlines"
    assert failed is not None
    assert (failed.code, failed.message) == (424, "too long")


def test_a_handler_that_cannot_be_initialized_is_an_error(model_dir: Path) -> None:
    with pytest.raises(RuntimeError, match="could not be initialized: 507 no memory"):
        call(TestHandler("model.py", str(model_dir)), "unready")


def test_another_answer_than_an_output_is_an_error(model_dir: Path) -> None:
    with pytest.raises(TypeError, match="returned int instead of an Output"):
        call(TestHandler("model.py", str(model_dir)), "wrong")


def test_a_file_needs_a_directory() -> None:
    with pytest.raises(ValueError, match="needs a model directory"):
        TestHandler("model.py")


def module(**functions: Any) -> types.ModuleType:
    made = types.ModuleType("handler_under_test")
    vars(made).update(functions)
    return made


def test_a_module_that_was_initialized_before_begins_anew() -> None:
    service = types.SimpleNamespace(initialized=True)
    handler = TestHandler(module(handle=lambda inputs: None, _service=service))
    assert service.initialized is False
    assert handler.inference(Input()) is None


class Countdown:
    """A handler with a rolling batch. Each request is a number, and the handler counts it down."""

    def __init__(self) -> None:
        self.left: list[int] = []
        self.calls: list[list[tuple[str, bool]]] = []

    def handle(self, inputs: Input) -> Output | None:
        if inputs.is_empty():
            return None
        items = inputs.get_batches()
        self.calls.append([(item.get_as_string(), item.contains_key("seed")) for item in items])
        self.left += [item.get_as_json() for item in items if item.get_as_bytes()]
        output = Output()
        for index, number in enumerate(self.left):
            output.add(Output.binary_encode({"data": str(number), "last": number == 1}), "data", index)
        self.left = [number - 1 for number in self.left if number > 1]
        return output


def test_a_rolling_batch_is_called_until_all_requests_have_finished() -> None:
    countdown = Countdown()
    texts = TestHandler(module(handle=countdown.handle)).inference_rolling_batch([2, 1, 3], [{"a": "b"}] * 3)
    assert texts == {0: "21", 1: "1", 2: "321"}
    assert countdown.calls == [[("2", True), ("1", True), ("3", True)], [("", False)] * 2, [("", False)]]


def test_a_rolling_batch_that_fails_or_answers_too_few_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="The rolling batch failed"):
        TestHandler(module(handle=lambda inputs: None)).inference_rolling_batch([1])
    with pytest.raises(RuntimeError, match="answered 0 of 1 requests"):
        TestHandler(module(handle=lambda inputs: Output())).inference_rolling_batch([1])


def test_a_batch_is_split_as_it_was_made() -> None:
    properties = [{"eula": "true", "Content-type": "application/json"}]
    serving = {"engine": "MPI", "option.rolling_batch": "vllm"}
    batch = test_model.create_concurrent_batch_request([{"inputs": "hé"}], properties, serving)
    (item,) = batch.get_batches()
    assert item.properties == properties[0]
    assert item.get_as_json() == {"inputs": "hé"}
    assert serving.items() <= batch.get_properties().items()
    assert "batch_size" not in serving


def test_requests_are_read_back_as_they_were_made() -> None:
    array = np.ones((1, 3, 2))
    assert test_model.create_text_request("é").get_data() == "é"
    assert test_model.create_json_request({"a": array}).get_data() == {"a": array.tolist()}
    assert test_model.create_numpy_request([array], "k").get_data("k")[0].shape == (1, 3, 2)
    assert test_model.create_npz_request([array]).get_data()[0].shape == (1, 3, 2)
    streamed = test_model.create_3p_request({"prompt": "x"}, stream=True)
    assert streamed.get_property("x-amzn-sagemaker-forwarded-api") == "InvokeEndpointWithResponseStream"


def test_answers_are_read() -> None:
    output = Output().add_as_json({"a": 1}, "j").add_as_numpy([np.ones(2)], "n").add_as_npz([np.ones(3)], "z")
    assert json.loads(test_model.extract_output_as_bytes(output, "j")) == {"a": 1}
    assert test_model.extract_output_as_numpy(output, "n")[0].size == 2
    assert test_model.extract_output_as_npz(output, "z")[0].size == 3
    assert test_model.extract_output_as_input(output).content is output.content


@pytest.mark.parametrize(
    ("name", "content_type"),
    [
        ("a.json", "application/json"),
        ("a.txt", "text/plain"),
        ("a.PNG", "image/png"),
        ("a.jpg", "image/jpeg"),
        ("a.jpeg", "image/jpeg"),
        ("a.gif", "image/gif"),
        ("a.ndlist", "tensor/ndlist"),
        ("a.npz", "tensor/npz"),
        ("a.bin", None),
    ],
)
def test_a_file_has_the_content_type_of_its_extension(tmp_path: Path, name: str, content_type: str | None) -> None:
    file = tmp_path / name
    file.write_bytes(b"x")
    request = test_model.create_request([str(file)], ["a=b=c"])
    assert request.get_property("content-type") == content_type
    assert request.get_as_bytes() == b"x"
    assert request.get_property("a") == "b=c"


def test_the_inputs_of_the_command_are_text_json_or_files_and_may_have_keys(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("[1]")
    request = test_model.create_request(["q=plain text", f"data={tmp_path / 'b.json'}"])
    assert request.content.keys == ["q", "data"]
    assert request.get_data() == [1]
    assert test_model.create_request(['{"a": "b=c"}']).get_data() == {"a": "b=c"}
    with pytest.raises(ValueError, match="Invalid model parameter: a"):
        test_model.create_request(["x"], ["a"])


def test_the_environment_gives_properties_that_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MODEL_ID", "hub/model")
    monkeypatch.setenv("OPTION_ENTRYPOINT", "mine.py")
    monkeypatch.setenv("OPTION_TGI_COMPAT", "true")
    properties = test_model.update_properties_with_env_vars({"tgi_compat": "false"})
    assert properties == {"model_id": "hub/model", "entryPoint": "mine.py", "tgi_compat": "false"}
    assert TestHandler(module(handle=print)).serving_properties["tgi_compat"] == "true"


def test_the_command_prints_the_answer_and_each_chunk(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model-dir", str(model_dir), "--input", "hi"]
    test_model.run(arguments)
    shown = capsys.readouterr().out
    assert shown.startswith('output: {\n  "code": 200')
    assert "\ncontent: hi!\n" in shown
    test_model.run([*arguments, "--parameters", "stream=true"])
    assert 'chunk: "{\\"outputs\\": \\"a\\"}\\n"\n' in capsys.readouterr().out
