"""The adaptive policy on a simulated card: it shrinks before a failure, and grows again."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.scene import GUIDES, MIB
from workers.policy.adaptive import CONTRADICTIONS, AdaptivePolicy, ladders_of
from workers.policy.base import Run, Stages
from workers.settings import Learned, MemorySettings, PolicyState, WorkloadSpec

ASKED = WorkloadSpec(name="mine:Mlp", dtype="fp16", size=4096, batch=1024, seed=0)

#: The memory of a step of the simulated workloads in bytes, from (size, batch).
Footprint = Callable[[int, int], int]

FIXED_BYTES = 100 * MIB
ROW_BYTES = MIB


def by_batch(size: int, batch: int) -> int:
    """Return the bytes of a model and of `batch` rows."""
    return FIXED_BYTES + ROW_BYTES * batch


def by_both(size: int, batch: int) -> int:
    """Return the bytes of a runtime and of `batch` square matrices."""
    return 20 * MIB + 24 * size * size * batch // 1024


def weights_and_rows(size: int, batch: int) -> int:
    """Return the bytes of a network. No line fits all steps: weights do not grow with the batch."""
    return 4 * size * size + 4 * size * size * batch // 256


def three_squares(size: int, batch: int) -> int:
    """Return the least memory of matmul in bytes."""
    return 3 * 2 * max(64, size // 64 * 64) ** 2


@dataclass(frozen=True, kw_only=True)
class Said:
    """The information that a workload gives about its memory."""

    size_power: float = 0.0
    batch_power: float = 1.0
    needs_are_exact: bool = False
    claim_bytes: int | None = None
    says: Callable[[int, int], int | None] = lambda _size, _batch: None
    offers: Stages | None = None

    def needed_bytes(self, size: int, batch: int) -> int | None:
        return self.says(size, batch)

    def stages(self) -> Stages | None:
        return self.offers


BATCH_ONLY = Said()
BOTH = Said(size_power=2.0)
MATMUL = Said(size_power=2.0, batch_power=0.0, needs_are_exact=True, says=three_squares)

#: The calls of a policy: time, name of the call, its arguments, and its result.
Log = list[tuple[float, str, tuple[Any, ...], Any]]


@dataclass
class Card:
    """Follows a policy as the loop does, with memory that is only counted.

    Steps take 1 s.
    """

    said: Said
    takes: Footprint
    allowed_bytes: int
    asked: WorkloadSpec = ASKED
    memory: MemorySettings = GUIDES
    shows_bytes: Callable[[int], int] = lambda allowed_bytes: allowed_bytes
    """Returns the allowed memory as the policy sees it."""
    learned: Learned | None = None
    held_bytes: int = 0
    beside_bytes: int = 0
    """Known memory that is held beside the need of steps."""
    now_s: float = 100.0
    good: list[Run] = field(default_factory=list)
    failed: list[tuple[float, Run]] = field(default_factory=list)
    log: Log = field(default_factory=list)

    def __post_init__(self) -> None:
        self.policy = self.fresh()

    def fresh(self) -> AdaptivePolicy:
        """Return a new policy with this card's clock."""
        return AdaptivePolicy(
            self.memory,
            self.asked,
            self.said,
            clock=lambda: self.now_s,
            held_bytes=lambda: self.held_bytes,
            learned=self.learned,
        )

    def tell(self, name: str, *arguments: Any) -> Any:
        answer = getattr(self.policy, name)(*arguments)
        self.log.append((self.now_s, name, arguments, answer))
        return answer

    def slice(self, steps: int = 1) -> Run | None:
        """Run a slice of `steps` good steps; return the next run, or `None` if nothing fits."""
        run, done = self.next(), 0
        while run is not None:
            self.now_s += 1.0
            if self.bytes_of(run) <= self.allowed_bytes:
                self.good.append(run)
                self.ended_well(run)
                done += 1
                if done == steps:
                    return run
            else:
                self.failed.append((self.now_s, run))
                self.tell("failed", run, None)
            run = self.next()
        self.now_s += 1.0
        return None

    def next(self) -> Run | None:
        return self.tell("next", self.shows_bytes(self.allowed_bytes))

    def bytes_of(self, run: Run) -> int:
        return self.takes(run.size, run.batch)

    def ended_well(self, run: Run) -> None:
        if self.beside_bytes:
            self.held_bytes = self.bytes_of(run) + self.beside_bytes
        self.tell("succeeded", run, self.bytes_of(run), False)

    @property
    def last(self) -> Run:
        return self.good[-1]

    @property
    def last_bytes(self) -> int:
        return self.bytes_of(self.last)


