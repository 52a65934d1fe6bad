"""What an error of an AWS service means: there is no such thing, it is there already, it is busy."""

from __future__ import annotations

import re
from typing import Any

_MISSING_CODES = frozenset(
    {"NoSuchEntity", "ObjectNotFoundException", "RepositoryNotFoundException", "ResourceNotFound"}
    | {"ResourceNotFoundException"}
)
_THERE_CODES = frozenset({"EntityAlreadyExists", "RepositoryAlreadyExistsException", "ResourceInUse"})
_BUSY_CODES = frozenset({"ConcurrentUpdateException", "DeleteConflict", "ResourceInUse", "ConcurrentModification"})
_DENIED_CODES = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
# SageMaker says most things with the one code ValidationException.
_MISSING = re.compile(r"could not find|cannot find|does not exist|not found|no scal(able target|ing policy)", re.I)
_THERE = re.compile(r"already exist", re.I)
_BUSY = re.compile(r"in-progress|in progress|cannot delete .* (while|which)|is in use|has inference", re.I)
_ROLE = re.compile(r"could not assume role|cannot assume|unable to assume|not authorized to assume", re.I)


def code(error: Any) -> str:
    """The service's code: "ValidationException"."""
    return str(error.response.get("Error", {}).get("Code", ""))


def message(error: Any) -> str:
    """The service's words."""
    return str(error.response.get("Error", {}).get("Message", ""))


def is_missing(error: Any) -> bool:
    """What the call is about is not there."""
    return code(error) in _MISSING_CODES or (
        code(error) == "ValidationException" and bool(_MISSING.search(message(error)))
    )


def is_already_there(error: Any) -> bool:
    """What the call should make is there."""
    return code(error) in _THERE_CODES or bool(_THERE.search(message(error)))


def is_busy(error: Any) -> bool:
    """The call is possible later: something else is going on with the resource."""
    return code(error) in _BUSY_CODES or bool(_BUSY.search(message(error)))


def is_denied(error: Any) -> bool:
    """The caller may not do this."""
    return code(error) in _DENIED_CODES


def is_role_too_new(error: Any) -> bool:
    """IAM has the role, but SageMaker does not see it yet."""
    return bool(_ROLE.search(message(error)))


def in_words(error: BaseException) -> str:
    """One line for people."""
    from botocore.exceptions import ClientError

    text = str(error)
    if isinstance(error, ClientError):
        text = f"{error.operation_name}: {code(error)}: {message(error)}"
    # A message may quote a container's answer, or list several problems.
    return " ".join(text.split()) or type(error).__name__
