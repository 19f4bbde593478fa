"""The CUDA device on a scripted card: what it measures of an allocator, and a context that grows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.devices import scripted_card
from tests.devices.scripted_card import Block, Card
from tests.engine.scene import events, slices
from tests.scene import MIB, spec_of
from workers.devices.cuda import CudaDevice
from workers.messages import Progress, Report
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload

BUDGET_BYTES = 1300 * MIB


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    scripted_card.use(card, monkeypatch)
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
    fills_claim = False

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


class Trains(OnCard):
    """Keeps a state; activations of several sizes come, and go while gradients come."""

    state: Sequence[Block] = ()
    steps = 0

    def step(self, size: int, batch: int) -> StepResult:
        Trains.steps += 1
        self.state = self.state or [self.card.take(8 * MIB) for _ in range(25)]
        held: list[Block | None] = [
            self.card.take((batch * (3 + i % 5) // 40 + 1) * MIB) for i in range(12)
        ]
        held[::2] = [None] * 6
        held.append(self.card.take((batch // 3 + 1) * MIB))
        for i in range(1, 12, 2):
            held[i] = None
            held.append(self.card.take((batch // 20 + 1) * MIB))
        return StepResult(flop=1.0)


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
    device.obtain(160 * MIB)  # as progressive allocation leaves it
    for _ in range(3):
        device.timed(lambda: with_gaps(card, 160))
        assert card.peaks["allocated_bytes"] == 160 * MIB
        assert card.peaks["reserved_bytes"] == 200 * MIB
        assert device.step_peak_bytes() == 200 * MIB
        assert device.step_peak_bytes() == 200 * MIB, "it is asked twice"


def test_what_is_reserved_and_unused_is_not_needed(card: Card) -> None:
    device = CudaDevice(spec(OnCard))
    device.obtain(200 * MIB)
    for rows in (50, 100, 250, 300):  # the last two fit no segment of those before
        device.timed(lambda rows=rows: card.take(rows * MIB))
        assert device.step_peak_bytes() == rows * MIB
    assert card.stats()["reserved_bytes"] == 750 * MIB


def test_steps_with_gaps_are_sized_by_what_they_reserve(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten minutes of a training, a step a second.

    The cap of 1000 MiB holds a batch of about 430.
    """
    real_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + Trains.steps)
    reports = slices(spec(Trains), [{}] * 400)
    assert sum(report.counts.steps_oom for report in reports) <= 10
    assert sorted(report.batch or 0 for report in reports)[len(reports) // 2] >= 300


def test_kernels_that_are_loaded_late_lower_the_cap(card: Card) -> None:
    reports: list[Report] = slices(spec(LoadsLate), [{}] * 6)
    (grew,) = events(reports, "context_grew")
    assert grew in reports[2].events, "with the first update"
    assert (grew.detail["grown_bytes"], grew.detail["context_bytes"]) == (120 * MIB, 420 * MIB)
    first, last = reports[0].device, reports[-1].device
    assert (first.cap_bytes, last.cap_bytes) == (1000 * MIB, 880 * MIB)
    assert last.context_bytes + last.cap_bytes == BUDGET_BYTES
    assert card.fraction * scripted_card.TOTAL_BYTES == pytest.approx(880 * MIB)
