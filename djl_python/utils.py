"""Small functions that LMI handlers import from this module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from djl_python import wire
from djl_python.inputs import Input
from djl_python.outputs import Output

_Result = TypeVar("_Result")
_FAILURE_CODE = 424


class IdCounter:
    """A counter that starts at 0 and restarts before it reaches `MAX_ID`."""

    MAX_ID = 999999

    def __init__(self) -> None:
        self.id = 0

    def get_id(self) -> int:
        return self.id

    def next_id(self) -> int:
        taken = self.id
        self.id = (taken + 1) % self.MAX_ID
        return taken

    def reset(self) -> None:
        self.id = 0


def find_model_file(model_dir: str, extensions: Iterable[str]) -> str | None:
    """Return the path of the only file with one of the extensions, or None.

    Args:
        model_dir: The directory to search.
        extensions: The extensions, without the dot.

    Raises:
        ValueError: The directory has several such files.
    """
    suffixes = {f".{extension}" for extension in extensions}
    found = sorted(str(path) for path in Path(model_dir).glob("*") if path.suffix in suffixes)
    if len(found) > 1:
        raise ValueError(f"Multiple model files found in {model_dir}: {', '.join(found)}. Only one is supported")
    return found[0] if found else None


def profile_objects(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return the function unchanged. In LMI, this decorator counts objects."""
    return function


def rolling_batch_inference(parsed_input: Any, inputs: Input, outputs: Output, rolling_batch: Any) -> Output:
    """Run one step of a rolling batch, add the results to `outputs`, and return `outputs`.

    A request that could not be parsed gets an error. The other requests continue.

    Args:
        parsed_input: The result of `parse_input_with_formatter`.
        inputs: The call.
        outputs: The output to fill.
        rolling_batch: The rolling batch.
    """
    if inputs.get_property("reset_rollingbatch") and rolling_batch.active_requests:
        rolling_batch.reset()
    results = iter(rolling_batch.inference(parsed_input.requests))
    for index in range(len(parsed_input.batch)):
        failure = parsed_input.errors.get(index)
        _add(outputs, index, next(results) if failure is None else _error(failure))
    return outputs


def get_input_details(
    requests: Sequence[Any], errors: Mapping[int, str], batch: Sequence[Input]
) -> tuple[list[Any], list[int], dict[str, Any], list[Any] | None]:
    """Return the inputs of a dynamic batch. Each request's `input_text` becomes a list.

    Returns:
        All inputs; the number of inputs in each request (0 if it could not be parsed); the parameters; and the adapters
        (None if no request names an adapter).

    Raises:
        ValueError: The requests have different parameters.
    """
    parameters: dict[str, Any] = requests[0].request_input.server_parameters
    inputs: list[Any] = []
    sizes = [0] * len(batch)
    adapters: list[Any] = []
    parsed = (index for index in range(len(batch)) if index not in errors)
    for index, request in zip(parsed, (request.request_input for request in requests), strict=True):
        if request.server_parameters != parameters:
            raise ValueError("In order to enable dynamic batching, all input batches must have the same parameters")
        if not isinstance(request.input_text, list):
            request.input_text = [request.input_text]
        inputs += request.input_text
        sizes[index] = len(request.input_text)
        if request.adapters:
            adapters += request.adapters if isinstance(request.adapters, list) else [request.adapters]
    return inputs, sizes, parameters, adapters or None


def is_best_of(parameters: Mapping[str, Any]) -> bool:
    """Return True if the request asks for the best of several sequences."""
    return _above_one(parameters, "best_of")


def is_beam_search(parameters: Mapping[str, Any]) -> bool:
    """Return True if the request asks for beam search."""
    return _above_one(parameters, "num_beams")


def is_multiple_sequences(parameters: Mapping[str, Any]) -> bool:
    """Return True if the request asks for several sequences."""
    return _above_one(parameters, "n")


def is_streaming(parameters: Mapping[str, Any]) -> bool:
    """Return True if the request asks for token streaming."""
    return bool(parameters.get("stream"))


def wait_till_generation_finished(parameters: Mapping[str, Any]) -> bool:
    """Return True if no text can be sent before all sequences have finished."""
    return is_best_of(parameters) or is_multiple_sequences(parameters) or is_beam_search(parameters)


def _above_one(parameters: Mapping[str, Any], name: str) -> bool:
    return (parameters.get(name) or 1) > 1


def _error(message: str) -> dict[str, Any]:
    error = wire.sendable(message)
    return {"data": "", "last": True, "code": _FAILURE_CODE, "error": error, "content_type": "application/json"}


def _add(output: Output, index: int, result: Mapping[str, Any]) -> None:
    chunk = {name: value for name, value in result.items() if value is not None}
    output.add(Output.binary_encode(chunk), key="data", batch_index=index)
    for name, header in (("content_type", "Content-Type"), ("request_id", "requestId")):
        if result.get(name) is not None:
            output.add_property(f"batch_{index}_{header}", result[name])
