"""The engine of a slot: runs the steps of its workload, and reports its status.

Its caller, `__main__.py` in a worker process, runs it in turns for as long as the process lives.
The policy chooses sizes; the engine does not. The loop inside a step calls back into the engine
through `parts.py`. No exception leaves a turn: every failure, also a SystemExit of the workload,
becomes text in the status.
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

#: Most metrics of a workload in one status; a status must stay small.
_MOST_METRICS: Final = 1_000

#: Shortest pause between two emergency products while no step fits.
_EMERGENCY_PAUSE_S: Final = 0.1


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec, begin: Begin, incarnation: int = 0) -> None:
        """Only store the arguments; `open`, or the first turn, opens the device."""
        self._spec, self._begin, self._incarnation = spec, begin, incarnation
        self._session: Session | None = None
        self._parts: Parts | None = None
        self._account = Account(slot=spec.slot)
        self._verdict = Verdict.OK
        self._cause: Cause | None = None
        self._is_held = False
        self._saves = 0
        """The newest `Orders.saves` that the engine has acted on."""
        self._must_save = False
        """Whether the last requested save is not done yet."""
        self._lease_bytes: int | None = None
        self._memory: MemoryInfo | None = None
        """Memory at the end of the last turn; `None` if that turn ended by a failure."""
        self._progress: Progress | None = None

    @property
    def is_open(self) -> bool:
        """Whether the engine has opened its device."""
        return self._session is not None

    def open(self, orders: Orders) -> Status:
        """Open the device and the workload, unless the orders hold the slot; run no step."""
        return self._status_after(orders, lambda: self._open(orders))

    def turn(self, orders: Orders, duration_s: float, wait: Wait = no_orders) -> Status:
        """Work for about `duration_s`, or until `wait` reports new orders; return the status.

        With a duration of 0, return after the first part that succeeds, or fails for good. A turn
        also ends early when the head must learn something at once, such as an error of the
        workload. After a verdict other than OK a turn does nothing.
        """
        return self._status_after(orders, lambda: self._turn(orders, duration_s, wait))

    def _status_after(self, orders: Orders, work: Callable[[], None]) -> Status:
        """Call `work`, turn its exceptions into a verdict or an error, and return the status."""
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
        # A user's `release` or `needed_bytes` may raise anything as well.
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
            self._obey_saves(orders, workload)
            session.thermal.sample(account)
            # A held worker that must save first continues, unless it has no memory for a step.
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

    def _obey_saves(self, orders: Orders, workload: Workload) -> None:
        """Ask the workload to save its state if the orders request it, and save if it can now."""
        if orders.saves > self._saves:
            self._saves, self._must_save = orders.saves, True
            workload.save_soon()
        if workload.save_due:
            workload.save()  # the last turn ended where it can save, or no step follows

    def _has_saved(self, workload: Workload) -> bool:
        """Return `True` once for each requested save, when it is done."""
        if self._must_save and not workload.save_due:
            self._must_save = False
            return True
        return False

    def _work(self, session: Session, parts: Parts) -> None:
        """Run steps until the turn is over.

        With a lease of 0 bytes, the engine reports the memory of its shared card and runs no step:
        the head has not decided yet how many bytes this worker may hold. An error of the workload
        ends the turn, so that the head learns of it at once. A finished save ends the turn as well:
        the head may end the process next, and later work would be lost.
        """
        account = self._account
        if session.memory.lease_bytes == 0:
            session.memory.park()
            waits = "its device is open; it waits for its share of the card"
            account.settle(*session.waiting_state(WorkerState.WARMING, waits))
            account.sleep(account.remaining_s)
            return
        if self._has_saved(session.workload):
            account.settle(*session.working_state("its state is saved, as requested"))
            return
        if session.duty.rest(account) and account.duration_s > 0:
            account.settle(*session.working_state("resting after a long step, to keep its duty"))
            return
        session.memory.release_if_grown()  # the next step allocates again what it needs
        parts.begin_turn()
        while (
            self._step(session, parts)
            and not self._has_saved(session.workload)
            and account.remaining_s > 0
        ):
            pass

    def _step(self, session: Session, parts: Parts) -> bool:
        """Run one step, or as much of it as the turn allows; return whether another may follow."""
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
            raise  # no later step can succeed
        except StarvedError as error:
            starved = str(error)
        except BaseException as error:  # noqa: BLE001 - classified outside the handler
            # Only text leaves the handler: the traceback keeps the frames alive, and they keep the
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
        """Check that the device still works, and wait for the turn to end: no step fits."""
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
        """Release memory and count an error of the workload.

        Raises:
            ContextCorruptedError: The device no longer works: some of its failures look like a bug
                of the workload.
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
        """Return the status, and remove the events in it from the account."""
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
            is_last = self._is_held or self._verdict is Verdict.DONE  # this may be the last status
            session.limits.keep(session.policy.learned, at_once=is_last)
        return replace(
            status,
            save_due=workload.save_due,
            team=workload.team,
            saved=None if workload.saved is None else str(workload.saved),
            # Sent after a failure as well: without it the head attributes an out-of-memory to a
            # full card.
            device=session.device.info,
            sensors=session.thermal.reading,
            claim_bytes=None if memory is None else workload.claim_bytes,
            resume=session.policy.state,
            metrics=dict(islice(workload.metrics.items(), _MOST_METRICS)),
        )


def _checked(result: object) -> StepResult:
    """Return the result of a step, or raise a TypeError; users tend to return their loss."""
    if isinstance(result, StepResult | None):
        return StepResult() if result is None else result
    raise TypeError(f"a step must return a StepResult or None, not {type(result).__name__}")
