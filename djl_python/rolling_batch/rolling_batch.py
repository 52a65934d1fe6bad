"""The base class for rolling batches, and functions for its subclasses."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from typing import Any

from djl_python.request import Request
from djl_python.request_io import Token
from djl_python.utils import IdCounter

FAILURE = "exception occurred during rolling batch inference"
FAILURE_CODE = 424

FINISH_REASON_MAPPER = ["length", "eos_token", "stop_sequence"]

Results = list[dict[str, Any]]


class RollingBatch(ABC):
    """A rolling batch.

    A subclass implements `inference`, which adds tokens to `active_requests` and returns `postprocess_results()`.
    """

    def __init__(self, configs: Any = None) -> None:
        self.configs = configs
        self.active_requests: list[Request] = []
        self.req_id_counter = IdCounter()

    @abstractmethod
    def inference(self, new_requests: list[Request]) -> Results:
        """Run one step, and return one result for each request: for the active requests, then for the new requests."""

    def add_new_requests(self, requests: list[Request]) -> None:
        self.active_requests.extend(requests)

    def postprocess_results(self) -> Results:
        """Return the next text of each active request. Remove finished requests from the batch."""
        results = [_result(request) for request in self.active_requests]
        self.active_requests = [request for request in self.active_requests if not request.is_last_token()]
        return results

    def reset(self) -> None:
        self.active_requests = []
        self.req_id_counter.reset()

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer, or None."""
        return None


def filter_unused_generation_params(
    parameters: dict[str, Any], allowed_params: Set[str], backend: str, remove_unused_params: bool = False
) -> dict[str, Any]:
    """Log the parameters that a backend does not support, and return `parameters`.

    Args:
        parameters: The parameters of a request.
        allowed_params: The parameters that the backend supports.
        backend: The backend's name, for the log.
        remove_unused_params: Whether to remove unsupported parameters from `parameters`.
    """
    unused = parameters.keys() - allowed_params
    if unused:
        names = ", ".join(sorted(unused))
        logging.warning("%s with rolling batch does not support the parameters %s", backend, names)
    if remove_unused_params:
        for name in unused:
            del parameters[name]
    return parameters


def stop_on_any_exception(step: Callable[..., Results]) -> Callable[..., Results]:
    """Decorate a step. If the step raises an exception, all active requests end with an error."""

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
