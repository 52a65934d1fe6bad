"""Which worker has which device. Source: contracts/lmi.md sections 2.10 and 7.1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from handlers.workers.worker import WorkerPlan

NO_DEVICE = "-1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Devices:
    """Hands out devices so that none has many more workers than another."""

    def __init__(self, groups: Sequence[str]) -> None:
        """`groups`: the devices of a worker each, such as "0", or "0,1" for one that takes several; "-1" is the CPU."""
        self._groups = tuple(groups) or (NO_DEVICE,)
        self._workers: Counter[str] = Counter()

    def take(self) -> str:
        """The group with the fewest workers, the first of several."""
        group = min(self._groups, key=lambda one: self._workers[one])
        self._workers[group] += 1
        return group

    def give_back(self, group: str) -> None:
        """A worker has ended."""
        self._workers[group] -= 1


def on_device(plan: WorkerPlan, group: str) -> WorkerPlan:
    """The plan for a worker on these devices: it is told its `device_id`, and of several it sees no others."""
    several = "," in group
    environment = plan.process.environment
    if several:
        environment = {**environment, _VISIBLE: _of_visible(group, environment.get(_VISIBLE))}
    standing = (*plan.order.standing_properties, ("device_id", "0" if several else group))
    return replace(
        plan,
        process=replace(plan.process, environment=environment),
        order=replace(plan.order, standing_properties=standing),
    )


def _of_visible(group: str, visible: str | None) -> str:
    """The group in the driver's own terms: its numbers count what this process sees."""
    if visible is None:
        return group
    names = [name.strip() for name in visible.split(",")]
    return ",".join(names[int(index)] for index in group.split(","))
