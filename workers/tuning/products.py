"""Matrix products as an arm: one worker of `matmul`, as a run would start it, with its duty."""

from __future__ import annotations

import time
from typing import Final

import psutil

from workers.devices.base import Device
from workers.engine.between_steps import DutyCycle
from workers.messages import IncompatibleError
from workers.tuning.messages import ArmSpec, Evaluated, Opened
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

#: What an arm counts, so that its figure is about that of the samples of a training.
_UNIT_FLOP: Final = 1e9


class Products:
    """One worker. Its memory is what the products need, not the whole claim: arms share a card."""

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        self._device = device
        workload = spec.spec.workload
        self._size, self._batch = workload.size, workload.batch
        if device.info.dtype != workload.dtype:
            raise IncompatibleError(
                f"this device computes {device.info.dtype} in place of {workload.dtype}"
            )
        self._duty = DutyCycle(spec.spec.duty)
        context = WorkloadContext(
            device=device.torch_device, dtype=device.torch_dtype, seed=spec.seed
        )
        with device.enforced():
            self._matmul = Matmul(context)

    def open(self, steps: int) -> Opened:
        """Find out how many products make a step."""
        began_s = time.perf_counter()
        for _ in range(steps):
            self._device.timed(self.step)
        info = self._device.info
        return Opened(
            step_s=(time.perf_counter() - began_s) / max(1, steps),
            peak_bytes=self._device.step_peak_bytes(),
            flop=_UNIT_FLOP,
            device_name=info.name,
            card=info.uuid or "cpu",
            device_bytes=info.total_bytes,
            driver=info.driver,
            torch=info.torch_version,
            host_bytes=psutil.Process().memory_info().rss,
        )

    def step(self) -> float:
        """Do one step, and rest as the duty says."""
        began_s = time.perf_counter()
        flop = self._matmul.step(self._size, self._batch).flop
        self._duty.worked(time.perf_counter() - began_s, 1.0)
        while self._duty.rest(1.0):
            pass
        return flop / _UNIT_FLOP

    def unpark(self) -> None:
        """Nothing waits: operands are drawn anew."""

    def park(self) -> int:
        """Drop operands and results."""
        with self._device.enforced():
            self._matmul.release()
        return 0

    def validation(self) -> Evaluated:
        """There is none."""
        return Evaluated(validation_loss=None, step=0)
