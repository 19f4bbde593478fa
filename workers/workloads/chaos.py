"""Any workload with the faults of `run --chaos` in it, by the name `workers.workloads.chaos:NAME`.

Faults of single steps come by chance or by count, faults that end the process with the directive of
a slice. They come at the beginning of a step, before anything allocates: torch's own exceptions,
real signals, a step that does not return. Does not decide which slice is struck (the head does) and
recovers from nothing.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from workers.messages import Directive, FaultKind, StruckDirective
from workers.settings import FailureKind
from workers.testing import OomInjector, injected_error
from workers.verification.check import Check
from workers.workloads.base import StepResult, Workload, WorkloadContext, find_workload

#: The setting with the step faults as JSON; the workload itself does not see it.
SETTING: Final = "chaos"

#: Exit status of a process that ends by `os._exit`: that of most programs after an error.
EXIT_STATUS: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFaults:
    """Faults that single steps of every worker meet. They are survived within the slice.

    By count in the style of spark-rapids' `injectRetryOOM`: the first `oom_skip` steps of a process
    pass, the `oom_num` that follow fail.
    """

    seed: int
    oom_rate: float = 0.0
    """Share of steps that run out of memory, 0..1."""
    oom_num: int = 0
    oom_skip: int = 0
    oom_kind: str = FailureKind.DEFINITE
    """DEFINITE or PROBABLE."""
    raise_rate: float = 0.0
    """Share of steps in which the workload raises, 0..1."""
    flip_rate: float = 0.0
    """Share of checks before which a bit of the result is flipped, 0..1."""


if TYPE_CHECKING:
    _Base = Workload
else:
    _Base = object


class Chaotic(_Base):
    """What a subclass of a workload adds to it.

    The random faults of a slice depend on its identity alone.
    """

    def __init__(self, context: WorkloadContext) -> None:
        settings = dict(context.settings)
        self._faults = faults = StepFaults(**json.loads(str(settings.pop(SETTING))))
        self._counted = OomInjector(num=faults.oom_num, skip=faults.oom_skip)
        self._chance = random.Random(faults.seed)  # noqa: S311 - repeatable is what is wanted
        # Checks come by the clock: not to disturb the steps.
        self._flips = random.Random(faults.seed)  # noqa: S311 - as above
        self._strike: FaultKind | None = None
        self._strike_at_s = 0.0
        super().__init__(replace(context, settings=settings))

    def begin_slice(self, directive: Directive) -> None:
        """Seed the random faults, and take the strike unless an earlier one still waits."""
        identity = (
            self._faults.seed, self.context.slot, directive.incarnation, directive.sequence
        )  # fmt: skip
        self._chance = random.Random("/".join(map(str, identity)))  # noqa: S311 - as above
        if self._strike is None and isinstance(directive, StruckDirective):
            self._strike = directive.kind
            self._strike_at_s = time.monotonic() + directive.at_share * directive.duration_s
        super().begin_slice(directive)

    def step(self, size: int, batch: int) -> StepResult | None:
        """Inject what is due, or do the step."""
        if self._strike is not None and time.monotonic() >= self._strike_at_s:
            kind, self._strike = self._strike, None
            perform(kind)
        # Both are drawn at every step, so that a fault of one kind does not change the rate of the
        # other.
        rates = (self._faults.oom_rate, self._faults.raise_rate)
        runs_out, fails = [self._chance.random() < rate for rate in rates]
        if self._counted.due() or runs_out:
            self._note(FaultKind.OOM)
            raise injected_error(FailureKind(self._faults.oom_kind))
        if fails:
            self._note(FaultKind.RAISE)
            raise injected_error(FailureKind.OTHER)
        return super().step(size, batch)  # type: ignore[safe-super]  # the wrapped workload has it

    def check(self, seed: int) -> Check | None:
        """Check the latest result, after a bit of it was flipped if that is due."""
        tamper = getattr(self, "tamper", lambda _seed: None)
        if self._flips.random() < self._faults.flip_rate and tamper(seed) is not None:
            self._note(FaultKind.FLIP)
        return super().check(seed)

    def _note(self, kind: FaultKind) -> None:
        self.context.tell("chaos", kind=kind.value, count=1)


def __getattr__(name: str) -> type[Workload]:
    """Return the workload of a name with faults in it."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type("Chaotic", (Chaotic, find_workload(name)), {})


def perform(kind: FaultKind) -> None:
    """Strike this process. Does not return.

    Raises:
        torch.AcceleratorError: For POISON, with the code of an illegal address.
        ValueError: `kind` is not a fault of a process.
    """
    match kind:
        case FaultKind.POISON:
            raise injected_error(FailureKind.CONTEXT_CORRUPTED)
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.SEGV:  # as the kernel sends it, whatever handler is set
            faulthandler.disable()
            # Outside the main thread the handlers in place pass the signal on.
            with suppress(ValueError):
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case FaultKind.EXIT:
            os._exit(EXIT_STATUS)
        case FaultKind.HANG:
            while True:
                time.sleep(3600.0)
        case _:
            raise ValueError(f"{kind} is not a process fault")
