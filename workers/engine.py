"""One slice: ask the policy, run steps, survive, report.

The engine lives in the worker's process for as long as that does and is driven by directives. It never decides a
size (the policy does) and never touches the device but through `Device`. No exception leaves `run_slice` except a
request to stop the process: failures travel as text in the report.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Any

from workers import oom
from workers.claim import climb
from workers.devices.base import Device
from workers.devices.opening import open_device
from workers.errors import MisfitError, PoisonedError
from workers.messages import Directive, FailureKind, Report, ResumeState, Verdict, WorkerSpec, WorkerState
from workers.oom import Failure
from workers.policy.base import Decision, Emergency, Event, Policy, Pressure, Release, Run, StepOk, StepOom
from workers.policy.registry import make_policy
from workers.tally import Tally
from workers.workloads.base import StepResult, Workload, WorkloadContext
from workers.workloads.loading import load_workload

#: How many probable out-of-memory errors in a row are believed. Their texts (cuBLAS, cuDNN) can also mean a bug of
#: the workload, and shrinking does not cure a bug.
MAX_PROBABLE_IN_A_ROW = 2

#: Share by which a claim must have changed to be an event: free memory never stands quite still.
_WORTH_TELLING = 0.01

#: Pause between two emergency products when nothing else fits: the worker shows that it lives and waits.
_EMERGENCY_PAUSE_S = 0.1


@dataclass(slots=True)
class _Life:
    """What one process holds for its slot from the first directive on."""

    spec: WorkerSpec
    device: Device
    workload: Workload
    policy: Policy[Any]
    state: Any
    incarnation: int
    claim_bytes: int = 0
    claim_share: float = 1.0
    probable_in_a_row: int = 0
    owed_sleep_s: float = 0.0
    in_emergency: bool = False
    last_run: Run | None = None
    failed_run: Run | None = None

    def release(self) -> None:
        """Have the workload drop its tensors, and everything unused go back to the device."""
        with self.device.enforced():
            self.workload.release()
        self.device.release()

    def ask(self, event: Event) -> Decision:
        self.state, decision = self.policy.decide(self.state, event)
        return decision

    def pressure(self) -> Pressure:
        floor = self.policy.floor
        return Pressure(
            free_bytes=self.device.free_bytes(),
            needed_at_floor_bytes=self.workload.needed_bytes(floor.size, floor.batch),
        )


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self) -> None:
        """Touch nothing: the device is opened by the first directive, which says how."""
        self._life: _Life | None = None
        self._poisoned: str | None = None

    def run_slice(self, directive: Directive) -> Report:
        """Work for about `directive.duration_s` and say how it went.

        Returns:
            Always a report; its verdict says whether this process may go on.
        """
        tally = Tally(directive=directive)
        failure: Failure | None = None
        try:
            if self._poisoned is not None:
                raise PoisonedError(self._poisoned)  # noqa: TRY301 - a slice queued behind the one that found out
            life = self._adopt(directive, tally)
            _work(life, tally)
            memory = life.device.memory()
        except MisfitError as error:
            tally.settle(WorkerState.STOPPED, str(error))
            return tally.report(Verdict.MISFIT)
        except PoisonedError as error:
            return self._give_up(tally, str(error))
        except Exception as error:  # noqa: BLE001 - a user's release, resize or needed_bytes may raise anything too
            failure = oom.classify(error)
            tally.error = oom.traceback_text(error)
        if failure is not None:
            return self._stumble(tally, failure)
        tally.claim_bytes = life.claim_bytes
        return tally.report(Verdict.OK, device=life.device.info, memory=memory, resume=self._resume())

    def _give_up(self, tally: Tally, reason: str) -> Report:
        self._poisoned = reason
        tally.settle(WorkerState.RESTARTING, f"the device no longer answers this process: {reason}")
        tally.event("poisoned", reason=reason)
        return tally.report(Verdict.POISONED, resume=self._resume())

    def _stumble(self, tally: Tally, failure: Failure) -> Report:
        """Report a failure outside any step as an error of the workload: it ends the slice and nothing else."""
        if failure.kind is FailureKind.POISONED:
            return self._give_up(tally, failure.text)
        tally.steps_error += 1
        tally.settle(WorkerState.BACKOFF, f"the workload failed outside its step: {failure.text}")
        device = None if self._life is None else self._life.device.info
        return tally.report(Verdict.OK, device=device, resume=self._resume())

    def _resume(self) -> ResumeState | None:
        return None if self._life is None else self._life.policy.dump(self._life.state)

    def _adopt(self, directive: Directive, tally: Tally) -> _Life:
        """Open the device for the first directive; take over its resume state when the slot got a new incarnation."""
        life = self._life
        if life is None:
            life = self._life = _open(directive.spec, directive.incarnation, tally)
            life.state = _resumed(life.policy, directive.resume, tally)
            tally.event(
                "device_opened",
                device=life.device.info.name,
                pid=life.device.info.pid,
                cap_bytes=life.device.info.cap_bytes,
                context_bytes=life.device.info.context_bytes,
                context_source=life.device.info.context_source,
                dtype=life.device.info.dtype,
                threads=life.device.info.threads,
            )
            _climb(life, tally)
        elif life.incarnation != directive.incarnation:
            life.incarnation = directive.incarnation
            life.state = _resumed(life.policy, directive.resume, tally)
        return life


def _open(spec: WorkerSpec, incarnation: int, tally: Tally) -> _Life:
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
    try:
        device = open_device(spec)
        context = WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=spec.workload.seed)
        workload = load_workload(spec.workload.name, context)
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
    return _Life(
        spec=spec,
        device=device,
        workload=workload,
        policy=policy,
        state=policy.initial(),
        incarnation=incarnation,
    )


def _resumed(policy: Policy[Any], resume: ResumeState | None, tally: Tally) -> Any:  # noqa: ANN401 - the policy's own
    if resume is None:
        return policy.initial()
    try:
        state = policy.load(resume)
    except ValueError as error:
        tally.event("resume_refused", reason=str(error))
        return policy.initial()
    tally.event("resumed", **dict(resume))
    return state


def _climb(life: _Life, tally: Tally) -> None:
    """Find out how much memory is there and tell the workload. Its tensors must be gone."""
    went = climb(life.device, life.spec.memory)
    claim_bytes = int(life.claim_share * went.claim_bytes)
    tally.oom_count += went.failures
    moved = abs(claim_bytes - life.claim_bytes) > _WORTH_TELLING * life.claim_bytes
    if moved or went.failures:
        tally.event("claimed", claim_bytes=claim_bytes, target_bytes=went.target_bytes, failures=went.failures)
    life.claim_bytes = claim_bytes
    with life.device.enforced():
        life.workload.resize(claim_bytes)


def _work(life: _Life, tally: Tally) -> None:
    """Follow the policy until the slice is over.

    A slice of no duration ends with the first good step. An error of the workload ends any slice, so that the head
    sees it before it happens a thousand times.
    """
    if life.last_run is not None:
        tally.size, tally.batch = life.last_run.size, life.last_run.batch
    _pay_sleep(life, tally)
    if life.owed_sleep_s > 0 and tally.directive.duration_s > 0:
        tally.settle(WorkerState.RUNNING, "resting, as its duty asks after a long step")
        return
    decision = life.ask(life.pressure())
    while True:
        match decision:
            case Release():
                life.device.release()
                decision = life.ask(life.pressure())
                continue
            case Emergency(reason=reason):
                _stay_in_emergency(life, tally, reason)
                return
            case Run():
                event = _step(life, tally, decision)
        if event is None:
            return
        decision = life.ask(event)
        if isinstance(event, StepOk):
            _owe_sleep(life, event.seconds)
            _pay_sleep(life, tally)
            if tally.remaining_s <= 0:
                if isinstance(decision, Release):
                    life.device.release()  # the next slice asks anew, and the policy counts this one as done
                return
        else:
            _note_backoff(tally, event, decision)
            if tally.remaining_s <= 0 and tally.directive.duration_s > 0:
                return


def _step(life: _Life, tally: Tally, run: Run) -> Event | None:
    """Run one step; return what to tell the policy, or `None` if the workload failed by its own fault."""
    failure: Failure | None = None
    traceback: str | None = None
    life.last_run = run
    tally.size, tally.batch = run.size, run.batch
    try:
        result, seconds = life.device.timed(lambda: life.workload.step(run.size, run.batch))
        flop = _flop(result)
    except Exception as error:  # noqa: BLE001 - classified below, outside the handler
        # Only text leaves the handler: the traceback holds the frames, and the frames hold the tensors.
        failure = oom.classify(error)
        traceback = oom.traceback_text(error)
    if failure is None:
        life.probable_in_a_row = 0
        life.in_emergency = False
        life.failed_run = None
        tally.steps_ok += 1
        tally.work_flop += flop
        tally.busy_s += seconds
        tally.settle(WorkerState.RUNNING, "")
        return StepOk(size=run.size, batch=run.batch, peak_bytes=life.device.step_peak_bytes(), seconds=seconds)
    if failure.kind is FailureKind.PROBABLE:
        life.probable_in_a_row += 1
    if failure.kind is FailureKind.OTHER or life.probable_in_a_row > MAX_PROBABLE_IN_A_ROW:
        life.release()
        life.device.rebase()
        broken = _emergency_failure(life)  # some of the card's own failures read like a bug of the workload
        if broken is not None:
            raise PoisonedError(broken.text)
        tally.steps_error += 1
        tally.error = traceback
        tally.settle(WorkerState.BACKOFF, f"the workload failed: {failure.text}")
        return None
    if failure.kind is FailureKind.POISONED:
        raise PoisonedError(failure.text)
    return _survive(life, tally, run, failure)


def _flop(result: object) -> float:
    """Return what a step counted; users tend to return their loss.

    Raises:
        TypeError: The step returned something else.
    """
    if result is None:
        return 0.0
    if isinstance(result, StepResult):
        return result.flop
    raise TypeError(f"a step must return a StepResult or None, not {type(result).__name__}")


def _survive(life: _Life, tally: Tally, run: Run, failure: Failure) -> StepOom:
    """Give everything back, see whether the device still answers, and find out what there is now.

    Raises:
        PoisonedError: It does not answer.
    """
    started = time.monotonic()
    tally.steps_oom += 1
    tally.oom_count += 1
    life.release()
    _prove_alive(life, tally)
    life.device.rebase()
    needed_bytes = life.workload.needed_bytes(run.size, run.batch)
    free_bytes = life.device.free_bytes()
    if needed_bytes is not None and needed_bytes <= life.claim_bytes:
        if life.failed_run == run:
            # It should have fitted, twice, so a step takes more than it says: leave more room beside the claim, as the
            # guide's progressive allocation does, or no size is small enough for a workload that fills its claim.
            life.claim_share *= 1.0 - life.spec.memory.retry_reduction
        life.failed_run = run
    _climb(life, tally)
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
    return StepOom(size=run.size, batch=run.batch, kind=failure.kind, needed_bytes=needed_bytes, free_bytes=free_bytes)


def _prove_alive(life: _Life, tally: Tally) -> None:
    """Run the emergency product; a device that cannot do even that has poisoned this process."""
    failure = _emergency_failure(life)
    if failure is not None and failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        # The error of the step itself may have surfaced only here: flushed now, and not to be taken for a broken card.
        life.device.release()
        failure = _emergency_failure(life)
    if failure is not None:
        raise PoisonedError(failure.text)
    tally.emergency_count += 1


def _emergency_failure(life: _Life) -> Failure | None:
    try:
        life.device.clear_pending_error()
        life.device.emergency()
    except PoisonedError:
        raise
    except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
        return oom.classify(error)
    return None


def _stay_in_emergency(life: _Life, tally: Tally, reason: str) -> None:
    """Nothing fits: show that the device lives, wait out the slice, and look again in the next one."""
    tally.settle(WorkerState.EMERGENCY, reason)
    if not life.in_emergency:
        tally.event("emergency", reason=reason)
        life.in_emergency = True
    life.release()
    _prove_alive(life, tally)
    time.sleep(max(_EMERGENCY_PAUSE_S, tally.remaining_s))
    life.device.rebase()
    _climb(life, tally)


def _note_backoff(tally: Tally, event: Event, decision: Decision) -> None:
    if isinstance(event, StepOom) and isinstance(decision, Run):
        again = (decision.size, decision.batch) == (event.size, event.batch)
        words = "once more at" if again else "down to"
        tally.settle(WorkerState.BACKOFF, f"out of memory at size {event.size}; {words} size {decision.size}")
        tally.event(
            "retry" if again else "backoff",
            from_size=event.size,
            from_batch=event.batch,
            size=decision.size,
            batch=decision.batch,
        )


def _owe_sleep(life: _Life, busy_s: float) -> None:
    """A step of `busy_s` at duty d owes busy_s x (1/d - 1) of idleness."""
    if life.spec.duty is not None:
        life.owed_sleep_s += busy_s * (1.0 / life.spec.duty - 1.0)


def _pay_sleep(life: _Life, tally: Tally) -> None:
    """Sleep off what is owed, as far as the slice allows; the rest is left to the next one."""
    pause_s = min(life.owed_sleep_s, tally.remaining_s)
    if pause_s > 0:
        time.sleep(pause_s)
        life.owed_sleep_s -= pause_s
