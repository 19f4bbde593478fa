"""What one worker process holds for its slot, from the first directive on, and how it comes by it.

Covers the device, the workload, the policy and its state. Does not run steps (`engine.py`) and does not survive
failures (`oom_recovery.py`).
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any, Final

from workers import oom
from workers.devices.base import Device
from workers.devices.opening import open_device
from workers.engine.fault_injection import ChaoticWorkload
from workers.engine.result_checks import ResultChecks
from workers.engine.slice_stats import SliceStats
from workers.engine.thermal_control import ThermalControl, open_thermal_control
from workers.errors import ContextCorruptedError, IncompatibleError
from workers.learned_limits.limits import choose, workload_fingerprint
from workers.messages import DeviceInfo
from workers.nvml.fake.library import load
from workers.oom import Failure
from workers.policy.base import Decision, Event, Growth, Policy, Pressure, Run
from workers.policy.registry import make_policy
from workers.settings import FailureKind, LimitKey, StoredLimit, WorkerSpec
from workers.workloads.base import Workload, WorkloadContext
from workers.workloads.loading import load_workload

#: How often a device is asked at most how much memory there is: it takes up to a fifth of a millisecond.
_MEASURE_EVERY_S: Final = 0.02

#: The best of so many copies is the memory's speed: others take their turns on the card in some of them.
_COPIES: Final = 8


@dataclass(slots=True)
class Session:
    """What one process holds for its slot from the first directive on."""

    spec: WorkerSpec
    device: Device
    workload: Workload
    policy: Policy[Any]
    state: Any
    """The policy's, from `take_up` on; its content is the policy's own."""
    key: LimitKey
    """The circumstances for which learned values are valid."""
    incarnation: int
    heat: ThermalControl
    proof: ResultChecks
    claim_bytes: int = 0
    """What the workload may fill: what progressive allocation obtained last, times `claim_share`, or what the policy
    wants held."""
    lease_bytes: int | None = None
    """What the head lets this worker hold now; `None` does not limit it."""
    room: int | None = None
    """What `room_bytes` found last."""
    told_run: Run | None = None
    """The last run whose size was worth an event."""
    claim_share: float = 1.0
    """Below 1 after steps that should have fitted into the claim and did not."""
    probable_in_a_row: int = 0
    owed_sleep_s: float = 0.0
    """Idleness that the duty still asks for."""
    in_emergency: bool = False
    last_run: Run | None = None
    failed_run: Run | None = None
    """The run that ran out of memory although it should have fitted, until a step ends well."""
    measured_at_s: float = float("-inf")
    """When the device was last asked how much memory there is."""
    chaos: ChaoticWorkload | None = None
    """`workload` itself, where `run --chaos` wrapped it."""

    def release(self) -> None:
        """Have the workload drop its tensors, and everything unused go back to the device."""
        with self.device.enforced():
            self.workload.release()
        self.device.release()

    def room_bytes(self) -> int:
        """Measure what a step may hold in all: bounded by the cap and the lease, less what is to stay free."""
        self.measured_at_s = time.monotonic()
        room_bytes = self.device.room_bytes(self.spec.memory.leave_free_bytes)
        self.room = room_bytes if self.lease_bytes is None else min(room_bytes, self.lease_bytes)
        return self.room

    def room_bytes_if_due(self) -> int | None:
        """Measure as `room_bytes` does, unless that was a moment ago: short steps should not pay for it each time."""
        due = time.monotonic() - self.measured_at_s >= _MEASURE_EVERY_S
        return self.room_bytes() if due else None

    def hold(self, hold_bytes: int) -> None:
        """Have the workload fill this much from now on, and give back what is more than that."""
        less = hold_bytes < self.claim_bytes
        self.claim_bytes = hold_bytes
        with self.device.enforced():
            self.workload.resize(hold_bytes)
        if less:
            self.device.release()

    def bandwidth(self) -> float | None:
        """Time the memory of the device, in bytes per second; `None` if the workload has none to spare for it."""
        best: float | None = None
        for _ in range(_COPIES):
            with self.device.enforced():
                moved_bytes, seconds = self.device.timed(self.workload.move)
            if moved_bytes is None:
                return None
            best = max(best or 0.0, moved_bytes / seconds) if seconds > 0 else best
        return best

    def lesson(self, peak_bytes: int) -> StoredLimit | None:
        """Return what a later run under the same circumstances could start from; `None` if the policy knows nothing."""
        learned = self.policy.learned(self.state)
        if learned is None:
            return None
        # 0 is no measurement: what small tensors take was in the process's memory before.
        known_bytes = peak_bytes or None
        return StoredLimit(key=self.key, learned=learned, peak_bytes=known_bytes, learned_at_unix_s=time.time())

    def ask(self, event: Event) -> Decision:
        """Tell the policy what happened, and return what it wants next."""
        self.state, decision = self.policy.decide(self.state, event)
        return decision

    def pressure(self) -> Pressure:
        """Measure how much memory there is, for the policy."""
        floor = self.policy.floor
        return Pressure(
            at_s=time.monotonic(),
            room_bytes=self.room_bytes(),
            free_bytes=self.device.free_bytes(),
            needed_at_floor_bytes=self.workload.needed_bytes(floor.size, floor.batch),
        )


def open_session(spec: WorkerSpec, incarnation: int, stats: SliceStats) -> Session:
    """Open device and workload.

    Raises:
        IncompatibleError: They can never work here.
        ContextCorruptedError: The device failed while it was opened; a fresh process may do better.
    """
    # torch's modules are never freed. Hidden from the collector, they make a collection cost 1 ms instead of 70. There
    # is no collection before it: that would cost each start what this saves, for little garbage.
    gc.freeze()
    failure: Failure | None = None
    chaos: ChaoticWorkload | None = None
    try:
        if spec.fake_sensors is not None:
            load(spec.fake_sensors)  # before anything asks the real ones
        device = open_device(spec)
        heat = open_thermal_control(spec, device.info.uuid)
        context = WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=spec.workload.seed)
        workload = load_workload(spec.workload.name, context)
        if spec.step_faults is not None:
            workload = chaos = ChaoticWorkload(workload, context, spec.step_faults)
    except (IncompatibleError, ContextCorruptedError):
        raise
    except Exception as error:  # noqa: BLE001 - any failure of a driver or a user's constructor becomes a sentence
        failure = oom.classify(error)
        text = f"{type(error).__name__}: {failure.text}"
    if failure is not None:
        if failure.kind is FailureKind.OTHER:
            raise IncompatibleError(f"{spec.slot}: cannot start: {text}")
        if failure.kind is not FailureKind.CONTEXT_CORRUPTED:
            stats.out_of_memory()  # tells the head that the card is full, and not that it is broken
        raise ContextCorruptedError(f"cannot open the device: {text}")
    growth = Growth(
        size_power=workload.size_power,
        batch_power=workload.batch_power,
        fills_claim=workload.fills_claim,
        needed_bytes=workload.needed_bytes,
        most_bytes=device.most_bytes,
    )
    try:
        policy = make_policy(spec.policy, spec.memory, spec.workload, growth)
    except ValueError as error:
        raise IncompatibleError(f"{spec.slot}: {error}") from error
    return Session(
        spec=spec,
        device=device,
        workload=workload,
        policy=policy,
        state=None,
        key=_key(spec, device.info),
        incarnation=incarnation,
        heat=heat,
        proof=ResultChecks(spec.check_share, f"{spec.slot}, {_card_words(device.info)}"),
        chaos=chaos,
    )


def take_up(session: Session, stats: SliceStats) -> None:
    """Give the policy its state: as the last report of the slot left it, else from what earlier runs have learned."""
    resume = stats.directive.resume
    if resume is not None:
        try:
            session.state = session.policy.load(resume)
        except ValueError as error:
            stats.event("resume_refused", reason=str(error))
        else:
            stats.event("resumed", **dict(resume))
            return
    limit = choose(session.spec.learned, session.key)
    if limit is not None:
        stats.event("remembered", size=limit.learned.size, learned_at_unix_s=limit.learned_at_unix_s)
    session.state = session.policy.initial(session.claim_bytes, None if limit is None else limit.learned)


def _card_words(device: DeviceInfo) -> str:
    return device.name if device.uuid is None else f"{device.name} {device.uuid}"


def _key(spec: WorkerSpec, device: DeviceInfo) -> LimitKey:
    workload = spec.workload
    return LimitKey(
        card=device.name,
        total_bytes=device.total_bytes,
        driver=device.driver,
        torch=device.torch_version,
        dtype=device.dtype,
        workload=workload_fingerprint(workload.name, size=workload.size, batch=workload.batch),
        cap_bytes=device.cap_bytes,
    )
