"""The memory of a slot on its device: what the next part may hold, and how it is given back.

The memory of the slot's loop (`workers/elastic/loop.py`). Takes nothing beyond what is allowed: the
cap, the lease of the head, and what has to stay free for others. Decides no size (the policy does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

from workers import oom
from workers.devices.base import Device
from workers.engine.account import Account
from workers.messages import ContextCorruptedError, Progress, StepCounts
from workers.oom import Failure
from workers.settings import FailureKind
from workers.units import MIB
from workers.workloads.base import Workload

R = TypeVar("R")

#: Shortest time between two measurements of free memory after steps: each takes up to 0.2 ms.
_MEASURE_EVERY_S: Final = 0.02

#: A process that holds so much more of its cap between steps than before is looked at for a leak.
_WORTH_A_LOOK: Final = 0.1

#: A worker with less than this share of its cap says why.
_FULL_SHARE: Final = 0.9


class SlotMemory:
    """What a slot holds, and what it may hold."""

    def __init__(
        self, device: Device, workload: Workload, leave_free_bytes: int, account: Account
    ) -> None:
        self._device, self._workload, self._account = device, workload, account
        self._leave_free_bytes = leave_free_bytes
        self.lease_bytes: int | None = None
        """What the head lets this worker hold now; `None` does not limit it."""
        self.measured_bytes: int | None = None
        """What was allowed when it was measured last."""
        self._measured_at_s = float("-inf")
        self.largest: object = None
        """The part that begins, where none of its workload is larger."""
        self.took_s = 0.0
        """Of the last part that ended well, by the device's own clock."""
        self.failed_at_s = 0.0
        """When the last part failed that ran out of memory (monotonic seconds)."""
        self.parked_bytes = 0
        """The workload's state that waits in host memory; 0 while it is on the device, or there is
        none.
        """
        self.kept_bytes: int | None = None
        """What the process held after the last release beyond what it held when it was opened;
        `None` also of a workload that keeps a state.
        """
        self._opened_kept_bytes = device.kept_bytes()
        self._is_warm = False
        """Whether the context was measured after the kernels of the workload were loaded."""
        self._checked_held_bytes: int | None = None
        """The most that was held between steps when it was last looked whether that is needed."""

    def begin_turn(self, lease_bytes: int | None) -> None:
        """Take over what may be held, and have it measured before the next part."""
        self.lease_bytes, self._measured_at_s = lease_bytes, float("-inf")

    def allowed_bytes(self) -> int | None:
        """Measure min(cap, lease, held + free - leave_free); `None` if that was done less than 20
        ms ago: after short steps it would cost too much.
        """
        now_s = time.monotonic()
        if now_s - self._measured_at_s < _MEASURE_EVERY_S:
            return None
        self._measured_at_s = now_s
        allowed_bytes = self._device.allowed_bytes(self._leave_free_bytes)
        if self.lease_bytes is not None:
            allowed_bytes = min(allowed_bytes, self.lease_bytes)
        self.measured_bytes = allowed_bytes
        return allowed_bytes

    def measured(self, part: Callable[[], R]) -> R:
        """Run a part under the cap, with the workload's state back on the device."""

        def on_device() -> R:
            if self.parked_bytes:
                self._workload.unpark()
                self.parked_bytes = 0
            return part()

        result, self.took_s = self._device.timed(on_device, self.largest)
        return result

    def peak_bytes(self) -> int:
        """Return the most that the last part held."""
        return self._device.step_peak_bytes()

    def failed_bytes(self, failure: Failure) -> int | None:
        """Return what the part that has just failed would have held; `None` where only its text
        hints at memory: what it held then shows nothing.
        """
        self.failed_at_s, device = time.monotonic(), self._device
        if failure.kind is FailureKind.PROBABLE:
            return None
        held_bytes = device.held_bytes() + (failure.requested_bytes or 0)
        return max(held_bytes, device.step_peak_bytes())

    def release(self) -> None:
        """Give back what a failed part no longer needs, and prove that the device answers.

        Raises:
            ContextCorruptedError: It does not.
        """
        self.shed()
        self.prove_alive()
        self.rebase()
        self._measured_at_s = float("-inf")

    def prove_alive(self) -> None:
        """Run the emergency product.

        Raises:
            ContextCorruptedError: The device cannot do even that: it does not answer this process
                any more.
        """
        failure = self.emergency_failure()
        if failure is not None and failure.is_out_of_memory:
            # The error of the step itself may have surfaced only here: clear it before the device
            # is called broken.
            self._device.release()
            failure = self.emergency_failure()
        if failure is not None:
            raise ContextCorruptedError(failure.text)
        self._account.counts += StepCounts(emergency_count=1)

    def emergency_failure(self) -> Failure | None:
        """Return why the device cannot run the emergency product, or `None` if it can.

        A wrong result is raised.
        """
        try:
            self._device.emergency()
        except ContextCorruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
            return oom.classify(error)
        return None

    def shed(self) -> None:
        """Have the workload drop what it can do without, and everything unused go back to the
        device.
        """
        if not self.parked_bytes:
            with self._device.enforced():
                self._workload.shed()
        self._given_back()

    def park(self) -> None:
        """Have the workload take all it has off the device.

        Its state waits in host memory if it keeps one.
        """
        if self.parked_bytes:
            return
        with self._device.enforced():
            self.parked_bytes = self._workload.park()
        self._given_back()
        if self.parked_bytes:
            self._account.event("parked", state_bytes=self.parked_bytes)

    def _given_back(self) -> None:
        self._device.release()
        # A state that is kept is no leak, and its size is the workload's own affair.
        kept_bytes = max(0, self._device.kept_bytes() - self._opened_kept_bytes)
        self.kept_bytes = None if self._keeps_state() else kept_bytes
        self._checked_held_bytes = None

    def rebase(self) -> None:
        """Measure what the process holds besides tensors, unless a state on a CPU would be taken
        for that.
        """
        device = self._device
        if device.info.kind == "cpu" and self._keeps_state():
            return
        grown_bytes = device.rebase()
        if grown_bytes:
            self._account.event(
                "context_grew",
                grown_bytes=grown_bytes,
                context_bytes=device.info.context_bytes,
                cap_bytes=device.info.cap_bytes,
            )

    def rebase_once_warm(self) -> None:
        """Measure it once more when all of the workload's kernels have run: a training's with its
        first update.
        """
        if self._is_warm or self._device.info.kind == "cpu":
            return
        progress = progress_of(self._workload)
        self._is_warm = progress is None or bool(progress.train_step)
        if self._is_warm:
            self.rebase()

    def _keeps_state(self) -> bool:
        return self._workload.progress() is not None

    def release_if_grown(self) -> None:
        """Have what can be dropped released if far more is held between steps than before: the rest
        is a leak.
        """
        held_bytes = self._device.held_bytes()
        if self._checked_held_bytes is None:
            self._checked_held_bytes = held_bytes
        elif held_bytes > self._checked_held_bytes + _WORTH_A_LOOK * self._device.most_bytes:
            self.shed()

    def shortage(self) -> str:
        """Say why the worker may hold much less than its cap; empty if it may hold enough."""
        cap_bytes, measured_bytes = self._device.most_bytes, self.measured_bytes
        if measured_bytes is None or measured_bytes >= _FULL_SHARE * cap_bytes:
            return ""
        leased = self.lease_bytes is not None and self.lease_bytes <= measured_bytes
        why = (
            "its share while the card is short, or its user's cap"
            if leased
            else "all that others leave on the device"
        )
        return f"{measured_bytes / MIB:.0f} of {cap_bytes / MIB:.0f} MiB: {why}"


def progress_of(workload: Workload) -> Progress | None:
    """Return how far a workload is, as it tells it.

    Raises:
        TypeError: What it tells is no `Progress`.
    """
    progress = workload.progress()
    if isinstance(progress, Progress | None):
        return progress
    raise TypeError(f"progress must return a Progress or None, not {type(progress).__name__}")
