"""Runs a handler without a server, from the command line or from tests (contracts/lmi.md section 7.6)."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from djl_python.handler_io import (
    create_3p_request,
    create_concurrent_batch_request,
    create_json_request,
    create_npz_request,
    create_numpy_request,
    create_request,
    create_text_request,
    decode_encoded_output_binary,
    extract_output_as_bytes,
    extract_output_as_input,
    extract_output_as_npz,
    extract_output_as_numpy,
    extract_output_as_string,
)
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.service_loader import ModelService, load_model_service

_ENVIRONMENT_PREFIX = "OPTION_"
_PROPERTY = re.compile(r"([^=:\s]+)\s*[=:]?\s*(.*)")


def load_properties(properties_dir: str | None) -> dict[str, str]:
    """The directory's `serving.properties`, the prefix `option.` taken off; nothing if there is no such file."""
    path = os.path.join(properties_dir or "", "serving.properties")
    if not properties_dir or not os.path.isfile(path):
        return {}
    with open(path, encoding="utf-8") as file:
        lines = [line.strip() for line in file]
    entries = (_PROPERTY.match(line) for line in lines if line and line[0] not in "#!")
    return {entry[1].removeprefix("option."): entry[2] for entry in entries if entry}


def update_properties_with_env_vars(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Adds `HF_MODEL_ID` as `model_id`, and each `OPTION_*`, where there is no such property yet."""
    for name, value in os.environ.items():
        if name == "HF_MODEL_ID":
            kwargs.setdefault("model_id", value)
        elif name.startswith(_ENVIRONMENT_PREFIX):
            key = name.removeprefix(_ENVIRONMENT_PREFIX).lower()
            kwargs.setdefault("entryPoint" if key == "entrypoint" else key, value)
    return kwargs


class TestHandler:
    """A handler as the server would call it: one call to initialize it, then requests."""

    __test__ = False

    def __init__(self, entry_point: str | ModuleType, model_dir: str | None = None) -> None:
        """Takes a module, or a file in the model directory, which becomes the working directory.

        Raises:
            ValueError: there is no such file, or no model directory for it.
        """
        self.serving_properties = update_properties_with_env_vars({}) | load_properties(model_dir)
        self._initialized = False
        if not isinstance(entry_point, str):
            self.service = ModelService(entry_point, model_dir)
            # A module that another test has used begins anew.
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
        """What the handler answers. The chunks of an async generator come as one Output with a stream.

        Raises:
            RuntimeError: the handler could not be initialized.
            TypeError: it returned something other than an Output or None.
            Exception: whatever the handler raises.
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
        """One call with several requests: a JSON document for each, and its properties."""
        return self.inference(create_concurrent_batch_request(inputs, properties, serving_properties))

    def inference_rolling_batch(
        self,
        inputs: Sequence[Any],
        properties: Sequence[Mapping[str, Any]] | None = None,
        serving_properties: Mapping[str, Any] | None = None,
    ) -> dict[int, str]:
        """Calls a rolling-batch handler until all requests have finished; the whole text of each.

        After the first call requests come without data and properties, as the server sends them (section 7.7).

        Raises:
            RuntimeError: the handler failed, or answered another number of requests.
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
    """What a handler of async mode comes to, with all its chunks."""
    if inspect.isawaitable(answer):
        answer = await answer
    if not isinstance(answer, AsyncIterator):
        return answer
    return _joined([output async for output in answer])


def _joined(outputs: Sequence[Output]) -> Output:
    """The chunks of an answer as one: the first one's headers, and the text of all."""
    joined, texts = Output(), []
    for output in outputs:
        chunk = decode_encoded_output_binary(extract_output_as_bytes(output))
        texts.append(chunk.get("data", ""))
        if "code" in chunk:
            joined.set_code(int(chunk["code"])).set_message(chunk.get("error", ""))
    joined.properties = dict(outputs[0].properties) if outputs else {}
    return joined.add_stream_content(texts, None)


def run(arguments: Sequence[str] | None = None) -> None:
    """The command `djl-test-model`: one request to a handler; prints the answer, and each chunk of a stream."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    options = _parser().parse_args(arguments)
    inputs = create_request(options.input, options.parameters)
    inputs.function_name = options.handler
    output = TestHandler(options.entry_point, options.model_dir).inference(inputs)
    print(f"output: {output}")
    for chunk in output.stream_chunks() if output else ():
        print(f"chunk: {json.dumps(chunk.decode('utf-8', 'replace'), ensure_ascii=False)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="djl-test-model", description="Calls a handler without a server")
    parser.add_argument("--model-dir", default=".", help="the model directory")
    parser.add_argument("--entry-point", default="model.py", help="the handler's file in the model directory")
    parser.add_argument("--handler", default="handle", help="the function to call")
    parser.add_argument("--input", nargs="+", default=["input.txt"], help="[key=]file or text, one or more")
    parser.add_argument("--parameters", nargs="+", help="properties of the request, k=v")
    return parser


__all__ = [
    "TestHandler",
    "create_3p_request",
    "create_concurrent_batch_request",
    "create_json_request",
    "create_npz_request",
    "create_numpy_request",
    "create_request",
    "create_text_request",
    "decode_encoded_output_binary",
    "extract_output_as_bytes",
    "extract_output_as_input",
    "extract_output_as_npz",
    "extract_output_as_numpy",
    "extract_output_as_string",
    "load_properties",
    "run",
    "update_properties_with_env_vars",
]

if __name__ == "__main__":
    run()
