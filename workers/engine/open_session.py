"""How a session is opened: the device under its cap, the workload, and the policy for both."""

from __future__ import annotations

import gc
from pathlib import Path

from workers import oom
from workers.devices.base import Device, open_device
from workers.engine.checkpoint_pieces import CheckpointPieces
from workers.engine.duty_cycle import DutyCycle
from workers.engine.result_checks import ResultChecks
from workers.engine.session import Session, Told
from workers.engine.slice_stats import SliceStats
from workers.engine.stop_request import failure_of_workload
from workers.engine.thermal_control import ThermalControl
from workers.learned_limits.limits import settings_hash, workload_fingerprint
from workers.learned_limits.store import default_path
from workers.messages import ContextCorruptedError, IncompatibleError, StepCounts
from workers.nvml.fake import load
from workers.oom import Failure
from workers.policy.base import Growth
from workers.policy.registry import make_policy
from workers.settings import FailureKind, LimitKey, WorkerSpec
from workers.units import MIB
from workers.workloads.base import Workload, WorkloadContext, find_workload


def _state_dir(spec: WorkerSpec) -> Path | None:
    return (
        None if spec.run_id is None else default_path().parent / "state" / spec.run_id / spec.slot
    )


def _make_workload(spec: WorkerSpec, device: Device, context: WorkloadContext) -> Workload:
    """Make the workload under its cap.

    `IncompatibleError` if it can never fit, else what its constructor raises.
    """
    make = find_workload(spec.workload.name)
    try:
        with device.enforced():
            return make(context)
    except BaseException as error:
        failure = failure_of_workload(error)
        held_bytes = device.held_bytes() + (failure.requested_bytes or 0)
        if failure.kind is not FailureKind.DEFINITE or held_bytes <= device.most_bytes:
            raise
    raise IncompatibleError(
        f"{spec.slot}: the constructor of workload {spec.workload.name} needs "
        f"{held_bytes / MIB:.0f} MiB or more, and "
        f"the cap is {device.most_bytes / MIB:.0f} MiB; allocate in `step` what its size decides, "
        "or raise "
        f"nodes.{spec.node}.vram_per_worker_gib"
    )


def open_session(spec: WorkerSpec, stats: SliceStats) -> Session:
    """Open device and workload.

    Raises:
        IncompatibleError: They can never work here.
        ContextCorruptedError: The device failed while it was opened; a fresh process may do better.
    """
    # torch's modules are never freed. Hidden from the collector, they make a collection cost 1 ms
    # instead of 70. There is no collection before it: that would cost each start what this saves,
    # for little garbage.
    gc.freeze()
    failure: Failure | None = None
    told = Told()
    try:
        if spec.fake_sensors is not None:
            load(spec.fake_sensors)  # before any query to the real ones
        device = open_device(spec)
        thermal = ThermalControl(spec, device.info.uuid)
        context = WorkloadContext(
            device=device.torch_device,
            dtype=device.torch_dtype,
            seed=spec.workload.seed,
            settings=spec.workload.settings,
            slot=spec.slot,
            state_dir=_state_dir(spec),
            # A process that comes up while its slot is held is not told from the one before it.
            fresh=stats.directive.incarnation == 0 and stats.directive.sequence == 0,
            checkpoint=stats.directive.checkpoint,
            tell=told.add,
        )
        workload = _make_workload(spec, device, context)
        rungs = workload.rungs(spec.workload.batch)
    except (IncompatibleError, ContextCorruptedError):
        raise
    except BaseException as error:  # noqa: BLE001 - any failure of a driver or a user's constructor becomes a sentence
        failure = failure_of_workload(error)
        text = f"{type(error).__name__}: {failure.text}, at {oom.place(error)}"
    if failure is not None:
        if failure.kind is FailureKind.OTHER:
            raise IncompatibleError(f"{spec.slot}: cannot start: {text}")
        if failure.kind is not FailureKind.CONTEXT_CORRUPTED:
            stats.count(
                StepCounts(oom_count=1)
            )  # tells the head that the card is full, and not that it is broken
        raise ContextCorruptedError(f"cannot open the device: {text}")
    growth = Growth(
        size_power=workload.size_power,
        batch_power=workload.batch_power,
        fills_claim=workload.fills_claim,
        needed_bytes=workload.needed_bytes,
        most_bytes=device.most_bytes,
        rungs=rungs,
    )
    try:
        policy = make_policy(spec.policy, spec.memory, spec.workload, growth)
    except ValueError as error:
        raise IncompatibleError(f"{spec.slot}: {error}") from error
    info = device.info
    stats.event(
        "device_opened",
        device=info.name,
        pid=info.pid,
        cap_bytes=info.cap_bytes,
        context_bytes=info.context_bytes,
        context_source=info.context_source,
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
                # What the units of its own rungs mean, any setting may change.
                **({} if rungs is None else {"settings": settings_hash(spec.workload.settings)}),
            ),
            cap_bytes=info.cap_bytes,
        ),
        thermal=thermal,
        checks=ResultChecks(
            spec.check_share, f"{spec.slot}, {info.name}" + (f" {info.uuid}" if info.uuid else "")
        ),
        duty=DutyCycle(spec.duty),
        told=told,
        pieces=CheckpointPieces(),
        incarnation=stats.directive.incarnation,
        opened_kept_bytes=device.kept_bytes(),
    )
