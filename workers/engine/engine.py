"""One slice: ask the policy, run steps, rest between them, report.

The engine lives as long as the worker's process. It never decides a size (the policy does). What
follows a step that fails is in `oom_recovery.py`. No exception leaves `run_slice` except a request
to stop the process (a signal's handler raised it): failures are text in the report, and a
SystemExit of the workload is one of them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Final

import psutil

from workers import oom
from workers.engine.oom_recovery import claim_memory, recover, stay_in_emergency
from workers.engine.session import Session, open_session
from workers.engine.slice_stats import SliceStats
from workers.messages import (
    ContextCorruptedError,
    Directive,
    IncompatibleError,
    MemoryInfo,
    Progress,
    Report,
    StepCounts,
    Verdict,
    WorkerState,
)
from workers.oom import Failure
from workers.policy.base import Decision, Release, Run, StepOk
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import StepResult

#: Length of a slice without work, and time between two sensor readings of a card that is too hot.
#: It is short, because the head may change the lease at any time.
_IDLE_POLL_S: Final = 0.1


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Touch nothing: the first directive opens the device."""
        self._spec = spec
        self._session: Session | None = None
        self._corrupted: str | None = None

    def run_slice(self, directive: Directive) -> Report:
        """Work for about `directive.duration_s`.

        The report's verdict says whether this process may continue.
        """
        stats = SliceStats(slot=self._spec.slot, directive=directive)
        memory: MemoryInfo | None = None
        progress: Progress | None = None
        verdict = Verdict.OK
        try:
            if self._corrupted is not None:
                # A slice queued behind the one that found out.
                raise ContextCorruptedError(self._corrupted)  # noqa: TRY301
            if self._session is None:
                self._session = open_session(self._spec, stats)
            self._session.begin_slice(stats)
            if not self._session.workload.finished and _prepare(self._session, stats):
                _work(self._session, stats)
            progress = self._session.progress()
            if self._session.workload.finished:
                # The process ends after that: first all of its state must have left it.
                if not self._session.pieces.pending(self._session.workload.saved):
                    verdict = Verdict.DONE
                stats.settle(WorkerState.DONE, "all its work is done")
            memory = replace(self._session.device.memory(), kept_bytes=self._session.kept_bytes)
        except IncompatibleError as error:
            verdict = error.verdict
            stats.settle(WorkerState.STOPPED, str(error))
        except ContextCorruptedError as error:
            verdict = self._give_up(stats, str(error))
        # A user's release, resize or needed_bytes may raise anything too.
        except BaseException as error:  # noqa: BLE001
            failure = oom.failure_of_workload(error)
            stats.error = oom.traceback_text(error)
            if failure.kind is FailureKind.CONTEXT_CORRUPTED:
                verdict = self._give_up(stats, failure.text)
            else:  # an error of the workload: it ends the slice and nothing else
                stats.counts += StepCounts(steps_error=1)
                stats.settle(
                    WorkerState.BACKOFF, f"the workload failed outside its step: {failure.text}"
                )
        return replace(self._report(stats, verdict, memory), progress=progress)

    def _give_up(self, stats: SliceStats, reason: str) -> Verdict:
        self._corrupted = reason
        stats.settle(WorkerState.STOPPED, f"the device no longer answers this process: {reason}")
        stats.event("poisoned", reason=reason)
        return Verdict.CONTEXT_CORRUPTED

    def _report(self, stats: SliceStats, verdict: Verdict, memory: MemoryInfo | None) -> Report:
        """Close the slice; `memory` is `None` if it ended by a failure."""
        session, directive = self._session, stats.directive
        report = Report(
            slot=stats.slot,
            incarnation=directive.incarnation,
            sequence=directive.sequence,
            verdict=verdict,
            state=stats.state,
            reason=stats.reason,
            device=None,
            memory=memory,
            size=stats.size,
            batch=stats.batch,
            claim_bytes=None,
            counts=stats.counts,
            wall_s=stats.elapsed_s,
            longest_step_s=stats.longest_step_s,
            rss_bytes=psutil.Process().memory_info().rss,
            error=stats.error,
            events=tuple(stats.events),
        )
        if session is None:
            return report
        return replace(
            report,
            events=(*report.events, *session.told.taken()),
            checkpoint=session.pieces.next(session.workload.saved),
            save_due=session.workload.save_due
            or (directive.save and session.pieces.pending(session.workload.saved)),
            # After every failure too: without it the head takes an out-of-memory for a card that is
            # full.
            device=session.device.info,
            sensors=session.thermal.reading,
            claim_bytes=None if memory is None else session.claim_bytes,
            resume=directive.resume
            if session.state is None
            else session.policy.dump(session.state),
            metrics=dict(session.workload.metrics),
            learned=None if memory is None else session.learned_limit(memory.peak_bytes),
        )


def _prepare(session: Session, stats: SliceStats) -> bool:
    """Find out what memory there is, and give the policy its state, unless that is done; say
    whether it is.

    A lease of 0 bytes asks a process that shares its card to open it and to report what memory
    there is, and no more: progressive allocation waits until the head has said how many bytes are
    for this worker.
    """
    if session.lease_bytes == 0:
        if session.state is not None:
            session.park(stats)
        waits = "its device is open; it waits for its share of the card"
        stats.settle(*session.waiting_state(WorkerState.WARMING, waits))
        time.sleep(min(stats.remaining_s, _IDLE_POLL_S))
        return False
    if session.state is None:
        with session.device.alone():
            claim_memory(session, stats)
        session.load_policy_state(stats)
    return True


