"""The base of a rolling batch: the requests that are being generated, and what each step says of them."""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from djl_python.request import Request
from djl_python.request_io import Token
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
        """What each active request has to send now; those that have finished leave the batch."""
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
    """Makes a failed step the end of all active requests, each with an error of its own."""

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
