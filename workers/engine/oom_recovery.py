"""What the engine does after a part that failed: prove that the device answers, obtain memory, and
tell.

The loop (`workers/elastic/loop.py`) has given memory back before, outside of its handler. Decides
no size (the policy does).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from workers import oom
from workers.devices.base import Device
from workers.engine.account import Account
from workers.engine.session import Session
from workers.messages import ContextCorruptedError, StepCounts, WorkerState
from workers.oom import Failure
from workers.policy.base import Run
from workers.settings import FailureKind, MemorySettings

#: Share by which a claim must have changed to be an event: free memory always moves a little.
_MIN_CLAIM_CHANGE = 0.01

#: Pause between two emergency products when no step fits: the worker tells that it lives, and
#: waits.
_EMERGENCY_PAUSE_S = 0.1


def after_oom(
    session: Session,
    account: Account,
    run: Run,
    failure: Failure,
    at_least_bytes: int | None,
    failed_at_s: float,
) -> None:
    """Count and tell an out-of-memory after which memory was given back, and obtain it anew.

    It happened at `failed_at_s` (monotonic seconds).
    """
    account.counts += StepCounts(steps_oom=1, steps_oom_probe=int(run.is_probe), oom_count=1)
    needed_bytes = session.workload.needed_bytes(run.size, run.batch)
    free_bytes = session.device.free_bytes()
    if run.hold_bytes is None and needed_bytes is not None and needed_bytes <= session.claim_bytes:
        session.note_unexpected_oom(run)
    claim_memory(session, account)
    account.event(
        "oom",
        kind=failure.kind.value,
        evidence=failure.evidence,
        text=failure.text,
        size=run.size,
        batch=run.batch,
        needed_bytes=needed_bytes,
        at_least_bytes=at_least_bytes,
        free_bytes=free_bytes,
        recovery_s=time.monotonic() - failed_at_s,
        **session.level_of(run),
    )


def after_error(session: Session, account: Account, failure: Failure, traceback: str) -> None:
    """Count an error that is the workload's own.

    Raises:
        ContextCorruptedError: The device no longer answers: some of its failures read like a bug of
            the workload.
    """
    if failure.kind is FailureKind.CONTEXT_CORRUPTED:
        raise ContextCorruptedError(failure.text)
    session.shed()
    session.rebase(account)
    broken = _emergency_failure(session)
    if broken is not None:
        raise ContextCorruptedError(broken.text)
    account.workload_failed(f"the workload failed: {failure.text}", traceback)


def note_backoff(session: Session, account: Account, failed: Run, run: Run) -> None:
    """Tell with what the part goes on that has failed."""
    changed = [
        f"{name} {getattr(run, name)}"
        for name in ("size", "batch", "level")
        if getattr(run, name) != getattr(failed, name)
    ]
    then = f"down to {' and '.join(changed)}" if changed else "once more the same"
    account.settle(
        WorkerState.BACKOFF, f"out of memory at size {failed.size}, batch {failed.batch}; {then}"
    )
    account.event(
        "backoff" if changed else "retry",
        from_size=failed.size,
        from_batch=failed.batch,
        size=run.size,
        batch=run.batch,
        **session.level_of(run),
    )


def prove_alive(session: Session, account: Account) -> None:
    """Run the emergency product.

    Raises:
        ContextCorruptedError: The device cannot do even that: it does not answer this process any
            more.
    """
    failure = _emergency_failure(session)
    if failure is not None and failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        # The error of the step itself may have surfaced only here: clear it before the device is
        # called broken.
        session.device.release()
        failure = _emergency_failure(session)
    if failure is not None:
        raise ContextCorruptedError(failure.text)
    account.counts += StepCounts(emergency_count=1)


def _emergency_failure(session: Session) -> Failure | None:
    """Return why the device cannot run the emergency product, or `None` if it can.

    A wrong result is raised.
    """
    try:
        session.device.emergency()
    except ContextCorruptedError:
        raise
    except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
        return oom.classify(error)
    return None


def claim_memory(session: Session, account: Account) -> None:
    """Find out by progressive allocation how much memory there is, and tell a workload that fills
    its claim.

    Its tensors must be gone. Others take what their steps take, and neighbours keep theirs.
    """
    if not session.growth.fills_claim:
        return
    ramp = ramp_up(session.device, session.spec.memory, session.lease_bytes)
    claim_bytes = int(session.claim_share * ramp.claim_bytes)
    account.counts += StepCounts(oom_count=ramp.failures)
    moved = abs(claim_bytes - session.claim_bytes) > _MIN_CLAIM_CHANGE * session.claim_bytes
    if moved or ramp.failures:
        account.event(
            "claimed",
            claim_bytes=claim_bytes,
            target_bytes=ramp.target_bytes,
            failures=ramp.failures,
        )
    session.set_claim(claim_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """What progressive allocation obtained."""

    claim_bytes: int
    """The largest block obtained; 0 when not even the floor was there."""
    target_bytes: int
    """What 100 % would have been."""
    failures: int
    """Blocks refused on the way, each a real out-of-memory."""


def ramp_up(device: Device, settings: MemorySettings, lease_bytes: int | None = None) -> Ramp:
    """Obtain growing blocks, one at a time, until one is refused for good or all that this worker
    may have is obtained.

    The 3070 guide's third technique: 20, 40, 60, 80, 100 % of the cap; a failed stage is tried
    again 10 % smaller, down to a floor.

    Each stage is a block of its own, and the last one stays in the allocator's pool in one piece
    (unless a larger one was refused, which empties the pool): a workload that fills its claim cuts
    its tensors out of it without gaps. The target is what is free now, so that the memory of other
    processes causes no failures, less what they are to find free at any moment. No tensor of the
    workload may be alive.

    Raises:
        ContextCorruptedError: The device failed in another way than by lack of memory.
    """
    target_bytes = _obtainable_bytes(device, settings, lease_bytes)
    claim_bytes = failures = 0
    share = settings.first_fraction
    wanted_bytes = int(min(1.0, share) * target_bytes)
    while claim_bytes < target_bytes:
        device.release()  # the last stage's block, or the cache that stood in the way
        room_bytes = _obtainable_bytes(device, settings, lease_bytes)
        if room_bytes <= claim_bytes:  # another process has grown meanwhile
            claim_bytes = room_bytes
            break
        wanted_bytes = min(wanted_bytes, room_bytes)
        obtained_bytes = _obtained(device, wanted_bytes)
        if obtained_bytes is None:
            failures += 1
            wanted_bytes = int(wanted_bytes * (1.0 - settings.retry_reduction))
            if wanted_bytes <= max(settings.floor_bytes, claim_bytes):
                device.release()
                break
            continue
        claim_bytes = max(claim_bytes, obtained_bytes)
        if failures or share >= 1.0:
            # All of it was obtained, or a refusal has found the limit; the largest block below it
            # is the claim.
            break
        share = share + settings.first_fraction
        wanted_bytes = int(min(1.0, share) * target_bytes)
    return Ramp(claim_bytes=claim_bytes, target_bytes=target_bytes, failures=failures)


def _obtainable_bytes(device: Device, settings: MemorySettings, lease_bytes: int | None) -> int:
    """Return how much more may be held now, by what `Session.measure_allowed` allows in all."""
    allowed_bytes = device.allowed_bytes(settings.leave_free_bytes)
    if lease_bytes is not None:
        allowed_bytes = min(allowed_bytes, lease_bytes)
    return max(0, min(device.free_bytes(), allowed_bytes - device.held_bytes()))


def _obtained(device: Device, wanted_bytes: int) -> int | None:
    """Obtain a block and let it go.

    Return the size it really had, or `None` if memory was short.
    """
    failure = None
    try:
        obtained_bytes = device.obtain(wanted_bytes)
    except Exception as error:  # noqa: BLE001 - every failure is classified; only memory's may pass
        failure = oom.classify(error)
    if failure is None:
        return obtained_bytes
    if failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        return None
    raise ContextCorruptedError(
        f"allocating {wanted_bytes} bytes failed for another reason: {failure.text}"
    )


def stay_in_emergency(session: Session, account: Account, reason: str) -> None:
    """No step fits: prove that the device answers, wait for the end of the turn, and measure again
    for the next.
    """
    session.enter_emergency(account, reason)
    session.park(account)
    account.settle(*session.waiting_state(WorkerState.EMERGENCY, reason))
    prove_alive(session, account)
    account.sleep(max(_EMERGENCY_PAUSE_S, account.remaining_s))
    session.rebase(account)
    claim_memory(session, account)
