"""The policy of the RTX 3070 guide: it shrinks after each failure and never grows again.

Covers the guide's three formulas (techniques 6, 7 and 9) and its emergency protocol (technique 8)::

    size  = max(size_floor, int(base_size * size_decay ** failures))
    batch = max(batch_floor, base_batch - batch_step * failures)
    clean up after every `cleanup_every` good steps

Does not grow back, does not use the bytes that a step took, and does not learn across runs.

Where the guide says nothing:

- A base already below a floor: the floor is the base. A floor stops the shrinking, it never
  enlarges a step.
- A failure that changes nothing: if rounding or a floor leaves size and batch as they were,
  failures are counted on until one of the two is smaller. The count stops where neither formula
  shrinks any further. That step is the floor.
- When the floor fails: emergency. A workload that knows its need is tried as soon as that much is
  allowed. If that turned out wrong, or if it does not know, it is tried at every
  `LOOKS_PER_BLIND_TRY`-th time, because repeated failures do harm (under WSL2, to all programs).
  One good step leaves the emergency, at the floor.
- When to clean up after a failure: recovering from one has already released everything, so the
  count starts again.
- A probable out-of-memory is treated as a definite one; the engine decides how many to accept.
- A process that takes the place of another: it goes on with the count of failures, and knows
  nothing else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from workers.policy.base import Needs, Run
from workers.settings import MemorySettings, PolicyState, WorkloadSpec
from workers.units import MIB

#: In an emergency, try the floor without knowing that it fits at every so many looks: about every
#: 10 s.
LOOKS_PER_BLIND_TRY: Final = 10

#: No sensible setting needs as many failures to reach the floor; the guide's own reach it after 8.
#: It bounds the search for the floor when a setting never shrinks (`size_decay` 1, `batch_step` 0).
MAX_FAILURES: Final = 1_000_000


class ClassicPolicy:
    """Shrinks size and batch with every memory failure, down to a floor, then waits in an
    emergency.

    Looks neither at what a step took nor at what was learned in earlier runs.
    """

    name: Final = "classic"
    #: The guide's rules count failures and learn no sizes.
    learned: Final = None

    def __init__(self, memory: MemorySettings, asked: WorkloadSpec, needs: Needs) -> None:
        self._memory, self._asked, self._needs = memory, asked, needs
        self.floor = self._step_after(MAX_FAILURES)
        self.failures = 0
        """Memory failures as the guide's formulas count them; never decreases."""
        self.is_emergency = False
        """Whether the floor has failed and no step has ended well since."""
        self.reason = ""
        self._allowed_bytes = 0
        """As it was told last."""
        self._good_since_cleanup = 0
        """Good steps since memory was last released."""
        self._looks = 0
        """Times that `next` was asked in this emergency since the floor failed last; from the
        beginning enough for a try where the workload says what the floor needs.
        """
        self._has_worked = False
        """Whether a step has ended well: until then each is a probe, as no later one is larger."""

    def next(self, allowed_bytes: int | None) -> Run | None:
        """Return the next part; `None` in an emergency in which nothing is to be tried now."""
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
        """Take note that a part ended well: that ends an emergency."""
        self._has_worked, self.is_emergency = True, False
        self._good_since_cleanup += 1

    def failed(self, _run: Run, _at_least_bytes: int | None) -> None:
        """Count a part that ran out of memory; that of the floor is an emergency."""
        self._good_since_cleanup = 0
        step = self._step_after(self.failures)
        if step == self.floor:
            is_first = not self.is_emergency and self._floor_bytes is not None
            self.is_emergency, self._looks = True, LOOKS_PER_BLIND_TRY if is_first else 0
            return
        while self._step_after(self.failures) == step:
            self.failures += 1

    @property
    def state(self) -> PolicyState:
        """The count of failures."""
        return PolicyState(failures=self.failures)

    def resume(self, state: PolicyState) -> None:
        """Go on with the count of an earlier process."""
        self.failures = min(state.failures, MAX_FAILURES)

    def _is_worth_a_try(self) -> bool:
        """Count a look at memory in an emergency; say whether the floor is to be tried now."""
        self._looks += 1
        return self._looks >= LOOKS_PER_BLIND_TRY and self._allowed_bytes >= (
            self._floor_bytes or 0
        )

    @property
    def _floor_bytes(self) -> int | None:
        """What the floor needs, if the workload says so."""
        return self._needs.needed_bytes(self.floor.size, self.floor.batch)

    def _step_after(self, failures: int) -> Run:
        """Apply the guide's formulas, techniques 7 and 9."""
        memory, base = self._memory, self._asked
        return Run(
            size=max(
                min(memory.size_floor, base.size), int(base.size * memory.size_decay**failures)
            ),
            batch=max(
                min(memory.batch_floor, base.batch), base.batch - memory.batch_step * failures
            ),
        )
