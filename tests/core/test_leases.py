"""Leases in a world of obedient workers: promises are kept, shares are fair, nobody starves, and noise moves nobody."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.leases import (
    NO_BOOKS,
    Books,
    Claimant,
    divide,
    fair_shares,
)
from tests.factories import MEMORY
from workers.messages import MemoryInfo

GIB = 2**30
CARD_BYTES = 24 * GIB
LEAVE_BYTES = GIB // 8

#: What may be missing from a fair share: a difference that is not worth moving a lease for, and
#: what is spared.
NEARLY = 0.96
SPARED_BYTES = CARD_BYTES // 100


@dataclass
class Person:
    """A worker that holds what it wants as far as its lease allows."""

    slot: str
    cap_bytes: int
    wants_bytes: int
    leases: list[int | None] = field(default_factory=lambda: [0])
    """Of the slice that runs and the one behind it."""
    held_bytes: int = 0
    reports: int = 0
    lets_go: bool = True
    """Whether it gives back what is more than its lease."""

    def may_hold_bytes(self) -> int:
        lease = self.leases[0]
        return self.cap_bytes if lease is None else min(lease, self.cap_bytes)


@dataclass
class World:
    """One card, on which only the workers and what is outside take memory.

    Each of them reports once a second.
    """

    people: list[Person]
    outside_bytes: int = 0
    now_s: float = 1000.0
    books: Books = field(default_factory=lambda: NO_BOOKS)
    leases: dict[str, int | None] = field(default_factory=dict)
    broken: int = 0
    """Promises that were not kept."""

    @property
    def there_bytes(self) -> int:
        """What the workers may hold: all that is not used outside, nor left free."""
        return CARD_BYTES - self.outside_bytes - LEAVE_BYTES

    @property
    def free_bytes(self) -> int:
        return CARD_BYTES - self.outside_bytes - sum(person.held_bytes for person in self.people)

    def report(self, person: Person, noise_bytes: int = 0, *, starving: bool = False) -> None:
        """Let its slice end: it reports, gets a directive, and begins the one that was queued."""
        person.reports += 1
        person.leases.pop(0)
        self.now_s += 1.0 / len(self.people)
        free_bytes = max(0, self.free_bytes + noise_bytes)
        told = {
            other.slot: self.claimant(other, free_bytes if other is person else None)
            for other in self.people
        }
        told[person.slot] = replace(told[person.slot], starving=starving)
        self.books, self.leases = divide(self.books, list(told.values()), self.now_s)
        while len(person.leases) < 2:
            person.leases.append(self.leases[person.slot])
        wanted_bytes = min(person.wants_bytes, person.may_hold_bytes())
        if not person.lets_go:
            wanted_bytes = max(wanted_bytes, person.held_bytes)
        room_bytes = max(0, person.held_bytes + self.free_bytes - LEAVE_BYTES)
        self.broken += wanted_bytes > room_bytes
        person.held_bytes = min(wanted_bytes, room_bytes)

    def claimant(self, person: Person, free_bytes: int | None) -> Claimant:
        """Say what is known of a worker; what was free only if it has just looked."""
        allowed = [person.cap_bytes if lease is None else lease for lease in person.leases]
        return Claimant(
            slot=person.slot,
            card="GPU-1",
            cap_bytes=person.cap_bytes,
            leave_free_bytes=LEAVE_BYTES,
            granted_bytes=max(allowed, default=0),
            report=(0, person.reports) if person.reports else None,
            memory=None if free_bytes is None else seen(person.held_bytes, free_bytes),
        )

    def rounds(self, count: int, draw: Random, noise: float = 0.0) -> None:
        """Let everybody report so often, in changing order."""
        for _ in range(count):
            for person in draw.sample(self.people, len(self.people)):
                self.report(person, int(draw.uniform(-noise, noise) * CARD_BYTES))

    def lease_of(self, slot: str) -> int:
        lease = self.leases[slot]
        assert lease is not None
        return lease

    def least_fair_bytes(self, person: Person) -> float:
        """Return the share of one whose neighbours are all left the room above what they want."""
        others = {
            other.slot: min(other.cap_bytes, int(1.25 * other.wants_bytes + other.cap_bytes / 32))
            for other in self.people
            if other is not person
        }
        shares = fair_shares(
            self.there_bytes - SPARED_BYTES, {**others, person.slot: person.wants_bytes}
        )
        return NEARLY * shares[person.slot]


def seen(held_bytes: int, free_bytes: int, total_bytes: int = CARD_BYTES) -> MemoryInfo:
    """What a worker says of its memory and of a card."""
    used_bytes = total_bytes - free_bytes
    device = {"device_total_bytes": total_bytes, "device_used_bytes": used_bytes}
    return replace(MEMORY, **device, reserved_bytes=held_bytes, peak_bytes=held_bytes)


def crowd(caps: list[int], wants: list[float] | None = None, outside: float = 0.0) -> World:
    wants = wants or [1.0] * len(caps)
    people = [
        Person(slot=f"pc1/{index}", cap_bytes=cap, wants_bytes=int(want * cap))
        for index, (cap, want) in enumerate(zip(caps, wants, strict=True))
    ]
    return World(people=people, outside_bytes=int(outside * CARD_BYTES))


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - the order of reports is no secret


def four(outside: float = 0.4) -> World:
    return crowd([int(0.24 * CARD_BYTES)] * 4, outside=outside)


pytestmark = pytest.mark.slow

#: Rounds of reports after which shares are fair, whoever wants little. Two directives are under way
#: when a lease is cut, what is left untaken is lent out after five reports, and what is lent may be
#: more than others want.
ROUNDS = 24

#: And where many want little: each that leaves its share makes those of the others larger, who are
#: then asked again.
LONG_ROUNDS = 60


caps = st.lists(st.integers(GIB, 12 * GIB), min_size=2, max_size=7)
worlds = st.builds(
    lambda caps, wants, outside: crowd(caps, wants[: len(caps)], outside),
    caps,
    st.lists(st.one_of(st.just(1.0), st.floats(0.05, 1.0)), min_size=7, max_size=7),
    st.floats(0.0, 0.7),
)
draws = st.integers(0, 2**32).map(seeded)


@given(pool_bytes=st.integers(0, 30 * GIB), more_bytes=st.integers(0, GIB), wanted=caps)
def test_shares_are_max_min_fair_and_use_up_the_pool(
    pool_bytes: int, more_bytes: int, wanted: list[int]
) -> None:
    wants = {str(index): want for index, want in enumerate(wanted)}
    shares = fair_shares(pool_bytes, wants)
    assert sum(shares.values()) == min(pool_bytes, sum(wanted))
    assert all(0 <= shares[slot] <= wants[slot] for slot in wants)
    unmet = [shares[slot] for slot in wants if shares[slot] < wants[slot]]
    # Nobody who has more than somebody with an unmet wish, but for the odd byte.
    assert all(share <= least + 1 for least in unmet for share in shares.values())
    larger = fair_shares(pool_bytes + more_bytes, wants)
    assert all(larger[slot] >= shares[slot] for slot in wants)


@given(world=worlds, draw=draws)
def test_promises_are_kept_and_no_lease_is_above_its_cap(world: World, draw: Random) -> None:
    for _ in range(12):
        for person in draw.sample(world.people, len(world.people)):
            world.report(person)
            leases = {other.slot: world.lease_of(other.slot) for other in world.people}
            assert sum(leases.values()) <= world.there_bytes
            assert all(0 <= leases[other.slot] <= other.cap_bytes for other in world.people)
            assert world.broken == 0


@settings(max_examples=30)
@given(world=worlds, draw=draws)
def test_shares_are_fair_after_some_rounds_and_stay_as_they_are(world: World, draw: Random) -> None:
    world.rounds(LONG_ROUNDS, draw)
    for person in world.people:
        assert person.held_bytes >= world.least_fair_bytes(person)
    before = dict(world.leases)
    world.rounds(20, draw)
    assert world.leases == before


@given(
    caps=caps,
    wants=st.lists(st.floats(0.0, 1.0), min_size=7, max_size=7),
    spare=st.floats(0.0, 0.5),
    draw=draws,
)
def test_where_all_caps_fit_every_lease_is_its_cap(
    caps: list[int], wants: list[float], spare: float, draw: Random
) -> None:
    world = crowd(caps, wants[: len(caps)])
    world.outside_bytes = CARD_BYTES - LEAVE_BYTES - int(sum(caps) * (1 + spare))
    for _ in range(12):
        for person in draw.sample(world.people, len(world.people)):
            # Who climbs takes more in every slice, so that no two looks agree.
            person.wants_bytes = min(person.cap_bytes, int(person.wants_bytes * 1.5))
            world.report(person)
            for other in world.people:
                assert world.leases[other.slot] == (other.cap_bytes if other.reports else 0)


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_some_percent_moves_next_to_nobody(seed: int) -> None:
    world, draw, moves = four(), seeded(seed), 0
    world.rounds(ROUNDS, draw, 0.02)
    for _ in range(300):
        before = dict(world.leases)
        world.rounds(1, draw, 0.02)
        moves += world.leases != before
    assert moves <= 5, "five minutes; without the window it would be hundreds"


@settings(max_examples=30)
@given(draw=draws, outside=st.floats(0.1, 0.6), at=st.floats(0.0, 1.0))
def test_a_newcomer_has_its_share_soon(draw: Random, outside: float, at: float) -> None:
    world = four(outside)
    newcomer = world.people.pop()
    world.rounds(ROUNDS, draw)
    world.people.insert(int(at * 3), newcomer)
    world.rounds(8, draw)
    assert world.broken == 0
    assert newcomer.held_bytes >= world.least_fair_bytes(newcomer)


def test_what_a_directive_allows_is_promised() -> None:
    first = Claimant(
        slot="pc1/0", card="GPU-1", report=(0, 1), cap_bytes=16 * GIB, memory=seen(0, 16 * GIB)
    )
    other = replace(first, slot="pc1/1")
    books, leases = divide(NO_BOOKS, [replace(first, granted_bytes=16 * GIB), other], 1.0)
    assert leases["pc1/0"] is not None
    assert leases["pc1/1"] == 0, "until the first heeds its lease, all of the bytes may be gone"
    _, leases = divide(
        books, [replace(first, report=(0, 2), granted_bytes=leases["pc1/0"]), other], 2.0
    )
    assert leases["pc1/1"] == pytest.approx(leases["pc1/0"], abs=1)


def test_what_a_modest_worker_leaves_is_lent_and_given_back() -> None:
    world, draw = four(0.4), seeded(1)
    modest = world.people[0]
    modest.wants_bytes = GIB
    world.rounds(ROUNDS, draw)
    assert world.lease_of(modest.slot) < 1.25 * GIB + modest.cap_bytes / 16
    assert all(world.lease_of(person.slot) > 0.17 * CARD_BYTES for person in world.people[1:])
    modest.wants_bytes = modest.cap_bytes
    world.rounds(8, draw)
    assert world.broken == 0
    assert modest.held_bytes >= world.least_fair_bytes(modest)


def test_a_stuck_worker_lends_its_share_and_is_asked_again() -> None:
    world, draw = four(0.4), seeded(1)
    stuck = world.people[0]
    stuck.wants_bytes = 0
    shares = []
    for _ in range(200):
        for person in draw.sample(world.people, 4):
            world.report(person, starving=person is stuck)
        shares.append(world.lease_of(stuck.slot) / CARD_BYTES)
    assert min(shares[ROUNDS:]) < 0.02
    times_asked = sum(
        before < 0.1 < after
        for before, after in zip(shares[ROUNDS:], shares[ROUNDS + 1 :], strict=False)
    )
    assert 2 <= times_asked <= 3, "about once a minute"


def test_who_waits_for_nothing_has_no_lease() -> None:
    alone = Claimant(slot="pc1/0", card="GPU-1", cap_bytes=GIB, report=(0, 1), memory=seen(0, 0, 1))
    elsewhere = replace(alone, slot="pc2/0", card="GPU-2")
    unknown = [replace(alone, slot=f"pc3/{index}", card=None) for index in range(3)]
    blind = [replace(alone, slot=f"pc4/{index}", card="GPU-4", memory=None) for index in range(3)]
    _, leases = divide(NO_BOOKS, [alone, elsewhere, *unknown, *blind], 1.0)
    assert set(leases.values()) == {None}


def test_the_same_reports_told_twice_change_nothing() -> None:
    world, draw = four(0.4), seeded(1)
    world.rounds(ROUNDS, draw)
    claimants = [world.claimant(person, world.free_bytes) for person in world.people]
    once = divide(world.books, claimants, world.now_s)
    again = divide(once[0], claimants, world.now_s)
    assert once == again
