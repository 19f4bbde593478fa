"""The engine of a slot: have the workload do steps, and tell how it is.

It lives as long as the slot's process, and is driven in turns by who holds it: `__main__.py` where
it is a program. It never decides a size (the policy does). The loop of a step meets the engine in
`parts.py`. No exception leaves a turn: failures are text in the status, a SystemExit of the
workload is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Final

import psutil

from workers import oom
from workers.engine.account import Account, TurnOverError, Wait, no_orders
from workers.engine.memory import progress_of
from workers.engine.parts import Parts, StarvedError
from workers.engine.session import Session, open_session
from workers.messages import (
    STARVED,
    Begin,
    Cause,
    ContextCorruptedError,
    IncompatibleError,
    MemoryInfo,
    Orders,
    Progress,
    Status,
    StepCounts,
    Verdict,
    WorkerState,
)
from workers.oom import Failure
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import StepResult, Workload

#: Figures of a workload in a status, which has to stay small.
_MOST_METRICS: Final = 1_000

#: Pause between two emergency products when no step fits: the worker tells that it lives, and
#: waits.
_EMERGENCY_PAUSE_S: Final = 0.1


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec, begin: Begin, incarnation: int = 0) -> None:
        """Touch nothing: `open` does, or the first turn."""
        self._spec, self._begin, self._incarnation = spec, begin, incarnation
        self._session: Session | None = None
        self._parts: Parts | None = None
        self._account = Account(slot=spec.slot)
        self._verdict = Verdict.OK
        self._cause: Cause | None = None
        self._is_held = False
        self._saves = 0
        """`Orders.saves` that it has taken in."""
        self._must_save = False
        """Whether the save that was asked for last is still to be done."""
        self._lease_bytes: int | None = None
        self._memory: MemoryInfo | None = None
        """As the present turn leaves it; `None` if it ended by a failure."""
        self._progress: Progress | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has opened its device."""
        return self._session is not None

    def open(self, orders: Orders) -> Status:
        """Open the device and the workload, unless it is to hold; do no step."""
        return self._told(orders, lambda: self._open(orders))

    def turn(self, orders: Orders, duration_s: float, wait: Wait = no_orders) -> Status:
        """Work for about so long, or until `wait` says that there are new orders.

        With a duration of 0, return after the first step that ends well, or fails for good. A turn
        also ends with what is to be told at once, such as an error of the workload. After a verdict
        other than OK nothing is done any more.
        """
        return self._told(orders, lambda: self._turn(orders, duration_s, wait))

    def _told(self, orders: Orders, work: Callable[[], None]) -> Status:
        """Do it, and say how that has ended."""
        account, self._memory = self._account, None
        try:
            if self._verdict is Verdict.OK:
                work()
            if self._session is not None and self._verdict in {Verdict.OK, Verdict.DONE}:
                device, kept_bytes = self._session.device, self._session.memory.kept_bytes
                self._memory = replace(device.memory(), kept_bytes=kept_bytes)
        except IncompatibleError as error:
            self._verdict, self._cause = error.verdict, error.cause
            account.settle(WorkerState.STOPPED, str(error))
        except ContextCorruptedError as error:
            self._give_up(str(error))
        # A user's release or needed_bytes may raise anything too.
        except BaseException as error:  # noqa: BLE001
            failure = oom.failure_of_workload(error)
            traceback = oom.traceback_text(error)
            if failure.kind is FailureKind.CONTEXT_CORRUPTED:
                account.error = traceback
                self._give_up(failure.text)
            else:  # an error of the workload: it ends the turn and nothing else
                reason = f"the workload failed outside its step: {failure.text}"
                account.workload_failed(reason, traceback)
        self._lease_bytes = orders.lease_bytes
        return self.status()

    def _open(self, orders: Orders) -> None:
        self._is_held = orders.holds
        if orders.holds:
            self._saves = orders.saves  # there is nothing to save
            self._account.settle(WorkerState.WARMING, "its device is not open: it is held")
        else:
            self._session = open_session(self._spec, self._begin, self._incarnation, self._account)
            self._parts = Parts(self._session, self._account)
            self._account.settle(WorkerState.WARMING, "its device is open")

    def _turn(self, orders: Orders, duration_s: float, wait: Wait) -> None:
        account = self._account
        if self._session is None:
            self._open(orders)
        session, parts = self._session, self._parts
        if session is None or parts is None:
            return
        account.begin_turn(duration_s, wait)
        workload = session.workload
        account.team_orders = orders.team
        try:
            session.memory.begin_turn(orders.lease_bytes)
            self._take_saves(orders, workload)
            session.thermal.sample(account)
            # One that is to save first goes on, unless it has no memory for a step.
            is_starved = account.state in STARVED or orders.lease_bytes == 0
            self._is_held = orders.holds and (is_starved or not workload.save_due)
            if not workload.finished and not self._is_held:
                workload.attend()
                self._work(session, parts)
            self._progress = progress_of(workload)
        finally:
            if not self._is_held:
                account.end_turn()
        if workload.finished:
            self._verdict = Verdict.DONE
            account.settle(WorkerState.DONE, "all its work is done")

    def _take_saves(self, orders: Orders, workload: Workload) -> None:
        """Have the state saved if that is asked for, as far as it can be now."""
        if orders.saves > self._saves:
            self._saves, self._must_save = orders.saves, True
            workload.save_soon()
        if workload.save_due:
            workload.save()  # the last turn ended at the moment for it, or no step follows

    def _has_saved(self, workload: Workload) -> bool:
        """Say once for each save that was asked for that it is done."""
        if self._must_save and not workload.save_due:
            self._must_save = False
            return True
        return False

    def _work(self, session: Session, parts: Parts) -> None:
        """Do steps until the turn is over.

        A lease of 0 bytes asks a process that shares its card to open it and to tell what memory
        there is, and no more: it waits until the head has said how many bytes are for this worker.
        An error of the workload ends the turn, so that the head learns of it. So does a save that
        was asked for: what follows may be the end of this process, and its work would be lost.
        """
        account = self._account
        if session.memory.lease_bytes == 0:
            session.memory.park()
            waits = "its device is open; it waits for its share of the card"
            account.settle(*session.waiting_state(WorkerState.WARMING, waits))
            account.sleep(account.remaining_s)
            return
        if self._has_saved(session.workload):
            account.settle(*session.working_state("its state is saved, as it was asked to"))
            return
        if session.duty.rest(account) and account.duration_s > 0:
            account.settle(*session.working_state("resting, as its duty asks after a long step"))
            return
        session.memory.release_if_grown()  # a step follows, which takes again what it needs
        parts.begin_turn()
        while (
            self._step(session, parts)
            and not self._has_saved(session.workload)
            and account.remaining_s > 0
        ):
            pass

    def _step(self, session: Session, parts: Parts) -> bool:
        """Do one step, or what of it fits into the turn; say whether another may follow."""
        account = self._account
        failure: Failure | None = None
        starved: str | None = None
        try:
            done = _checked(session.workload.run(parts.loop))
        except TurnOverError:
            if waits_for := session.workload.waits_for:
                account.settle(account.state, waits_for)
            return False
        except (IncompatibleError, ContextCorruptedError):
            raise  # no step will ever do better
        except StarvedError as error:
            starved = str(error)
        except BaseException as error:  # noqa: BLE001 - classified outside the handler
            # Only text leaves the handler: the traceback holds the frames, and the frames hold the
            # tensors.
            failure = oom.failure_of_workload(error)
            traceback = oom.traceback_text(error)
        if starved is not None:
            self._starve(session, parts, starved)
            return False
        if failure is not None:
            self._after_error(session, failure, traceback)
            return False
        account.counts += StepCounts(steps_ok=1, parts_further=-1, work_flop=done.flop)
        session.workload.save()
        return not session.workload.finished

    def _starve(self, session: Session, parts: Parts, reason: str) -> None:
        """No step fits: prove that the device answers, and wait for the end of the turn."""
        account, memory = self._account, session.memory
        if not parts.in_emergency:
            account.event("emergency", reason=reason)
        parts.in_emergency = True
        memory.park()
        account.settle(*session.waiting_state(WorkerState.EMERGENCY, reason))
        memory.prove_alive()
        account.sleep(max(_EMERGENCY_PAUSE_S, account.remaining_s))
        memory.rebase()

    def _after_error(self, session: Session, failure: Failure, traceback: str) -> None:
        """Count an error that is the workload's own.

        Raises:
            ContextCorruptedError: The device no longer answers: some of its failures read like a
                bug of the workload.
        """
        if failure.kind is FailureKind.CONTEXT_CORRUPTED:
            raise ContextCorruptedError(failure.text)
        session.memory.shed()
        session.memory.rebase()
        broken = session.memory.emergency_failure()
        if broken is not None:
            raise ContextCorruptedError(broken.text)
        self._account.workload_failed(f"the workload failed: {failure.text}", traceback)

    def _give_up(self, reason: str) -> None:
        is_own = oom.is_of_program(reason)
        self._verdict = Verdict.CONTEXT_CORRUPTED
        self._cause = Cause.EXCEPTION if is_own else Cause.DRIVER
        account = self._account
        account.settle(WorkerState.STOPPED, f"the device no longer answers this process: {reason}")
        account.event("poisoned", reason=reason)

    def status(self) -> Status:
        """Say how it is; the events in it are not told again."""
        account, session = self._account, self._session
        events, account.events = tuple(account.events), []
        status = Status(
            slot=account.slot,
            incarnation=self._incarnation,
            verdict=self._verdict,
            verdict_cause=self._cause,
            state=account.state,
            reason=account.reason,
            is_up=True,
            is_held=self._is_held,
            memory=self._memory,
            size=account.size,
            batch=account.batch,
            lease_bytes=self._lease_bytes,
            counts=account.counts,
            wall_s=account.wall_s,
            longest_step_s=account.longest_step_s,
            errors_in_a_row=account.errors_in_a_row,
            error=account.error,
            rss_bytes=psutil.Process().memory_info().rss,
            saves=self._saves,
            resume=self._begin.resume,
            progress=self._progress,
            events=events,
        )
        if session is None:
            return status
        workload, memory = session.workload, self._memory
        if memory is not None and session.limits is not None:
            is_last = self._is_held or self._verdict is Verdict.DONE  # nothing may follow
            session.limits.keep(session.policy.learned, at_once=is_last)
        return replace(
            status,
            save_due=workload.save_due,
            team=workload.team,
            saved=None if workload.saved is None else str(workload.saved),
            # After every failure too: without it the head takes an out-of-memory for a card that is
            # full.
            device=session.device.info,
            sensors=session.thermal.reading,
            claim_bytes=None if memory is None else workload.claim_bytes,
            resume=session.policy.state,
            metrics=dict(islice(workload.metrics.items(), _MOST_METRICS)),
        )


def _checked(result: object) -> StepResult:
    """Return what a step says of itself; users tend to return their loss."""
    if isinstance(result, StepResult | None):
        return StepResult() if result is None else result
    raise TypeError(f"a step must return a StepResult or None, not {type(result).__name__}")
