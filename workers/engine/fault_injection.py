"""A workload that meets the faults of `run --chaos`: failures of single steps, and strikes that end its process.

Covers what happens inside a worker's process, at the beginning of a step and so before anything allocates: torch's own
exceptions, real signals, a step that does not return. Does not decide which slice carries a strike (the head does) and
recovers from nothing (the engine does, as it would from the real thing).
"""

from __future__ import annotations

import faulthandler
import os
import random
import signal
import time
from contextlib import suppress
from typing import Final

from workers.engine.slice_stats import SliceStats
from workers.messages import FaultKind, ProcessFault
from workers.settings import FailureKind, StepFaults
from workers.testing import OomInjector, injected_error
from workers.verification.check import Check
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: Status of a process that leaves by `os._exit`; what most programs end with when something went wrong.
EXIT_STATUS: Final = 1

_HANG_NAP_S = 3600.0


class ChaoticWorkload(Workload):
    """Another workload, whose steps meet faults. What a slice meets by chance depends on its identity alone."""

    def __init__(self, inner: Workload, context: WorkloadContext, faults: StepFaults) -> None:
        """Wrap `inner`; nothing fails before `begin_slice`.

        Args:
            inner: The workload that does the work.
            context: As it was given to `inner`, which need not keep it.
            faults: What its steps meet.
        """
        super().__init__(context)
        self._inner = inner
        self.size_power, self.batch_power, self.fills_claim = inner.size_power, inner.batch_power, inner.fills_claim
        self._faults = faults
        self._counted = OomInjector(num=faults.oom_num, skip=faults.oom_skip)
        self._stats: SliceStats | None = None
        self._chance = random.Random(faults.seed)  # noqa: S311 - repeatable is what is wanted
        self._flips = random.Random(faults.seed)  # noqa: S311 - checks come by the clock: not to disturb the steps
        self._strike: ProcessFault | None = None
        self._strike_at_s = 0.0

    def begin_slice(self, stats: SliceStats) -> None:
        """Take up a slice: its chances, and its strike unless one of an earlier slice still waits for a step."""
        directive = stats.directive
        self._stats = stats
        identity = (self._faults.seed, stats.slot, directive.incarnation, directive.sequence)
        self._chance = random.Random("/".join(map(str, identity)))  # noqa: S311 - repeatable is what is wanted
        if self._strike is None and directive.process_fault is not None:
            self._strike = directive.process_fault
            self._strike_at_s = time.monotonic() + directive.process_fault.at_share * stats.remaining_s

    def step(self, size: int, batch: int) -> StepResult | None:
        """Meet what is due, or let the wrapped workload do its step.

        Raises:
            RuntimeError: Injected, or what the step itself raises.
        """
        if self._strike is not None and time.monotonic() >= self._strike_at_s:
            process_fault, self._strike = self._strike, None
            perform(process_fault.kind)
        # Both are drawn at every step, so that one kind's rate does not change when the other strikes.
        runs_out, fails = (self._chance.random() < rate for rate in (self._faults.oom_rate, self._faults.raise_rate))
        if self._counted.due() or runs_out:
            self._tell(FaultKind.OOM)
            raise injected_error(self._faults.oom_kind)
        if fails:
            self._tell(FaultKind.RAISE)
            raise injected_error(FailureKind.OTHER)
        return self._inner.step(size, batch)

    def release(self) -> None:
        """See `Workload.release`."""
        self._inner.release()

    def resize(self, claim_bytes: int) -> None:
        """See `Workload.resize`."""
        self._inner.resize(claim_bytes)

    def needed_bytes(self, size: int, batch: int) -> int | None:
        """See `Workload.needed_bytes`."""
        return self._inner.needed_bytes(size, batch)

    def check(self, seed: int) -> Check | None:
        """Check the latest result, in which some checks find a bit flipped."""
        if self._flips.random() < self._faults.flip_rate and self._inner.tamper(seed) is not None:
            self._tell(FaultKind.FLIP)
        return self._inner.check(seed)

    def move(self) -> int | None:
        """See `Workload.move`."""
        return self._inner.move()

    def tamper(self, seed: int) -> str | None:
        """See `Workload.tamper`."""
        return self._inner.tamper(seed)

    def _tell(self, kind: FaultKind) -> None:
        """Note an injected failure."""
        if self._stats is not None:
            self._stats.repeated_event("chaos", kind.value)


def perform(kind: FaultKind) -> None:
    """Do to this process what a strike of `kind` does. Returns from none of them.

    Raises:
        torch.AcceleratorError: For POISON, with the code of an illegal address.
        ValueError: `kind` is none that strikes a process.
    """
    match kind:
        case FaultKind.POISON:
            raise injected_error(FailureKind.CONTEXT_CORRUPTED)
        case FaultKind.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case FaultKind.SEGV:
            _crash()
        case FaultKind.EXIT:
            os._exit(EXIT_STATUS)
        case FaultKind.HANG:
            while True:
                time.sleep(_HANG_NAP_S)
        case _:
            raise ValueError(f"{kind} does not strike a process")


def _crash() -> None:
    """Die of SIGSEGV as the kernel deals it out, whatever has a handler for it."""
    faulthandler.disable()
    with suppress(ValueError):  # not in the main thread: the handlers in place pass the signal on after their say
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
