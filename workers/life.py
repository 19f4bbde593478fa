"""What one worker process holds for its slot, from the first directive on, and how it comes by it.

Covers the device, the workload, the policy and its state. Does not run steps (`engine.py`) and does not survive
failures (`recovery.py`).
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from workers import oom
from workers.chaos import ChaoticWorkload
from workers.devices.base import Device
from workers.devices.opening import open_device
from workers.errors import MisfitError, PoisonedError
from workers.messages import FailureKind, ResumeState, WorkerSpec
from workers.oom import Failure
from workers.policy.base import Decision, Event, Policy, Pressure, Run
from workers.policy.registry import make_policy
from workers.tally import Tally
from workers.workloads.base import Workload, WorkloadContext
from workers.workloads.loading import load_workload


@dataclass(slots=True)
class Life:
    """What one process holds for its slot from the first directive on."""

    spec: WorkerSpec
    device: Device
    workload: Workload
    policy: Policy[Any]
    state: Any
    """The policy's; nobody else knows what is in it."""
    incarnation: int
    claim_bytes: int = 0
    """What progressive allocation obtained last, times `claim_share`."""
    claim_share: float = 1.0
    """Below 1 after steps that should have fitted into the claim and did not."""
    probable_in_a_row: int = 0
    owed_sleep_s: float = 0.0
    """Idleness that the duty still asks for."""
    in_emergency: bool = False
    last_run: Run | None = None
    failed_run: Run | None = None
    """The run that ran out of memory although it should have fitted, until a step ends well."""
    chaos: ChaoticWorkload | None = None
    """`workload` itself, where `run --chaos` wrapped it."""

    def release(self) -> None:
        """Have the workload drop its tensors, and everything unused go back to the device."""
        with self.device.enforced():
            self.workload.release()
        self.device.release()

    def ask(self, event: Event) -> Decision:
        """Tell the policy what happened, and return what it wants next."""
        self.state, decision = self.policy.decide(self.state, event)
        return decision

    def pressure(self) -> Pressure:
        """Measure how much memory there is, for the policy."""
        floor = self.policy.floor
        return Pressure(
            free_bytes=self.device.free_bytes(),
            needed_at_floor_bytes=self.workload.needed_bytes(floor.size, floor.batch),
        )


def open_life(spec: WorkerSpec, incarnation: int, tally: Tally) -> Life:
    """Open device and workload.

    Raises:
        MisfitError: They can never work here.
        PoisonedError: The device failed while it was opened; a fresh process may do better.
    """
    try:
        policy = make_policy(spec.policy, spec.memory, spec.workload)
    except ValueError as error:
        raise MisfitError(f"{spec.slot}: {error}") from error
    # torch's modules live for ever: taken out of the collector's sight, a collection costs 1 ms instead of 70. Without
    # a collection before it: that would cost every start what this saves, for little that was garbage.
    gc.freeze()
    failure: Failure | None = None
    chaos: ChaoticWorkload | None = None
    try:
        device = open_device(spec)
        context = WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=spec.workload.seed)
        workload = load_workload(spec.workload.name, context)
        if spec.step_faults is not None:
            workload = chaos = ChaoticWorkload(workload, context, spec.step_faults)
    except (MisfitError, PoisonedError):
        raise
    except Exception as error:  # noqa: BLE001 - any failure of a driver or a user's constructor becomes a sentence
        failure = oom.classify(error)
        text = f"{type(error).__name__}: {failure.text}"
    if failure is not None:
        if failure.kind is FailureKind.OTHER:
            raise MisfitError(f"{spec.slot}: cannot start: {text}")
        if failure.kind is not FailureKind.POISONED:
            tally.oom_count += 1  # tells the head that the card is full, and not that it is broken
        raise PoisonedError(f"cannot open the device: {text}")
    return Life(
        spec=spec,
        device=device,
        workload=workload,
        policy=policy,
        state=policy.initial(),
        incarnation=incarnation,
        chaos=chaos,
    )


def resumed(policy: Policy[Any], resume: ResumeState | None, tally: Tally) -> Any:  # noqa: ANN401 - the policy's own
    """Return the policy's state as the last report left it; a fresh one if there is none, or it cannot be read."""
    if resume is None:
        return policy.initial()
    try:
        state = policy.load(resume)
    except ValueError as error:
        tally.event("resume_refused", reason=str(error))
        return policy.initial()
    tally.event("resumed", **dict(resume))
    return state
