"""Opens what a worker process needs: the device under its cap, the workload, the policy.

Does not run steps (`engine.py`, `parts.py`) or release memory (`memory.py`).
"""

from __future__ import annotations

import gc
import os
import time
from dataclasses import dataclass
from typing import Final

import psutil

from workers import oom
from workers.devices import open_device
from workers.devices.base import Device
from workers.engine.account import Account
from workers.engine.between_steps import DutyCycle, ResultChecks, ThermalControl
from workers.engine.chaos import ChaoticMemory
from workers.engine.memory import SlotMemory
from workers.host import mps
from workers.learned_limits import (
    LimitKey,
    LimitStore,
    default_path,
    settings_hash,
    workload_fingerprint,
)
from workers.messages import (
    Begin,
    Cause,
    ContextCorruptedError,
    IncompatibleError,
    StepCounts,
    WorkerState,
)
from workers.oom import Failure
from workers.policy.adaptive import AdaptivePolicy
from workers.policy.base import Policy, Stages
from workers.policy.classic import ClassicPolicy
from workers.settings import FailureKind, Learned, PolicyState, WorkerSpec
from workers.units import MIB
from workers.workloads.base import Workload, WorkloadContext, find_workload

#: Time between two writes of the learned limits; a killed process loses newer ones.
_KEEP_EVERY_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What `open_session` has opened for a slot."""

    spec: WorkerSpec
    device: Device
    workload: Workload
    stages: Stages | None
    """The stages that the workload offers; `None`: any size and batch."""
    policy: Policy
    memory: SlotMemory
    limits: LimitStore | None
    """Where the limits for a later run under the same conditions are kept; `None`: they are not
    kept.
    """
    thermal: ThermalControl
    checks: ResultChecks
    duty: DutyCycle

    def waiting_state(self, state: WorkerState, reason: str) -> tuple[WorkerState, str]:
        """Return the state of a worker that has no memory for a step, and the reason to show."""
        parked_bytes = self.memory.parked_bytes
        if not parked_bytes:
            return state, reason
        return (
            WorkerState.PARKED,
            f"{parked_bytes / MIB:.0f} MiB of its state wait in host memory: {reason}",
        )

    def working_state(self, note: str = "") -> tuple[WorkerState, str]:
        """Return the state of a worker that runs steps, and the reason to show.

        `note` is shown only if no wrong result or throttling is reported.
        """
        if self.checks.reason is not None:
            return WorkerState.CORRUPT, self.checks.reason
        if self.thermal.slows:
            return WorkerState.THROTTLED, self.thermal.decision.reason
        alarm = self.thermal.decision.reason if self.thermal.alarmed else ""
        notice = note or self.workload.notice or self.memory.shortage()
        return WorkerState.RUNNING, notice or alarm


def _make_workload(
    make: type[Workload], spec: WorkerSpec, device: Device, context: WorkloadContext
) -> Workload:
    """Construct the workload under the memory cap.

    Raises `IncompatibleError` if it can never fit, else any exception of its constructor.
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
        f"{held_bytes / MIB:.0f} MiB or more, and the cap is {device.most_bytes / MIB:.0f} MiB; "
        "allocate in `step` what its size decides, or raise "
        f"nodes.{spec.node}.vram_per_worker_gib",
        cause=Cause.OUT_OF_MEMORY,
    )


def _become_mps_client(spec: WorkerSpec) -> None:
    """Set the variables of an MPS client; raise `IncompatibleError` if no MPS daemon runs here."""
    problem = mps.missing_daemon()
    if problem is not None:
        raise IncompatibleError(f"{spec.slot}: {problem}", cause=Cause.DRIVER)
    os.environ.update(mps.client_variables(spec.thread_share, spec.budget_bytes))


