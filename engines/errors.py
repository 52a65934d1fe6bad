"""The errors of requests.

Clients get the messages. A message names the field, the value and the allowed values. It has no traceback and no path.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

SHOWN = 200  # The maximum number of characters of a client's name or value in a message.
_QUOTED = re.compile(r"`(\w+)`")


class RequestError(Exception):
    """The base class of the errors that end a request without its answer."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __copy__(self) -> RequestError:
        """Return a copy without the traceback. `__init__` is skipped, because subclasses have other arguments."""
        error = type(self).__new__(type(self), *self.args)
        error.__dict__ |= self.__dict__
        return error


class UnknownModel(RequestError):
    """The call names a model, or a version of a model, that the server does not serve."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class ModelNotNamed(UnknownModel):
    """The call names no model, and the server was not started with exactly one model."""


class NotServed(RequestError):
    """The model cannot answer this kind of call. An example is a chat on an engine without chats."""


class NotReady(RequestError):
    """The model is still loading, or the server is stopping."""


class NoWorkers(NotReady):
    """The model was scaled down to no workers."""


class CrossSite(RequestError):
    """A browser has sent the request on behalf of another site, to a route that controls or monitors the server."""


class Unauthorized(RequestError):
    """The server asks for keys, and the request has none of them."""

    def __init__(self, *, in_browser: bool = False) -> None:
        message = "this server asks for a key: send the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
        if in_browser:  # A browser sends neither header when it opens a page.
            message += ", such as with curl -H 'x-api-key: KEY'; /console has a field for the key"
        super().__init__(message)


class BodyTooLarge(RequestError):
    """The request's body is larger than allowed."""


class BodyTimeout(RequestError):
    """The rest of the request's body did not come in time."""


class InvalidRequest(RequestError):
    """The client's request is invalid. The error is found before inference."""


class InvalidParameter(InvalidRequest):
    """A parameter of the request has a wrong type or value. The error is found before inference."""

    def __init__(self, parameter: str, message: str) -> None:
        super().__init__(f"`{parameter}` {message}")
        self.parameter = parameter

    def renamed(self, names: Mapping[str, str]) -> InvalidParameter:
        """Return the error with the client's names for parameters.

        Args:
            names: The client's name for each of the engine's names. Names that are not listed stay unchanged.
        """
        parameter = names.get(self.parameter, self.parameter)
        message = _QUOTED.sub(lambda found: f"`{names.get(found[1], found[1])}`", self.message)
        return InvalidParameter(parameter, message.removeprefix(f"`{parameter}` "))


class UnusableImage(InvalidRequest):
    """An image cannot be fetched, its base64 is invalid, or its content is not an allowed image."""

    def __init__(self, fault: Literal["fetch", "base64", "content"], reason: str) -> None:
        """Create the error. In the message, `reason` follows the words "an image"."""
        super().__init__(f"an image {reason}")
        self.fault, self.reason = fault, reason


class InvalidChat(InvalidRequest):
    """The model's chat template, or the server, refuses the messages of a chat."""


class UnknownAdapter(InvalidRequest):
    """The call names an adapter that is not registered."""

    def __init__(self, name: str, registered: Iterable[str] = ()) -> None:
        super().__init__(f"the adapter {name[:SHOWN]!r} is not registered")
        self.name, self.registered = name, tuple(registered)


class AdapterUnusable(InvalidRequest):
    """The call names a registered adapter whose files have since been removed, changed or damaged."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"the adapter {name[:SHOWN]!r} cannot be loaded: {reason}")
        self.name = name


class AdapterError(RequestError):
    """An adapter cannot be registered, updated or removed. Everything stays as it was."""


class AdapterConflict(AdapterError):
    """The name is invalid or taken, or another change of the adapter is in progress."""


class AdapterTaken(AdapterConflict):
    """Another adapter with the same name is registered."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the adapter {name[:SHOWN]!r} is registered already")
        self.name = name


class AdapterFailed(AdapterError):
    """The adapter cannot be loaded, or the custom handler has refused it."""


class AdapterMissing(AdapterFailed):
    """The adapter's directory does not exist."""


class NoRoomForAdapter(AdapterError):
    """All of the engine's adapter slots are taken by adapters that are pinned or in use."""


class ContextExceeded(InvalidRequest):
    """The model's context has no room for the prompt and the new tokens that the request needs."""

    def __init__(self, prompt_tokens: int, new_tokens: int, context: int) -> None:
        wanted = "one new token" if new_tokens == 1 else f"{new_tokens} new tokens"
        room = f" and at least {wanted}" if new_tokens else ""
        super().__init__(
            f"the prompt has {prompt_tokens} tokens; the model's context of {context} tokens must hold it{room}"
        )
        self.prompt_tokens, self.new_tokens, self.context = prompt_tokens, new_tokens, context


class PromptTooLong(InvalidRequest):
    """The prompt has more tokens than `option.max_prompt_tokens` allows."""

    def __init__(self, prompt_tokens: int, most: int) -> None:
        super().__init__(f"the prompt has {prompt_tokens} tokens; at most {most} are taken (option.max_prompt_tokens)")
        self.prompt_tokens, self.most = prompt_tokens, most


class Overloaded(RequestError):
    """The server has no room for the request. `status` is the status code for LMI's clients."""

    def __init__(self, message: str, status: int = 503) -> None:
        super().__init__(message)
        self.status = status


class GenerationFailed(RequestError):
    """The engine failed to answer this request. Other requests are not affected."""


class EngineFault(GenerationFailed):
    """The engine ended this request with an error, and gave no reason."""

    def __init__(self) -> None:
        super().__init__("the engine reported an internal error for this request")


class InternalError(GenerationFailed):
    """A bug in this server. The log has the details under the request's id."""

    def __init__(self) -> None:
        super().__init__("internal error; the log has more under this request's id")


class DeadlineExceeded(GenerationFailed):
    """The deadline of a call has passed: a call for text had no token yet, or a pooling call was incomplete."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the call had no answer at its deadline ({seconds:g} s)")


class EngineDead(RequestError):
    """The engine has died, and its requests have failed."""

    def __init__(self, message: str = "the engine has died; the request was not completed") -> None:
        super().__init__(message)
