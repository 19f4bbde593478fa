"""What a worker does when memory has run out: give everything back, prove that the device answers, look what is there.

Runs outside every exception handler: a handler's traceback holds the frames, and the frames hold the tensors. Decides
no size (the policy does).
"""

from __future__ import annotations

import time

from workers import oom
from workers.engine.memory_ramp import climb
from workers.engine.session import Life
from workers.engine.slice_stats import Tally
from workers.errors import PoisonedError
from workers.messages import WorkerState
from workers.oom import Failure
from workers.policy.base import Run, StepOom
from workers.settings import FailureKind

#: Share by which a claim must have changed to be an event: free memory never stands quite still.
_WORTH_TELLING = 0.01

#: Pause between two emergency products when nothing else fits: the worker shows that it lives and waits.
_EMERGENCY_PAUSE_S = 0.1


def find_claim(life: Life, tally: Tally) -> None:
    """Find out how much memory is there and tell the workload. Its tensors must be gone."""
    went = climb(life.device, life.spec.memory, life.lease_bytes)
    claim_bytes = int(life.claim_share * went.claim_bytes)
    tally.oom_count += went.failures
    moved = abs(claim_bytes - life.claim_bytes) > _WORTH_TELLING * life.claim_bytes
    if moved or went.failures:
        tally.event("claimed", claim_bytes=claim_bytes, target_bytes=went.target_bytes, failures=went.failures)
    life.claim_bytes = claim_bytes
    with life.device.enforced():
        life.workload.resize(claim_bytes)


def survive(life: Life, tally: Tally, run: Run, failure: Failure) -> StepOom:
    """Give everything back, see whether the device still answers, and find out what there is now.

    Raises:
        PoisonedError: It does not answer.
    """
    started = time.monotonic()
    tally.steps_oom += 1
    tally.oom_count += 1
    life.release()
    prove_alive(life, tally)
    life.device.rebase()
    needed_bytes = life.workload.needed_bytes(run.size, run.batch)
    free_bytes = life.device.free_bytes()
    if run.hold_bytes is None and needed_bytes is not None and needed_bytes <= life.claim_bytes:
        if life.failed_run == run:
            # It should have fitted, twice, so a step takes more than it says: leave more room beside the claim, as the
            # guide's progressive allocation does, or no size is small enough for a workload that fills its claim.
            life.claim_share *= 1.0 - life.spec.memory.retry_reduction
        life.failed_run = run
    find_claim(life, tally)
    tally.event(
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
        room_bytes=life.room_bytes(),
    )


def prove_alive(life: Life, tally: Tally) -> None:
    """Run the emergency product; a device that cannot do even that has poisoned this process."""
    failure = emergency_failure(life)
    if failure is not None and failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        # The error of the step itself may have surfaced only here: flushed now, and not to be taken for a broken card.
        life.device.release()
        failure = emergency_failure(life)
    if failure is not None:
        raise PoisonedError(failure.text)
    tally.emergency_count += 1


def emergency_failure(life: Life) -> Failure | None:
    """Return why the device cannot even run the emergency product, or `None` if it can.

    Raises:
        PoisonedError: It runs it, with a wrong result.
    """
    try:
        life.device.clear_pending_error()
        life.device.emergency()
    except PoisonedError:
        raise
    except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
        return oom.classify(error)
    return None


def stay_in_emergency(life: Life, tally: Tally, reason: str) -> None:
    """Nothing fits: show that the device lives, wait out the slice, and look again in the next one."""
    tally.settle(WorkerState.EMERGENCY, reason)
    if not life.in_emergency:
        tally.event("emergency", reason=reason)
        life.in_emergency = True
    life.release()
    prove_alive(life, tally)
    time.sleep(max(_EMERGENCY_PAUSE_S, tally.remaining_s))
    life.device.rebase()
    find_claim(life, tally)
