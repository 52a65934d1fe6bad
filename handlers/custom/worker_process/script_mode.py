"""SageMaker's script mode: `model_fn`, `input_fn`, `predict_fn` and `output_fn` instead of a handler function.

Source: AWS's sagemaker-inference-toolkit, `transformer.py`, `encoder.py` and `decoder.py`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from djl_python.inputs import Input
from djl_python.lazy_import import require
from djl_python.outputs import Output

from .script_context import Context, Headers, RequestProcessor
from .socket_protocol import LoadRequest, Properties

LOADS = "model_fn"  # The function that a script must have.
_STEPS = ("input_fn", "predict_fn", "output_fn")
_JSON, _CSV, _NPY = "application/json", "text/csv", "application/x-npy"
# `input_fn` and `transform_fn` get bodies of these types as `Text`, and all other bodies as bytes.
_TEXT_TYPES = (_JSON, _CSV)
_ANY = "*/*"
_PURPOSE = "the default input_fn and output_fn"
_OK, _UNSUPPORTED = 200, 415


class Text(str):
    """A body in JSON or CSV.

    The toolkit passes strings to a script, and LMI passes bytes. So this string can be decoded like bytes.
    """

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Decode the body's bytes, as `bytes.decode` does."""
        return self.encode("utf-8").decode(encoding, errors)

    def __bytes__(self) -> bytes:
        return self.encode("utf-8")


class SageMakerScript:
    """A customer's module in script mode, as a handler function. Each call is one request, never a batch.

    The module has `model_fn(model_dir)`. It may have `input_fn(body, content_type)`, `predict_fn(data, model)` and
    `output_fn(prediction, accept)`, which have defaults. Instead of these three functions, it may have
    `transform_fn(model, body, content_type, accept)`.

    `pre_model_fn(model_dir)` runs before `model_fn`, and `model_warmup_fn(model_dir, model)` after it. Each function
    may take one more argument, the context. Values that a function sets in the context take precedence over the values
    that the functions return.
    """

    def __init__(self, module: ModuleType, request: LoadRequest) -> None:
        """Find the functions of the module.

        Args:
            module: The customer's module.
            request: The model, for the context.

        Raises:
            ValueError: The module has `transform_fn` and a function that `transform_fn` replaces.
        """
        self._functions = {name: value for name, value in vars(module).items() if callable(value)}
        steps = [name for name in _STEPS if name in self._functions]
        if "transform_fn" in self._functions and steps:
            raise ValueError(f"transform_fn cannot be used together with {', '.join(steps)}")
        self._request = request
        self._model: Any = None
        self._context: Context | None = None
        self._default_accept = _JSON

    def __call__(self, inputs: Input, headers: Properties = ()) -> Output | None:
        """Answer a request, or load the model if the input is empty.

        Args:
            inputs: The request's body and id, or the properties of the initializing call.
            headers: The request's headers. The properties of `inputs` hold these headers and the custom attributes.
        """
        if inputs.is_empty():
            self._load(inputs)
            return None
        assert self._context is not None
        reply = self._context.begin(inputs.get_property("requestId"), Headers(headers))
        try:
            body, content_type = self._answer(inputs, reply)
        except Exception as error:
            # The toolkit's errors, which scripts raise, have these attributes.
            code, message = getattr(error, "status_code", None), getattr(error, "message", None)
            if not isinstance(code, int) or not 400 <= code < 600:
                raise
            output = Output().error(str(message or error), code)
            return _with_headers(output, {**reply.get_response_headers(), **output.properties})
        output = Output(reply.get_response_status_code() or _OK, reply.get_response_status_phrase() or "OK")
        return _with_headers(output, {"content-type": content_type, **reply.get_response_headers()}).add(body, "data")

    def _load(self, inputs: Input) -> None:
        model_dir = self._request.model_dir
        self._context = Context(self._request, inputs.get_property("device_id"))
        self._default_accept = inputs.get_property("default_accept") or _JSON
        if "pre_model_fn" in self._functions:
            self._call("pre_model_fn", None, model_dir)
        self._model = self._call(LOADS, None, model_dir)
        if "model_warmup_fn" in self._functions:
            self._call("model_warmup_fn", None, model_dir, self._model)

    def _answer(self, inputs: Input, request: RequestProcessor) -> tuple[Any, str]:
        content_type = request.get_request_property("Content-Type") or _JSON
        accept = request.get_request_property("Accept")
        if not accept or accept == _ANY:
            accept = self._default_accept
        is_text = _media_type(content_type) in _TEXT_TYPES
        body = Text(inputs.get_as_string()) if is_text else bytes(inputs.get_as_bytes())
        if "transform_fn" in self._functions:
            answer = self._call("transform_fn", None, self._model, body, content_type, accept)
        else:
            data = self._call("input_fn", _decode, body, content_type)
            prediction = self._call("predict_fn", _predict, data, self._model)
            answer = self._call("output_fn", _encode, prediction, accept)
        return answer if isinstance(answer, tuple) else (answer, accept)

    def _call(self, name: str, default: Callable[..., Any] | None, *arguments: Any) -> Any:
        """Return the result of a function of the script.

        Raises:
            TypeError: The function takes a different number of arguments, or the script does not have the function.
        """
        function = self._functions.get(name, default)
        if function is None:
            raise TypeError(f"the script has no {name}")
        taken = len(signature(function).parameters)
        if taken == len(arguments) + 1:
            arguments = (*arguments, self._context)
        if taken != len(arguments):
            raise TypeError(f"{name} takes {taken} arguments; it is called with {len(arguments)}, or one more")
        return function(*arguments)


class _UnsupportedType(Exception):
    """The default functions do not support the content type."""

    status_code = _UNSUPPORTED

    def __init__(self, name: str, content_type: str) -> None:
        super().__init__(f"the content type {content_type[:200]!r} needs {name}; without it: {_JSON}, {_CSV}, {_NPY}")


def _with_headers(output: Output, headers: Mapping[str, Any]) -> Output:
    for name, value in Headers(headers.items()).items():
        output.add_property(name, value)
    return output


def _media_type(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _decode(body: str | bytes, content_type: str) -> Any:
    numpy = require("numpy", _PURPOSE)
    match _media_type(content_type):
        case "application/json":
            return numpy.array(json.loads(body))
        case "text/csv":
            return numpy.genfromtxt(io.StringIO(str(body)), delimiter=",")
        case "application/x-npy" if isinstance(body, bytes):
            return numpy.load(io.BytesIO(body), allow_pickle=False)
    raise _UnsupportedType("input_fn", content_type)


def _predict(data: Any, model: Any) -> Any:
    return model.predict(data) if hasattr(model, "predict") else model(data)


def _encode(prediction: Any, accept: str) -> Any:
    """Return the body and its type: the first known type in `accept`. This is the default `output_fn`."""
    for each in accept.split(","):
        match _media_type(each):
            case "application/json" | "application/*" | "*/*":
                return json.dumps(prediction, default=_plain), _JSON
            case "text/csv":
                text = io.StringIO()
                require("numpy", _PURPOSE).savetxt(text, prediction, delimiter=",", fmt="%s")
                return text.getvalue(), _CSV
            case "application/x-npy":
                array = io.BytesIO()
                require("numpy", _PURPOSE).save(array, prediction, allow_pickle=False)
                return array.getvalue(), _NPY
    raise _UnsupportedType("output_fn", accept)


def _plain(value: Any) -> Any:
    """Convert an array or a number from numpy to a value that JSON can hold."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON by the default output_fn")
