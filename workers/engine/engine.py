"""One slice: ask the policy, run steps, survive, report.

The engine lives in the worker's process for as long as that does and is driven by directives. It never decides a
size (the policy does) and never touches the device but through `Device`. No exception leaves `run_slice` except a
request to stop the process: failures travel as text in the report.
"""

from __future__ import annotations

import time
from dataclasses import replace

from workers import oom
from workers.engine.duty_cycle import GLANCE_S, between_steps, cool_enough, pay_sleep, settle_working
from workers.engine.oom_recovery import emergency_failure, find_claim, stay_in_emergency, survive
from workers.engine.session import Life, open_life, take_up
from workers.engine.slice_stats import Tally
from workers.errors import MisfitError, PoisonedError
from workers.messages import Directive, Report, ResumeState, Verdict, WorkerState
from workers.oom import Failure
from workers.policy.base import Decision, Emergency, Event, Release, Run, StepOk, StepOom
from workers.settings import FailureKind
from workers.workloads.base import StepResult

#: How many probable out-of-memory errors in a row are believed. Their texts (cuBLAS, cuDNN) can also mean a bug of
#: the workload, and shrinking does not cure a bug.
MAX_PROBABLE_IN_A_ROW = 2

#: Factor between two steps that is an event.
_WORTH_TELLING = 1.1


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self) -> None:
        """Touch nothing: the device is opened by the first directive, which says how."""
        self._life: Life | None = None
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
            if life.chaos is not None:
                life.chaos.begin_slice(tally)
            life.heat.look(tally)
            if _begun(life, tally):
                _work(life, tally)
            tally.sensors = life.heat.reading
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
        tally.learned = None if life.state is None else life.lesson(memory.peak_bytes)
        return tally.report(Verdict.OK, device=life.device.info, memory=memory, resume=self._resume(tally))

    def _give_up(self, tally: Tally, reason: str) -> Report:
        self._poisoned = reason
        tally.settle(WorkerState.RESTARTING, f"the device no longer answers this process: {reason}")
        tally.event("poisoned", reason=reason)
        # With the device, if it was ever opened: without it the head takes an out-of-memory for a card that is full.
        device = None if self._life is None else self._life.device.info
        return tally.report(Verdict.POISONED, device=device, resume=self._resume(tally))

    def _stumble(self, tally: Tally, failure: Failure) -> Report:
        """Report a failure outside any step as an error of the workload: it ends the slice and nothing else."""
        if failure.kind is FailureKind.POISONED:
            return self._give_up(tally, failure.text)
        tally.steps_error += 1
        tally.settle(WorkerState.BACKOFF, f"the workload failed outside its step: {failure.text}")
        device = None if self._life is None else self._life.device.info
        return tally.report(Verdict.OK, device=device, resume=self._resume(tally))

    def _resume(self, tally: Tally) -> ResumeState | None:
        life = self._life
        if life is None:
            return None
        return tally.directive.resume if life.state is None else life.policy.dump(life.state)

    def _adopt(self, directive: Directive, tally: Tally) -> Life:
        """Open the device for the first directive; take over its resume state when the slot got a new incarnation."""
        life = self._life
        if life is None:
            life = self._life = open_life(directive.spec, directive.incarnation, tally)
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
        elif life.incarnation != directive.incarnation:
            life.incarnation = directive.incarnation
            if life.state is not None:
                take_up(life, tally)
        life.lease_bytes = directive.lease_bytes
        return life


def _begun(life: Life, tally: Tally) -> bool:
    """Find out what memory there is, and give the policy its state, unless that is done; say whether it is.

    A lease of nothing asks a process that shares its card to open it and to tell what is there, and no more: it climbs
    once it knows which bytes are its own.
    """
    if life.lease_bytes == 0:
        tally.settle(WorkerState.WARMING, "its device is open; it waits for its share of the card")
        if life.state is not None:
            life.release()
        time.sleep(min(tally.remaining_s, GLANCE_S))
        return False
    if life.state is not None:
        return True
    with life.device.alone():
        find_claim(life, tally)
    take_up(life, tally)
    return True


def _work(life: Life, tally: Tally) -> None:
    """Follow the policy until the slice is over.

    A slice of no duration ends with the first good step. An error of the workload ends any slice, so that the head
    sees it before it happens a thousand times.
    """
    if life.last_run is not None:
        tally.size, tally.batch = life.last_run.size, life.last_run.batch
    pay_sleep(life, tally)
    if life.owed_sleep_s > 0 and tally.directive.duration_s > 0:
        settle_working(life, tally, "resting, as its duty asks after a long step")
        return
    decision = life.ask(life.pressure())
    while True:
        match decision:
            case Release():
                life.device.release()
                decision = life.ask(life.pressure())
                continue
            case Emergency(reason=reason):
                stay_in_emergency(life, tally, reason)
                return
            case Run():
                event = _step(life, tally, decision)
        if event is None:
            return
        if isinstance(event, StepOk):
            between_steps(life, tally, event)
            # Looked at after the sleep: what was free before it may have been taken meanwhile.
            decision = life.ask(replace(event, at_s=time.monotonic(), room_bytes=life.room_bytes_if_due()))
            if tally.remaining_s <= 0:
                if isinstance(decision, Release):
                    life.device.release()  # the next slice asks anew, and the policy counts this one as done
                return
        else:
            decision = life.ask(event)
            _note_backoff(tally, event, decision)
            if tally.remaining_s <= 0 and tally.directive.duration_s > 0:
                return


def _step(life: Life, tally: Tally, run: Run) -> Event | None:
    """Run one step; return what to tell the policy.

    `None` if there is nothing to tell, and no more to do in this slice: the workload failed by its own fault, or the
    card is too hot.
    """
    if not cool_enough(life, tally):
        return None
    failure: Failure | None = None
    traceback: str | None = None
    _note_change(life, tally, run)
    life.last_run = run
    if run.hold_bytes is not None and run.hold_bytes != life.claim_bytes:
        life.hold(run.hold_bytes)
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
        settle_working(life, tally)
        return StepOk(
            at_s=time.monotonic(),
            size=run.size,
            batch=run.batch,
            peak_bytes=life.device.step_peak_bytes(),
            seconds=seconds,
            room_bytes=None,
        )
    if failure.kind is FailureKind.PROBABLE:
        life.probable_in_a_row += 1
    if failure.kind is FailureKind.OTHER or life.probable_in_a_row > MAX_PROBABLE_IN_A_ROW:
        life.release()
        life.device.rebase()
        broken = emergency_failure(life)  # some of the card's own failures read like a bug of the workload
        if broken is not None:
            raise PoisonedError(broken.text)
        tally.steps_error += 1
        tally.error = traceback
        tally.settle(WorkerState.BACKOFF, f"the workload failed: {failure.text}")
        return None
    if failure.kind is FailureKind.POISONED:
        raise PoisonedError(failure.text)
    return survive(life, tally, run, failure)


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


def _note_change(life: Life, tally: Tally, run: Run) -> None:
    """Tell of a step that is much smaller or larger than the last one told of. After a failure `backoff` tells it."""
    told = life.told_run
    if told is None or run == told:
        life.told_run = run
        return
    now, before = (each.hold_bytes or each.size * each.size * each.batch for each in (run, told))
    if max(now, before) < _WORTH_TELLING * min(now, before):
        return
    life.told_run = run
    tally.event(
        "gave_way" if now < before else "grew",
        from_size=told.size,
        from_batch=told.batch,
        from_hold_bytes=told.hold_bytes,
        size=run.size,
        batch=run.batch,
        hold_bytes=run.hold_bytes,
        room_bytes=life.room,
    )


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
