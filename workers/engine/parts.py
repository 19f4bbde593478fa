"""The turn around the parts of a slot's steps: it waits, counts, tells and ends.

A step is whatever the workload makes of it: one part, or a whole batch of a training in as many
parts as memory asks for. Each part goes through here. Decides no size (the policy does) and gives
no memory back (`memory.py` does).
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

#: Between two readings of the sensors of a card that is too hot.
_COOL_POLL_S: Final = 0.1

#: A step that is larger or smaller than the last reported one by this factor is an event.
_MIN_CHANGE_FACTOR: Final = 1.1


class StarvedError(Exception):
    """Nothing fits; the message says why."""


class Parts:
    """The parts of a slot's steps, turn by turn; what surrounds their loop."""

    def __init__(self, session: Session, account: Account) -> None:
        self._session, self._account = session, account
        self.loop: Loop[Run] = Loop(session.policy, session.memory, self)
        self.in_emergency = False
        """Whether no step has fitted since one ended well."""
        self._has_begun = self._has_done = False
        """Whether a part was begun in this turn, and whether one has ended well."""
        self._failed: Run | None = None
        """The part before, if it ran out of memory."""
        self._reported: Run | None = None
        """The last part whose size was told by an event, or the first one."""

    def begin_turn(self) -> None:
        """Forget the parts of the turn before."""
        self._has_begun = self._has_done = False
        self._failed = None

    def begins(self, run: Run) -> None:
        """Wait until the card is cool enough, and take note of the part.

        Raises:
            TurnOverError: The time is over, or all work is done.
        """
        session, account = self._session, self._account
        if self._failed is not None:
            self._note_backoff(self._failed, run)
            self._failed = None
        # A turn of no duration goes on to the first part that ends well.
        is_enough = self._has_done or (self._has_begun and account.duration_s > 0)
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
        """Count it; then read the sensors, check the result and rest, as far as that is due."""
        session, account, took_s = self._session, self._account, self._session.memory.took_s
        self._has_done, self.in_emergency = True, False
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
        """Count and tell it."""
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
        """Tell with what the part goes on that has failed."""
        changed = [
            f"{name} {getattr(run, name)}"
            for name in ("size", "batch", "level")
            if getattr(run, name) != getattr(failed, name)
        ]
        then = f"down to {' and '.join(changed)}" if changed else "once more the same"
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
        """Report a part much smaller or larger than the last reported one."""
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
        """Return what an event says of a part's level; nothing where the workload offers none."""
        return {} if self._session.stages is None else {"level": run.level}

    def _wait_until_cool(self) -> bool:
        """Wait while the card is too hot; say whether it is cool enough before the turn is over."""
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
