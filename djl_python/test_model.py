"""Runs a handler without a server, from the command line or in tests."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import random
import re
import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from djl_python import wire
from djl_python.inputs import Input
from djl_python.np_util import to_nd_list, to_npz
from djl_python.outputs import Output
from djl_python.service_loader import ModelService, load_model_service

if TYPE_CHECKING:
    from numpy.typing import NDArray

_JSON = "application/json"
_TEXT = "text/plain"
_CONTENT_TYPES = {
    ".json": _JSON,
    ".txt": _TEXT,
    ".gif": "image/gif",
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".ndlist": "tensor/ndlist",
    ".npz": "tensor/npz",
}
_KEY = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_SEED_LIMIT = 2**31


def load_properties(properties_dir: str | None) -> dict[str, str]:
    """Return the settings of a directory's `serving.properties`, without the prefix `option.`; {} without this file."""
    path = os.path.join(properties_dir or "", "serving.properties")
    if not properties_dir or not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        entries = (line.partition("=") for line in file if line.strip() and not line.startswith("#"))
        return {name.strip().removeprefix("option."): value.strip() for name, _, value in entries}


def update_properties_with_env_vars(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Add the variable `HF_MODEL_ID` as `model_id`, and each variable `OPTION_*`. Existing properties are kept."""
    for name, value in os.environ.items():
        if name == "HF_MODEL_ID":
            kwargs.setdefault("model_id", value)
        elif name.startswith("OPTION_"):
            key = name.removeprefix("OPTION_").lower()
            kwargs.setdefault("entryPoint" if key == "entrypoint" else key, value)
    return kwargs


class TestHandler:
    """Calls a handler as the server does: one call initializes the handler, and further calls are requests."""

    __test__ = False

    def __init__(self, entry_point: str | ModuleType, model_dir: str | None = None) -> None:
        """Load the handler.

        Args:
            entry_point: A module, or a file in the model directory.
            model_dir: The model directory. If the entry point is a file, the model directory becomes the working
                directory.

        Raises:
            ValueError: The file does not exist, or a file was given without a model directory.
        """
        self.serving_properties = update_properties_with_env_vars({}) | load_properties(model_dir)
        self._initialized = False
        if not isinstance(entry_point, str):
            self.service = ModelService(entry_point, model_dir)
            # Another test may already have initialized the module.
            if hasattr(entry_point, "_service"):
                entry_point._service.initialized = False
            return
        if not model_dir:
            raise ValueError("an entry point that is a file needs a model directory")
        os.chdir(model_dir)
        model_dir = os.getcwd()
        if model_dir not in sys.path:
            sys.path.append(model_dir)
        self.service = load_model_service(model_dir, entry_point)

    def inference(self, inputs: Input) -> Output | None:
        """Return the handler's answer. The chunks from an async generator become one Output with a stream.

        Raises:
            RuntimeError: The handler could not be initialized.
            TypeError: The handler returned a value that is neither an Output nor None.
            Exception: The handler raised this exception.
        """
        function_name = inputs.get_function_name() or "handle"
        inputs.properties = {**self.serving_properties, **inputs.properties}
        self._initialize(function_name, inputs.properties)
        return self._invoke(function_name, inputs)

    def inference_batch(
        self,
        inputs: Sequence[Any],
        properties: Sequence[Mapping[str, Any]] | None = None,
        serving_properties: Mapping[str, Any] | None = None,
    ) -> Output | None:
        return self.inference(create_concurrent_batch_request(inputs, properties, serving_properties))

    def inference_rolling_batch(
        self,
        inputs: Sequence[Any],
        properties: Sequence[Mapping[str, Any]] | None = None,
        serving_properties: Mapping[str, Any] | None = None,
    ) -> dict[int, str]:
        """Call a rolling-batch handler until all requests have finished. Return the whole text of each request.

        In later calls, the requests have no data and no properties, as in the server's calls.

        Raises:
            RuntimeError: The handler failed, or the number of answers differs from the number of requests in the call.
        """
        texts = dict.fromkeys(range(len(inputs)), "")
        active = list(texts)
        request = create_concurrent_batch_request(inputs, properties, serving_properties)
        while active:
            chunks = self._rolling_batch_step(request, len(active))
            for index, chunk in zip(active, chunks, strict=True):
                texts[index] += chunk["data"]
            active = [index for index, chunk in zip(active, chunks, strict=True) if chunk["last"].lower() != "true"]
            request = create_concurrent_batch_request([b""] * len(active), None, serving_properties)
        return texts

    def _rolling_batch_step(self, request: Input, active: int) -> list[dict[str, str]]:
        output = self.inference(request)
        if output is None or output.code != 200:
            raise RuntimeError(f"The rolling batch failed: {output}")
        chunks = [decode_encoded_output_binary(value) for value in output.content.values]
        if len(chunks) != active:
            raise RuntimeError(f"The handler answered {len(chunks)} of {active} requests")
        return chunks

    def _initialize(self, function_name: str, properties: Mapping[str, Any]) -> None:
        if self._initialized:
            return
        configuration = Input()
        configuration.function_name = function_name
        configuration.properties = {"device_id": "-1", **properties}
        output = self._invoke(function_name, configuration)
        if output is not None and output.code >= 300:
            raise RuntimeError(f"The handler could not be initialized: {output.code} {output.message}")
        self._initialized = True

    def _invoke(self, function_name: str, inputs: Input) -> Output | None:
        answer = self.service.invoke_handler(function_name, inputs)
        if inspect.isawaitable(answer) or isinstance(answer, AsyncIterator):
            answer = asyncio.run(_completed(answer))
        if answer is not None and not isinstance(answer, Output):
            raise TypeError(f"The handler returned {type(answer).__name__} instead of an Output")
        return answer


async def _completed(answer: Any) -> Any:
    """Return the answer of an async handler. Its chunks become one Output: all texts, and each header's first value."""
    if inspect.isawaitable(answer):
        answer = await answer
    if not isinstance(answer, AsyncIterator):
        return answer
    joined, texts = Output(), []
    async for output in answer:
        chunk = decode_encoded_output_binary(extract_output_as_bytes(output))
        texts.append(chunk.get("data", ""))
        joined.properties = output.properties | joined.properties
        if "code" in chunk:
            joined.set_code(int(chunk["code"])).set_message(chunk.get("error", ""))
    return joined.add_stream_content(texts, None)


def create_request(input_files: Sequence[str], parameters: Iterable[str] | None = None) -> Input:
    """Return a request whose content comes from files or texts.

    The request has the content type of the entry `data`, or of the first entry if there is no `data`. A file's
    extension determines its content type. Text in braces is JSON, and other text is plain text.

    Args:
        input_files: Entries `[key=]<file or text>`.
        parameters: Properties `k=v`.

    Raises:
        ValueError: A property has no `=`.
    """
    request = _request(None)
    for parameter in parameters or ():
        name, separator, value = parameter.partition("=")
        if not separator:
            raise ValueError(f"Invalid model parameter: {parameter}")
        request.properties[name] = value
    content_types: dict[str | None, str] = {}
    for entry in input_files:
        named = None if os.path.exists(entry) else _KEY.fullmatch(entry)
        key, source = (named[1], named[2]) if named else (None, entry)
        content, content_type = _read(source)
        request.content.add(key, content)
        content_types.setdefault(key, content_type)
    chosen = content_types.get("data") or next(iter(content_types.values()), "")
    if chosen:
        request.properties["content-type"] = chosen
    return request


def create_json_request(json_data: Any, key: str | None = None) -> Input:
    """Return a request with a JSON document."""
    return _request(_JSON, Output().add_as_json(json_data).content.value_at(0), key)


def create_text_request(text: str, key: str | None = None) -> Input:
    """Return a request with plain text."""
    return _request(_TEXT, text.encode("utf-8"), key)


def create_numpy_request(list: Any, key: str | None = None) -> Input:
    """Return a request with arrays as NDList."""
    return _request("tensor/ndlist", to_nd_list(list), key)


def create_npz_request(list: Any, key: str | None = None) -> Input:
    """Return a request with arrays as npz."""
    return _request("tensor/npz", to_npz(list), key)


def create_3p_request(json_data: Any, stream: bool = False, key: str | None = None) -> Input:
    """Return a Bedrock-compatible request."""
    request = create_json_request(json_data, key)
    request.properties["X-Amzn-SageMaker-Forwarded-Api"] = (
        "InvokeEndpointWithResponseStream" if stream else "InvokeEndpoint"
    )
    return request


def create_concurrent_batch_request(
    inputs: Sequence[Any],
    properties: Sequence[Mapping[str, Any]] | None = None,
    serving_properties: Mapping[str, Any] | None = None,
) -> Input:
    """Return several requests as one Input. A request with data also gets a seed.

    Args:
        inputs: The data of each request, as bytes or as a JSON document.
        properties: The properties of each request.
        serving_properties: Properties of the whole batch.
    """
    request = Input()
    request.properties = {**(serving_properties or {}), "batch_size": len(inputs)}
    request.function_name = request.properties.get("handler", "handle")
    for index, own in enumerate(properties or ()):
        for name, value in own.items():
            request.properties[f"batch_{index:03d}_{name}"] = value
    for index, document in enumerate(inputs):
        encoded = document if isinstance(document, bytes) else bytes(create_json_request(document).get_as_bytes())
        request.content.add(f"batch_{index:03d}_data", encoded)
        if encoded:
            request.content.add(f"batch_{index:03d}_seed", str(random.randrange(_SEED_LIMIT)).encode())
    return request


def extract_output_as_input(outputs: Output) -> Input:
    """Return an answer as an `Input`, which has methods for reading the content."""
    inputs = Input()
    inputs.properties, inputs.content = outputs.properties, outputs.content
    return inputs


def extract_output_as_bytes(outputs: Output, key: str | None = None) -> Any:
    """Return the content of an answer as bytes.

    Raises:
        KeyError: The answer has no content with this key.
    """
    return extract_output_as_input(outputs).get_as_bytes(key)


def extract_output_as_numpy(outputs: Output, key: str | None = None) -> list[NDArray[Any]]:
    """Return the arrays in an answer's NDList content.

    Raises:
        KeyError: The answer has no content with this key.
        ValueError: The content is malformed.
    """
    return extract_output_as_input(outputs).get_as_numpy(key)


def extract_output_as_npz(outputs: Output, key: str | None = None) -> list[NDArray[Any]]:
    """Return the arrays in an answer's npz content.

    Raises:
        KeyError: The answer has no content with this key.
        ValueError: The content is malformed.
    """
    return extract_output_as_input(outputs).get_as_npz(key)


def extract_output_as_string(outputs: Output, key: str | None = None) -> str:
    """Return the content of an answer as text.

    Raises:
        KeyError: The answer has no content with this key.
        ValueError: The answer has no content, or the content is not UTF-8.
    """
    return extract_output_as_input(outputs).get_as_string(key)


def decode_encoded_output_binary(binary: bytes | bytearray) -> dict[str, str]:
    """Decode a map that `Output.binary_encode` encoded. All values are text.

    Raises:
        ValueError: The bytes are malformed.
    """
    return wire.read_string_map(binary)[0]


def _request(content_type: str | None, content: bytes | bytearray | None = None, key: str | None = None) -> Input:
    request = Input()
    request.properties["device_id"] = "-1"
    if content_type:
        request.properties["content-type"] = content_type
    request.content.add(key, content)
    return request


def _read(source: str) -> tuple[bytes, str]:
    if not os.path.isfile(source):
        is_json = source.startswith("{") and source.endswith("}")
        return source.encode("utf-8"), _JSON if is_json else _TEXT
    with open(source, "rb") as file:
        return file.read(), _CONTENT_TYPES.get(os.path.splitext(source)[1].lower(), "")


def _shown(value: bytes | bytearray) -> str:
    """Return an answer's value as text, or its size if it is not text."""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return f"{len(value)} bytes"


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command `djl-test-model`: send one request to a handler, and print the answer or the stream's chunks."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    parser = argparse.ArgumentParser(prog="djl-test-model", description="Calls a handler without a server")
    parser.add_argument("--model-dir", default=".", help="the model directory")
    parser.add_argument("--entry-point", default="model.py", help="the handler's file in the model directory")
    parser.add_argument("--handler", default="handle", help="the function to call")
    parser.add_argument(
        "--input",
        nargs="+",
        default=["input.txt"],
        help="contents of the request: [key=]FILE or [key=]TEXT, one or more",
    )
    parser.add_argument("--parameters", nargs="+", help="properties of the request, each KEY=VALUE")
    options = parser.parse_args(arguments)
    inputs = create_request(options.input, options.parameters)
    inputs.function_name = options.handler
    output = TestHandler(options.entry_point, options.model_dir).inference(inputs)
    print(f"output: {output}")
    for key, value in zip(output.content.keys, output.content.values, strict=True) if output else ():
        print(f"content{'' if key is None else f' {key}'}: {_shown(value)}")
    for chunk in output.stream_chunks() if output else ():
        print(f"chunk: {json.dumps(chunk.decode('utf-8', 'replace'), ensure_ascii=False)}")


if __name__ == "__main__":
    run()
