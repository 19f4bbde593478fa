"""The adaptive policy on a card of so many bytes: gives way before anything fails, and grows back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.scene import GUIDES, MIB
from workers.policy.adaptive import AdaptivePolicy, AdaptiveState
from workers.policy.base import (
    Decision,
    Emergency,
    Event,
    Growth,
    Pressure,
    Release,
    Run,
    StepOk,
    StepOom,
)
from workers.settings import Learned, Scalar, WorkloadSpec

ASKED = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=1024, seed=0)

#: What a step of the simulated workloads takes, as footprint of (size, batch).
Footprint = Callable[[int, int], int]

FIXED_BYTES = 100 * MIB
ROW_BYTES = MIB


def by_batch(size: int, batch: int) -> int:
    """Return the bytes of a model and of so many rows."""
    return FIXED_BYTES + ROW_BYTES * batch


def by_both(size: int, batch: int) -> int:
    """Return the bytes of a runtime and of so many squares."""
    return 20 * MIB + 24 * size * size * batch // 1024


def weights_and_rows(size: int, batch: int) -> int:
    """Return the bytes of a network: its weights do not grow with the batch, so no one line fits all of its steps."""
    return 4 * size * size + 4 * size * size * batch // 256


def three_squares(size: int, batch: int) -> int:
    """Return what matmul needs at the least."""
    return 3 * 2 * max(64, size // 64 * 64) ** 2


BATCH_ONLY = Growth(
    size_power=0.0,
    batch_power=1.0,
    fills_claim=False,
    needed_bytes=lambda _size, _batch: None,
    most_bytes=1 << 40,
)
BOTH = replace(BATCH_ONLY, size_power=2.0)
MATMUL = Growth(
    size_power=2.0,
    batch_power=0.0,
    fills_claim=True,
    needed_bytes=three_squares,
    most_bytes=200 * MIB,
)


def adaptive(growth: Growth, workload: WorkloadSpec = ASKED, **memory: Any) -> AdaptivePolicy:
    return AdaptivePolicy(replace(GUIDES, **memory), workload, growth)


@dataclass
class Card:
    """Follows the policy as the engine does, on memory that is counted and not taken.

    Steps take a second.
    """

    policy: AdaptivePolicy
    takes: Footprint
    allowed_bytes: int
    shows_bytes: Callable[[int], int] = lambda allowed_bytes: allowed_bytes
    """What the policy learns of the memory that is allowed."""
    measured_every: int = 1
    """How many steps there are for each that ends with a measurement of free memory."""
    state: AdaptiveState = field(init=False)
    beside_bytes: int = 0
    """What a step takes beside what it holds, where it fills its claim."""
    now_s: float = 100.0
    good: list[Run] = field(default_factory=list)
    failed: list[tuple[float, Run]] = field(default_factory=list)
    releases: int = 0
    log: list[tuple[Event, Decision]] = field(default_factory=list)

    def begin(self, claim_bytes: int = 0, learned: Learned | None = None) -> Card:
        self.state = self.policy.initial(claim_bytes, learned)
        return self

    def tell(self, event: Event) -> Decision:
        self.state, decision = self.policy.decide(self.state, event)
        self.log.append((event, decision))
        return decision

    def slice(self, steps: int = 1) -> Decision:
        """Run a slice of so many good steps.

        Return the last decision, which is an emergency if it ended so.
        """
        decision, done = self.look(), 0
        while not isinstance(decision, Emergency):
            if isinstance(decision, Release):
                self.releases += 1
                decision = self.look()
                continue
            self.now_s += 1.0
            if self.bytes_of(decision) <= self.allowed_bytes:
                self.good.append(decision)
                decision = self.tell(self.ended_well(decision))
                done += 1
                if done == steps:
                    return decision
            else:
                self.failed.append((self.now_s, decision))
                decision = self.tell(self.ran_out(decision))
        self.now_s += 1.0
        return decision

    def bytes_of(self, run: Run) -> int:
        return (
            self.takes(run.size, run.batch)
            if run.hold_bytes is None
            else run.hold_bytes + self.beside_bytes
        )

    def look(self) -> Decision:
        floor = self.policy.floor
        return self.tell(
            Pressure(
                at_s=self.now_s,
                free_bytes=self.allowed_bytes,
                allowed_bytes=self.shows_bytes(self.allowed_bytes),
                needed_at_floor_bytes=self.takes(floor.size, floor.batch),
            )
        )

    def ended_well(self, run: Run) -> StepOk:
        return StepOk(
            at_s=self.now_s,
            peak_bytes=self.bytes_of(run),
            allowed_bytes=None
            if len(self.good) % self.measured_every
            else self.shows_bytes(self.allowed_bytes),
        )

    def ran_out(self, run: Run) -> StepOom:
        return StepOom(
            at_s=self.now_s,
            needed_bytes=None,
            at_least_bytes=0,
            free_bytes=self.allowed_bytes,
            allowed_bytes=self.shows_bytes(self.allowed_bytes),
        )

    @property
    def last(self) -> Run:
        return self.good[-1]

    @property
    def last_bytes(self) -> int:
        return self.bytes_of(self.last)


def matmul(allowed_bytes: int = 200 * MIB, claim_bytes: int = 200 * MIB, size: int = 4096) -> Card:
    policy = adaptive(MATMUL, replace(ASKED, name="matmul", size=size))
    return Card(policy, three_squares, allowed_bytes).begin(claim_bytes)


def mlp(allowed_bytes: int, **memory: Any) -> Card:
    return Card(adaptive(BATCH_ONLY, **memory), by_batch, allowed_bytes).begin()


class TestFilling:
    """A workload that holds all of its claim: what it holds follows the allowed bytes, and its size what it holds."""

    @pytest.mark.parametrize("measured_every", [2, 3, 10, 1000])
    def test_steps_after_which_nobody_looked_cost_little(self, measured_every: int) -> None:
        card = matmul(size=65536)
        card.measured_every = measured_every
        for _ in range(20):
            card.slice(20)
            assert 0.85 * 200 * MIB <= card.last_bytes <= 200 * MIB
        assert card.last_bytes >= 0.96 * 200 * MIB
        assert len({run.hold_bytes for run in card.good}) <= 12, (
            "each change fills all of the memory anew"
        )
        card.allowed_bytes = 90 * MIB
        card.slice(20)
        assert 0.85 * 90 * MIB <= card.last_bytes <= 90 * MIB
        assert card.failed == []

    def test_what_a_step_takes_beside_its_claim_is_learned(self) -> None:
        first = matmul()
        first.beside_bytes = 20 * MIB
        first.slice(30)
        assert len(first.failed) == 1
        assert 0.97 * 200 * MIB <= first.last_bytes <= 200 * MIB
        second = matmul()
        second.beside_bytes = 20 * MIB
        second.begin(200 * MIB, first.policy.learned(first.state))
        second.slice(1)
        assert second.failed == []
        assert 0.97 * 200 * MIB <= second.last_bytes <= 200 * MIB

    @given(
        rooms=st.lists(st.integers(0, 300 * MIB), min_size=1, max_size=30),
        claim_bytes=st.integers(0, 200 * MIB),
        size=st.integers(1, 70_000),
        steps=st.integers(1, 4),
    )
    def test_it_never_asks_for_more_than_the_room_and_so_never_fails(
        self, rooms: list[int], claim_bytes: int, size: int, steps: int
    ) -> None:
        card = matmul(claim_bytes=claim_bytes, size=size)
        floor_bytes = three_squares(card.policy.floor.size, 1)
        for allowed_bytes in rooms:
            card.allowed_bytes = allowed_bytes
            before = len(card.good)
            ended = card.slice(steps)
            if allowed_bytes < min(floor_bytes, MATMUL.most_bytes):
                assert isinstance(ended, Emergency)
            for run in card.good[before:]:
                assert run.hold_bytes is not None
                assert run.hold_bytes <= min(allowed_bytes, MATMUL.most_bytes)
                assert three_squares(run.size, 1) <= run.hold_bytes
        assert card.failed == []


class TestStepping:
    """A workload that takes what its step takes, and says nothing about it: learned from the peaks of its steps."""

    @given(
        batch=st.integers(1, 1_000_000),
        batch_floor=st.integers(1, 64),
        fixed_mib=st.integers(0, 500),
        row_bytes=st.integers(100, 4 * MIB),
        room_mib=st.integers(100, 20_000),
    )
    @example(batch=65536, batch_floor=32, fixed_mib=10, row_bytes=10_000, room_mib=200)
    @example(batch=4, batch_floor=1, fixed_mib=50, row_bytes=100, room_mib=100)
    def test_whatever_is_asked_for_and_whatever_is_there(
        self, batch: int, batch_floor: int, fixed_mib: int, row_bytes: int, room_mib: int
    ) -> None:
        """Of the batches there are it ends at the largest that fits, or close to it, and nothing fails on the way."""
        policy = adaptive(BATCH_ONLY, replace(ASKED, batch=batch), batch_floor=batch_floor)
        card = Card(
            policy, lambda _size, rows: fixed_mib * MIB + row_bytes * rows, room_mib * MIB
        ).begin()
        smallest_bytes = card.takes(ASKED.size, min(batch, batch_floor))
        for _ in range(60):
            card.slice(2)
        if smallest_bytes > room_mib * MIB:
            assert card.good == []
            assert card.failed
            return
        if smallest_bytes > 0.8 * room_mib * MIB:
            assert len(card.failed) <= 3, (
                "so near to its floor it grows slowly, and may find out where that ends"
            )
            return
        assert card.failed == []
        between = max(1, batch // 256)  # two neighbouring batches
        fits = (0.97 * room_mib * MIB - fixed_mib * MIB) / row_bytes
        assert card.last.batch >= 0.95 * min(batch, fits) - between - 1

    @settings(max_examples=40)
    @given(rooms=st.lists(st.integers(1, 400), min_size=1, max_size=20), steps=st.integers(1, 10))
    def test_there_is_no_emergency_while_its_smallest_step_would_fit(
        self, rooms: list[int], steps: int
    ) -> None:
        card = Card(adaptive(BOTH, failures_per_minute=1000), weights_and_rows, 0).begin()
        floor_bytes = weights_and_rows(GUIDES.size_floor, GUIDES.batch_floor)
        for room_mib in rooms:
            card.allowed_bytes = room_mib * MIB
            card.now_s += 60.0  # whatever it waited for is over
            ended = card.slice(steps)
            assert not isinstance(ended, Emergency) or card.allowed_bytes < 1.25 * floor_bytes

    def test_a_floor_that_never_fitted_is_tried_ever_more_rarely(self) -> None:
        card = mlp(allowed_bytes=50 * MIB)
        for _ in range(300):
            card.slice()
        assert card.good == []
        times_s = [at_s for at_s, _ in card.failed]
        assert 4 <= len(times_s) <= 8
        assert all(run.batch == GUIDES.batch_floor for _, run in card.failed[1:])


class TestWhatTheWorkloadSays:
    @given(
        rooms=st.lists(st.integers(0, 1200), min_size=1, max_size=30),
        learned=st.none() | st.builds(Learned, size=st.integers(1, 1 << 40)),
    )
    def test_nothing_is_run_that_is_said_not_to_fit(
        self, rooms: list[int], learned: Learned | None
    ) -> None:
        card = Card(adaptive(replace(BATCH_ONLY, needed_bytes=by_batch)), by_batch, 0).begin(
            0, learned
        )
        for room_mib in rooms:
            card.allowed_bytes = room_mib * MIB
            ended = card.slice(2)
            assert isinstance(ended, Emergency) == (room_mib < 132) or 132 <= room_mib < 140, (
                "the margin of a step"
            )
        assert card.failed == []


class TestLearned:
    @pytest.mark.parametrize(
        ("allowed_mib", "learned", "least", "most"),
        [
            pytest.param(300, Learned(size=600, fixed_bytes=FIXED_BYTES, unit_bytes=ROW_BYTES),
             0.9 * 200, 200, id="checked against the room first"),
            pytest.param(700, Learned(size=500), 500, 500,
             id="without a footprint it is believed until it fails"),
        ],
    )  # fmt: skip
    def test_a_learned_size_is_the_first(
        self, allowed_mib: int, learned: Learned, least: float, most: float
    ) -> None:
        card = mlp(allowed_bytes=allowed_mib * MIB)
        card.begin(0, learned)
        card.slice(1)
        assert least <= card.last.batch <= most
        assert card.failed == []

    def test_nothing_is_learned_before_a_step_has_ended_well(self) -> None:
        card = mlp(allowed_bytes=50 * MIB)
        card.slice()
        assert card.policy.learned(card.state) is None

    @settings(max_examples=20)
    @given(size=st.integers(1, 1024), fixed_mib=st.floats(0, 10_000), row_mib=st.floats(0.01, 100))
    @example(size=30, fixed_mib=0.0, row_mib=0.5)
    @example(size=600, fixed_mib=0.0, row_mib=0.01)
    @example(size=600, fixed_mib=10_000.0, row_mib=100.0)
    def test_however_wrong_it_finds_its_way(
        self, size: int, fixed_mib: float, row_mib: float
    ) -> None:
        card = mlp(allowed_bytes=700 * MIB)
        card.begin(0, Learned(size=size, fixed_bytes=fixed_mib * MIB, unit_bytes=row_mib * MIB))
        for _ in range(300):
            card.slice()
        assert len(card.failed) <= 8
        assert card.last.batch >= 0.8 * 600


def test_a_partial_step_teaches_nothing() -> None:
    card = mlp(allowed_bytes=300 * MIB)
    card.slice(20)
    before, settled = card.state, card.last
    for _ in range(20):
        card.tell(
            replace(card.ended_well(card.last), peak_bytes=MIB, allowed_bytes=None, partial=True)
        )
    assert card.state.sizer.line == before.sizer.line
    assert card.slice() == settled
    assert card.failed == []


def test_an_emergency_names_the_smallest_step_in_words() -> None:
    card = matmul(allowed_bytes=200 * MIB)
    card.beside_bytes = 1 << 40
    while not isinstance(ended := card.slice(), Emergency):
        pass
    while "minute" in ended.reason:
        card.now_s += 60.0
        ended = card.slice()
        assert isinstance(ended, Emergency)
    floor = card.policy.floor
    assert floor.hold_bytes is not None
    step = f"the smallest step (size {floor.size} batch {floor.batch}, holding {floor.hold_bytes / MIB:.1f} MiB)"
    assert ended.reason.startswith(step)


def test_only_what_is_larger_than_all_that_fits_is_a_probe() -> None:
    card = mlp(allowed_bytes=300 * MIB)
    card.slice(30)
    assert card.good[0].is_probe
    grew = [after.batch > before.batch for before, after in pairwise(card.good)]
    assert [run.is_probe for run in card.good[1:]] == grew
    settled = card.last
    card.allowed_bytes = 200 * MIB
    card.slice(10)
    assert card.last.batch < settled.batch
    assert not any(run.is_probe for run in card.good[-10:]), "it shrank"
    card.allowed_bytes, shrunk = 300 * MIB, card.last
    card.slice(10)
    again = [run for run in card.good[-10:] if shrunk.batch < run.batch < 0.9 * settled.batch]
    assert again
    assert not any(run.is_probe for run in again), "as large a one has ended well lately"


class TestResume:
    @pytest.mark.parametrize("growth", [BATCH_ONLY, BOTH, MATMUL], ids=["batch", "both", "filling"])
    def test_a_fresh_process_goes_on_at_the_same_step(self, growth: Growth) -> None:
        takes = {id(BATCH_ONLY): by_batch, id(BOTH): by_both, id(MATMUL): three_squares}[id(growth)]
        card = Card(adaptive(growth), takes, 150 * MIB).begin(150 * MIB)
        card.slice(30)
        dumped = json.loads(json.dumps(card.policy.dump(card.state)))
        fresh = Card(adaptive(growth), takes, 150 * MIB)
        fresh.state = fresh.policy.load(dumped)
        assert fresh.policy.dump(fresh.state) == dumped
        fresh.slice()
        assert 0.95 * card.last_bytes <= card.bytes_of(fresh.last) <= 150 * MIB
        assert fresh.failed == []

    @pytest.mark.parametrize(
        ("key", "values"),
        [
            ("units", (0, -5, 1.5, True, "600")),
            ("fixed_bytes", (-1.0, float("nan"), True)),
            ("unit_bytes", (float("inf"), "many")),
        ],
    )
    def test_a_damaged_mapping_is_refused(self, key: str, values: tuple[Scalar, ...]) -> None:
        card = mlp(allowed_bytes=700 * MIB)
        card.slice(12)
        for value in values:
            with pytest.raises(ValueError, match=f"{key} must be"):
                card.policy.load({**card.policy.dump(card.state), key: value})


growths = st.sampled_from([BATCH_ONLY, BOTH, MATMUL, replace(BATCH_ONLY, needed_bytes=by_batch)])


@given(
    growth=growths,
    rooms=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=40),
    wobbles=st.lists(st.floats(0.5, 1.5), min_size=1, max_size=20),
    lies=st.floats(0.5, 2.0),
    claim_bytes=st.integers(0, 1 << 31),
)
def test_the_same_events_give_the_same_decisions(
    growth: Growth, rooms: list[int], wobbles: list[float], lies: float, claim_bytes: int
) -> None:
    """Whatever happened: what was asked for is within what was asked of it, and a log replays."""
    card = Card(
        adaptive(growth), by_both, 0, shows_bytes=lambda allowed_bytes: int(lies * allowed_bytes)
    )
    card.begin(claim_bytes)
    for number, allowed_bytes in enumerate(rooms):
        wobble = wobbles[number % len(wobbles)]
        card.takes = lambda size, batch, wobble=wobble: math.ceil(wobble * by_both(size, batch))  # type: ignore[misc]
        card.allowed_bytes = allowed_bytes
        card.slice(3)
    floor = card.policy.floor
    state = card.policy.initial(claim_bytes, None)
    for event, decision in card.log:
        state, again = card.policy.decide(state, event)
        assert again == decision
        if isinstance(decision, Run):
            assert floor.size <= decision.size <= ASKED.size
            assert floor.batch <= decision.batch <= ASKED.batch
            assert (decision.hold_bytes is not None) == growth.fills_claim
        if isinstance(decision, Emergency):
            assert decision.reason
    assert state == card.state
    json.dumps(card.policy.dump(state), allow_nan=False)
