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
    """Its memory, and what this process holds of it."""

    def __init__(self, context_bytes: int = 300 * MIB) -> None:
        self.context_bytes = context_bytes
        self.fraction = 1.0
        self.segments: list[list[tuple[int, bool]]] = []
        """Blocks of each: size, and whether it is in use."""
        self.peaks: dict[str, int] = {}
        self.refused = 0

    def stats(self) -> dict[str, int]:
        blocks = [(size, used, len(segment)) for segment in self.segments for size, used in segment]
        return {
            "allocated_bytes": sum(size for size, used, _ in blocks if used),
            "reserved_bytes": sum(size for size, _, _ in blocks),
            "inactive_split_bytes": sum(
                size for size, used, count in blocks if not used and count > 1
            ),
        }

    def nested(self, _device: object = None) -> dict[str, Any]:
        return {
            name: {"all": {"current": now, "peak": self.peaks[name]}}
            for name, now in self.stats().items()
        }

    def flat(self, _device: object = None) -> dict[str, int]:
        kinds = {
            f"{name}.all.{kind}": n
            for name, s in self.nested().items()
            for kind, n in s["all"].items()
        }
        return {**kinds, "num_alloc_retries": 0}

    def reset(self, _device: object = None) -> None:
        self.peaks = self.stats()

    def empty(self) -> None:
        self.segments = [segment for segment in self.segments if any(used for _, used in segment)]

    def take(self, size: int) -> Block:
        free = [
            (found, at, number)
            for at, segment in enumerate(self.segments)
            for number, (found, used) in enumerate(segment)
            if not used and found >= size
        ]
        if not free:
            if self.stats()["reserved_bytes"] + size > self.fraction * TOTAL_BYTES:
                self.empty()
            if self.stats()["reserved_bytes"] + size > self.fraction * TOTAL_BYTES:
                self.refused += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size // MIB}.00 MiB."
                )
            self.segments.append([(size, False)])
            free = [(size, len(self.segments) - 1, 0)]
        found, at, number = min(free)
        rest = [(found - size, False)] if found > size else []
        segment = self.segments[at]
        segment[number : number + 1] = [(size, True), *rest]
        self.peaks = {name: max(self.peaks[name], now) for name, now in self.stats().items()}
        return Block(self, segment, sum(before for before, _ in segment[:number]))

    def give(self, segment: list[tuple[int, bool]], offset: int) -> None:
        joined: list[tuple[int, bool]] = []
        at = 0
        for size, used in segment:
            mine = used and at != offset
            if joined and not mine and not joined[-1][1]:
                joined[-1] = (joined[-1][0] + size, False)
            else:
                joined.append((size, mine))
            at += size
        segment[:] = joined

    @property
    def process_bytes(self) -> int:
        """As NVML tells it."""
        return self.context_bytes + self.stats()["reserved_bytes"]


class Block:
    """A tensor of the card; goes back when it is let go."""

    def __init__(self, card: Card, segment: list[tuple[int, bool]], offset: int) -> None:
        self._place = card, segment, offset

    def __del__(self) -> None:
        card, segment, offset = self._place
        card.give(segment, offset)


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
        "memory_reserved": lambda _device=None: card.stats()["reserved_bytes"],
        "memory_allocated": lambda _device=None: card.stats()["allocated_bytes"],
        "max_memory_allocated": lambda _device=None: card.peaks["allocated_bytes"],
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


def with_gaps(card: Card, rows: int) -> None:
    """Take 16 blocks, free every other, and take half of that again in one piece, which fits no gap."""
    block_bytes = max(1, rows // 16) * MIB
    blocks: list[Block | None] = [card.take(block_bytes) for _ in range(16)]
    blocks[::2] = [None] * 8
    card.take(4 * block_bytes)


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
    device = CudaDevice(spec(OnCard))
    card.take(160 * MIB)  # as the block of a smaller claim leaves it
    for _ in range(3):
        device.timed(lambda: with_gaps(card, 160))
        assert card.peaks["allocated_bytes"] == 160 * MIB
        assert card.peaks["reserved_bytes"] == 200 * MIB
        assert device.step_peak_bytes() == 200 * MIB
        assert device.step_peak_bytes() == 200 * MIB, "it is asked twice"


def test_what_is_reserved_and_unused_is_not_needed(card: Card) -> None:
    device = CudaDevice(spec(OnCard))
    card.take(200 * MIB)
    for rows in (50, 100, 250, 300):  # the last two fit no segment of those before
        device.timed(lambda rows=rows: card.take(rows * MIB))
        assert device.step_peak_bytes() == rows * MIB
    assert card.stats()["reserved_bytes"] == 750 * MIB


def test_kernels_that_are_loaded_late_lower_the_cap(card: Card) -> None:
    statuses: list[Status] = turns(spec(LoadsLate), [{}] * 6)
    (grew,) = events(statuses, "context_grew")
    assert grew in statuses[2].events, "with the first update"
    assert (grew.detail["grown_bytes"], grew.detail["context_bytes"]) == (120 * MIB, 420 * MIB)
    first, last = statuses[0].device, statuses[-1].device
    assert (first.cap_bytes, last.cap_bytes) == (1000 * MIB, 880 * MIB)
    assert last.context_bytes + last.cap_bytes == BUDGET_BYTES
    assert card.fraction * TOTAL_BYTES == pytest.approx(880 * MIB)
