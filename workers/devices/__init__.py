"""Devices: memory is capped, allocated and measured here."""

from __future__ import annotations

from workers.devices.base import Device
from workers.messages import IncompatibleError
from workers.settings import WorkerSpec


def open_device(spec: WorkerSpec) -> Device:
    """Open the device of `spec` for this process, and cap it.

    Raises:
        IncompatibleError: This machine has no such device, or the budget does not fit it.
    """
    if spec.device == "cuda":
        from workers.devices.cuda import CudaDevice  # noqa: PLC0415 - a CPU worker never loads it

        return CudaDevice(spec)
    if spec.device == "cpu":
        # This module needs Linux; a CUDA worker does not.
        from workers.devices.cpu import CpuDevice  # noqa: PLC0415

        return CpuDevice(spec)
    raise IncompatibleError(f"{spec.slot}: unknown device {spec.device!r}; valid: cuda, cpu")
