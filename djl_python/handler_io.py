"""Requests as a server makes them, and answers as it reads them, for tests of handlers (contracts/lmi.md section 7.6).

Customers import these functions from `djl_python.test_model`.
"""

from __future__ import annotations

import os
import random
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from djl_python.inputs import Input
from djl_python.np_util import to_nd_list, to_npz
from djl_python.outputs import Output

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


def create_request(input_files: Sequence[str], parameters: Iterable[str] | None = None) -> Input:
    """A request from `[key=]file-or-text` entries and `k=v` properties.

    The content type is that of the entry `data`, or else of the first: by the file's extension; text in braces is
    JSON, and other text is plain.

    Raises:
        ValueError: a property has no `=`.
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
    """A request with a JSON document."""
    return _request(_JSON, Output().add_as_json(json_data).content.value_at(0), key)


def create_text_request(text: str, key: str | None = None) -> Input:
    """A request with plain text."""
    return _request(_TEXT, text.encode("utf-8"), key)


def create_numpy_request(list: Any, key: str | None = None) -> Input:
    """A request with arrays as NDList."""
    return _request("tensor/ndlist", to_nd_list(list), key)


def create_npz_request(list: Any, key: str | None = None) -> Input:
    """A request with arrays as npz."""
    return _request("tensor/npz", to_npz(list), key)


def create_3p_request(json_data: Any, stream: bool = False, key: str | None = None) -> Input:
    """A Bedrock-compatible request."""
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
    """Several requests as one Input: a JSON document, or bytes as they are, for each, and its properties.

    A request that has data also gets a seed. Properties of the server belong to the whole batch.
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
    """An answer's properties and content, to be read as a request's."""
    inputs = Input()
    inputs.properties, inputs.content = outputs.properties, outputs.content
    return inputs


def extract_output_as_bytes(outputs: Output, key: str | None = None) -> Any:
    """An answer's content as bytes. Raises KeyError."""
    return extract_output_as_input(outputs).get_as_bytes(key)


def extract_output_as_numpy(outputs: Output, key: str | None = None) -> list[NDArray[Any]]:
    """An answer's content as arrays of NDList. Raises KeyError and ValueError."""
    return extract_output_as_input(outputs).get_as_numpy(key)


def extract_output_as_npz(outputs: Output, key: str | None = None) -> list[NDArray[Any]]:
    """An answer's content as arrays of npz. Raises KeyError and ValueError."""
    return extract_output_as_input(outputs).get_as_npz(key)


def extract_output_as_string(outputs: Output, key: str | None = None) -> str:
    """An answer's content as text. Raises KeyError and ValueError."""
    return extract_output_as_input(outputs).get_as_string(key)


def decode_encoded_output_binary(binary: bytes | bytearray) -> dict[str, str]:
    """What `Output.binary_encode` has encoded, all values as text. Raises ValueError if the bytes are broken."""
    try:
        (count,), at = struct.unpack_from(">h", binary), 2
        texts: list[str] = []
        for _ in range(2 * count):
            (length,) = struct.unpack_from(">i", binary, at)
            text = bytes(binary[at + 4 : at + 4 + max(length, 0)])
            if len(text) < length:
                raise ValueError(f"{length} bytes of text wanted at {at}, {len(text)} left")
            texts.append(text.decode("utf-8"))
            at += 4 + len(text)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"The encoded answer is broken: {error}") from error
    return dict(zip(texts[::2], texts[1::2], strict=True))


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
