"""The engine's work before and after each part of a step: waits, counts, logs events.

The workload decides what a step is: one part, or a whole training batch in as many parts as the
memory requires. Every part passes through `Parts`. Does not decide sizes (the policy does) and does
not release memory (`memory.py` does).
"""

from __future__ import annotations

import time
from typing import Final

from workers.elastic.loop import Loop
from workers.engine.account import Account, TurnOverError
from workers.engine.session import Session
from workers.messages import StepCounts, WorkerState
from workers.oom import Failure
from workers.policy.base import Run
from workers.settings import Scalar

#: Pause between two sensor readings while the card is too hot.
_COOL_POLL_S: Final = 0.1

#: A part whose size differs from the last reported one by this factor is an event.
_MIN_CHANGE_FACTOR: Final = 1.1


class StarvedError(Exception):
    """Not even the smallest part fits; the message says why."""


class Parts:
    """The engine's side of the loop: implements `workers.elastic.loop.Watch` for one slot."""

    def __init__(self, session: Session, account: Account) -> None:
        self._session, self._account = session, account
        self.loop: Loop[Run] = Loop(session.policy, session.memory, self)
        self.in_emergency = False
        """Whether no part has succeeded since an emergency began."""
        self._has_begun = self._has_succeeded = False
        """Whether a part was begun in this turn, and whether one has succeeded."""
        self._failed: Run | None = None
        """The previous part, if it ran out of memory."""
        self._reported: Run | None = None
        """The last part whose size an event reported, or the first part."""

    def begin_turn(self) -> None:
        """Forget the parts of the previous turn."""
        self._has_begun = self._has_succeeded = False
        self._failed = None

    def begins(self, run: Run) -> None:
        """Wait until the card is cool enough, and report the part if its size changed.

        Raises:
            TurnOverError: The time of the turn is over, or all work is done.
        """
        session, account = self._session, self._account
        if self._failed is not None:
            self._note_backoff(self._failed, run)
            self._failed = None
        # A turn with a duration of 0 continues until the first part succeeds.
        is_enough = self._has_succeeded or (self._has_begun and account.duration_s > 0)
        if session.workload.finished or (is_enough and account.remaining_s <= 0):
            raise TurnOverError
        if not self._wait_until_cool():
            raise TurnOverError
        self._has_begun = True
        self._report_size_change(run)
        if run.releases_first:
            session.device.release()
        session.memory.largest = run if run.is_largest else None
        account.size, account.batch = run.size, run.batch

    def ended(self, run: Run) -> None:
        """Count a successful part; then read the sensors, check the result and rest, if these are
        due.
        """
        session, account, took_s = self._session, self._account, self._session.memory.took_s
        self._has_succeeded, self.in_emergency = True, False
        account.good_part(took_s)
        session.memory.rebase_once_warm()
        session.thermal.sample(account)
        checked_s = session.checks.after_step(
            session.device, session.workload, run, took_s, account
        )
        account.settle(*session.working_state())
        account.counts += StepCounts(busy_s=checked_s)
        session.duty.worked(took_s + checked_s, session.thermal.decision.duty)
        session.duty.rest(account)

    def ran_out(self, run: Run, failure: Failure, at_least_bytes: int | None) -> None:
        """Count the out-of-memory, and log it as an event."""
        session, account, device = self._session, self._account, self._session.device
        account.counts += StepCounts(steps_oom=1, steps_oom_probe=int(run.is_probe), oom_count=1)
        account.event(
            "oom",
            kind=failure.kind.value,
            evidence=failure.evidence,
            text=failure.text,
            size=run.size,
            batch=run.batch,
            needed_bytes=session.workload.needed_bytes(run.size, run.batch),
            at_least_bytes=at_least_bytes,
            free_bytes=max(0, device.allowed_bytes(0) - device.held_bytes()),
            recovery_s=time.monotonic() - session.memory.failed_at_s,
            **self._level_of(run),
        )
        self._failed = run

    def starved(self, reason: str) -> None:
        """End the step.

        Raises:
            StarvedError: Always.
        """
        raise StarvedError(reason)

    def _note_backoff(self, failed: Run, run: Run) -> None:
        """Log the size with which the failed part is tried again."""
        changed = [
            f"{name} {getattr(run, name)}"
            for name in ("size", "batch", "level")
            if getattr(run, name) != getattr(failed, name)
        ]
        then = f"down to {' and '.join(changed)}" if changed else "retried unchanged"
        self._account.settle(
            WorkerState.BACKOFF,
            f"out of memory at size {failed.size}, batch {failed.batch}; {then}",
        )
        self._account.event(
            "backoff" if changed else "retry",
            from_size=failed.size,
            from_batch=failed.batch,
            size=run.size,
            batch=run.batch,
            **self._level_of(run),
        )

    def _report_size_change(self, run: Run) -> None:
        """Log an event if a part is much smaller or larger than the last reported one."""
        before = self._reported
        if before is None or run == before:
            self._reported = run
            return
        now_units, before_units = (part.size * part.size * part.batch for part in (run, before))
        if run.level != before.level:
            now_units = before_units * (2 if run.level < before.level else 0)
        if max(now_units, before_units) < _MIN_CHANGE_FACTOR * min(now_units, before_units):
            return
        self._reported = run
        self._account.event(
            "gave_way" if now_units < before_units else "grew",
            from_size=before.size,
            from_batch=before.batch,
            size=run.size,
            batch=run.batch,
            allowed_bytes=self._session.memory.measured_bytes,
            **self._level_of(run),
        )

    def _level_of(self, run: Run) -> dict[str, Scalar]:
        """Return a part's level for an event; empty if the workload has no stages."""
        return {} if self._session.stages is None else {"level": run.level}

    def _wait_until_cool(self) -> bool:
        """Wait while the card is too hot; return `False` if the turn ends before it is cool."""
        session, account = self._session, self._account
        while session.thermal.decision.paused:
            wrong_result, reason = session.checks.reason, session.thermal.decision.reason
            if wrong_result is None:
                account.settle(WorkerState.PAUSED, reason)
            else:
                account.settle(WorkerState.CORRUPT, f"{wrong_result}; {reason}")
            is_over = not account.remaining_s and account.elapsed_s >= _COOL_POLL_S
            if account.has_orders or is_over:
                return False
            session.duty.rested(account.sleep(_COOL_POLL_S))
            session.thermal.sample(account)
        return True
