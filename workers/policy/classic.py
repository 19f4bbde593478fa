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
  free. If that turned out wrong, or if it does not know, it is tried at every
  `PRESSURES_PER_BLIND_TRY`-th time, because repeated failures do harm (under WSL2, to all
  programs). One good step leaves the emergency, at the floor.
- When to clean up after a failure: recovering from one has already released everything, so the
  count starts again.
- A probable out-of-memory is treated as a definite one; the engine decides how many to accept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Final, assert_never

from workers.policy.base import (
    Decision,
    Emergency,
    Event,
    Pressure,
    Release,
    Run,
    StepOk,
    StepOom,
    check_keys,
    whole,
)
from workers.settings import Learned, MemorySettings, Scalar, WorkloadSpec
from workers.units import MIB

#: Good steps between two retries at the same size. The guide promises a success rate of about 95 %:
#: one forgiven failure in 20 attempts keeps that promise, more would not.
GOOD_STEPS_PER_RETRY: Final = 19

#: In an emergency, try the floor without knowing that it fits at every so many looks: about every
#: 10 s.
PRESSURES_PER_BLIND_TRY: Final = 10

#: No sensible setting needs as many failures to reach the floor; the guide's own reach it after 8.
#: It bounds the search for the floor when a setting never shrinks (`size_decay` 1, `batch_step` 0).
MAX_FAILURES: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassicState:
    """What the classic policy remembers."""

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
    free.
    """
    pressures_since_try: int = 0
    """`Pressure` events of this emergency since the floor was last tried."""
    has_worked: bool = False
    """Whether a step has ended well: until then each is a probe, as no later one is larger."""


class ClassicPolicy:
    """Shrinks size and batch with every memory failure, down to a floor, then waits in an
    emergency.

    Trusts that an event is about the step it asked for last; the sizes in events are not read.
    """

    name: Final = "classic"

    def __init__(self, memory: MemorySettings, workload: WorkloadSpec) -> None:
        self._memory = memory
        self._workload = workload
        self.floor = self._step_after(MAX_FAILURES)
        reached = bisect_left(
            range(MAX_FAILURES), True, key=lambda count: self._step_after(count) == self.floor
        )
        self._failures_at_floor = reached

    # The guide's policy looks at neither.
    def initial(self, claim_bytes: int, learned: Learned | None) -> ClassicState:  # noqa: ARG002
        """Return the state of a worker without failures: it starts at the base size and batch."""
        return ClassicState()

    def decide(self, state: ClassicState, event: Event) -> tuple[ClassicState, Decision]:
        """Return the state after `event` and what to do next."""
        match event:
            case StepOk():
                return self._after_good_step(state)
            case StepOom():
                state, decision = self._after_oom(state, event)
            case Pressure():
                state, decision = self._under_pressure(state, event)
            case _:
                assert_never(event)
        if isinstance(decision, Run) and not state.has_worked:
            decision = replace(decision, is_probe=True)
        return state, decision

    def learned(self, state: ClassicState) -> None:  # noqa: ARG002 - see `Policy.learned`
        """Return `None`: the guide's rules count failures and learn no sizes."""
        return

    def dump(self, state: ClassicState) -> dict[str, Scalar]:
        """Return `state` as scalars, signed with the policy's name so that no other policy takes it
        for its own.
        """
        return {"policy": self.name, **asdict(state)}

    def load(self, data: Mapping[str, Scalar]) -> ClassicState:
        """Return the state that `dump` wrote, see `Policy.load`."""
        check_keys(data, self.name, (field.name for field in fields(ClassicState)))
        state = ClassicState(
            failures=whole(data, "failures", 0, self._failures_at_floor),
            good_steps_to_retry=whole(data, "good_steps_to_retry", 0, GOOD_STEPS_PER_RETRY),
            steps_since_cleanup=whole(
                data, "steps_since_cleanup", 0, max(0, self._memory.cleanup_every - 1)
            ),
            emergency=_flag(data, "emergency"),
            floor_tried_in_vain=_flag(data, "floor_tried_in_vain"),
            pressures_since_try=whole(data, "pressures_since_try", 0, PRESSURES_PER_BLIND_TRY - 1),
            has_worked=_flag(data, "has_worked"),
        )
        if state.emergency and state.failures < self._failures_at_floor:
            raise ValueError(
                f"an emergency after {state.failures} failures, although the step could still "
                "shrink"
            )
        return state

    def _after_good_step(self, state: ClassicState) -> tuple[ClassicState, Decision]:
        good_steps = state.steps_since_cleanup + 1
        clean_up = good_steps >= self._memory.cleanup_every > 0
        state = ClassicState(
            failures=state.failures,
            good_steps_to_retry=max(0, state.good_steps_to_retry - 1),
            steps_since_cleanup=0 if clean_up or not self._memory.cleanup_every else good_steps,
            has_worked=True,
        )
        return state, Release() if clean_up else self._step_after(state.failures)

    def _after_oom(self, state: ClassicState, event: StepOom) -> tuple[ClassicState, Decision]:
        state = replace(state, steps_since_cleanup=0)
        if state.emergency:
            # The floor was tried again and failed; the next try is after later looks.
            state = replace(state, floor_tried_in_vain=True, pressures_since_try=0)
            return state, self._emergency(event.free_bytes, event.needed_bytes)
        needed_bytes = event.needed_bytes
        came_back = needed_bytes is not None and event.free_bytes >= needed_bytes
        if came_back and not state.good_steps_to_retry:
            state = replace(state, good_steps_to_retry=GOOD_STEPS_PER_RETRY)
            return state, self._step_after(state.failures)
        if state.failures >= self._failures_at_floor:
            state = replace(state, emergency=True, floor_tried_in_vain=False, pressures_since_try=0)
            return state, self._emergency(event.free_bytes, event.needed_bytes)
        state = replace(
            state, failures=self._failures_until_smaller(state.failures), good_steps_to_retry=0
        )
        return state, self._step_after(state.failures)

    def _under_pressure(
        self, state: ClassicState, event: Pressure
    ) -> tuple[ClassicState, Decision]:
        if not state.emergency:
            return state, self._step_after(state.failures)
        pressures = state.pressures_since_try + 1
        waited = pressures >= PRESSURES_PER_BLIND_TRY
        needed_bytes = event.needed_at_floor_bytes
        if needed_bytes is None:
            try_floor = waited
        else:
            try_floor = event.free_bytes >= needed_bytes and (
                waited or not state.floor_tried_in_vain
            )
        if try_floor:
            return replace(state, pressures_since_try=0), self.floor
        # The count stops one short of a try, so that it stays bounded however long memory is too
        # small to try.
        state = replace(state, pressures_since_try=min(pressures, PRESSURES_PER_BLIND_TRY - 1))
        return state, self._emergency(event.free_bytes, needed_bytes)

    def _emergency(self, free_bytes: int, needed_bytes: int | None) -> Emergency:
        need = "" if needed_bytes is None else f", it needs {needed_bytes / MIB:.1f} MiB"
        floor = f"size {self.floor.size} batch {self.floor.batch}"
        return Emergency(
            reason=f"out of memory at the smallest step ({floor}{need}), {free_bytes / MIB:.1f} "
            "MiB free"
        )

    def _step_after(self, failures: int) -> Run:
        """Apply the guide's formulas, techniques 7 and 9."""
        memory, base = self._memory, self._workload
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
