"""The policy of the RTX 3070 guide: shrinks after each failure and never grows again.

Implements the guide's three formulas (techniques 6, 7, 9) and emergency protocol (technique 8)::

    size  = max(size_floor, int(base_size * size_decay ** failures))
    batch = max(batch_floor, base_batch - batch_step * failures)
    clean up after every `cleanup_every` good steps

Does not grow back, does not use the peak of a step, and does not learn across runs.

Decisions that the guide leaves open:

- A base below a floor: the base is the floor. A floor stops the shrinking; it never enlarges a
  step.
- A failure that changes nothing: if size and batch stay the same because of rounding or a floor,
  the count rises until one of them shrinks. The step at which neither formula shrinks any further
  is the floor.
- The floor fails: emergency. If the workload states its need, the floor is tried as soon as that
  much is allowed. If such a try fails, or the workload states nothing, it is tried at every
  `CHECKS_PER_BLIND_TRY`-th call, because repeated failures do harm (under WSL2, to all programs).
  One success ends the emergency, at the floor.
- Clean-up after a failure: the recovery has released everything, so the count starts again.
- A probable out-of-memory counts as a definite one; the loop decides how many to accept.
- A new process of the slot: it continues with the count of failures, and nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from workers.policy.base import Needs, Run
from workers.settings import MemorySettings, PolicyState, WorkloadSpec
from workers.units import MIB

#: In an emergency, calls of `next` between two tries of the floor without knowing that it fits:
#: about 10 s.
CHECKS_PER_BLIND_TRY: Final = 10

#: Bounds the search for the floor if the settings never shrink (`size_decay` 1, `batch_step` 0).
#: The guide's settings reach the floor after 8 failures.
MAX_FAILURES: Final = 1_000_000


class ClassicPolicy:
    """Shrinks size and batch with every memory failure, down to a floor, then waits in an
    emergency.

    Uses neither the peak of a step nor the limits learned in earlier runs.
    """

    name: Final = "classic"
    #: The guide's rules count failures and learn no sizes.
    learned: Final = None

    def __init__(self, memory: MemorySettings, spec: WorkloadSpec, needs: Needs) -> None:
        self._memory, self._spec, self._needs = memory, spec, needs
        self.floor = self._step_after(MAX_FAILURES)
        self.failures = 0
        """Failures as the guide's formulas count them; never decreases."""
        self.is_emergency = False
        """Whether the floor has failed and no step has succeeded since."""
        self.reason = ""
        self._allowed_bytes = 0
        """The last measured value."""
        self._good_since_cleanup = 0
        """Successful steps since the last clean-up."""
        self._checks = 0
        """Calls of `next` since the floor last failed. If the workload states the need of the
        floor, it starts high enough for a try.
        """
        self._has_worked = False
        """Whether a step has succeeded; until then each step is a probe, as no later one is
        larger.
        """

    def next(self, allowed_bytes: int | None) -> Run | None:
        """Return the next part; `None` in an emergency if the floor is not due for a try."""
        if allowed_bytes is not None:
            self._allowed_bytes = allowed_bytes
        if self.is_emergency and not self._is_worth_a_try():
            needed_bytes = self._floor_bytes
            need = "" if needed_bytes is None else f", it needs {needed_bytes / MIB:.1f} MiB"
            self.reason = (
                f"out of memory at the smallest step (size {self.floor.size} batch "
                f"{self.floor.batch}{need}), {self._allowed_bytes / MIB:.1f} MiB free"
            )
            return None
        cleans_up = 0 < self._memory.cleanup_every <= self._good_since_cleanup
        if cleans_up:
            self._good_since_cleanup = 0
        return replace(
            self._step_after(self.failures),
            is_probe=not self._has_worked,
            releases_first=cleans_up,
        )

    def succeeded(self, _run: Run, _peak_bytes: int | None, _is_partial: bool) -> None:
        """Record that a part succeeded; this ends an emergency."""
        self._has_worked, self.is_emergency = True, False
        self._good_since_cleanup += 1

    def failed(self, _run: Run, _at_least_bytes: int | None) -> None:
        """Count a part that ran out of memory; a failure of the floor begins an emergency."""
        self._good_since_cleanup = 0
        step = self._step_after(self.failures)
        if step == self.floor:
            is_first = not self.is_emergency and self._floor_bytes is not None
            self.is_emergency, self._checks = True, CHECKS_PER_BLIND_TRY if is_first else 0
            return
        while self._step_after(self.failures) == step:
            self.failures += 1

    @property
    def state(self) -> PolicyState:
        """The count of failures."""
        return PolicyState(failures=self.failures)

    def resume(self, state: PolicyState) -> None:
        """Continue with the count of an earlier process."""
        self.failures = min(state.failures, MAX_FAILURES)

    def _is_worth_a_try(self) -> bool:
        """Count a call in an emergency; return whether to try the floor now."""
        self._checks += 1
        return self._checks >= CHECKS_PER_BLIND_TRY and self._allowed_bytes >= (
            self._floor_bytes or 0
        )

    @property
    def _floor_bytes(self) -> int | None:
        """Memory that the floor needs, if the workload states it."""
        return self._needs.needed_bytes(self.floor.size, self.floor.batch)

    def _step_after(self, failures: int) -> Run:
        """Apply the guide's formulas, techniques 7 and 9."""
        memory, base = self._memory, self._spec
        return Run(
            size=max(
                min(memory.size_floor, base.size), int(base.size * memory.size_decay**failures)
            ),
            batch=max(
                min(memory.batch_floor, base.batch), base.batch - memory.batch_step * failures
            ),
        )
