"""Small functions that LMI's handlers import from this module."""

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
    """Counts up from 0 and starts again at `MAX_ID`."""

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
    """The path of the one file with such an extension (given without its dot); None if there is none. Raises
    ValueError: there are several."""
    suffixes = {f".{extension}" for extension in extensions}
    found = sorted(str(path) for path in Path(model_dir).glob("*") if path.suffix in suffixes)
    if len(found) > 1:
        raise ValueError(f"Multiple model files found in {model_dir}: {', '.join(found)}. Only one is supported")
    return found[0] if found else None


def profile_objects(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """The function itself: LMI's decorator, which counts objects, has no effect here."""
    return function


def rolling_batch_inference(parsed_input: Any, inputs: Input, outputs: Output, rolling_batch: Any) -> Output:
    """Runs one step of a rolling batch for what `parse_input_with_formatter` has parsed; returns `outputs`. A request
    that could not be parsed gets an error of its own; the others continue."""
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
    """A dynamic batch: all inputs, how many of them each request has (0 where it could not be parsed), the parameters,
    and the adapters, None where no request has any. Makes a list of each request's `input_text`.

    Raises ValueError: the requests have different parameters.
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
    """Whether the best of several sequences is requested."""
    return _above_one(parameters, "best_of")


def is_beam_search(parameters: Mapping[str, Any]) -> bool:
    """Whether beam search is requested."""
    return _above_one(parameters, "num_beams")


def is_multiple_sequences(parameters: Mapping[str, Any]) -> bool:
    """Whether several sequences are requested."""
    return _above_one(parameters, "n")


def is_streaming(parameters: Mapping[str, Any]) -> bool:
    """Whether token streaming is requested."""
    return bool(parameters.get("stream"))


def wait_till_generation_finished(parameters: Mapping[str, Any]) -> bool:
    """Whether no text can be sent before all sequences have finished."""
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