def open_session(spec: WorkerSpec, begin: Begin, incarnation: int, account: Account) -> Session:
    """Open the device and the workload, and make the policy with its earlier state.

    Raises:
        IncompatibleError: The workload can never run here.
        ContextCorruptedError: The device failed while it was opened; a fresh process may succeed.
    """
    failure: Failure | None = None
    before_bytes = psutil.Process().memory_info().rss
    try:
        # Import the workload's modules before the cap is set: like torch, they do not count against
        # it.
        make = find_workload(spec.workload.name)
        make.prepare(spec.workload.settings)
        imported_bytes = max(0, psutil.Process().memory_info().rss - before_bytes)
        # Modules are never freed. Hiding them from the garbage collector reduces a collection from
        # 70 ms to 1 ms. A collection before it would cost each start about as much, for little
        # garbage.
        gc.freeze()
        if spec.mps:
            _become_mps_client(spec)
        device = open_device(spec)
        thermal = ThermalControl(spec, device.info.uuid)
        states = default_path().parent / "state"
        context = WorkloadContext(
            device=device.torch_device,
            dtype=device.torch_dtype,
            seed=spec.workload.seed,
            settings=spec.workload.settings,
            slot=spec.slot,
            state_dir=None if spec.run_id is None else states / spec.run_id / spec.slot,
            incarnation=incarnation,
            fresh=begin.fresh,
            checkpoint=begin.checkpoint,
            memory=spec.memory,
            tell=account.event,
            team=spec.team,
            team_orders=lambda: account.team_orders,
            pause=account.pause,
        )
        workload = _make_workload(make, spec, device, context)
        stages = workload.stages()
    except (IncompatibleError, ContextCorruptedError):
        raise
    # Any failure of a driver or of a user's constructor becomes a text.
    except BaseException as error:  # noqa: BLE001
        failure = oom.failure_of_workload(error)
        text = f"{type(error).__name__}: {failure.text}, at {oom.place(error)}"
        account.error = oom.traceback_text(error)
    if failure is not None:  # outside the handler: the error keeps objects alive
        if failure.kind is FailureKind.OTHER:
            raise IncompatibleError(f"{spec.slot}: cannot start: {text}")
        if failure.kind is not FailureKind.CONTEXT_CORRUPTED:
            # shows the head that the card is full, not broken
            account.counts += StepCounts(oom_count=1)
        raise ContextCorruptedError(f"cannot open the device: {text}")
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
    key = _limit_key(spec, device, stages)
    arguments = device, workload, spec.memory.leave_free_bytes, account
    memory = SlotMemory(*arguments)
    if spec.oom_rate:
        # Each process draws other errors.
        seed = f"{spec.chaos_seed}/{spec.slot}/{incarnation}"
        memory = ChaoticMemory(*arguments, seed=seed, oom_rate=spec.oom_rate)
    limits: LimitStore | None = None
    if spec.memory.remember and spec.follows_memory:
        limits = LimitStore(
            lambda: key,
            lambda reason: account.event("limits_unavailable", reason=reason),
            every_s=_KEEP_EVERY_S,
        )
    return Session(
        spec=spec,
        device=device,
        workload=workload,
        stages=stages,
        policy=_make_policy(spec, device, workload, limits, begin.resume, account),
        memory=memory,
        limits=limits,
        thermal=thermal,
        checks=ResultChecks(
            spec.check_share, f"{spec.slot}, {info.name}" + (f" {info.uuid}" if info.uuid else "")
        ),
        duty=DutyCycle(spec.duty),
    )


def _make_policy(
    spec: WorkerSpec,
    device: Device,
    workload: Workload,
    limits: LimitStore | None,
    resume: PolicyState | None,
    account: Account,
) -> Policy:
    """Make the policy, with the slot's last reported state or else the limits of earlier runs."""
    limit = None if limits is None else limits.best()
    try:
        policy = _new_policy(spec, device, workload, None if limit is None else limit.learned)
    except ValueError as error:
        raise IncompatibleError(f"{spec.slot}: {error}") from error
    if resume is not None:
        try:
            policy.resume(resume)
        except ValueError as error:
            account.event("resume_refused", reason=str(error))
        else:
            account.event("resumed", level=resume.level, failures=resume.failures)
            return policy
    if limit is not None:
        account.event(
            "remembered", size=limit.learned.size, learned_at_unix_s=limit.learned_at_unix_s
        )
    return policy


def _new_policy(
    spec: WorkerSpec, device: Device, workload: Workload, learned: Learned | None
) -> Policy:
    """Make the policy that `spec.policy` names; `ValueError` if it is unknown, or refuses."""
    memory, asked = spec.memory, spec.workload
    if spec.policy == AdaptivePolicy.name:
        clock, held_bytes = time.monotonic, device.held_bytes
        return AdaptivePolicy(
            memory, asked, workload, clock=clock, held_bytes=held_bytes, learned=learned
        )
    if spec.policy != ClassicPolicy.name:
        known = f"{AdaptivePolicy.name}, {ClassicPolicy.name}"
        raise ValueError(f"no policy is called {spec.policy!r}; there are: {known}")
    if workload.stages() is not None:
        raise ValueError(
            f"workload {asked.name!r} needs memory.policy: adaptive; classic knows no stages"
        )
    return ClassicPolicy(memory, asked, workload)


def _limit_key(spec: WorkerSpec, device: Device, stages: Stages | None) -> LimitKey:
    info = device.info
    return LimitKey(
        card=info.name,
        driver=info.driver,
        torch=info.torch_version,
        dtype=info.dtype,
        workload=workload_fingerprint(
            spec.workload.name,
            size=spec.workload.size,
            batch=spec.workload.batch,
            # Any setting may change the memory of a batch.
            **({} if stages is None else {"settings": settings_hash(spec.workload.settings)}),
        ),
        cap_bytes=info.cap_bytes,
    )
