"""From a failed step to the next one: give memory back, prove that the device answers, measure, ask the policy.

The functions stand in the order in which they run. Runs outside every exception handler: the traceback of a
handler holds the frames, and the frames hold the tensors. Decides no size (the policy does).
"""

from __future__ import annotations

import time

from workers import oom
from workers.engine.memory_ramp import ramp_up
from workers.engine.session import Session
from workers.engine.slice_stats import SliceStats
from workers.errors import ContextCorruptedError
from workers.messages import WorkerState
from workers.oom import Failure
from workers.policy.base import Decision, Run, StepOom
from workers.settings import FailureKind

#: How many probable out-of-memory errors in a row are accepted. Their texts (cuBLAS, cuDNN) can also mean a bug of
#: the workload, and shrinking does not cure a bug.
MAX_PROBABLE_IN_A_ROW = 2

#: Share by which a claim must have changed to be an event: free memory always moves a little.
_MIN_CLAIM_CHANGE = 0.01

#: Pause between two emergency products when no step fits: the worker reports that it lives, and waits.
_EMERGENCY_PAUSE_S = 0.1


def handle_failure(
    session: Session, stats: SliceStats, run: Run, failure: Failure, traceback: str | None
) -> StepOom | None:
    """Recover from a failed step.

    Returns:
        What to tell the policy of an out-of-memory; `None` if the workload failed by its own fault, which ends the
        slice.

    Raises:
        ContextCorruptedError: The device no longer answers this process.
    """
    if failure.kind is FailureKind.CONTEXT_CORRUPTED:
        raise ContextCorruptedError(failure.text)
    if failure.kind is FailureKind.PROBABLE:
        session.count_probable_failure()
    if failure.kind is FailureKind.OTHER or session.probable_in_a_row > MAX_PROBABLE_IN_A_ROW:
        _blame_workload(session, stats, failure, traceback)
        return None
    return _recover(session, stats, run, failure)


def _blame_workload(session: Session, stats: SliceStats, failure: Failure, traceback: str | None) -> None:
    session.release()
    session.device.rebase()
    broken = _emergency_failure(session)  # some failures of the device itself read like a bug of the workload
    if broken is not None:
        raise ContextCorruptedError(broken.text)
    stats.step_failed()
    stats.raised(traceback)
    stats.settle(WorkerState.BACKOFF, f"the workload failed: {failure.text}")


def _recover(session: Session, stats: SliceStats, run: Run, failure: Failure) -> StepOom:
    """Give everything back, check that the device still answers, and measure what memory there is now."""
    started_s = time.monotonic()
    stats.step_out_of_memory()
    session.release()
    prove_alive(session, stats)
    session.device.rebase()
    needed_bytes = session.workload.needed_bytes(run.size, run.batch)
    free_bytes = session.device.free_bytes()
    if run.hold_bytes is None and needed_bytes is not None and needed_bytes <= session.claim_bytes:
        session.note_unexpected_oom(run)
    claim_memory(session, stats)
    stats.event(
        "oom",
        kind=failure.kind.value,
        evidence=failure.evidence,
        text=failure.text,
        size=run.size,
        batch=run.batch,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        recovery_s=time.monotonic() - started_s,
    )
    return StepOom(
        at_s=time.monotonic(),
        size=run.size,
        batch=run.batch,
        kind=failure.kind,
        needed_bytes=needed_bytes,
        free_bytes=free_bytes,
        allowed_bytes=session.measure_allowed(),
    )


def prove_alive(session: Session, stats: SliceStats) -> None:
    """Run the emergency product; a device that cannot do even that does not answer this process any more.

    Raises:
        ContextCorruptedError: It cannot.
    """
    failure = _emergency_failure(session)
    if failure is not None and failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        # The error of the step itself may have surfaced only here: clear it before the device is called broken.
        session.device.release()
        failure = _emergency_failure(session)
    if failure is not None:
        raise ContextCorruptedError(failure.text)
    stats.emergency_done()


def _emergency_failure(session: Session) -> Failure | None:
    """Return why the device cannot run the emergency product, or `None` if it can.

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


def claim_memory(session: Session, stats: SliceStats) -> None:
    """Find out by progressive allocation how much memory there is, and tell the workload. Its tensors must be gone."""
    ramp = ramp_up(session.device, session.spec.memory, session.lease_bytes)
    claim_bytes = int(session.claim_share * ramp.claim_bytes)
    stats.out_of_memory(ramp.failures)
    moved = abs(claim_bytes - session.claim_bytes) > _MIN_CLAIM_CHANGE * session.claim_bytes
    if moved or ramp.failures:
        stats.event("claimed", claim_bytes=claim_bytes, target_bytes=ramp.target_bytes, failures=ramp.failures)
    session.set_claim(claim_bytes)


def ask_after_oom(session: Session, stats: SliceStats, event: StepOom) -> Decision:
    """Tell the policy of an out-of-memory, and return what it wants next: another step, a release or the emergency."""
    decision = session.ask(event)
    if isinstance(decision, Run):
        again = (decision.size, decision.batch) == (event.size, event.batch)
        words = "once more at" if again else "down to"
        stats.settle(WorkerState.BACKOFF, f"out of memory at size {event.size}; {words} size {decision.size}")
        stats.event(
            "retry" if again else "backoff",
            from_size=event.size,
            from_batch=event.batch,
            size=decision.size,
            batch=decision.batch,
        )
    return decision


def stay_in_emergency(session: Session, stats: SliceStats, reason: str) -> None:
    """No step fits: prove that the device answers, wait for the end of the slice, and measure again for the next."""
    stats.settle(WorkerState.EMERGENCY, reason)
    if session.enter_emergency():
        stats.event("emergency", reason=reason)
    session.release()
    prove_alive(session, stats)
    time.sleep(max(_EMERGENCY_PAUSE_S, stats.remaining_s))
    session.device.rebase()
    claim_memory(session, stats)
