"""The input of the checks: the machine, the scale of the load, and the specs of the workers.

The numbers for a card come from the guides and from cluster.yaml. For a CPU they are scaled as in a
rehearsal: bytes by 1/16, and sizes further. (The smaller budget by 1/8: a worker on a CPU reserves
a constant amount outside its cap, which would be 4 % of a smaller cap.)
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil
import torch
from benches.common import lone_worker

from acceptance.crew import Watch, in_child, open_watch
from acceptance.outcome import Outcome
from orchestrator.config.gpu_specs import GpuProfile, match_profile
from workers.devices import open_device
from workers.messages import DeviceInfo
from workers.nvml import queries
from workers.settings import WorkerSpec
from workers.units import GIB, MIB

#: Largest share of the free memory for all workers together. The guides give 23.10 of 23.56 GiB,
#: which is 98.0 %.
_OF_FREE = 0.99


class NotHereError(RuntimeError):
    """A check cannot be made on this machine; the text says why."""


class Check(NamedTuple):
    """A requirement, the function that measures it, and the function that judges the result."""

    must_hold: str
    measure: Callable[[Machine], Any]
    judge: Callable[[Any], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The load of the checks for a kind of device. The defaults are the full load of a card."""

    #: Budgets of each of the 3090 guide's seven workers, and of each of the 3070 guide's three.
    large_budget_bytes: int = int(3.30 * GIB)
    small_budget_bytes: int = int(1.5 * GIB)
    size: int = 8192
    small_size: int = 1024  # at this size one worker leaves most of the device idle
    too_large_size: int = 65536
    dtypes: tuple[str, ...] = ("fp32", "tf32", "fp16", "bf16")
    dtype: str = "fp16"  # for checks that use a single type
    floor_bytes: int = 100 * MIB
    leave_free_bytes: int = 128 * MIB
    counts: tuple[int, ...] = (1, 2, 3, 7)
    duties: tuple[float, ...] = (0.3, 0.6, 0.9)
    errors: int = 200
    rounds: int = 6
    passes: int = 2
    turn_s: float = 1.0
    side_s: float = 8.0


_CPU: Mapping[str, Any] = {
    "large_budget_bytes": int(3.30 * GIB) // 16, "small_budget_bytes": int(1.5 * GIB) // 8,
    "size": 512, "small_size": 64, "too_large_size": 16384, "dtypes": ("fp32", "bf16"),
    "dtype": "fp32", "floor_bytes": 100 * MIB // 16, "leave_free_bytes": 128 * MIB // 16,
}  # fmt: skip
_QUICK: dict[str, Any] = {"rounds": 3, "passes": 1, "turn_s": 0.6, "side_s": 3.0}
_QUICK_CPU: dict[str, Any] = {
    "counts": (1, 3), "duties": (0.3, 0.9), "errors": 24, "rounds": 2, "turn_s": 0.15,
    "side_s": 1.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The input of a check; `host` describes the machine for the JSON and the results page."""

    device: str
    quick: bool
    scale: Scale
    host: Mapping[str, Any]
    profile: GpuProfile | None  # of the card; `None` on a CPU
    watch: Watch

    def specs(
        self,
        count: int,
        budget_bytes: int,
        *,
        dtype: str | None = None,
        size: int | None = None,
        label: str = "w",
        **shared: Any,  # noqa: ANN401 - fields of WorkerSpec
    ) -> tuple[WorkerSpec, ...]:
        """Return the specs of `count` workers on one card, as the head would make them."""
        shared = {"policy": "adaptive", **shared, "workers_on_host": count}
        shared["card_budget_bytes"] = count * budget_bytes
        spec = lone_worker(
            budget_bytes=budget_bytes, device=self.device, dtype=dtype or self.scale.dtype,
            size=size or self.scale.size, floor_bytes=self.scale.floor_bytes,
            leave_free_bytes=self.scale.leave_free_bytes,
        )  # fmt: skip
        return tuple(replace(spec, slot=f"{label}/{number}", **shared) for number in range(count))

    def fitting(self, count: int, budget_bytes: int) -> tuple[int, str | None]:
        """Return a budget that fits `count` times into the free memory; a note if it is smaller."""
        free_bytes = self.host["free_bytes"]
        fits = int(_OF_FREE * free_bytes) // count
        if budget_bytes <= fits:
            return budget_bytes, None
        return fits, (
            f"{count} x {budget_bytes / GIB:.2f} GiB do not fit the {free_bytes / GIB:.2f} GiB "
            "that were free on this "
            f"{self.host['card']}: scaled to {count} x {fits / GIB:.2f} GiB"
        )


def open_machine(device: str, *, quick: bool, command: str) -> Machine:
    """Describe this machine. ChildDiedError: a child process cannot open the device."""
    on_cpu = device == "cpu"
    changes = dict(_CPU) if on_cpu else {}
    changes |= (_QUICK | _QUICK_CPU if on_cpu else _QUICK) if quick else {}
    scale, watch = Scale(**changes), open_watch(device)
    spec = lone_worker(
        budget_bytes=scale.small_budget_bytes, device=device, dtype=scale.dtype,
        floor_bytes=scale.floor_bytes,
    )  # fmt: skip
    # Measured before our processes use the card; the driver may not report it.
    driver_bytes = queries.card_free_bytes(queries.visible_card()) if device == "cuda" else None
    info, card = in_child(watch, open_once, spec)
    host = {
        "card": info.name, "uuid": info.uuid, "total_bytes": info.total_bytes, **card,
        "driver": info.driver, "context_bytes": info.context_bytes,
        "context_source": info.context_source, "torch": info.torch_version,
        "cuda": torch.version.cuda,  # the version that torch was built for
        "python": platform.python_version(), "system": platform.platform(),
        "cores": os.cpu_count() or 1,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),  # of the start
        "command": command,
    }  # fmt: skip
    if driver_bytes is not None:
        host["free_bytes"] = driver_bytes
    profile = match_profile(info.name, info.total_bytes) if device == "cuda" else None
    return Machine(device=device, quick=quick, scale=scale, host=host, profile=profile, watch=watch)


def open_once(spec: WorkerSpec) -> tuple[DeviceInfo, Mapping[str, Any]]:
    """Describe the device, in a child. Memory that this process holds counts as free."""
    device = open_device(spec)
    if device.info.kind != "cuda":
        free_bytes, capability, count = int(psutil.virtual_memory().available), None, None
    else:
        properties = torch.cuda.get_device_properties(device.torch_device)
        free_bytes = torch.cuda.mem_get_info(device.torch_device)[0]
        free_bytes += device.info.context_bytes + device.memory().reserved_bytes
        capability = f"{properties.major}.{properties.minor}"
        count = int(properties.multi_processor_count)
    card = {"free_bytes": free_bytes, "compute_capability": capability}
    return device.info, {**card, "multiprocessors": count}
