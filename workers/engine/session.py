"""What one worker process holds for its slot, from its first turn on, and how it is opened:
the device under its cap, the workload, and the policy for both.

Only this file changes a `Session`: others call the methods. Does not run steps (`engine.py`) or
recover from failures (`oom_recovery.py`).
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from workers import oom
from workers.devices import open_device
from workers.devices.base import Device
from workers.engine.account import Account
from workers.engine.between_steps import DutyCycle, ResultChecks, ThermalControl
from workers.host import mps
from workers.learned_limits import choose, default_path, settings_hash, workload_fingerprint
from workers.messages import (
    STARVED,
    Begin,
    ContextCorruptedError,
    IncompatibleError,
    Orders,
    Progress,
    ResumeState,
    StepCounts,
    VerdictCause,
    WorkerEvent,
    WorkerState,
)
from workers.oom import Failure
from workers.policy import make_policy
from workers.policy.base import Decision, Event, Growth, Policy, Pressure, Run
from workers.settings import FailureKind, LimitKey, Scalar, StoredLimit, WorkerSpec
from workers.units import MIB
from workers.workloads.base import Workload, WorkloadContext, find_workload

R = TypeVar("R")

#: Shortest time between two measurements of free memory after steps: each takes up to 0.2 ms.
_MEASURE_EVERY_S: Final = 0.02

#: The fastest of this many copies is the memory's speed: during the others, other processes may use
#: the card.
_COPIES: Final = 8

#: A step that is larger or smaller than the last reported one by this factor is an event.
_MIN_CHANGE_FACTOR: Final = 1.1

#: A process that holds so much more of its cap between steps than before is looked at for a leak.
_WORTH_A_LOOK: Final = 0.1

#: A worker with less than this share of its cap says why.
_FULL_SHARE: Final = 0.9


class Told:
    """The events that a workload has told of and no status has carried yet."""

    def __init__(self) -> None:
        self._events: list[WorkerEvent] = []

    def add(self, name: str, /, **detail: Scalar) -> None:
        """Keep an event for the next status. Those that differ by their `count` alone are one."""
        event = WorkerEvent(name=name, at_unix_s=time.time(), detail=detail)
        for index, other in enumerate(self._events if "count" in detail else ()):
            if (name, {**detail, "count": None}) == (other.name, {**other.detail, "count": None}):
                counts = (detail["count"], other.detail["count"])
                detail["count"] = sum(count for count in counts if isinstance(count, int))
                self._events[index] = replace(other, detail=detail)
                return
        self._events.append(event)

    def taken(self) -> list[WorkerEvent]:
        """Return them, and forget them."""
        events, self._events = self._events, []
        return events


@dataclass(slots=True)
class Session:
    """The device, the workload, the policy and its state."""

    # Set once, when it is opened.
    spec: WorkerSpec
    device: Device
    workload: Workload
    growth: Growth
    """What the policy was told of the workload."""
    policy: Policy[Any]
    key: LimitKey
    """The circumstances for which learned values are valid."""
    thermal: ThermalControl
    checks: ResultChecks
    duty: DutyCycle
    told: Told

    # Changed by the methods below.
    saves: int = 0
    """`Orders.saves` that it has taken in."""
    must_save: bool = False
    """Whether the save that was asked for last is still to be done."""
    state: Any = None
    """The policy's state; `None` until `load_policy_state`."""
    claim_bytes: int = 0
    """What the workload may fill: what progressive allocation obtained last, times `claim_share`,
    or what the policy wants held."""
    claim_share: float = 1.0
    """Below 1 after steps that should have fitted into the claim and did not."""
    lease_bytes: int | None = None
    """What the head lets this worker hold now; `None` does not limit it."""
    allowed_bytes: int | None = None
    """What `measure_allowed` found last."""
    measured_at_s: float = float("-inf")
    """When it was measured last (monotonic seconds)."""
    last_run: Run | None = None
    parked_bytes: int = 0
    """The workload's state that waits in host memory; 0 while it is on the device, or there is
    none.
    """
    reported_run: Run | None = None
    """The last run whose size was told by an event, or the first one."""
    failed_run: Run | None = None
    """The run that ran out of memory although it should have fitted; `None` again after a step that
    ends well.
    """
    in_emergency: bool = False
    opened_kept_bytes: int = 0
    """What the process held after the workload was made."""
    kept_bytes: int | None = None
    """What it held beyond that after the last release; `None` also of a workload that keeps a
    state.
    """
    is_warm: bool = False
    """Whether the context was measured after the kernels of the workload were loaded."""
    checked_held_bytes: int | None = None
    """The most that it held between steps when it was last looked whether that is needed."""

    def begin_turn(self, orders: Orders, account: Account) -> None:
        """Take over what is wanted, save what is to be saved, and read the sensors, as far as that
        is due.
        """
        self.lease_bytes = orders.lease_bytes
        if orders.saves > self.saves:
            self.saves, self.must_save = orders.saves, True
            self.workload.save_soon()
        if self.workload.save_due:
            self.workload.save()  # the last turn ended at the moment for it, or no step follows
        self.thermal.sample(account)

    def has_saved(self) -> bool:
        """Say once for each save that was asked for that it is done."""
        if self.must_save and not self.workload.save_due:
            self.must_save = False
            return True
        return False

    def holds(self, orders: Orders, account: Account) -> bool:
        """Whether it is to do no step: one that is to save first goes on, unless it has no memory
        for a step.
        """
        starved = account.state in STARVED or orders.lease_bytes == 0
        return orders.holds and (starved or not self.workload.save_due)

    def load_policy_state(self, resume: ResumeState | None, account: Account) -> None:
        """Give the policy its state: that of the slot's last status, else one made from what
        earlier runs learned.
        """
        if resume is not None:
            try:
                self.state = self.policy.load(resume)
            except ValueError as error:
                account.event("resume_refused", reason=str(error))
            else:
                account.event("resumed", **dict(resume))
                return
        limit = choose(self.spec.learned, self.key)
        if limit is not None:
            account.event(
                "remembered", size=limit.learned.size, learned_at_unix_s=limit.learned_at_unix_s
            )
        self.state = self.policy.initial(self.claim_bytes, None if limit is None else limit.learned)

    def ask(self, event: Event) -> Decision:
        """Tell the policy what happened, and return what it wants next."""
        self.state, decision = self.policy.decide(self.state, event)
        return decision

    def start_part(self, run: Run, account: Account) -> None:
        """Note the part that begins now, and make the workload fill what the policy wants held for
        it.
        """
        self._report_size_change(run, account)
        self.last_run = run
        if run.hold_bytes is not None and run.hold_bytes != self.claim_bytes:
            shrinks = run.hold_bytes < self.claim_bytes
            self.set_claim(run.hold_bytes)
            if shrinks:
                self.device.release()

    def on_device(self, part: Callable[[], R]) -> R:
        """Run a part with the workload's state back on the device."""
        if self.parked_bytes:
            self.workload.unpark()
            self.parked_bytes = 0
        return part()

    def part_succeeded(self) -> None:
        """Forget the failures before this part."""
        self.in_emergency = False
        self.failed_run = None

    def note_unexpected_oom(self, run: Run) -> None:
        """Note that a step ran out of memory although it should have fitted into the claim.

        After the second time the workload gets a smaller share of the claim: the step takes more
        than it says, and if the workload fills its claim, no size would be small enough.
        """
        if self.failed_run == run:
            self.claim_share *= 1.0 - self.spec.memory.retry_reduction
        self.failed_run = run

    def enter_emergency(self, account: Account, reason: str) -> None:
        """Note that no step fits, and report it if that is new."""
        if not self.in_emergency:
            account.event("emergency", reason=reason)
        self.in_emergency = True

    def _report_size_change(self, run: Run, account: Account) -> None:
        """Report a step much smaller or larger than the last reported one.

        After a failure `backoff` has done so.
        """
        before = self.reported_run
        if before is None or run == before:
            self.reported_run = run
            return
        now_units, before_units = (
            step.hold_bytes or step.size * step.size * step.batch for step in (run, before)
        )
        if run.level != before.level:
            now_units = before_units * (2 if run.level < before.level else 0)
        if max(now_units, before_units) < _MIN_CHANGE_FACTOR * min(now_units, before_units):
            return
        self.reported_run = run
        account.event(
            "gave_way" if now_units < before_units else "grew",
            from_size=before.size,
            from_batch=before.batch,
            from_hold_bytes=before.hold_bytes,
            size=run.size,
            batch=run.batch,
            hold_bytes=run.hold_bytes,
            allowed_bytes=self.allowed_bytes,
            **self.level_of(run),
        )

    def level_of(self, run: Run) -> dict[str, Scalar]:
        """Return what an event says of a run's level; nothing where the workload offers none."""
        return {} if self.growth.stages is None else {"level": run.level}

    def shed(self) -> None:
        """Have the workload drop what it can do without, and everything unused go back to the
        device.
        """
        if not self.parked_bytes:
            with self.device.enforced():
                self.workload.shed()
        self._given_back()

    def park(self, account: Account) -> None:
        """Have the workload take all it has off the device.

        Its state waits in host memory if it keeps one.
        """
        if self.parked_bytes:
            return
        with self.device.enforced():
            self.parked_bytes = self.workload.park()
        self._given_back()
        if self.parked_bytes:
            account.event("parked", state_bytes=self.parked_bytes)

    def _given_back(self) -> None:
        self.device.release()
        # A state that is kept is no leak, and its size is the workload's own affair.
        kept_bytes = max(0, self.device.kept_bytes() - self.opened_kept_bytes)
        self.kept_bytes = None if self._keeps_state() else kept_bytes
        self.checked_held_bytes = None

    def rebase(self, account: Account) -> None:
        """Measure what the process holds besides tensors, unless a state on a CPU would be taken
        for that.
        """
        if self.device.info.kind == "cpu" and self._keeps_state():
            return
        grown_bytes = self.device.rebase()
        if grown_bytes:
            info = self.device.info
            account.event(
                "context_grew",
                grown_bytes=grown_bytes,
                context_bytes=info.context_bytes,
                cap_bytes=info.cap_bytes,
            )

    def rebase_once_warm(self, account: Account) -> None:
        """Measure it once more when all of the workload's kernels have run: a training's with its
        first update.
        """
        if self.is_warm or self.device.info.kind == "cpu":
            return
        progress = self.progress()
        self.is_warm = progress is None or bool(progress.train_step)
        if self.is_warm:
            self.rebase(account)

    def _keeps_state(self) -> bool:
        return self.workload.progress() is not None

    def progress(self) -> Progress | None:
        """Return how far the workload is, as it tells it."""
        progress = self.workload.progress()
        if isinstance(progress, Progress | None):
            return progress
        raise TypeError(f"progress must return a Progress or None, not {type(progress).__name__}")

    def release_if_grown(self) -> None:
        """Have what can be dropped released if far more is held between steps than before: the rest
        is a leak.
        """
        held_bytes = self.device.held_bytes()
        if self.checked_held_bytes is None:
            self.checked_held_bytes = held_bytes
        elif held_bytes > self.checked_held_bytes + _WORTH_A_LOOK * self.device.most_bytes:
            self.shed()

    def set_claim(self, claim_bytes: int) -> None:
        """Let the workload fill this much from now on."""
        self.claim_bytes = claim_bytes
        with self.device.enforced():
            self.workload.resize(claim_bytes)

    def measure_allowed(self) -> int:
        """Measure what a step may hold in all: min(cap, lease, held + free - leave_free)."""
        self.measured_at_s = time.monotonic()
        allowed_bytes = self.device.allowed_bytes(self.spec.memory.leave_free_bytes)
        self.allowed_bytes = (
            allowed_bytes if self.lease_bytes is None else min(allowed_bytes, self.lease_bytes)
        )
        return self.allowed_bytes

    def measure_allowed_if_due(self) -> int | None:
        """Measure, unless the last time was less than 20 ms ago: after short steps it would cost
        too much.
        """
        due = time.monotonic() - self.measured_at_s >= _MEASURE_EVERY_S
        return self.measure_allowed() if due else None

    def bandwidth(self) -> float | None:
        """Time copies in the device's memory, in bytes per second.

        `None` if the workload has no memory for it.
        """
        best: float | None = None
        for _ in range(_COPIES):
            moved_bytes, seconds = self.device.timed(self.workload.move)
            if moved_bytes is None:
                return None
            best = max(best or 0.0, moved_bytes / seconds) if seconds > 0 else best
        return best

    def learned_limit(self, peak_bytes: int) -> StoredLimit | None:
        """Return what a later run under the same circumstances could start from.

        `None` if nothing was learned.
        """
        learned = None if self.state is None else self.policy.learned(self.state)
        if learned is None:
            return None
        # A peak of 0 is no measurement: what small tensors take was in the process's memory before.
        return StoredLimit(
            key=self.key,
            learned=learned,
            peak_bytes=peak_bytes or None,
            learned_at_unix_s=time.time(),
        )

    def pressure(self) -> Pressure:
        """Measure how much memory there is, for the policy."""
        floor = self.policy.floor
        return Pressure(
            at_s=time.monotonic(),
            allowed_bytes=self.measure_allowed(),
            free_bytes=self.device.free_bytes(),
            needed_at_floor_bytes=self.workload.needed_bytes(floor.size, floor.batch),
        )

    def waiting_state(self, state: WorkerState, reason: str) -> tuple[WorkerState, str]:
        """Return the state of a worker that has no memory for a step, and the reason to show."""
        if not self.parked_bytes:
            return state, reason
        return (
            WorkerState.PARKED,
            f"{self.parked_bytes / MIB:.0f} MiB of its state wait in host memory: {reason}",
        )

    def working_state(self, note: str = "") -> tuple[WorkerState, str]:
        """Return the state of a worker that does its work, and the reason to show.

        `note` is the least of reasons.
        """
        if self.checks.reason is not None:
            return WorkerState.CORRUPT, self.checks.reason
        if self.thermal.slows:
            return WorkerState.THROTTLED, self.thermal.decision.reason
        alarm = self.thermal.decision.reason if self.thermal.alarmed else ""
        return WorkerState.RUNNING, note or self.workload.notice or self._shortage() or alarm

    def _shortage(self) -> str:
        """Say why the worker may hold much less than its cap; empty if it may hold enough."""
        cap_bytes = self.device.most_bytes
        if self.allowed_bytes is None or self.allowed_bytes >= _FULL_SHARE * cap_bytes:
            return ""
        leased = self.lease_bytes is not None and self.lease_bytes <= self.allowed_bytes
        why = (
            "its share while the card is short, or its user's cap"
            if leased
            else "all that others leave on the device"
        )
        return f"{self.allowed_bytes / MIB:.0f} of {cap_bytes / MIB:.0f} MiB: {why}"


