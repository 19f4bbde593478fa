"""Recovery from out-of-memory: give everything back, prove that the device answers, measure what is free.

Runs outside every exception handler: a handler's traceback holds the frames, and the frames hold the tensors. Decides
no size (the policy does).
"""

from __future__ import annotations

import time

from workers import oom
from workers.engine.memory_ramp import climb
from workers.engine.session import Session
from workers.engine.slice_stats import SliceStats
from workers.errors import ContextCorruptedError
from workers.messages import WorkerState
from workers.oom import Failure
from workers.policy.base import Run, StepOom
from workers.settings import FailureKind

#: Share by which a claim must have changed to be an event: free memory never stands quite still.
_WORTH_TELLING = 0.01

#: Pause between two emergency products when nothing else fits: the worker shows that it lives and waits.
_EMERGENCY_PAUSE_S = 0.1


def find_claim(session: Session, stats: SliceStats) -> None:
    """Find out how much memory is there and tell the workload. Its tensors must be gone."""
    went = climb(session.device, session.spec.memory, session.lease_bytes)
    claim_bytes = int(session.claim_share * went.claim_bytes)
    stats.out_of_memory(went.failures)
    moved = abs(claim_bytes - session.claim_bytes) > _WORTH_TELLING * session.claim_bytes
    if moved or went.failures:
        stats.event("claimed", claim_bytes=claim_bytes, target_bytes=went.target_bytes, failures=went.failures)
    session.claim_bytes = claim_bytes
    with session.device.enforced():
        session.workload.resize(claim_bytes)


def survive(session: Session, stats: SliceStats, run: Run, failure: Failure) -> StepOom:
    """Give everything back, see whether the device still answers, and find out what there is now.

    Raises:
        ContextCorruptedError: It does not answer.
    """
    started = time.monotonic()
    stats.step_out_of_memory()
    session.release()
    prove_alive(session, stats)
    session.device.rebase()
    needed_bytes = session.workload.needed_bytes(run.size, run.batch)
    free_bytes = session.device.free_bytes()
    if run.hold_bytes is None and needed_bytes is not None and needed_bytes <= session.claim_bytes:
        if session.failed_run == run:
            # It should have fitted, twice, so a step takes more than it says: leave more room beside the claim, as the
            # guide's progressive allocation does, or no size is small enough for a workload that fills its claim.
            session.claim_share *= 1.0 - session.spec.memory.retry_reduction
        session.failed_run = run
    find_claim(session, stats)
    stats.event(
        "oom",
        kind=failure.kind.value,
        evidence=failure.evidence,
        text=failure.text,
        size=run.size,
        batch=run.batch,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        recovery_s=time.monotonic() - started,
    )
    return StepOom(
        at_s=time.monotonic(),
        size=run.size,
        batch=run.batch,
        kind=failure.kind,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        room_bytes=session.room_bytes(),
    )


def prove_alive(session: Session, stats: SliceStats) -> None:
    """Run the emergency product; a device that cannot do even that has corrupted this process's context."""
    failure = emergency_failure(session)
    if failure is not None and failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        # The error of the step itself may have surfaced only here: flushed now, and not to be mistaken for a broken
        # card.
        session.device.release()
        failure = emergency_failure(session)
    if failure is not None:
        raise ContextCorruptedError(failure.text)
    stats.emergency_done()


def emergency_failure(session: Session) -> Failure | None:
    """Return why the device cannot even run the emergency product, or `None` if it can.

    Raises:
        ContextCorruptedError: It runs it, with a wrong result.
    """
    try:
        session.device.clear_pending_error()
        session.device.emergency()
    except ContextCorruptedError:
        raise
    except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
        return oom.classify(error)
    return None


def stay_in_emergency(session: Session, stats: SliceStats, reason: str) -> None:
    """Nothing fits: show that the device lives, wait out the slice, and look again in the next one."""
    stats.settle(WorkerState.EMERGENCY, reason)
    if not session.in_emergency:
        stats.event("emergency", reason=reason)
        session.in_emergency = True
    session.release()
    prove_alive(session, stats)
    time.sleep(max(_EMERGENCY_PAUSE_S, stats.remaining_s))
    session.device.rebase()
    find_claim(session, stats)