def matmul(allowed_bytes: int = 200 * MIB, size: int = 4096) -> Card:
    return Card(MATMUL, three_squares, allowed_bytes, replace(ASKED, name="matmul", size=size))


def mlp(allowed_bytes: int, **how: Any) -> Card:
    return Card(BATCH_ONLY, by_batch, allowed_bytes, **how)


class TestExact:
    """A workload that holds more than it needs, and states its need."""

    def test_what_is_held_beside_its_need_is_left_free(self) -> None:
        card = matmul(size=65536)
        card.held_bytes = card.beside_bytes = 20 * MIB  # the workspace of a library
        card.policy = card.fresh()
        card.slice(20)
        assert card.last_bytes >= 0.95 * 180 * MIB
        assert max(map(card.bytes_of, card.good)) <= 180 * MIB

    @given(
        rooms=st.lists(st.integers(0, 300 * MIB), min_size=1, max_size=30),
        size=st.integers(1, 70_000),
        steps=st.integers(1, 4),
        holds=st.floats(1.0, 3.0),
    )
    def test_it_never_asks_for_more_than_the_room_whatever_steps_hold(
        self, rooms: list[int], size: int, steps: int, holds: float
    ) -> None:
        card = matmul(size=size)
        floor_bytes = three_squares(min(GUIDES.size_floor, size), 1)
        for allowed_bytes in rooms:
            card.allowed_bytes = allowed_bytes
            run = card.slice(steps)
            assert (run is None) == (allowed_bytes < floor_bytes)
            if run is not None:
                assert three_squares(run.size, 1) <= allowed_bytes
                card.tell("succeeded", run, int(holds * card.bytes_of(run)), False)
        assert card.failed == []


class TestStepping:
    """A workload that does not state its need, which the policy learns from the peaks of steps."""

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
        """The policy ends at or near the largest batch that fits, without a failure."""
        card = Card(
            BATCH_ONLY,
            lambda _size, rows: fixed_mib * MIB + row_bytes * rows,
            room_mib * MIB,
            replace(ASKED, batch=batch),
            replace(GUIDES, batch_floor=batch_floor),
        )
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
        card = Card(BOTH, weights_and_rows, 0, memory=replace(GUIDES, failures_per_minute=1000))
        floor_bytes = weights_and_rows(GUIDES.size_floor, GUIDES.batch_floor)
        for room_mib in rooms:
            card.allowed_bytes = room_mib * MIB
            card.now_s += 60.0  # longer than any wait
            ended = card.slice(steps)
            assert ended is not None or card.allowed_bytes < 1.25 * floor_bytes


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
        card = mlp(allowed_bytes=allowed_mib * MIB, learned=learned)
        card.slice(1)
        assert least <= card.last.batch <= most
        assert card.failed == []

    def test_nothing_is_learned_before_a_step_has_ended_well(self) -> None:
        card = mlp(allowed_bytes=50 * MIB)
        card.slice()
        assert card.policy.learned is None

    @settings(max_examples=20)
    @given(size=st.integers(1, 1024), fixed_mib=st.floats(0, 10_000), row_mib=st.floats(0.01, 100))
    @example(size=30, fixed_mib=0.0, row_mib=0.5)
    @example(size=600, fixed_mib=0.0, row_mib=0.01)
    @example(size=600, fixed_mib=10_000.0, row_mib=100.0)
    def test_however_wrong_it_finds_its_way(
        self, size: int, fixed_mib: float, row_mib: float
    ) -> None:
        learned = Learned(size=size, fixed_bytes=fixed_mib * MIB, unit_bytes=row_mib * MIB)
        card = mlp(allowed_bytes=700 * MIB, learned=learned)
        for _ in range(300):
            card.slice()
        assert len(card.failed) <= 8
        assert card.last.batch >= 0.8 * 600


def test_a_partial_step_teaches_nothing() -> None:
    card = mlp(allowed_bytes=300 * MIB)
    card.slice(20)
    before, settled = card.policy.state, card.last
    for _ in range(20):
        card.tell("succeeded", card.last, MIB, True)
    assert card.policy.state == before
    assert card.slice() == settled
    assert card.failed == []


def test_on_the_way_down_the_batch_gives_way_before_the_size() -> None:
    (ladder,) = ladders_of(GUIDES, replace(ASKED, batch=128), BOTH)
    runs = list(reversed(ladder.values()))
    smallest = next(at for at, run in enumerate(runs) if run.batch == GUIDES.batch_floor)
    assert all(run.size == ASKED.size for run in runs[: smallest + 1])
    assert all(run.batch == GUIDES.batch_floor for run in runs[smallest:])
    assert (runs[-1], runs[0]) == (Run(size=256, batch=32), Run(size=4096, batch=128))


