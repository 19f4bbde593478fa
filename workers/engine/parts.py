"""What the loop of a step meets in the engine: the policy for sizes, the device for memory, and the
turn around both, which counts, tells and ends.

A step is whatever the workload makes of it: one part, or a whole batch of a training in as many
parts as memory asks for. Each part goes through here. Decides no size (the policy does). What
follows a part that runs out of memory is in `oom_recovery.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Final, TypeVar

from workers.elastic.loop import Loop
from workers.engine import oom_recovery
from workers.engine.account import Account
from workers.engine.session import Session
from workers.messages import StepCounts, WorkerState
from workers.oom import Failure
from workers.policy.base import Decision, Emergency, Release, Run, StepOk, StepOom

R = TypeVar("R")

#: Between two readings of the sensors of a card that is too hot.
_COOL_POLL_S: Final = 0.1


class TurnOverError(Exception):
    """The turn ends before the next part begins; the step goes on in the next turn."""


class StarvedError(Exception):
    """Nothing fits; the message says why."""


class Parts:
    """The parts of a slot's steps, turn by turn."""

    def __init__(self, session: Session, account: Account) -> None:
        memory = DeviceMemory(session, account)
        self._sizes, self._turns = PolicySizes(session), Turns(session, account, memory)
        self.loop: Loop[Run] = Loop(self._sizes, memory, self._turns)

    def begin_turn(self) -> None:
        """Begin the parts of a turn."""
        self._turns.begin_turn()

    def end_turn(self) -> None:
        """Have the policy know of the last part of a turn."""
        self._sizes.end_turn()


class PolicySizes:
    """Sizes by the policy of a slot."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._done: StepOk | None = None
        self._decision: Decision | None = None
        """What the policy wants after a failure."""
        self.reason = ""

    def next(self, allowed_bytes: int | None) -> Run | None:
        """See `Sizes.next`."""
        session = self._session
        done, decision = self._done, self._decision
        self._done = self._decision = None
        if done is not None:
            decision = session.ask(replace(done, allowed_bytes=allowed_bytes))
        elif decision is None:
            decision = session.ask(session.pressure())
        while isinstance(decision, Release):
            session.device.release()
            decision = session.ask(session.pressure())
        if isinstance(decision, Emergency):
            self.reason = decision.reason
            return None
        return decision

    def succeeded(self, _run: Run, peak_bytes: int | None, is_partial: bool) -> None:
        """See `Sizes.succeeded`."""
        self._done = StepOk(
            at_s=time.monotonic(),
            peak_bytes=peak_bytes or 0,
            allowed_bytes=None,
            held_bytes=self._session.device.held_bytes(),
            partial=is_partial,
        )

    def failed(self, run: Run, at_least_bytes: int | None) -> None:
        """See `Sizes.failed`."""
        session = self._session
        self._decision = session.ask(
            StepOom(
                at_s=time.monotonic(),
                needed_bytes=session.workload.needed_bytes(run.size, run.batch),
                at_least_bytes=at_least_bytes or 0,
                free_bytes=session.device.free_bytes(),
                allowed_bytes=session.measure_allowed(),
            )
        )

    def end_turn(self) -> None:
        """Have the policy know of the last part; the next turn looks at memory first."""
        decision, done = None, self._done
        self._done = self._decision = None
        if done is not None:
            decision = self._session.ask(done)
        if isinstance(decision, Release):
            # The next turn asks again, and the policy counts this one as done.
            self._session.device.release()


class DeviceMemory:
    """The memory of a slot on its device."""

    def __init__(self, session: Session, account: Account) -> None:
        self._session, self._account = session, account
        self.took_s = 0.0
        """Of the last part that ended well, by the device's own clock."""
        self.failed_at_s = 0.0
        """When the last part failed that ran out of memory (monotonic seconds)."""

    def allowed_bytes(self) -> int | None:
        """See `Memory.allowed_bytes`."""
        return self._session.measure_allowed_if_due()

    def measured(self, part: Callable[[], R]) -> R:
        """See `Memory.measured`."""
        session, run = self._session, self._session.last_run
        largest = run if run is not None and run.is_largest else None
        result, self.took_s = session.device.timed(lambda: session.on_device(part), largest)
        return result

    def peak_bytes(self) -> int | None:
        """See `Memory.peak_bytes`."""
        return self._session.device.step_peak_bytes()

    def failed_bytes(self, failure: Failure) -> int:
        """See `Memory.failed_bytes`."""
        self.failed_at_s, device = time.monotonic(), self._session.device
        held_bytes = device.held_bytes() + (failure.requested_bytes or 0)
        return max(held_bytes, device.step_peak_bytes())

    def release(self) -> None:
        """Give memory back, and prove that the device answers.

        Raises:
            ContextCorruptedError: It does not.
        """
        self._session.shed()
        oom_recovery.prove_alive(self._session, self._account)
        self._session.rebase(self._account)


class Turns:
    """The turns of the engine around the parts."""

    def __init__(self, session: Session, account: Account, memory: DeviceMemory) -> None:
        self._session, self._account, self._memory = session, account, memory
        self._has_begun = self._has_done = False
        """Whether a part was begun in this turn, and whether one has ended well."""
        self._failed: Run | None = None
        """The part before, if it ran out of memory."""

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
            oom_recovery.note_backoff(session, account, self._failed, run)
            self._failed = None
        # A turn of no duration goes on to the first part that ends well.
        is_enough = self._has_done or (self._has_begun and account.duration_s > 0)
        if session.workload.finished or (is_enough and account.remaining_s <= 0):
            raise TurnOverError
        if not self._wait_until_cool():
            raise TurnOverError
        self._has_begun = True
        session.start_part(run, account)
        account.use(run.size, run.batch)

    def ended(self, run: Run) -> None:
        """Count it; then read the sensors, check the result and rest, as far as that is due."""
        session, account, took_s = self._session, self._account, self._memory.took_s
        self._has_done = True
        session.part_succeeded()
        account.good_part(took_s)
        session.rebase_once_warm(account)
        session.thermal.sample(account)
        checked_s = session.checks.after_step(
            session.device, session.workload, run, took_s, account
        )
        # Under MPS other processes compute while the memory is timed, which makes it look slower
        # than it is.
        if session.device.info.kind == "cuda" and not session.spec.mps:
            session.thermal.measure_bandwidth(session.bandwidth, account)
        account.settle(*session.working_state())
        account.counts += StepCounts(busy_s=checked_s)
        session.duty.worked(took_s + checked_s, session.thermal.decision.duty)
        session.duty.rest(account)

    def ran_out(self, run: Run, failure: Failure, at_least_bytes: int | None) -> None:
        """Count and tell it, and find out what memory there is."""
        session, failed_at_s = self._session, self._memory.failed_at_s
        oom_recovery.after_oom(session, self._account, run, failure, at_least_bytes, failed_at_s)
        self._failed = run

    def starved(self, reason: str) -> None:
        """End the step.

        Raises:
            StarvedError: Always.
        """
        raise StarvedError(reason)

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
