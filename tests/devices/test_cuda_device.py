"""The CUDA device on a scripted card: what it measures of an allocator, and a context that grows."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.engine.scene import events, turns
from tests.scene import MIB, spec_of
from workers.devices import cuda
from workers.devices.cuda import CudaDevice
from workers.messages import Progress, Status
from workers.nvml import queries
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload

TOTAL_BYTES = 8192 * MIB


class Event:
    """Of the card's clock."""

    def __init__(self, **_: object) -> None:
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at_s - self.at_s)


class Card:
    """Its memory, and what torch's allocator tells of it in this process."""

    def __init__(self, context_bytes: int = 300 * MIB) -> None:
        self.context_bytes = context_bytes
        self.fraction = 1.0
        self.reserved_bytes = 0
        self.reset()

    def reset(self, _device: object = None) -> None:
        self.peaks = {"allocated_bytes": 0, "inactive_split_bytes": 0}
        self.peaks["reserved_bytes"] = self.reserved_bytes

    def take(self, size_bytes: int, reserved_bytes: int = 0, splits_bytes: int = 0) -> None:
        """Hold so much for a moment; at its most the pool is so large, with so much in gaps."""
        if size_bytes > self.fraction * TOTAL_BYTES:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self.reserved_bytes = max(self.reserved_bytes, size_bytes, reserved_bytes)
        seen = size_bytes, splits_bytes, self.reserved_bytes
        self.peaks = {
            name: max(self.peaks[name], now) for name, now in zip(self.peaks, seen, strict=True)
        }

    def nested(self, _device: object = None) -> dict[str, Any]:
        now = {"allocated_bytes": 0, "inactive_split_bytes": 0}
        now["reserved_bytes"] = self.reserved_bytes
        return {
            name: {"all": {"current": now[name], "peak": peak}} for name, peak in self.peaks.items()
        }

    def flat(self, _device: object = None) -> dict[str, int]:
        now = {
            f"{name}.all.current": each["all"]["current"] for name, each in self.nested().items()
        }
        return {**now, "num_alloc_retries": 0}

    def empty(self) -> None:
        self.reserved_bytes = 0

    @property
    def process_bytes(self) -> int:
        """As NVML tells it."""
        return self.context_bytes + self.reserved_bytes


def use(card: Card, patch: pytest.MonkeyPatch) -> None:
    """Make it the card that this process sees."""

    def set_fraction(fraction: float, _device: object) -> None:
        card.fraction = fraction

    card.reset()
    properties = SimpleNamespace(total_memory=TOTAL_BYTES, name="Scripted", uuid="0")
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_properties": lambda _device: properties,
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda _device: card.fraction,
        "memory_reserved": lambda _device=None: card.reserved_bytes,
        "memory_allocated": lambda _device=None: 0,
        "memory_stats": card.flat,
        "memory_stats_as_nested_dict": card.nested,
        "reset_peak_memory_stats": card.reset,
        "mem_get_info": lambda _device: (TOTAL_BYTES - card.process_bytes, TOTAL_BYTES),
        "empty_cache": card.empty,
        "synchronize": lambda _device=None: None,
        "Event": Event,
    }
    for name, answer in answers.items():
        patch.setattr(torch.cuda, name, answer)
    patch.setattr(queries, "process_used_bytes", lambda _card: card.process_bytes)
    patch.setattr(queries, "card_used_bytes", lambda _card: card.process_bytes)
    patch.setattr(cuda, "EmergencyProduct", lambda *_: SimpleNamespace(run=lambda: None))
    patch.setattr(cuda.CudaDevice, "_warm_up", lambda *_: None)


BUDGET_BYTES = 1300 * MIB


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    use(card, monkeypatch)
    OnCard.card = card
    return card


def spec(workload: type) -> WorkerSpec:
    name = f"{workload.__module__}:{workload.__name__}"
    asked = spec_of(
        device="cuda", budget_bytes=BUDGET_BYTES, name=name, policy="adaptive", batch_floor=1
    )
    return replace(asked, workload=replace(asked.workload, size=1, batch=4096))


class OnCard(Workload):
    """Takes a MiB of the card for each row of its batch."""

    card: Card
    size_power = 0.0

    def step(self, size: int, batch: int) -> StepResult:
        self.card.take(batch * MIB)
        return StepResult(flop=1.0)

    def release(self) -> None:
        pass


class LoadsLate(OnCard):
    """A training whose kernels are loaded with its first update, in the third step."""

    steps = 0

    def step(self, size: int, batch: int) -> StepResult:
        self.steps += 1
        if self.steps in {1, 3}:
            self.card.context_bytes += 60 * MIB
        return super().step(size, batch)

    def progress(self) -> Progress:
        return Progress(train_step=self.steps // 3)


def test_gaps_within_a_step_count_as_needed(card: Card) -> None:
    """Of 16 blocks every other was freed, and half of that taken again in one piece: no gap is so
    large.
    """
    device = CudaDevice(spec(OnCard))
    card.reserved_bytes = 160 * MIB  # as the block of a smaller claim leaves it
    for _ in range(3):
        device.timed(lambda: card.take(160 * MIB, 200 * MIB, 80 * MIB))
        assert device.step_peak_bytes() == 200 * MIB
        assert device.step_peak_bytes() == 200 * MIB, "it is asked twice"


def test_what_is_reserved_and_unused_is_not_needed(card: Card) -> None:
    device = CudaDevice(spec(OnCard))
    card.reserved_bytes = 200 * MIB
    # The last two fit no segment of those before.
    for rows, reserved in ((50, 200), (100, 200), (250, 450), (300, 750)):
        device.timed(lambda rows=rows, reserved=reserved: card.take(rows * MIB, reserved * MIB))
        assert device.step_peak_bytes() == rows * MIB


def test_kernels_that_are_loaded_late_lower_the_cap(card: Card) -> None:
    statuses: list[Status] = turns(spec(LoadsLate), [{}] * 6)
    (grew,) = events(statuses, "context_grew")
    assert grew in statuses[2].events, "with the first update"
    assert (grew.detail["grown_bytes"], grew.detail["context_bytes"]) == (120 * MIB, 420 * MIB)
    first, last = statuses[0].device, statuses[-1].device
    assert (first.cap_bytes, last.cap_bytes) == (1000 * MIB, 880 * MIB)
    assert last.context_bytes + last.cap_bytes == BUDGET_BYTES
    assert card.fraction * TOTAL_BYTES == pytest.approx(880 * MIB)