def test_an_emergency_names_the_smallest_step_in_words() -> None:
    card = matmul(allowed_bytes=MIB // 5)
    assert card.slice() is None
    step = "the smallest step (size 256 batch 1024)"
    assert card.policy.reason == f"{step} needs 0.4 MiB, 0.2 MiB are there"


class TestContradictions:
    """Failures of parts that would have held far less than the allowed memory."""

    @pytest.mark.parametrize("allowed_mib", [140, 300])
    def test_they_are_tried_again_at_once_and_cost_nothing(self, allowed_mib: int) -> None:
        card = mlp(allowed_bytes=allowed_mib * MIB)
        card.slice(30)
        for _ in range(20):  # far more than a minute allows
            for _ in range(CONTRADICTIONS):
                assert self.fails(card).batch >= card.last.batch
            card.slice()
        assert card.failed == []

    def test_one_more_in_a_row_is_believed(self) -> None:
        card = mlp(allowed_bytes=300 * MIB)
        card.slice(30)
        for _ in range(CONTRADICTIONS + 1):
            assert self.fails(card).batch >= card.last.batch
        smaller = card.next()
        assert smaller.batch < card.last.batch

    def fails(self, card: Card) -> Run:
        """Make the next part fail with far less than the allowed memory; return it."""
        run = card.next()
        card.tell("failed", run, 20 * MIB)
        return run

    @pytest.mark.parametrize("shown_bytes", [299 * MIB, 0, None])
    def test_what_held_nearly_all_or_shows_nothing_is_believed_at_once(
        self, shown_bytes: int | None
    ) -> None:
        card = mlp(allowed_bytes=300 * MIB)
        card.slice(30)
        card.tell("failed", card.last, shown_bytes)
        smaller = card.next()
        assert smaller.batch < card.last.batch


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
    @pytest.mark.parametrize("said", [BATCH_ONLY, BOTH, MATMUL], ids=["batch", "both", "exact"])
    def test_a_fresh_process_goes_on_at_the_same_step(self, said: Said) -> None:
        takes = {id(BATCH_ONLY): by_batch, id(BOTH): by_both, id(MATMUL): three_squares}[id(said)]
        card = Card(said, takes, 150 * MIB)
        card.slice(30)
        fresh = Card(said, takes, 150 * MIB)
        fresh.policy.resume(card.policy.state)
        assert fresh.policy.state == card.policy.state
        fresh.slice()
        assert 0.95 * card.last_bytes <= card.bytes_of(fresh.last) <= 150 * MIB
        assert fresh.failed == []

    def test_a_state_of_other_levels_is_refused(self) -> None:
        with pytest.raises(ValueError, match="3 levels, not 1"):
            Card(BATCH_ONLY, by_batch, 150 * MIB).policy.resume(PolicyState(learned=(None,) * 3))


@given(
    said=st.sampled_from([BATCH_ONLY, BOTH, MATMUL, replace(BATCH_ONLY, says=by_batch)]),
    rooms=st.lists(st.integers(0, 1 << 31), min_size=1, max_size=40),
    wobbles=st.lists(st.floats(0.5, 1.5), min_size=1, max_size=20),
    lies=st.floats(0.5, 2.0),
)
def test_the_same_calls_give_the_same_decisions(
    said: Said, rooms: list[int], wobbles: list[float], lies: float
) -> None:
    """After any events the runs are within the request, and replaying the log gives the same."""
    card = Card(said, by_both, 0, shows_bytes=lambda allowed_bytes: int(lies * allowed_bytes))
    for number, allowed_bytes in enumerate(rooms):
        wobble = wobbles[number % len(wobbles)]
        card.takes = lambda size, batch, wobble=wobble: math.ceil(wobble * by_both(size, batch))  # type: ignore[misc]
        card.allowed_bytes = allowed_bytes
        card.slice(3)
    ended, again = card.policy.state, card.fresh()
    for at_s, name, arguments, answer in card.log:
        card.now_s = at_s
        assert getattr(again, name)(*arguments) == answer
        if name == "next" and answer is None:
            assert again.reason
        if isinstance(answer, Run):
            assert min(GUIDES.size_floor, ASKED.size) <= answer.size <= ASKED.size
            assert min(GUIDES.batch_floor, ASKED.batch) <= answer.batch <= ASKED.batch
    assert again.state == ended
