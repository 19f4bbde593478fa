"""One slice: ask the policy, run steps, survive, report.

The engine lives as long as the worker's process and is driven by directives. It never decides a size (the policy does)
and uses the device only through `Device`. No exception leaves `run_slice` except a request to stop the process:
failures are text in the report.
"""

from __future__ import annotations

import time
from dataclasses import replace

from workers import oom
from workers.engine.duty_cycle import GLANCE_S, between_steps, cool_enough, pay_sleep, settle_working
from workers.engine.oom_recovery import emergency_failure, find_claim, stay_in_emergency, survive
from workers.engine.session import Session, open_session, take_up
from workers.engine.slice_stats import SliceStats
from workers.errors import ContextCorruptedError, IncompatibleError
from workers.messages import Directive, Report, ResumeState, Verdict, WorkerState
from workers.oom import Failure
from workers.policy.base import Decision, Emergency, Event, Release, Run, StepOk, StepOom
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import StepResult

#: How many probable out-of-memory errors in a row are accepted. Their texts (cuBLAS, cuDNN) can also mean a bug of
#: the workload, and shrinking does not cure a bug.
MAX_PROBABLE_IN_A_ROW = 2

#: Factor between two steps that is an event.
_WORTH_TELLING = 1.1


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Touch nothing: the first directive opens the device."""
        self._spec = spec
        self._life: Session | None = None
        self._poisoned: str | None = None

    def run_slice(self, directive: Directive) -> Report:
        """Work for about `directive.duration_s` and say how it went.

        Returns:
            Always a report; its verdict says whether this process may continue.
        """
        stats = SliceStats(slot=self._spec.slot, directive=directive)
        failure: Failure | None = None
        try:
            if self._poisoned is not None:
                raise ContextCorruptedError(self._poisoned)  # noqa: TRY301 - a slice queued behind the one that found out
            session = self._adopt(directive, stats)
            if session.chaos is not None:
                session.chaos.begin_slice(stats)
            session.heat.look(stats)
            if _begun(session, stats):
                _work(session, stats)
            stats.sensors = session.heat.reading
            memory = session.device.memory()
        except IncompatibleError as error:
            stats.settle(WorkerState.STOPPED, str(error))
            return stats.report(Verdict.INCOMPATIBLE)
        except ContextCorruptedError as error:
            return self._give_up(stats, str(error))
        except Exception as error:  # noqa: BLE001 - a user's release, resize or needed_bytes may raise anything too
            failure = oom.classify(error)
            stats.raised(oom.traceback_text(error))
        if failure is not None:
            return self._stumble(stats, failure)
        stats.claim_bytes = session.claim_bytes
        stats.learned = None if session.state is None else session.lesson(memory.peak_bytes)
        return stats.report(Verdict.OK, device=session.device.info, memory=memory, resume=self._resume(stats))

    def _give_up(self, stats: SliceStats, reason: str) -> Report:
        self._poisoned = reason
        stats.settle(WorkerState.STOPPED, f"the device no longer answers this process: {reason}")
        stats.event("poisoned", reason=reason)
        # With the device, if it was ever opened: without it the head takes an out-of-memory for a card that is full.
        device = None if self._life is None else self._life.device.info
        return stats.report(Verdict.CONTEXT_CORRUPTED, device=device, resume=self._resume(stats))

    def _stumble(self, stats: SliceStats, failure: Failure) -> Report:
        """Report a failure outside any step as an error of the workload: it ends the slice and nothing else."""
        if failure.kind is FailureKind.CONTEXT_CORRUPTED:
            return self._give_up(stats, failure.text)
        stats.step_failed()
        stats.settle(WorkerState.BACKOFF, f"the workload failed outside its step: {failure.text}")
        device = None if self._life is None else self._life.device.info
        return stats.report(Verdict.OK, device=device, resume=self._resume(stats))

    def _resume(self, stats: SliceStats) -> ResumeState | None:
        session = self._life
        if session is None:
            return None
        return stats.directive.resume if session.state is None else session.policy.dump(session.state)

    def _adopt(self, directive: Directive, stats: SliceStats) -> Session:
        """Open the device for the first directive; take over its resume state when the slot got a new incarnation."""
        session = self._life
        if session is None:
            session = self._life = open_session(self._spec, directive.incarnation, stats)
            stats.event(
                "device_opened",
                device=session.device.info.name,
                pid=session.device.info.pid,
                cap_bytes=session.device.info.cap_bytes,
                context_bytes=session.device.info.context_bytes,
                context_source=session.device.info.context_source,
                dtype=session.device.info.dtype,
                threads=session.device.info.threads,
            )
        elif session.incarnation != directive.incarnation:
            session.incarnation = directive.incarnation
            if session.state is not None:
                take_up(session, stats)
        session.lease_bytes = directive.lease_bytes
        return session


def _begun(session: Session, stats: SliceStats) -> bool:
    """Find out what memory there is, and give the policy its state, unless that is done; say whether it is.

    A lease of nothing asks a process that shares its card to open it and to tell what is there, and no more: it climbs
    once it knows which bytes are its own.
    """
    if session.lease_bytes == 0:
        stats.settle(WorkerState.WARMING, "its device is open; it waits for its share of the card")
        if session.state is not None:
            session.release()
        time.sleep(min(stats.remaining_s, GLANCE_S))
        return False
    if session.state is not None:
        return True
    with session.device.alone():
        find_claim(session, stats)
    take_up(session, stats)
    return True


def _work(session: Session, stats: SliceStats) -> None:
    """Follow the policy until the slice is over.

    A slice of no duration ends with the first good step. An error of the workload ends any slice, so that the head
    sees it before it happens a thousand times.
    """
    if session.last_run is not None:
        stats.use(session.last_run.size, session.last_run.batch)
    pay_sleep(session, stats)
    if session.owed_sleep_s > 0 and stats.directive.duration_s > 0:
        settle_working(session, stats, "resting, as its duty asks after a long step")
        return
    decision = session.ask(session.pressure())
    while True:
        match decision:
            case Release():
                session.device.release()
                decision = session.ask(session.pressure())
                continue
            case Emergency(reason=reason):
                stay_in_emergency(session, stats, reason)
                return
            case Run():
                event = _step(session, stats, decision)
        if event is None:
            return
        if isinstance(event, StepOk):
            between_steps(session, stats, event)
            # Looked at after the sleep: what was free before it may have been taken meanwhile.
            decision = session.ask(replace(event, at_s=time.monotonic(), room_bytes=session.room_bytes_if_due()))
            if stats.remaining_s <= 0:
                if isinstance(decision, Release):
                    session.device.release()  # the next slice asks again, and the policy counts this one as done
                return
        else:
            decision = session.ask(event)
            _note_backoff(stats, event, decision)
            if stats.remaining_s <= 0 and stats.directive.duration_s > 0:
                return


def _step(session: Session, stats: SliceStats, run: Run) -> Event | None:
    """Run one step; return what to tell the policy.

    `None` if there is nothing to tell, and no more to do in this slice: the workload failed by its own fault, or the
    card is too hot.
    """
    if not cool_enough(session, stats):
        return None
    failure: Failure | None = None
    traceback: str | None = None
    _note_change(session, stats, run)
    session.last_run = run
    if run.hold_bytes is not None and run.hold_bytes != session.claim_bytes:
        session.hold(run.hold_bytes)
    stats.use(run.size, run.batch)
    try:
        result, seconds = session.device.timed(lambda: session.workload.step(run.size, run.batch))
        flop = _flop(result)
    except Exception as error:  # noqa: BLE001 - classified below, outside the handler
        # Only text leaves the handler: the traceback holds the frames, and the frames hold the tensors.
        failure = oom.classify(error)
        traceback = oom.traceback_text(error)
    if failure is None:
        session.probable_in_a_row = 0
        session.in_emergency = False
        session.failed_run = None
        stats.step_done(flop, seconds)
        settle_working(session, stats)
        return StepOk(
            at_s=time.monotonic(),
            size=run.size,
            batch=run.batch,
            peak_bytes=session.device.step_peak_bytes(),
            seconds=seconds,
            room_bytes=None,
        )
    if failure.kind is FailureKind.PROBABLE:
        session.probable_in_a_row += 1
    if failure.kind is FailureKind.OTHER or session.probable_in_a_row > MAX_PROBABLE_IN_A_ROW:
        session.release()
        session.device.rebase()
        broken = emergency_failure(session)  # some of the card's own failures read like a bug of the workload
        if broken is not None:
            raise ContextCorruptedError(broken.text)
        stats.step_failed()
        stats.raised(traceback)
        stats.settle(WorkerState.BACKOFF, f"the workload failed: {failure.text}")
        return None
    if failure.kind is FailureKind.CONTEXT_CORRUPTED:
        raise ContextCorruptedError(failure.text)
    return survive(session, stats, run, failure)


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


def _note_change(session: Session, stats: SliceStats, run: Run) -> None:
    """Write an event for a step much smaller or larger than the last one written. After a failure `backoff` says so."""
    told = session.told_run
    if told is None or run == told:
        session.told_run = run
        return
    now, before = (each.hold_bytes or each.size * each.size * each.batch for each in (run, told))
    if max(now, before) < _WORTH_TELLING * min(now, before):
        return
    session.told_run = run
    stats.event(
        "gave_way" if now < before else "grew",
        from_size=told.size,
        from_batch=told.batch,
        from_hold_bytes=told.hold_bytes,
        size=run.size,
        batch=run.batch,
        hold_bytes=run.hold_bytes,
        room_bytes=session.room,
    )


def _note_backoff(stats: SliceStats, event: Event, decision: Decision) -> None:
    if isinstance(event, StepOom) and isinstance(decision, Run):
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
