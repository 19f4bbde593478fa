"""The policy of the RTX 3070 guide: it shrinks after each failure and never grows again.

Covers the guide's three formulas (techniques 6, 7 and 9) and its emergency protocol (technique 8)::

    size  = max(size_floor, int(base_size * size_decay ** failures))
    batch = max(batch_floor, base_batch - batch_step * failures)
    clean up after every `cleanup_every` good steps

Does not grow back, does not use the bytes that a step took, and does not learn across runs.

Where the guide says nothing:

- A base already below a floor: the floor is the base. A floor stops the shrinking, it never
  enlarges a step.
- Which failures count: if the memory came back, the step is tried once more at the same size, and
  shrinks only if that fails too. A further retry needs `GOOD_STEPS_PER_RETRY` good steps or a
  smaller size, otherwise a step that fails every second time would be retried without end.
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
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Final

from workers.policy.base import Needs, Run, check_keys, whole
from workers.settings import MemorySettings, Scalar, WorkloadSpec
from workers.units import MIB

#: Good steps between two retries at the same size. The guide promises a success rate of about 95 %:
#: one forgiven failure in 20 attempts keeps that promise, more would not.
GOOD_STEPS_PER_RETRY: Final = 19

#: In an emergency, try the floor without knowing that it fits at every so many looks: about every
#: 10 s.
LOOKS_PER_BLIND_TRY: Final = 10

#: No sensible setting needs as many failures to reach the floor; the guide's own reach it after 8.
#: It bounds the search for the floor when a setting never shrinks (`size_decay` 1, `batch_step` 0).
MAX_FAILURES: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicState:
    """What the classic policy remembers, also in another process."""

    failures: int = 0
    """Memory failures as the guide's formulas count them; never decreases."""
    good_steps_to_retry: int = 0
    """Good steps to go before a failure at this size may be retried; 0 allows the retry."""
    steps_since_cleanup: int = 0
    """Good steps since memory was last released; stays 0 when clean-up is off."""
    emergency: bool = False
    """Whether the floor has failed and no step has ended well since."""
    floor_tried_in_vain: bool = False
    """Whether the floor failed again during this emergency, although the workload's stated need was
    there.
    """
    looks_since_try: int = 0
    """Times that `next` was asked in this emergency since the floor was last tried."""
    has_worked: bool = False
    """Whether a step has ended well: until then each is a probe, as no later one is larger."""


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
        self._failures_at_floor = bisect_left(
            range(MAX_FAILURES), True, key=lambda count: self._step_after(count) == self.floor
        )
        self.state = ClassicState()
        self._failed: Run | None = None
        """The last part, if it ran out of memory; judged by what is allowed after it."""
        self._allowed_bytes = 0
        """As it was told last."""
        self.reason = ""

    def next(self, allowed_bytes: int | None) -> Run | None:
        """Return the next part; `None` in an emergency in which nothing is to be tried now."""
        if allowed_bytes is not None:
            self._allowed_bytes = allowed_bytes
        failed, self._failed = self._failed, None
        if failed is not None:
            self._judge(failed)
        elif self.state.emergency:
            self._look()
        state = self.state
        if state.emergency and (failed is not None or state.looks_since_try):
            needed_bytes = self._needed_bytes(self.floor)
            need = "" if needed_bytes is None else f", it needs {needed_bytes / MIB:.1f} MiB"
            self.reason = (
                f"out of memory at the smallest step (size {self.floor.size} batch "
                f"{self.floor.batch}{need}), {self._allowed_bytes / MIB:.1f} MiB free"
            )
            return None
        every = self._memory.cleanup_every
        cleans_up = 0 < every <= state.steps_since_cleanup
        if cleans_up:
            self.state = replace(state, steps_since_cleanup=0)
        return replace(
            self._step_after(state.failures),
            is_probe=not state.has_worked,
            releases_first=cleans_up,
        )

    def succeeded(self, _run: Run, _peak_bytes: int | None, _is_partial: bool) -> None:
        """Take note that a part ended well: that ends an emergency."""
        state = self.state
        self.state = ClassicState(
            failures=state.failures,
            good_steps_to_retry=max(0, state.good_steps_to_retry - 1),
            steps_since_cleanup=state.steps_since_cleanup + 1 if self._memory.cleanup_every else 0,
            has_worked=True,
        )

    def failed(self, run: Run, _at_least_bytes: int | None) -> None:
        """Take note that a part ran out of memory."""
        self._failed = run

    def dump(self) -> dict[str, Scalar]:
        """Return the state as scalars, signed with the policy's name so that no other policy takes
        it for its own.
        """
        return {"policy": self.name, **asdict(self.state)}

    def load(self, data: Mapping[str, Scalar]) -> None:
        """Go on with what `dump` returned, see `Policy.load`."""
        check_keys(data, self.name, (field.name for field in fields(ClassicState)))
        state = ClassicState(
            failures=whole(data, "failures", 0, self._failures_at_floor),
            good_steps_to_retry=whole(data, "good_steps_to_retry", 0, GOOD_STEPS_PER_RETRY),
            steps_since_cleanup=whole(data, "steps_since_cleanup", 0, self._memory.cleanup_every),
            emergency=_flag(data, "emergency"),
            floor_tried_in_vain=_flag(data, "floor_tried_in_vain"),
            looks_since_try=whole(data, "looks_since_try", 0, LOOKS_PER_BLIND_TRY - 1),
            has_worked=_flag(data, "has_worked"),
        )
        if state.emergency and state.failures < self._failures_at_floor:
            raise ValueError(
                f"an emergency after {state.failures} failures, although the step could still "
                "shrink"
            )
        self.state = state

    def _judge(self, failed: Run) -> None:
        """Count a failure, unless its memory came back and a retry was earned."""
        state = replace(self.state, steps_since_cleanup=0)
        needed_bytes = self._needed_bytes(failed)
        came_back = needed_bytes is not None and self._allowed_bytes >= needed_bytes
        if state.emergency:
            # The floor was tried again and failed; the next try is after later looks.
            state = replace(state, floor_tried_in_vain=True, looks_since_try=0)
        elif came_back and not state.good_steps_to_retry:
            state = replace(state, good_steps_to_retry=GOOD_STEPS_PER_RETRY)
        elif state.failures >= self._failures_at_floor:
            state = replace(state, emergency=True, floor_tried_in_vain=False, looks_since_try=0)
        else:
            failures = self._failures_until_smaller(state.failures)
            state = replace(state, failures=failures, good_steps_to_retry=0)
        self.state = state

    def _look(self) -> None:
        """Count a look at memory in an emergency: 0 after one that has the floor tried."""
        state = self.state
        looks = state.looks_since_try + 1
        needed_bytes = self._needed_bytes(self.floor)
        is_tried = looks >= LOOKS_PER_BLIND_TRY
        if needed_bytes is not None:
            is_tried = self._allowed_bytes >= needed_bytes and (
                is_tried or not state.floor_tried_in_vain
            )
        # The count stops one short of a try, so that it stays bounded however long memory is too
        # small to try.
        looks = 0 if is_tried else min(looks, LOOKS_PER_BLIND_TRY - 1)
        self.state = replace(state, looks_since_try=looks)

    def _needed_bytes(self, run: Run) -> int | None:
        return self._needs.needed_bytes(run.size, run.batch)

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

    def _failures_until_smaller(self, failures: int) -> int:
        """Return the least count above `failures` with a smaller step.

        Bisection, because the formulas never rise.
        """
        step = self._step_after(failures)
        candidates = range(failures + 1, self._failures_at_floor)
        return (
            failures
            + 1
            + bisect_left(candidates, True, key=lambda count: self._step_after(count) != step)
        )


def _flag(data: Mapping[str, Scalar], key: str) -> bool:
    value = data[key]
    if isinstance(value, bool):
        return value
    raise ValueError(f"{key} must be true or false, not {value!r}")
