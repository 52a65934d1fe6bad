"""The context that SageMaker's inference toolkit passes to the functions of a script.

Source: awslabs/multi-model-server, `mms/context.py` and `mms/metrics/metrics_store.py`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable
from typing import Any

from .socket_protocol import LoadRequest

logger = logging.getLogger("djl_python")

_CONTENT_TYPE = "content-type"
_MANIFEST = os.path.join("MAR-INF", "MANIFEST.json")
# The names that MMS gives to units.
_UNITS: dict[str | None, str] = {
    "ms": "Milliseconds",
    "s": "Seconds",
    "percent": "Percent",
    "count": "Count",
    None: "unit",
    "B": "Bytes",
    "kB": "Kilobytes",
    "MB": "Megabytes",
    "GB": "Gigabytes",
}
_NOT_A_NAME = re.compile(r"\W", re.ASCII)


class Headers(dict[str, Any]):
    """Headers, in order. Unlike in MMS, the case of a name does not matter."""

    def __init__(self, given: Iterable[tuple[str, Any]] = ()) -> None:
        super().__init__()
        for name, value in given:
            self[name] = value

    def _key(self, name: object) -> Any:
        if not isinstance(name, str) or super().__contains__(name):
            return name
        return next((key for key in self if key.lower() == name.lower()), name)

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(self._key(name))

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(self._key(name), value)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(self._key(name))

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(self._key(name), default)


class RequestProcessor:
    """One request's headers, and the status and the headers of its reply."""

    def __init__(self, headers: Headers) -> None:
        self._headers, self._reply_headers = headers, Headers()
        self._status: int | None = 200
        self._phrase: str | None = None

    def get_request_property(self, key: str) -> Any:
        return self._headers.get(key)

    def get_request_properties(self) -> Headers:
        return self._headers

    def report_status(self, code: int | None, reason_phrase: str | None = None) -> None:
        self._status, self._phrase = code, reason_phrase

    def get_response_status_code(self) -> int | None:
        return self._status

    def get_response_status_phrase(self) -> str | None:
        return self._phrase

    def add_response_property(self, key: str, value: Any) -> None:
        self._reply_headers[key] = value

    def get_response_headers(self) -> Headers:
        return self._reply_headers

    def get_response_header(self, key: str) -> Any:
        return self._reply_headers.get(key)


class Metrics:
    """Prints the metrics of a script as lines that the server reads and shows at /metrics."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def add_counter(self, name: str, value: float, idx: int | None = None, dimensions: Any = None) -> None:
        self.add_metric(name, value, idx, "count", dimensions)

    def add_time(
        self, name: str, value: float, idx: int | None = None, unit: str = "ms", dimensions: Any = None
    ) -> None:
        self.add_metric(name, value, idx, unit, dimensions)

    def add_size(
        self, name: str, value: float, idx: int | None = None, unit: str = "MB", dimensions: Any = None
    ) -> None:
        self.add_metric(name, value, idx, unit, dimensions)

    def add_percent(self, name: str, value: float, idx: int | None = None, dimensions: Any = None) -> None:
        self.add_metric(name, value, idx, "percent", dimensions)

    def add_error(self, name: str, value: Any, dimensions: Any = None) -> None:
        """Log an error. An error's value is text, which a metric cannot hold."""
        logger.error("%s: %s", name, value)

    def add_metric(
        self, name: str, value: float, idx: int | None = None, unit: str | None = None, dimensions: Any = None
    ) -> None:
        """Print a metric. `_` replaces characters that a metric's name cannot contain."""
        shown = ",".join([*map(str, dimensions or ()), f"ModelName:{self._model_name}"])
        unit = _UNITS.get(unit, unit)
        print(f"[METRICS]{_NOT_A_NAME.sub('_', name)}.{unit}:{value}|#{shown}|{int(time.time())}", flush=True)


class Context:
    """Shows the model and the request to the functions of a script, and lets them set the reply's status and headers.

    A worker has one context for all requests. The context has no request while the model is being loaded. The index of
    a request is always 0, because a script gets no batches.
    """

    def __init__(self, request: LoadRequest, device: str | None) -> None:
        """Create the context for the load of the model.

        Args:
            request: The model.
            device: The worker's GPUs, such as `0` or `0,1`. None and `-1` mean no GPU.
        """
        self.model_name = request.model_name
        self.manifest: Any = None
        manifest = os.path.join(request.model_dir, _MANIFEST)
        if os.path.exists(manifest):
            with open(manifest, encoding="utf-8") as file:
                self.manifest = json.load(file)
        self.system_properties: dict[str, Any] = {
            "model_dir": request.model_dir,
            "gpu_id": None if device in (None, "-1") else int(device.partition(",")[0]),
            "batch_size": 1,
            "server_name": "Slipway",
            "server_version": request.server_version,
        }
        self.metrics = Metrics(request.model_name)
        self.request_ids: dict[int, str] = {}
        self.request_processor: list[RequestProcessor] = []

    def begin(self, request_id: str | None, headers: Headers) -> RequestProcessor:
        """Set the current request. The next calls of the script's functions belong to this request."""
        self.request_ids = {} if request_id is None else {0: request_id}
        self.request_processor = [RequestProcessor(headers)]
        return self.request_processor[0]

    def get_request_id(self, idx: int = 0) -> str | None:
        return self.request_ids.get(idx)

    def get_request_header(self, idx: int, key: str) -> Any:
        return self.request_processor[idx].get_request_property(key)

    def get_all_request_header(self, idx: int) -> Headers:
        return self.request_processor[idx].get_request_properties()

    def set_response_content_type(self, idx: int, value: str) -> None:
        self.set_response_header(idx, _CONTENT_TYPE, value)

    def get_response_content_type(self, idx: int) -> Any:
        return self.get_response_headers(idx).get(_CONTENT_TYPE)

    def get_response_status(self, idx: int) -> tuple[int | None, str | None]:
        processor = self.request_processor[idx]
        return processor.get_response_status_code(), processor.get_response_status_phrase()

    def set_response_status(self, code: int | None = 200, phrase: str = "", idx: int = 0) -> None:
        self.request_processor[idx].report_status(code, reason_phrase=phrase)

    def set_all_response_status(self, code: int | None = 200, phrase: str = "") -> None:
        for processor in self.request_processor:
            processor.report_status(code, reason_phrase=phrase)

    def get_response_headers(self, idx: int) -> Headers:
        return self.request_processor[idx].get_response_headers()

    def set_response_header(self, idx: int, key: str, value: Any) -> None:
        self.request_processor[idx].add_response_property(key, value)
