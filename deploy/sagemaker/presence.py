"""Looks whether a resource is there, whose it is and how far it is, and waits for it to come or to go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deploy.sagemaker.api_call import ApiCall, Cloud
from deploy.sagemaker.naming import ENDPOINT_TAG, tag_map
from deploy.sagemaker.progress import Clock, Progress
from deploy.sagemaker.resource import Resource
from deploy.sagemaker.service_errors import in_words, is_busy, is_missing

POLL = 10.0
"""Seconds between two looks at something that takes minutes."""
_SIGN_OF_LIFE = 60.0
_UNSEEN_LIMIT = 60.0
"""Seconds until what was made is seen: IAM's roles, and what SageMaker reads from eventually consistent tables."""
_FAILURES_IN_A_ROW = 5
IN_SERVICE, FAILED, DELETING = "InService", "Failed", "Deleting"
_FAILED = frozenset({FAILED, "OutOfService", "UpdateRollbackFailed"})


@dataclass(frozen=True, slots=True)
class Found:
    """A resource that is there."""

    description: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    status: str = IN_SERVICE
    reason: str = ""
    """Why it failed."""

    def belongs_to(self, endpoint: str) -> bool:
        """Whether it carries the tag of this deployment."""
        return self.tags.get(ENDPOINT_TAG) == endpoint


class NotInService(Exception):
    """An endpoint or a component failed, or took longer than it may."""


class NotGone(Exception):
    """Something could not be removed in time."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What carries out calls, tells of them and keeps the time."""

    cloud: Cloud
    progress: Progress
    clock: Clock


def find(cloud: Cloud, resource: Resource) -> Found | None:
    """The resource as it is now, with its tags; None if it is not there."""
    from botocore.exceptions import ClientError

    kind = resource.kind
    try:
        answer: Mapping[str, Any] = cloud.call(resource.lookup)
        if kind.listed is not None:
            if not answer.get(kind.listed):
                return None
            answer = answer[kind.listed][0]
        tags = _tags(cloud.call(kind.tags(answer))) if kind.tags else {}
    except ClientError as error:
        if is_missing(error):
            return None
        raise
    status = str(answer[kind.status]) if kind.status else IN_SERVICE
    return Found(answer, tags, status, str(answer.get("FailureReason", "")))


def wait_until_in_service(around: Surroundings, resource: Resource, limit: float) -> Found:
    """Wait for an endpoint or a component, at most `limit` seconds; a few looks may fail.

    Raises:
        NotInService: it failed, is gone, or took too long.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    start = told = around.clock.now()
    status, failures = "", 0
    while True:
        try:
            found = find(around.cloud, resource)
            failures = 0
        except (BotoCoreError, ClientError) as error:
            failures += 1
            if failures == _FAILURES_IN_A_ROW:
                raise
            around.progress.say(f"{resource.key}: {in_words(error)}; trying again")
            around.clock.sleep(POLL)
            continue
        if found is None:
            raise NotInService(f"{resource.key} is gone")
        if found.status == IN_SERVICE:
            return found
        if found.status in _FAILED:
            raise NotInService(f"{resource.key} is {found.status}: {found.reason or 'no reason was given'}")
        now = around.clock.now()
        if found.status != status or now - told >= _SIGN_OF_LIFE:
            around.progress.say(f"{resource.key}: {found.status}")
            status, told = found.status, now
        if now - start > limit:
            raise NotInService(f"{resource.key} is still {found.status} after {limit:.0f} s")
        around.clock.sleep(POLL)


def call_until_seen(around: Surroundings, call: ApiCall, unseen: Callable[[Any], str | None]) -> dict[str, Any]:
    """Carry out a call that uses what was made a moment ago, and that the service may not see for a while.

    `unseen` says what an error shows to be unseen; None: the error is another one.

    Raises:
        botocore.exceptions.ClientError: the service refused, or still does after a minute.
    """
    from botocore.exceptions import ClientError

    end = around.clock.now() + _UNSEEN_LIMIT
    while True:
        try:
            return around.cloud.call(call)
        except ClientError as error:
            what = unseen(error)
            if what is None or around.clock.now() > end:
                raise
            around.progress.say(f"{call.service} does not see {what} yet; trying again")
            around.clock.sleep(POLL)


def remove(around: Surroundings, resource: Resource, limit: float) -> bool:
    """Remove a resource and wait until it is gone, at most `limit` seconds; False if it was not there.

    Raises:
        NotGone: it was busy or there for too long.
        botocore.exceptions.ClientError: the service refused.
    """
    from botocore.exceptions import ClientError

    start = around.clock.now()
    told = False
    while True:
        try:
            around.cloud.call(resource.removal)
            break
        except ClientError as error:
            if is_missing(error):
                return False
            if not is_busy(error):
                raise
            if around.clock.now() - start > limit:
                raise NotGone(f"{resource.key}: {in_words(error)}, for {limit:.0f} s") from error
            if not told:
                around.progress.say(f"{resource.key} cannot be removed yet: {in_words(error)}")
                told = True
            around.clock.sleep(POLL)
    if resource.kind.status is not None:
        _wait_until_gone(around, resource, start + limit)
    return True


def _wait_until_gone(around: Surroundings, resource: Resource, end: float) -> None:
    while (found := find(around.cloud, resource)) is not None:
        if found.status == FAILED:
            raise NotGone(f"{resource.key} is Failed: {found.reason or 'no reason was given'}")
        if around.clock.now() > end:
            raise NotGone(f"{resource.key} is still {found.status}")
        around.clock.sleep(POLL)


def _tags(answer: Mapping[str, Any]) -> dict[str, str]:
    return tag_map(answer.get("Tags", answer.get("tags")))
