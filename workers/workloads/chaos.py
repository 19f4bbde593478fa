"""Any workload with the out-of-memory errors of `run --chaos` in it, by the name
`workers.workloads.chaos:NAME`.

The errors are torch's own, and come at the beginning of a part of a step, before anything
allocates. Recovers from nothing: the engine does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Final, TypeVar

from workers.elastic.loop import Loop
from workers.policy.base import Run
from workers.settings import FailureKind
from workers.testing import injected_error
from workers.workloads.base import StepResult, Workload, WorkloadContext, find_workload

#: The setting with seed and rate as JSON; the workload itself does not see it.
_SETTING: Final = "chaos"

R = TypeVar("R")

if TYPE_CHECKING:
    _Base = Workload
else:
    _Base = object


class Chaotic(_Base):
    """What a subclass of a workload adds to it; a process's errors depend on which one it is."""

    def __init__(self, context: WorkloadContext) -> None:
        settings = dict(context.settings)
        faults = json.loads(str(settings.pop(_SETTING)))
        self._oom_rate = float(faults["oom_rate"])
        identity = (faults["seed"], context.slot, context.incarnation)
        self._chance = Random("/".join(map(str, identity)))  # noqa: S311 - repeatable is wanted
        super().__init__(replace(context, settings=settings))

    def run(self, loop: Loop[Run]) -> StepResult | None:
        """Do a step of which any part may run out of memory, if chance says so."""
        run_part = loop.run

        def run(part: Callable[[Run], R]) -> R:
            return run_part(lambda size: part(self._tried(size)))

        setattr(loop, "run", run)  # noqa: B010 - mypy has methods constant
        try:
            return super().run(loop)
        finally:
            del loop.run

    def _tried(self, size: Run) -> Run:
        """Return the size of a part that begins, unless it runs out of memory."""
        if self._chance.random() < self._oom_rate:
            self.context.tell("chaos", kind="oom", count=1)
            raise injected_error(FailureKind.DEFINITE)
        return size


def __getattr__(name: str) -> type[Workload]:
    """Return the workload of a name with out-of-memory errors in it."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type("Chaotic", (Chaotic, find_workload(name)), {})
