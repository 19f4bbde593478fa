"""The engine of a slot: have the workload do steps, and tell how it is.

It lives as long as the slot's process, and is driven in turns by who holds it: `__main__.py` where
it is a program. It never decides a size (the policy does). The loop of a step meets the engine in
`parts.py`. No exception leaves a turn except a request to stop the process (a signal's handler
raised it): failures are text in the status, a SystemExit of the workload is one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Final

import psutil

from workers import oom
from workers.engine.account import Account, Wait, no_orders
from workers.engine.oom_recovery import after_error, claim_memory, stay_in_emergency
from workers.engine.parts import Parts, StarvedError, TurnOverError
from workers.engine.session import Session, open_session
from workers.messages import (
    Begin,
    ContextCorruptedError,
    IncompatibleError,
    MemoryInfo,
    Orders,
    Progress,
    Status,
    Verdict,
    VerdictCause,
    WorkerState,
)
from workers.oom import Failure
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import StepResult

#: Figures of a workload in a status, which has to stay small.
_MOST_METRICS: Final = 1_000


class Engine:
    """The worker of one slot, in this process."""

    def __init__(self, spec: WorkerSpec, begin: Begin, incarnation: int = 0) -> None:
        """Touch nothing: `open` does, or the first turn."""
        self._spec, self._begin, self._incarnation = spec, begin, incarnation
        self._session: Session | None = None
        self._parts: Parts | None = None
        self._account = Account(slot=spec.slot)
        self._verdict = Verdict.OK
        self._cause: VerdictCause | None = None
        self._is_held = False
        self._saves = 0
        """`Orders.saves` that came before it was open: there was nothing to save."""
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
                device = self._session.device
                self._memory = replace(device.memory(), kept_bytes=self._session.kept_bytes)
        except IncompatibleError as error:
            self._verdict, self._cause = error.verdict, error.cause
            account.settle(WorkerState.STOPPED, str(error))
        except ContextCorruptedError as error:
            self._give_up(str(error))
        # A user's release, resize or needed_bytes may raise anything too.
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
        if self._session is not None:
            return
        if orders.holds:
            self._saves = orders.saves
            self._account.settle(WorkerState.WARMING, "its device is not open: it is held")
        else:
            self._session = open_session(self._spec, self._begin, self._incarnation, self._account)
            self._session.saves = self._saves
            self._parts = Parts(self._session, self._account)
            self._begin = replace(self._begin, checkpoint=None)  # as large as a training's state
            self._account.settle(WorkerState.WARMING, "its device is open")

    def _turn(self, orders: Orders, duration_s: float, wait: Wait) -> None:
        account = self._account
        if self._session is None:
            self._open(orders)
        session, parts = self._session, self._parts
        if session is None or parts is None:
            return
        account.begin_turn(duration_s, wait)
        try:
            session.begin_turn(orders, account)
            self._is_held = session.holds(orders, account)
            if (
                not session.workload.finished
                and not self._is_held
                and _prepare(session, self._begin, account)
            ):
                _work(session, account, parts)
            self._progress = session.progress()
        finally:
            if not self._is_held:
                account.end_turn()
        if session.workload.finished:
            self._verdict = Verdict.DONE
            account.settle(WorkerState.DONE, "all its work is done")

    def _give_up(self, reason: str) -> None:
        is_own = oom.is_of_program(reason)
        self._verdict = Verdict.CONTEXT_CORRUPTED
        self._cause = VerdictCause.EXCEPTION if is_own else VerdictCause.DEVICE
        account = self._account
        account.settle(WorkerState.STOPPED, f"the device no longer answers this process: {reason}")
        account.event("poisoned", reason=reason)

    def status(self) -> Status:
        """Say how it is; the events in it are not told again."""
        account, session = self._account, self._session
        events, account.events = account.events, []
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
            events=tuple(events),
        )
        if session is None:
            return status
        workload, memory = session.workload, self._memory
        return replace(
            status,
            events=(*status.events, *session.told.taken()),
            saves=session.saves,
            save_due=workload.save_due,
            saved=None if workload.saved is None else str(workload.saved),
            # After every failure too: without it the head takes an out-of-memory for a card that is
            # full.
            device=session.device.info,
            sensors=session.thermal.reading,
            claim_bytes=session.claim_bytes
            if memory is not None and session.growth.fills_claim
            else None,
            resume=status.resume if session.state is None else session.policy.dump(session.state),
            metrics=dict(islice(workload.metrics.items(), _MOST_METRICS)),
            learned=None if memory is None else session.learned_limit(memory.peak_bytes),
        )


def _prepare(session: Session, begin: Begin, account: Account) -> bool:
    """Find out what memory there is, and give the policy its state, unless that is done; say
    whether it is.

    A lease of 0 bytes asks a process that shares its card to open it and to tell what memory there
    is, and no more: progressive allocation waits until the head has said how many bytes are
    for this worker.
    """
    if session.lease_bytes == 0:
        if session.state is not None:
            session.park(account)
        waits = "its device is open; it waits for its share of the card"
        account.settle(*session.waiting_state(WorkerState.WARMING, waits))
        account.sleep(account.remaining_s)
        return False
    if session.state is None:
        with session.device.alone():
            claim_memory(session, account)
        session.load_policy_state(begin.resume, account)
    return True


def _work(session: Session, account: Account, parts: Parts) -> None:
    """Do steps until the turn is over.

    An error of the workload ends it, so that the head learns of it. So does a save that was asked
    for: what follows may be the end of this process, and its work would be lost.
    """
    if session.has_saved():
        account.settle(*session.working_state("its state is saved, as it was asked to"))
        return
    if session.duty.rest(account) and account.duration_s > 0:
        account.settle(*session.working_state("resting, as its duty asks after a long step"))
        return
    session.release_if_grown()  # a step follows, which takes again what it needs
    parts.begin_turn()
    while _step(session, account, parts) and not session.has_saved() and account.remaining_s > 0:
        pass
    parts.end_turn()


def _step(session: Session, account: Account, parts: Parts) -> bool:
    """Do one step, or what of it fits into the turn; say whether another may follow."""
    failure: Failure | None = None
    starved: str | None = None
    try:
        done = _checked(session.workload.run(parts.loop))
    except TurnOverError:
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
        stay_in_emergency(session, account, starved)
        return False
    if failure is not None:
        after_error(session, account, failure, traceback)
        return False
    account.good_step(done.flop)
    session.workload.save()
    return not session.workload.finished


def _checked(result: object) -> StepResult:
    """Return what a step says of itself; users tend to return their loss."""
    if isinstance(result, StepResult | None):
        return StepResult() if result is None else result
    raise TypeError(f"a step must return a StepResult or None, not {type(result).__name__}")