def _work(session: Session, stats: SliceStats) -> None:
    """Follow the policy until the slice is over.

    An error of the workload ends it, so that the head learns of it. So does a save that was asked
    for: what follows may be the end of this process, and its work would be lost.
    """
    if session.last_run is not None:
        stats.use(session.last_run.size, session.last_run.batch)
    if _has_saved(session, stats):
        stats.settle(*session.working_state("its state is saved, as it was asked to"))
        return
    if session.duty.rest(stats.remaining_s) and stats.directive.duration_s > 0:
        stats.settle(*session.working_state("resting, as its duty asks after a long step"))
        return
    session.release_if_grown()  # a step follows, which takes again what it needs
    decision: Decision | None = session.ask(session.pressure())
    while isinstance(decision, Run | Release):
        if isinstance(decision, Run):
            decision = _step(session, stats, decision)
        else:
            session.device.release()
            decision = session.ask(session.pressure())
    if decision is not None:
        stay_in_emergency(session, stats, decision.reason)


def _step(session: Session, stats: SliceStats, run: Run) -> Decision | None:
    """Run one step, rest, and return what the policy wants next.

    `None` ends the slice: its time is over, all work is done, the workload failed by its own fault,
    or the card is too hot.
    """
    if not _wait_until_cool(session, stats):
        return None
    failure: Failure | None = None
    session.start_step(run, stats)
    stats.use(run.size, run.batch)
    try:
        result, seconds = session.device.timed(lambda: session.step(run), session.largest(run))
        done = _checked(result)
    except IncompatibleError:
        raise  # no step will ever do better
    except BaseException as error:  # noqa: BLE001 - classified outside the handler
        # Only text leaves the handler: the traceback holds the frames, and the frames hold the
        # tensors.
        failure = oom.failure_of_workload(error)
        traceback = oom.traceback_text(error)
        # And what they hold: it is gone as soon as the handler is left.
        held_bytes = session.device.held_bytes() + (failure.requested_bytes or 0)
        if failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
            oom.drop_frames(error)
    if failure is not None:
        at_least_bytes = max(held_bytes, session.device.step_peak_bytes())
        return recover(session, stats, run, failure, traceback, at_least_bytes)
    session.step_succeeded()
    session.workload.save()
    stats.counts += StepCounts(steps_ok=1, work_flop=done.flop, busy_s=seconds)
    stats.longest_step_s = max(stats.longest_step_s, seconds)
    peak_bytes = session.device.step_peak_bytes()
    session.workload.measured(peak_bytes, seconds)
    session.rebase_once_warm(stats)
    if session.workload.finished:
        return None

    _between_steps(session, stats, run, seconds)
    decision = session.ask(
        StepOk(
            at_s=time.monotonic(),
            peak_bytes=peak_bytes,
            # Measured after the sleep: other processes may have taken memory meanwhile.
            allowed_bytes=session.measure_allowed_if_due(),
            partial=done.partial,
        )
    )
    if stats.remaining_s > 0 and not _has_saved(session, stats):
        return decision
    if isinstance(decision, Release):
        # The next slice asks again, and the policy counts this one as done.
        session.device.release()
    return None


def _has_saved(session: Session, stats: SliceStats) -> bool:
    return stats.directive.save and not session.workload.save_due


def _wait_until_cool(session: Session, stats: SliceStats) -> bool:
    """Wait while the card is too hot; say whether it is cool enough before the slice is over."""
    while session.thermal.decision.paused:
        wrong_result = session.checks.reason
        if wrong_result is None:
            stats.settle(WorkerState.PAUSED, session.thermal.decision.reason)
        else:
            stats.settle(WorkerState.CORRUPT, f"{wrong_result}; {session.thermal.decision.reason}")
        if stats.elapsed_s >= max(stats.directive.duration_s, _IDLE_POLL_S):
            return False
        time.sleep(_IDLE_POLL_S)
        session.duty.rested(_IDLE_POLL_S)
        session.thermal.sample(stats)
    return True


def _between_steps(session: Session, stats: SliceStats, run: Run, seconds: float) -> None:
    """Read the sensors and check the step's result, as far as that is due.

    Then rest as the duty asks.
    """
    session.thermal.sample(stats)
    checked_s = session.checks.after_step(session.device, session.workload, run, seconds, stats)
    # Under MPS other processes compute while the memory is timed, which makes it look slower than
    # it is.
    if session.device.info.kind == "cuda" and not session.spec.mps:
        session.thermal.measure_bandwidth(session.bandwidth, stats)
    stats.settle(*session.working_state())
    stats.counts += StepCounts(busy_s=checked_s)
    session.duty.worked(seconds + checked_s, session.thermal.decision.duty)
    session.duty.rest(stats.remaining_s)


def _checked(result: object) -> StepResult:
    """Return what a step says of itself; users tend to return their loss."""
    if isinstance(result, StepResult | None):
        return StepResult() if result is None else result
    raise TypeError(f"a step must return a StepResult or None, not {type(result).__name__}")
