"""What can go wrong with a request, as a tree.

    RequestError                 the request ends; its contract says with which bytes
    ├── InvalidRequest           the client sent something wrong; nothing was generated
    │   └── InvalidParameter     ... in a generation parameter, which is named
    ├── Overloaded               the queue is full; to be tried again later
    ├── GenerationFailed         the engine gave up on this request alone
    └── EngineDead               the engine is gone, with every request in it

Messages are shown to clients: they name the field, the value and what is allowed, and hold no traceback or path.
"""

from __future__ import annotations


class RequestError(Exception):
    """A request that ends without its answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(RequestError):
    """The client sent something wrong; found before inference."""


class InvalidParameter(InvalidRequest):
    """A generation parameter has a wrong type or value; found before inference."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"`{parameter}` {message}")
        self.parameter = parameter


class Overloaded(RequestError):
    """No room for this request at present."""


class GenerationFailed(RequestError):
    """The engine could not go on with this request; others are not touched."""


class EngineDead(RequestError):
    """The engine is gone and with it all requests that it had."""

    def __init__(self, message: str = "the engine has died; the request was not completed") -> None:
        super().__init__(message)
