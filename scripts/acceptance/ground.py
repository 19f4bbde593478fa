"""What the checks stand on: the machine, what is asked of it, and the specs of the workers.

The numbers for a card are those of the guides and of cluster.yaml; the CPU's are the same scaled as in a rehearsal:
bytes by 1/16 and sizes further down, so that a processor gets through in time. (The smaller budget by 1/8: what a
worker on a CPU keeps out of its cap is the same for each, and would be 4 % of a cap that small.)
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psutil
import torch
from benches.common import lone_worker

from acceptance.crew import Crews, Watch, in_child
from orchestrator.config.gpu_specs import GpuProfile, match_profile, profile_of
from workers.devices.opening import open_device
from workers.host.gpu_facts import look_at_cards
from workers.messages import DeviceInfo
from workers.nvml import queries
from workers.settings import WorkerSpec
from workers.units import GIB, MIB

#: Of what is free, what all workers together may be given; the guides' 23.31 of 23.69 GiB are 98.4 %.
_OF_FREE = 0.99


class NotHereError(RuntimeError):
    """A check cannot be made here; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """What is asked of a kind of device."""

    large_budget_bytes: int
    """Of each of the 3090 guide's seven workers."""
    small_budget_bytes: int
    """Of each of the 3070 guide's three."""
    size: int
    small_size: int
    """So small that one worker leaves most of the device idle."""
    too_large_size: int
    dtypes: tuple[str, ...]
    dtype: str
    """Of the checks that use one."""
    floor_bytes: int
    leave_free_bytes: int
    counts: tuple[int, ...] = (1, 2, 3, 7)
    duties: tuple[float, ...] = (0.3, 0.6, 0.9)
    errors: int = 200
    rounds: int = 6
    passes: int = 2
    turn_s: float = 1.0
    side_s: float = 8.0
    products: int = 300
    """Right products of each type, for the check of results."""
    flips: int = 3
    """Flipped bits of each type, place and size."""
    samples: int = 120


_SCALES = {
    "cuda": Scale(
        large_budget_bytes=int(3.33 * GIB),
        small_budget_bytes=int(1.5 * GIB),
        size=8192,
        small_size=1024,
        too_large_size=65536,
        dtypes=("fp32", "tf32", "fp16", "bf16"),
        dtype="fp16",
        floor_bytes=100 * MIB,
        leave_free_bytes=128 * MIB,
    ),
    "cpu": Scale(
        large_budget_bytes=int(3.33 * GIB) // 16,
        small_budget_bytes=int(1.5 * GIB) // 8,
        size=512,
        small_size=64,
        too_large_size=16384,
        dtypes=("fp32", "bf16"),
        dtype="fp32",
        floor_bytes=100 * MIB // 16,
        leave_free_bytes=128 * MIB // 16,
    ),
}
_QUICK: Mapping[str, Any] = {
    "rounds": 3,
    "passes": 1,
    "turn_s": 0.6,
    "side_s": 3.0,
    "products": 100,
    "flips": 1,
    "samples": 60,
}
_QUICK_CPU: Mapping[str, Any] = {"errors": 24, "rounds": 2, "turn_s": 0.3, "side_s": 1.0, "products": 40}


def scale_of(device: str, *, quick: bool) -> Scale:
    """Return what is asked of a device."""
    if not quick:
        return _SCALES[device]
    return replace(_SCALES[device], **{**_QUICK, **(_QUICK_CPU if device == "cpu" else {})})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """All that a check is given."""

    device: str
    quick: bool
    scale: Scale
    host: Mapping[str, Any]
    """The machine, as JSON and a results page show it."""
    profile: GpuProfile | None
    """Of the card; `None` on a CPU."""
    watch: Watch
    crews: Crews = field(default_factory=Crews)

    def specs(
        self,
        count: int,
        budget_bytes: int,
        *,
        dtype: str | None = None,
        size: int | None = None,
        policy: str = "adaptive",
        duty: float | None = None,
        label: str = "w",
    ) -> tuple[WorkerSpec, ...]:
        """Return the specs of `count` workers that share the card, as the head would make them."""
        spec = lone_worker(
            budget_bytes=budget_bytes,
            device=self.device,
            dtype=dtype or self.scale.dtype,
            size=size or self.scale.size,
            floor_bytes=self.scale.floor_bytes,
            leave_free_bytes=self.scale.leave_free_bytes,
        )
        shared = replace(spec, card_budget_bytes=count * budget_bytes, workers_on_host=count, policy=policy, duty=duty)
        return tuple(replace(shared, slot=f"{label}/{number}") for number in range(count))

    def fitting(self, count: int, budget_bytes: int) -> tuple[int, str | None]:
        """Return a budget of which `count` fit what was free, and a sentence if it is less than asked."""
        free_bytes = self.host["free_bytes"]
        fits = int(_OF_FREE * free_bytes) // count
        if budget_bytes <= fits:
            return budget_bytes, None
        return fits, (
            f"{count} x {budget_bytes / GIB:.2f} GiB do not fit the {free_bytes / GIB:.2f} GiB that were free on this "
            f"{self.host['card']}: scaled to {count} x {fits / GIB:.2f} GiB"
        )


def look_around(device: str, command: str, watch: Watch, scale: Scale) -> tuple[Mapping[str, Any], GpuProfile | None]:
    """Find out what machine this is; in a process of its own, because it opens the device.

    Raises:
        acceptance.crew.SeatDiedError: The device cannot be opened; says why.
    """
    spec = lone_worker(
        budget_bytes=scale.small_budget_bytes, device=device, dtype=scale.dtype, floor_bytes=scale.floor_bytes
    )
    # Before anything of ours is there; the driver may not tell.
    told_bytes = queries.card_free_bytes(queries.visible_card()) if device == "cuda" else None
    opened: tuple[DeviceInfo, Mapping[str, Any]] = in_child(watch, open_once, spec)
    info, card = opened
    host = {
        "card": info.name,
        "uuid": info.uuid,
        "total_bytes": info.total_bytes,
        **card,
        "driver": info.driver,
        "context_bytes": info.context_bytes,
        "context_source": info.context_source,
        "torch": info.torch_version,
        "cuda": torch.version.cuda,  # what torch was built for
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count() or 1,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),  # of the start
        "command": command,
    }
    if told_bytes is not None:
        host["free_bytes"] = told_bytes
    return host, _profile(info) if device == "cuda" else None


def open_once(spec: WorkerSpec) -> tuple[DeviceInfo, Mapping[str, Any]]:
    """Open the device and look at it, what this process holds counted as free. The body of a child."""
    device = open_device(spec)
    if device.info.kind != "cuda":
        free_bytes = int(psutil.virtual_memory().available)
        return device.info, {"free_bytes": free_bytes, "compute_capability": None, "multiprocessors": None}
    properties = torch.cuda.get_device_properties(device.torch_device)
    free_bytes, _ = torch.cuda.mem_get_info(device.torch_device)
    return device.info, {
        "free_bytes": free_bytes + device.info.context_bytes + device.held_bytes(),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": int(properties.multi_processor_count),
    }


def _profile(info: DeviceInfo) -> GpuProfile | None:
    """Return what is known of the card: its row of the table, or by formula."""
    for card in look_at_cards().cards:
        if card.uuid == info.uuid:
            return profile_of(card)
    return match_profile(info.name, info.total_bytes)
