"""The formats of a recorded request: SageMaker's data capture, Slipway's format, and OpenAI's batch input.

In each format, a line is one JSON object. The format is recognized by the object's fields.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from replay.request import CUSTOM_ATTRIBUTES, HEADER_NAME, Headers, RecordedRequest, Reply, encodable, with_content_type

_METHOD = re.compile(r"[A-Z]{1,20}")
_SEPARATOR = re.compile(r"[/\\]")
_FORMATS = "`captureData` (SageMaker), `custom_id` (OpenAI's batches) or `path`"


class Malformed(ValueError):
    """A line is not a request. The message names the field and the expected value, and quotes nothing from the line."""


def read_line(line: bytes, place: str, path: str) -> RecordedRequest:
    """Parse a line of a source.

    Args:
        place: The file and the line's number.
        path: The path for requests whose format has no path.

    Raises:
        Malformed: The line is not a request.
    """
    try:
        record = json.loads(line)
    except RecursionError:
        raise Malformed("the JSON is nested too deeply") from None
    except UnicodeDecodeError:
        raise Malformed("it is not UTF-8 text; expected a JSON object") from None
    except ValueError as error:
        message = getattr(error, "msg", "")
        raise Malformed(f"it is not JSON{f' ({message})' if message else ''}; expected a JSON object") from None
    if not isinstance(record, dict):
        raise Malformed(f"it is {_kind(record)}; expected a JSON object")
    if "captureData" in record:
        return _of_sagemaker(record, place, path)
    if "custom_id" in record:
        return _of_batch(record, place)
    if "path" in record:
        return _plain(record, place)
    raise Malformed(f"it has none of {_FORMATS}")


def _of_sagemaker(record: Mapping[str, Any], place: str, path: str) -> RecordedRequest:
    captured = _object(record, "captureData")
    metadata = _object(record, "eventMetadata") if record.get("eventMetadata") is not None else {}
    given = _object(captured, "endpointInput", "captureData.")
    body, content_type = _captured(given, "captureData.endpointInput")
    headers = [("content-type", content_type)] if content_type else []
    attributes = metadata.get("customAttributes")
    if isinstance(attributes, list) and all(isinstance(part, str) for part in attributes):
        attributes = ",".join(attributes)
    if attributes is not None and not isinstance(attributes, str):
        raise Malformed("`eventMetadata.customAttributes` must be a string or an array of strings")
    if attributes and not _is_value(attributes):
        raise Malformed("`eventMetadata.customAttributes` must be the value of a header, in Latin-1")
    if attributes:
        headers.append((CUSTOM_ATTRIBUTES, attributes))
    reply = None
    if captured.get("endpointOutput") is not None:
        answer, kind = _captured(_object(captured, "endpointOutput", "captureData."), "captureData.endpointOutput")
        # SageMaker captures only calls that succeed.
        reply = Reply(200, (("content-type", kind),) if kind else (), answer, headers_known=False)
    own_path = metadata.get("path")
    at = metadata.get("inferenceTime")
    return RecordedRequest(
        id=_id(metadata.get("eventId") or metadata.get("inferenceId"), place),
        place=place,
        method="POST",
        path=_path(own_path, "eventMetadata.path") if own_path is not None else path,
        headers=tuple(headers),
        body=body,
        reply=reply,
        time=_time(at, "eventMetadata.inferenceTime") if at is not None else None,
    )


def _captured(part: Mapping[str, Any], name: str) -> tuple[bytes, str]:
    data, encoding = part.get("data"), part.get("encoding")
    if not isinstance(data, str):
        raise Malformed(f"`{name}.data` must be a string, got {_kind(data)}")
    content_type = part.get("observedContentType") or ""
    if not isinstance(content_type, str):
        raise Malformed(f"`{name}.observedContentType` must be a string, got {_kind(content_type)}")
    if not _is_value(content_type):
        raise Malformed(f"`{name}.observedContentType` must be the value of a header, in Latin-1")
    if encoding == "BASE64":
        return _base64(data, f"{name}.data"), content_type
    if encoding in ("JSON", "CSV", "NONE"):
        return _encoded(data, f"{name}.data"), content_type
    raise Malformed(f"`{name}.encoding` must be JSON, CSV or BASE64")


def _of_batch(record: Mapping[str, Any], place: str) -> RecordedRequest:
    if "url" not in record and "response" in record:
        raise Malformed("it is a line of a batch's output; expected its input, with `url` and `body`")
    body = record.get("body")
    if not isinstance(body, dict):
        raise Malformed(f"`body` must be an object, got {_kind(body)}")
    return RecordedRequest(
        id=_id(record["custom_id"], place),
        place=place,
        method=_method(record),
        path=_path(record.get("url"), "url"),
        headers=with_content_type(()),
        body=_json(body),
    )


def _plain(record: Mapping[str, Any], place: str) -> RecordedRequest:
    at, answer = record.get("time"), record.get("answer")
    if answer is not None and not isinstance(answer, dict):
        raise Malformed(f"`answer` must be an object, got {_kind(answer)}")
    method = _method(record)
    headers = _headers(record.get("headers"), "headers")
    return RecordedRequest(
        id=_id(record.get("id"), place),
        place=place,
        method=method,
        path=_path(record["path"], "path"),
        headers=headers if method == "GET" else with_content_type(headers),
        body=_body(record, ""),
        reply=None if answer is None else _answer(answer),
        time=_time(at, "time") if at is not None else None,
    )


def _answer(answer: Mapping[str, Any]) -> Reply:
    status, complete = answer.get("status", 200), answer.get("complete", True)
    if not isinstance(status, int) or isinstance(status, bool) or not 100 <= status <= 599:
        raise Malformed("`answer.status` must be an integer from 100 to 599")
    if not isinstance(complete, bool):
        raise Malformed(f"`answer.complete` must be a boolean, got {_kind(complete)}")
    headers = _headers(answer.get("headers"), "answer.headers")
    kind = answer.get("content_type")
    if kind is not None and not isinstance(kind, str):
        raise Malformed(f"`answer.content_type` must be a string, got {_kind(kind)}")
    if kind:
        headers = (("content-type", kind), *(pair for pair in headers if pair[0] != "content-type"))
    elif "headers" not in answer and not isinstance(answer.get("body"), str):
        headers = with_content_type(headers)
    return Reply(
        status,
        headers,
        _body(answer, "answer."),
        headers_known=answer.get("headers") is not None,
        complete=complete,
        seconds=_seconds(answer, "seconds"),
        first_byte=_seconds(answer, "first_byte_seconds"),
    )


def _body(record: Mapping[str, Any], prefix: str) -> bytes:
    encoded = record.get("body_base64")
    if encoded is not None:
        if not isinstance(encoded, str):
            raise Malformed(f"`{prefix}body_base64` must be a string, got {_kind(encoded)}")
        return _base64(encoded, f"{prefix}body_base64")
    body = record.get("body")
    if body is None:
        return b""
    return _encoded(body, f"{prefix}body") if isinstance(body, str) else _json(body)


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()
    except RecursionError:
        raise Malformed("the JSON is nested too deeply") from None
    except ValueError:
        raise Malformed("`body` must have no NaN and no infinity") from None


def _encoded(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise Malformed(f"`{name}` has half of a surrogate pair; expected text") from None


def _base64(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Malformed(f"`{name}` must be base64") from None


def _headers(given: Any, name: str) -> Headers:
    if given is None:
        return ()
    if not isinstance(given, dict):
        raise Malformed(f"`{name}` must be an object, got {_kind(given)}")
    for key, value in given.items():
        if not re.fullmatch(HEADER_NAME, key):
            raise Malformed(f"`{name}` has a key that is no name of a header")
        if not isinstance(value, str) or not _is_value(value):
            raise Malformed(f"`{name}.{key.lower()}` must be a string of visible characters")
    return tuple((key.lower(), value) for key, value in given.items())


def _is_value(text: str) -> bool:
    return all((" " <= character <= "\xff" and character != "\x7f") or character == "\t" for character in text)


def _object(record: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    found = record.get(key)
    if not isinstance(found, dict):
        raise Malformed(f"`{prefix}{key}` must be an object, got {_kind(found)}")
    return found


def _path(path: Any, name: str) -> str:
    if not isinstance(path, str) or not path.startswith("/"):
        raise Malformed(f"`{name}` must be a path that begins with /, such as /v1/chat/completions")
    if not all("!" <= character <= "~" for character in path) or "#" in path:
        raise Malformed(f"`{name}` must have visible ASCII characters and no fragment; encode others as %XX")
    if any(part.partition(";")[0] in (".", "..") for part in _SEPARATOR.split(unquote(path.partition("?")[0]))):
        raise Malformed(f"`{name}` must have no segment `.` or `..`: it would leave the path of --to or --against")
    return path


def _method(record: Mapping[str, Any]) -> str:
    method = record.get("method") or "POST"
    if not isinstance(method, str) or not _METHOD.fullmatch(method.upper()):
        raise Malformed("`method` must be an HTTP method, such as POST")
    return method.upper()


def _id(given: Any, place: str) -> str:
    if given is None or given == "":
        return place
    if not isinstance(given, str | int) or isinstance(given, bool):
        raise Malformed(f"the id must be a string, got {_kind(given)}")
    return encodable(str(given))


def _time(given: Any, name: str) -> float:
    try:
        number = _finite(given)
        at = datetime.fromisoformat(given) if number is None else datetime.fromtimestamp(number, UTC)
    except (TypeError, ValueError, OverflowError, OSError):
        raise Malformed(f"`{name}` must be a time such as 2026-11-26T15:00:00.250Z, or seconds since 1970") from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _seconds(answer: Mapping[str, Any], key: str) -> float | None:
    given = answer.get(key)
    if given is None:
        return None
    number = _finite(given)
    if number is None or number < 0:
        raise Malformed(f"`answer.{key}` must be a number of at least 0")
    return number


def _finite(given: Any) -> float | None:
    """Return a finite number as a float, or None for anything else. An integer may be too large for a float."""
    if not isinstance(given, int | float) or isinstance(given, bool):
        return None
    try:
        number = float(given)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "nothing"}
    return names.get(type(value), "a number")
