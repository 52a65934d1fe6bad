"""Decodes requests and encodes predictions by their content type."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from djl_python.inputs import READERS, Input, kind_of, read_csv_text
from djl_python.lazy_import import require
from djl_python.outputs import Output

_JSON = "application/json"
_CSV_HEADERS = ("question", "context", "inputs")


def decode(inputs: Input, content_type: str | None, key: str | None = None, require_csv_headers: bool = True) -> Any:
    """Return a request's decoded content.

    JSON is returned as the parsed value, CSV as by `decode_csv`, and other content as `{"inputs": ...}`.

    Raises:
        KeyError: The request has no content with this key.
        ValueError: The body is malformed.
        ImportError: The package for this kind of body is not installed.
    """
    if not content_type:
        return inputs.get_as_json(key=key) if inputs.get_as_bytes(key=key) else {"inputs": ""}
    match kind := kind_of(content_type):
        case "application/json":
            return inputs.get_as_json(key=key)
        case "text/csv":
            which = {"key": key} if key else {}
            return decode_csv(inputs, require_headers=require_csv_headers, **which)
        case "text/plain":
            return {"inputs": [inputs.get_as_string(key=key)]}
        case "text/":
            return {"inputs": inputs.get_as_bytes(key=key)}
        case _:
            return {"inputs": getattr(inputs, READERS[kind])(key=key)}


def encode(outputs: Output, prediction: Any, content_type: str | None, key: str | None = None) -> None:
    """Add a prediction as JSON, CSV or npz if the content type names that format. Otherwise add it as NDList.

    Raises:
        TypeError: The format does not support the prediction's type.
        ValueError: The format cannot represent the prediction.
    """
    match kind_of(content_type or _JSON):
        case "application/json":
            outputs.add_as_json(prediction, key=key)
            outputs.add_property("Content-Type", _JSON)
        case "text/csv":
            outputs.add_as_string(encode_csv(prediction), key=key)
            outputs.add_property("Content-Type", "text/csv")
        case "tensor/npz":
            outputs.add_as_npz(prediction, key=key)
            outputs.add_property("Content-Type", "tensor/npz")
        case _:
            outputs.add_as_numpy(prediction, key=key)
            outputs.add_property("Content-Type", "tensor/ndlist")


def decode_csv(inputs: Input, require_headers: bool = True, key: str | None = None) -> Any:
    """Return CSV as `{"inputs": [...]}`, or, without `require_headers`, as a two-dimensional array of numbers.

    The inputs are the values in the column `inputs`. If the header has no such column, each whole row is an input.

    Raises:
        ValueError: The header has none of the columns `question`, `context` and `inputs`. Without `require_headers`:
            the CSV has no rows, a cell is not a number, or the rows differ in length.
    """
    text = (inputs.get_as_string(key=key) if key else inputs.get_as_string()).removeprefix("\ufeff")
    if not require_headers:
        return _numbers(text)
    names, rows = read_csv_text(text)
    if not any(wanted in name.lower() for name in names for wanted in _CSV_HEADERS):
        raise ValueError(
            "You need to provide the correct CSV with Header columns to use it with the default handler: "
            f"one of {', '.join(_CSV_HEADERS)}"
        )
    return {"inputs": [row["inputs"] for row in rows] if "inputs" in names else rows}


def encode_csv(content: Any) -> str:
    """Return CSV for a list of mappings or for rows of values. For mappings, the header lists all their keys.

    Raises:
        ValueError: The content is neither a list of mappings nor rows of values.
    """
    rows = [content] if isinstance(content, Mapping) else content.tolist() if hasattr(content, "tolist") else content
    if isinstance(rows, (str, bytes)) or not hasattr(rows, "__iter__"):
        raise ValueError(f"CSV needs rows, not {type(content).__name__}")
    rows = list(rows)
    stream = io.StringIO(newline="")
    if all(isinstance(row, Mapping) for row in rows):
        names = list(dict.fromkeys(name for row in rows for name in row))
        writer = csv.DictWriter(stream, names)  # Lines end with \r\n, as in LMI.
        writer.writeheader()
        writer.writerows(rows)
    else:
        csv.writer(stream, lineterminator="\n").writerows(_row(row) for row in rows)
    return stream.getvalue()


def _row(row: Any) -> Sequence[Any]:
    if isinstance(row, Mapping):
        raise ValueError("CSV needs rows that are all mappings, or none")
    return row if isinstance(row, (list, tuple)) else [row]


def _numbers(text: str) -> Any:
    numpy = require("numpy", "CSV without a header")
    # As in numpy's `genfromtxt`, `#` starts a comment, and lines that contain nothing else are skipped.
    rows = [row for line in io.StringIO(text) if (row := line.partition("#")[0].strip(" \r\n"))]
    if not rows:
        raise ValueError("The CSV body has no rows")
    try:
        numbers = numpy.loadtxt(rows, delimiter=",", quotechar='"', comments=None, ndmin=2)
    except ValueError as error:
        raise ValueError(
            "CSV contains non-numeric data, or rows of different length. Please provide numeric data only."
        ) from error
    if numpy.isnan(numbers).any():
        raise ValueError("CSV contains non-numeric data. Please provide numeric data only.")
    return numbers
