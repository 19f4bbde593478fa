"""A workload into which `run --chaos` injects faults: failures of single steps, and faults that end
its process.

They come at the beginning of a step, before anything allocates: torch's own exceptions, real
signals, a step that does not return. Does not decide which slice carries a process fault (the head
does) and recovers from nothing.
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any, Final

from workers.engine.slice_stats import SliceStats
from workers.messages import FaultKind, ProcessFault
from workers.settings import FailureKind, StepFaults
from workers.testing import OomInjector, injected_error
from workers.verification.check import Check
from workers.workloads.base import StepResult, Workload

#: Exit status of a process that ends by `os._exit`: that of most programs after an error.
EXIT_STATUS: Final = 1


class ChaoticWorkload:
    """Another workload, with faults in its steps and checks; all else that it is asked it hands on.

    The random faults of a slice depend on its identity alone.
    """

    def __init__(self, inner: Workload, faults: StepFaults) -> None:
        """Wrap `inner`; nothing fails before `begin_slice`."""
        self._inner = inner
        self._faults = faults
        self._counted = OomInjector(num=faults.oom_num, skip=faults.oom_skip)
        self._stats: SliceStats | None = None
        self._chance = random.Random(faults.seed)  # noqa: S311 - repeatable is what is wanted
        self._flips = random.Random(faults.seed)  # noqa: S311 - checks come by the clock: not to disturb the steps
        self._process_fault: ProcessFault | None = None
        self._process_fault_at_s = 0.0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a workload has
        return getattr(self._inner, name)

    def begin_slice(self, stats: SliceStats) -> None:
        """Begin a slice: seed its random faults, and take its process fault unless an earlier one
        still waits.
        """
        directive = stats.directive
        self._stats = stats
        identity = (self._faults.seed, stats.slot, directive.incarnation, directive.sequence)
        self._chance = random.Random("/".join(map(str, identity)))  # noqa: S311 - repeatable is what is wanted
        if self._process_fault is None and directive.process_fault is not None:
            self._process_fault = directive.process_fault
            self._process_fault_at_s = (
                time.monotonic() + directive.process_fault.at_share * stats.remaining_s
            )

    def step(self, size: int, batch: int) -> StepResult | None:
        """Inject what is due, or let the wrapped workload do its step."""
        if self._process_fault is not None and time.monotonic() >= self._process_fault_at_s:
            process_fault, self._process_fault = self._process_fault, None
            perform(process_fault.kind)
        # Both are drawn at every step, so that a fault of one kind does not change the rate of the
        # other.
        runs_out, fails = (
            self._chance.random() < rate
            for rate in (self._faults.oom_rate, self._faults.raise_rate)
        )
        if self._counted.due() or runs_out:
            self._note(FaultKind.OOM)
            raise injected_error(self._faults.oom_kind)
        if fails:
            self._note(FaultKind.RAISE)
            raise injected_error(FailureKind.OTHER)
        return self._inner.step(size, batch)

    def check(self, seed: int) -> Check | None:
        """Check the latest result, after a bit of it was flipped if that is due."""
        if self._flips.random() < self._faults.flip_rate and self._inner.tamper(seed) is not None:
            self._note(FaultKind.FLIP)
        return self._inner.check(seed)

    def _note(self, kind: FaultKind) -> None:
        if self._stats is not None:
            self._stats.repeated_event("chaos", kind.value)


def perform(kind: FaultKind) -> None:
    """Inject a process fault into this process. Does not return.

    Raises:
        torch.AcceleratorError: For POISON, with the code of an illegal address.
        ValueError: `kind` is not a process fault.
    """
    match kind:
        case FaultKind.POISON:
            raise injected_error(FailureKind.CONTEXT_CORRUPTED)
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.SEGV:  # as the kernel sends it, whatever handler is set
            faulthandler.disable()
            with suppress(
                ValueError
            ):  # not in the main thread: the handlers in place pass the signal on
                signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGSEGV)
        case FaultKind.EXIT:
            os._exit(EXIT_STATUS)
        case FaultKind.HANG:
            while True:
                time.sleep(3600.0)
        case _:
            raise ValueError(f"{kind} is not a process fault")
