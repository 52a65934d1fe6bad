"""One call of a rolling-batch handler: new requests in, a chunk for each active request out.

Source: contracts/lmi.md sections 3.2 and 7.7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from djl_python import wire
from djl_python.encode_decode import decode
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.request import Request
from djl_python.request_io import TextInput
from djl_python.rolling_batch.rolling_batch import FAILURE_CODE, RollingBatch

ParseRequest = Callable[[Input], TextInput]


def parse_rolling_batch_request(item: Input, configuration: Mapping[str, Any]) -> TextInput:
    """LMI's default schema; `configuration` gives `output_formatter` and `tgi_compat`.

    Raises:
        ValueError: the body, `inputs` or `parameters` are not as section 3.2 says.
    """
    payload = decode(item, item.get_property("Content-Type"))
    if not isinstance(payload, dict):
        raise ValueError("Request payload should be a json object specifying the 'inputs' field")
    prompt, parameters = payload.get("inputs"), payload.get("parameters") or {}
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("The 'inputs' field must be a string that is not empty")
    if not isinstance(parameters, dict):
        raise ValueError("'parameters' must be provided as an object of key-value pairs")
    parameters = parameters | {"stream": bool(payload.get("stream", parameters.get("stream")))}
    return TextInput(
        input_text=prompt,
        parameters=parameters,
        adapters=payload.get("adapters"),
        output_formatter=configuration.get("output_formatter"),
        tgi_compat=str(configuration.get("tgi_compat", "")).lower() == "true",
    )


def rolling_batch_inference(batch: RollingBatch, inputs: Input, parse: ParseRequest) -> Output:
    """Runs one step. A request that cannot be parsed gets an error of its own; the others go on."""
    if inputs.get_property("reset_rollingbatch"):
        batch.reset()
    # Requests that the batch knows already come without data, before the new ones.
    items = inputs.get_batches()
    known = sum(not item.get_as_bytes() for item in items)
    new: list[Request] = []
    errors: dict[int, str] = {}
    for index, item in enumerate(items[known:], known):
        try:
            new.append(Request(_complete(parse(item), item, batch)))
        except Exception as error:  # also whatever a custom formatter raises
            logging.exception("Request %s cannot be parsed", item.get_property("requestId"))
            errors[index] = f"Input Parsing failed. {error}"
    results = iter(batch.inference(new))
    output = Output()
    for index in range(len(items)):
        failure = errors.get(index)
        _add(output, index, next(results) if failure is None else _error(failure))
    return output


def _complete(request: TextInput, item: Input, batch: RollingBatch) -> TextInput:
    request.request_id = batch.req_id_counter.next_id()
    request.client_request_id = item.get_property("requestId")
    request.tokenizer = batch.get_tokenizer()
    request.server_parameters = dict(request.parameters)
    if item.contains_key("seed"):
        request.server_parameters.setdefault("seed", item.get_as_string("seed"))
    return request


def _error(message: str) -> dict[str, Any]:
    error = wire.sendable(message)
    return {"data": "", "last": True, "code": FAILURE_CODE, "error": error, "content_type": "application/json"}


def _add(output: Output, index: int, result: Mapping[str, Any]) -> None:
    chunk = {name: value for name, value in result.items() if value is not None}
    output.add(Output.binary_encode(chunk), key="data", batch_index=index)
    for name, header in (("content_type", "Content-Type"), ("request_id", "requestId")):
        if result.get(name) is not None:
            output.add_property(f"batch_{index}_{header}", result[name])
