"""Carries a plan out: keeps what is there already, waits, and removes what it made if anything fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from deploy.sagemaker import logs
from deploy.sagemaker.plan import Plan
from deploy.sagemaker.presence import (
    DELETING,
    FAILED,
    POLL,
    Found,
    NotGone,
    NotInService,
    Surroundings,
    call_until_seen,
    find,
    remove,
    wait_until_in_service,
)
from deploy.sagemaker.resource import COMPONENT, ENDPOINT, MODEL, REPOSITORY, ROLE, Resource
from deploy.sagemaker.service_errors import in_words, is_already_there, is_missing, is_role_too_new

_LOG_LINES = 20
_LOG_SECONDS = 3600.0

Hook = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a plan came to, by `Resource.key`."""

    created: tuple[str, ...]
    kept: tuple[str, ...]


class Conflict(Exception):
    """Something of the same name is there and is not what the plan asks for; nothing was changed."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class Failed(Exception):
    """A step failed. `left` names what the rollback did not remove."""

    def __init__(self, reason: str, left: tuple[str, ...], *, interrupted: bool = False) -> None:
        super().__init__(reason)
        self.left = left
        self.interrupted = interrupted


class Executor:
    """Executes plans."""

    def __init__(self, around: Surroundings, *, rollback: bool = True, hooks: Mapping[str, Hook] | None = None) -> None:
        """`hooks` are run after the resource of that key is there."""
        self._around = around
        self._rollback = rollback
        self._hooks = hooks or {}

    def deploy(self, plan: Plan) -> Outcome:
        """Have everything of the plan there and in service.

        Raises:
            Conflict: something that is there differs.
            Failed: a step failed, or was interrupted; what was made by then is removed.
            botocore.exceptions.ClientError: what is there could not be looked up.
        """
        self.examine(plan)
        run = _Run(self._around, plan)
        try:
            for resource in plan.resources:
                run.apply(resource)
                self._hooks.get(resource.key, _nothing)()
        except BaseException as error:
            if not isinstance(error, Exception | KeyboardInterrupt):
                raise
            raise self._failed(run, error) from error
        return Outcome(tuple(run.created), tuple(run.kept))

    def examine(self, plan: Plan) -> None:
        """Look whether anything stands in the way.

        Raises:
            Conflict: something does.
        """
        problems = [problem for resource in plan.resources if (problem := self._conflict(plan, resource))]
        if problems:
            raise Conflict(tuple(problems))

    def _conflict(self, plan: Plan, resource: Resource) -> str | None:
        found = find(self._around.cloud, resource)
        if found is None or found.status == DELETING:
            return None
        if resource.kind.tags is None or resource.kind is REPOSITORY:
            return None
        if not found.belongs_to(plan.name):
            return f"{resource.key} is there already and does not belong to this deployment (it has no such tag)"
        if found.status != FAILED and not resource.kind.same(resource.create.parameters, found.description, found.tags):
            return f"{resource.key} is there and differs from what is asked for; `slipway update` changes it"
        return None

    def _failed(self, run: _Run, error: BaseException) -> Failed:
        interrupted = isinstance(error, KeyboardInterrupt)
        reason = "interrupted" if interrupted else in_words(error)
        around = self._around
        around.progress.say(f"failed: {reason}")
        if isinstance(error, NotInService) and run.current is not None:
            tell_log(around, run.current, run.since)
        if not self._rollback:
            return Failed(reason, tuple(run.created), interrupted=interrupted)
        return Failed(reason, run.undo(), interrupted=interrupted)


def tell_log(around: Surroundings, resource: Resource, since: float) -> None:
    """Show the last lines that an endpoint or a component which did not come into service has logged.

    `since`, in seconds since 1970: the log outlives what has logged, and an earlier one of the name is not meant.
    """
    if resource.kind not in (ENDPOINT, COMPONENT):
        return
    group = logs.group_of_endpoint if resource.kind is ENDPOINT else logs.group_of_component
    for line in logs.last_lines(around.cloud, group(resource.name), _LOG_LINES, since):
        around.progress.say(f"  log: {line}")


class _Run:
    """One execution: what it has made so far, and what the calls answered."""

    def __init__(self, around: Surroundings, plan: Plan) -> None:
        self._around = around
        self._plan = plan
        self._answers: dict[str, Mapping[str, Any]] = {}
        self.current: Resource | None = None
        self.created: dict[str, Resource] = {}
        self.kept: list[str] = []
        self._begun = time.time()

    @property
    def since(self) -> float:
        """Seconds since 1970, from which on the log is of the current resource: this run, or at most an hour before."""
        made = self.current is not None and self.current.key in self.created
        return self._begun if made else self._begun - _LOG_SECONDS

    def apply(self, resource: Resource) -> None:
        """Have one resource there and in service."""
        around = self._around
        self.current = resource
        found = self._cleared(resource)
        if found is not None and not resource.kind.replaces:
            around.progress.say(f"{resource.key}: there already")
            self.kept.append(resource.key)
        else:
            self._create(resource, found)
        if resource.kind.status is not None:
            wait_until_in_service(around, resource, self._plan.wait_limit)
            around.progress.say(f"{resource.key}: InService")

    def undo(self) -> tuple[str, ...]:
        """Remove what this run made, last first; gives what is left."""
        left: list[str] = []
        for resource in reversed(tuple(self.created.values())):
            try:
                self._around.progress.say(f"removing {resource.key}")
                remove(self._around, resource, self._plan.wait_limit)
            except KeyboardInterrupt:
                left += [key for key in self.created if key not in left]
                self._around.progress.say("rollback interrupted")
                return tuple(left)
            except Exception as error:  # the others are to be removed all the same; what is left is reported
                self._around.progress.say(f"{resource.key} is left: {in_words(error)}")
                left.append(resource.key)
                if resource.kind is ENDPOINT and self._is_there(resource):
                    # What serves needs its configuration, model, role and image.
                    return (*left, *(key for key in reversed(self.created) if key not in left))
            else:
                del self.created[resource.key]
        return tuple(left)

    def _is_there(self, resource: Resource) -> bool:
        try:
            return find(self._around.cloud, resource) is not None
        except Exception:  # it could not be looked up, so it may be
            return True

    def _cleared(self, resource: Resource) -> Found | None:
        """What is there, once something that is failed or on its way out is gone."""
        found = find(self._around.cloud, resource)
        if found is None or resource.kind.status is None or found.status not in (FAILED, DELETING):
            return found
        self._around.progress.say(f"{resource.key} is {found.status}: waiting until it is gone")
        if found.status == FAILED:
            remove(self._around, resource, self._plan.wait_limit)
            return None
        end = self._around.clock.now() + self._plan.wait_limit
        while found is not None:
            if self._around.clock.now() > end:
                raise NotGone(f"{resource.key} is still {found.status}")
            self._around.clock.sleep(POLL)
            found = find(self._around.cloud, resource)
        return None

    def _create(self, resource: Resource, found: Found | None) -> None:
        from botocore.exceptions import ClientError

        call = resource.create.resolved(self._answers)
        if found is None:
            # Noted before the call: it may take effect although its answer is lost.
            self.created[resource.key] = resource
        else:
            # Tags are given when something is made; for what is there, some services refuse them.
            call = replace(call, parameters={key: item for key, item in call.parameters.items() if key != "Tags"})
        self._around.progress.say(f"{'creating' if found is None else 'setting'} {resource.key}")
        try:
            self._answers[resource.key] = call_until_seen(self._around, call, self._unseen)
        except ClientError as error:
            if found is None and is_already_there(error) and not self._is_ours(resource):
                del self.created[resource.key]
                raise
            if not is_already_there(error):
                raise

    def _is_ours(self, resource: Resource) -> bool:
        """After "already exists": whether an earlier attempt of the same call made it, whose answer was lost."""
        found = find(self._around.cloud, resource)
        return (
            found is not None
            and found.belongs_to(self._plan.name)
            and resource.kind.same(resource.create.parameters, found.description, found.tags)
        )

    def _unseen(self, error: Any) -> str | None:
        if is_role_too_new(error) and self._made_role():
            return "the new role"
        # What a model does not find, its data or its image, was not made here.
        of_model = self.current is not None and self.current.kind is MODEL
        return "what was just made" if is_missing(error) and not of_model else None

    def _made_role(self) -> bool:
        return any(resource.kind is ROLE for resource in self.created.values())


def _nothing() -> None:
    """The hook of a resource that has none."""