def _state_dir(spec: WorkerSpec) -> Path | None:
    return (
        None if spec.run_id is None else default_path().parent / "state" / spec.run_id / spec.slot
    )


def _make_workload(
    make: type[Workload], spec: WorkerSpec, device: Device, context: WorkloadContext
) -> Workload:
    """Make the workload under its cap.

    `IncompatibleError` if it can never fit, else what its constructor raises.
    """
    try:
        with device.enforced():
            return make(context)
    except BaseException as error:
        failure = oom.failure_of_workload(error)
        held_bytes = device.held_bytes() + (failure.requested_bytes or 0)
        if failure.kind is not FailureKind.DEFINITE or held_bytes <= device.most_bytes:
            raise
    raise IncompatibleError(
        f"{spec.slot}: the constructor of workload {spec.workload.name} needs "
        f"{held_bytes / MIB:.0f} MiB or more, and "
        f"the cap is {device.most_bytes / MIB:.0f} MiB; allocate in `step` what its size decides, "
        "or raise "
        f"nodes.{spec.node}.vram_per_worker_gib",
        cause=VerdictCause.NO_ROOM,
    )


def _become_mps_client(spec: WorkerSpec) -> None:
    """Set what CUDA reads when it starts; `IncompatibleError` if no daemon runs here."""
    problem = mps.missing_daemon()
    if problem is not None:
        raise IncompatibleError(f"{spec.slot}: {problem}", cause=VerdictCause.NO_DEVICE)
    os.environ.update(mps.client_variables(spec.thread_share, spec.budget_bytes))


