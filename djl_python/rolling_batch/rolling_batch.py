"""The base class of a rolling batch, and one step of a handler that has one."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from djl_python import wire
from djl_python.encode_decode import decode
from djl_python.inputs import Input
from djl_python.outputs import Output
from djl_python.request import Request
from djl_python.request_io import TextInput, Token
from djl_python.utils import IdCounter

FAILURE = "exception occurred during rolling batch inference"
FAILURE_CODE = 424

Results = list[dict[str, Any]]


class RollingBatch(ABC):
    """A subclass generates tokens for `active_requests` in `inference` and ends it with `postprocess_results()`."""

    def __init__(self, configs: Any = None) -> None:
        self.configs = configs
        self.active_requests: list[Request] = []
        self.req_id_counter = IdCounter()

    @abstractmethod
    def inference(self, new_requests: list[Request]) -> Results:
        """One step, for the active and the new requests; a result for each of them, in that order."""

    def add_new_requests(self, requests: list[Request]) -> None:
        """Takes requests into the batch."""
        self.active_requests.extend(requests)

    def postprocess_results(self) -> Results:
        """The next text of each active request; those that have finished leave the batch."""
        results = [_result(request) for request in self.active_requests]
        self.active_requests = [request for request in self.active_requests if not request.is_last_token()]
        return results

    def reset(self) -> None:
        """Drops all requests."""
        self.active_requests = []
        self.req_id_counter.reset()

    def get_tokenizer(self) -> Any:
        """The model's tokenizer; None if the batch has none."""
        return None


def stop_on_any_exception(step: Callable[..., Results]) -> Callable[..., Results]:
    """Ends all active requests with an error when a step fails."""

    @functools.wraps(step)
    def guarded(self: RollingBatch, *args: Any, **kwargs: Any) -> Results:
        try:
            return step(self, *args, **kwargs)
        except Exception:
            logging.exception("The rolling batch failed with %d requests", len(self.active_requests))
            for request in self.active_requests:
                token = Token(-1, "", log_prob=-1, special_token=True, error_msg=FAILURE)
                request.set_next_token(token, last_token=True, finish_reason="error")
                request.set_error_message(FAILURE)
                request.set_error_code(FAILURE_CODE)
            results = self.postprocess_results()
            self.reset()
            return results

    return guarded


def _result(request: Request) -> dict[str, Any]:
    result = {
        "data": request.get_next_token(),
        "last": request.is_last_token(),
        "content_type": request.get_content_type(),
        "request_id": request.get_client_request_id(),
    }
    request.reset_next_token()
    failure = {"error": request.get_error_message(), "code": request.get_error_code()}
    return result | {name: value for name, value in failure.items() if value}


def parse_rolling_batch_request(item: Input, configuration: Mapping[str, Any]) -> TextInput:
    """LMI's default schema; `configuration` gives `output_formatter` and `tgi_compat`.

    Raises:
        ValueError: the body, `inputs` or `parameters` are malformed.
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


def rolling_batch_inference(batch: RollingBatch, inputs: Input, parse: Callable[[Input], TextInput]) -> Output:
    """Runs one step. A request that cannot be parsed gets an error of its own; the others continue."""
    if inputs.get_property("reset_rollingbatch"):
        batch.reset()
    # The requests that the batch has already come first, without data.
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
