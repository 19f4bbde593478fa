"""The memory of a slot on its device: how much the next part may hold, and how it is released.

`SlotMemory` is the `Memory` of the slot's loop (`workers/elastic/loop.py`). It respects the cap,
the head's lease, and the memory to leave free for others. Does not decide sizes (the policy does).
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

#: Shortest time between two measurements of free memory: each takes up to 0.2 ms.
_MEASURE_EVERY_S: Final = 0.02

#: If the memory held between steps grows by this share of the cap, the engine releases what it can,
#: to tell a leak from unused memory.
_RELEASE_AT_GROWTH: Final = 0.1

#: A worker that may hold less than this share of its cap reports the reason.
_FULL_SHARE: Final = 0.9


class SlotMemory:
    """Measures what a slot holds and may hold, and releases it."""

    def __init__(
        self, device: Device, workload: Workload, leave_free_bytes: int, account: Account
    ) -> None:
        self._device, self._workload, self._account = device, workload, account
        self._leave_free_bytes = leave_free_bytes
        self.lease_bytes: int | None = None
        """Bytes that the head lets this worker hold now; `None`: no limit."""
        self.measured_bytes: int | None = None
        """The last measured result of `allowed_bytes`."""
        self._measured_at_s = float("-inf")
        self.largest: object = None
        """The part that begins, if it is the largest one of its workload."""
        self.took_s = 0.0
        """Duration of the last successful part, by the device's clock."""
        self.failed_at_s = 0.0
        """Time of the last out-of-memory (monotonic seconds)."""
        self.parked_bytes = 0
        """Size of the workload's state while it is parked in host memory; else 0."""
        self.kept_bytes: int | None = None
        """Bytes that the process still held after the last release, beyond those at its start;
        `None` before the first release and for a workload that keeps a state.
        """
        self._opened_kept_bytes = device.kept_bytes()
        self._is_warm = False
        """Whether the context was measured after the workload's kernels were loaded."""
        self._checked_held_bytes: int | None = None
        """Bytes held at the start of the first turn after the last release."""

    def begin_turn(self, lease_bytes: int | None) -> None:
        """Set the lease, and make the next `allowed_bytes` measure again."""
        self.lease_bytes, self._measured_at_s = lease_bytes, float("-inf")

    def allowed_bytes(self) -> int | None:
        """Measure min(cap, lease, held + free - leave_free); `None` if the last measurement is less
        than 20 ms old, because short steps would spend too much time on it.
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
        """Run a part under the cap; first move a parked state back to the device."""

        def on_device() -> R:
            if self.parked_bytes:
                self._workload.unpark()
                self.parked_bytes = 0
            return part()

        result, self.took_s = self._device.timed(on_device, self.largest)
        return result

    def peak_bytes(self) -> int:
        """Return the most bytes that the last part held."""
        return self._device.step_peak_bytes()

    def failed_bytes(self, failure: Failure) -> int | None:
        """Return the bytes that a failed part would have held; `None` if it failed as PROBABLE."""
        self.failed_at_s, device = time.monotonic(), self._device
        if failure.kind is FailureKind.PROBABLE:
            return None
        held_bytes = device.held_bytes() + (failure.requested_bytes or 0)
        return max(held_bytes, device.step_peak_bytes())

    def release(self) -> None:
        """Release the memory of a failed part, and check that the device still works.

        Raises:
            ContextCorruptedError: The device does not work any more.
        """
        self.shed()
        self.prove_alive()
        self.rebase()
        self._measured_at_s = float("-inf")

    def prove_alive(self) -> None:
        """Check that the device still works, by running the emergency product.

        Raises:
            ContextCorruptedError: Even the emergency product fails: the device no longer serves
                this process.
        """
        failure = self.emergency_failure()
        if failure is not None and failure.is_out_of_memory:
            # The error of the step itself may surface only here: clear it and try again before the
            # device counts as broken.
            self._device.release()
            failure = self.emergency_failure()
        if failure is not None:
            raise ContextCorruptedError(failure.text)
        self._account.counts += StepCounts(emergency_count=1)

    def emergency_failure(self) -> Failure | None:
        """Run the emergency product; return its failure, or `None` if it succeeded.

        Raises:
            ContextCorruptedError: Its result is wrong.
        """
        try:
            self._device.emergency()
        except ContextCorruptedError:
            raise
        except Exception as error:  # noqa: BLE001 - classified, and judged by the caller
            return oom.classify(error)
        return None

    def shed(self) -> None:
        """Make the workload drop what a failed step has left, and release all unused memory."""
        if not self.parked_bytes:
            with self._device.enforced():
                self._workload.shed()
        self._release_unused()

    def park(self) -> None:
        """Make the workload remove everything that it holds from the device.

        A workload that keeps a state moves it to host memory.
        """
        if self.parked_bytes:
            return
        with self._device.enforced():
            self.parked_bytes = self._workload.park()
        self._release_unused()
        if self.parked_bytes:
            self._account.event("parked", state_bytes=self.parked_bytes)

    def _release_unused(self) -> None:
        self._device.release()
        # A state that the workload keeps on purpose is not a leak.
        kept_bytes = max(0, self._device.kept_bytes() - self._opened_kept_bytes)
        self.kept_bytes = None if self._keeps_state() else kept_bytes
        self._checked_held_bytes = None

    def rebase(self) -> None:
        """Measure what the process holds besides tensors. On a CPU skip a workload that keeps a
        state: its state would be counted.
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
        """Measure the context again once all kernels have run; for a training: after an update."""
        if self._is_warm or self._device.info.kind == "cpu":
            return
        progress = progress_of(self._workload)
        self._is_warm = progress is None or bool(progress.train_step)
        if self._is_warm:
            self.rebase()

    def _keeps_state(self) -> bool:
        return self._workload.progress() is not None

    def release_if_grown(self) -> None:
        """Call `shed` if far more is held between steps than before; what remains is a leak."""
        held_bytes = self._device.held_bytes()
        if self._checked_held_bytes is None:
            self._checked_held_bytes = held_bytes
        elif held_bytes > self._checked_held_bytes + _RELEASE_AT_GROWTH * self._device.most_bytes:
            self.shed()

    def shortage(self) -> str:
        """Return why the worker may hold much less than its cap; "" if it may hold enough."""
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
    """Return the workload's progress; `None` for a workload without an end.

    Raises:
        TypeError: Its `progress` returned something else.
    """
    progress = workload.progress()
    if isinstance(progress, Progress | None):
        return progress
    raise TypeError(f"progress must return a Progress or None, not {type(progress).__name__}")