def open_session(spec: WorkerSpec, begin: Begin, incarnation: int, account: Account) -> Session:
    """Open device and workload.

    Raises:
        IncompatibleError: They can never work here.
        ContextCorruptedError: The device failed while it was opened; a fresh process may do better.
    """
    failure: Failure | None = None
    told = Told()
    before_bytes = psutil.Process().memory_info().rss
    try:
        # What a workload imports belongs to the process, as torch does: it is there before the cap.
        make = find_workload(spec.workload.name)
        make.prepare(spec.workload.settings)
        imported_bytes = max(0, psutil.Process().memory_info().rss - before_bytes)
        # Modules are never freed. Hidden from the collector, they make a collection cost 1 ms
        # instead of 70. There is no collection before it: that would cost each start what this
        # saves, for little garbage.
        gc.freeze()
        if spec.mps:
            _become_mps_client(spec)
        device = open_device(spec)
        thermal = ThermalControl(spec, device.info.uuid)
        context = WorkloadContext(
            device=device.torch_device,
            dtype=device.torch_dtype,
            seed=spec.workload.seed,
            settings=spec.workload.settings,
            slot=spec.slot,
            state_dir=_state_dir(spec),
            incarnation=incarnation,
            fresh=begin.fresh,
            checkpoint=begin.checkpoint,
            tell=told.add,
        )
        workload = _make_workload(make, spec, device, context)
        stages = workload.stages()
    except (IncompatibleError, ContextCorruptedError):
        raise
    # Any failure of a driver or a user's constructor becomes a sentence.
    except BaseException as error:  # noqa: BLE001
        failure = oom.failure_of_workload(error)
        text = f"{type(error).__name__}: {failure.text}, at {oom.place(error)}"
        account.error = oom.traceback_text(error)
    if failure is not None:
        if failure.kind is FailureKind.OTHER:
            raise IncompatibleError(
                f"{spec.slot}: cannot start: {text}", cause=VerdictCause.EXCEPTION
            )
        if failure.kind is not FailureKind.CONTEXT_CORRUPTED:
            # tells the head that the card is full, and not that it is broken
            account.counts += StepCounts(oom_count=1)
        raise ContextCorruptedError(f"cannot open the device: {text}")
    growth = Growth(
        size_power=workload.size_power,
        batch_power=workload.batch_power,
        fills_claim=workload.fills_claim,
        needed_bytes=workload.needed_bytes,
        most_bytes=device.most_bytes,
        stages=stages,
    )
    try:
        policy = make_policy(spec.policy, spec.memory, spec.workload, growth)
    except ValueError as error:
        raise IncompatibleError(f"{spec.slot}: {error}") from error
    info = device.info
    account.event(
        "device_opened",
        device=info.name,
        pid=info.pid,
        cap_bytes=info.cap_bytes,
        context_bytes=info.context_bytes,
        context_source=info.context_source,
        imported_bytes=imported_bytes,
        peak_source=info.peak_source,
        dtype=info.dtype,
        threads=info.threads,
        torch=info.torch_version,
        driver=info.driver,
    )
    return Session(
        spec=spec,
        device=device,
        workload=workload,
        growth=growth,
        policy=policy,
        key=LimitKey(
            card=info.name,
            total_bytes=info.total_bytes,
            driver=info.driver,
            torch=info.torch_version,
            dtype=info.dtype,
            workload=workload_fingerprint(
                spec.workload.name,
                size=spec.workload.size,
                batch=spec.workload.batch,
                # What a batch takes, any setting may change.
                **({} if stages is None else {"settings": settings_hash(spec.workload.settings)}),
            ),
            cap_bytes=info.cap_bytes,
        ),
        thermal=thermal,
        checks=ResultChecks(
            spec.check_share, f"{spec.slot}, {info.name}" + (f" {info.uuid}" if info.uuid else "")
        ),
        duty=DutyCycle(spec.duty),
        told=told,
        opened_kept_bytes=device.kept_bytes(),
    )
