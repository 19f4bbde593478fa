"""Leases in a world of obedient workers: promises are kept, shares are fair, nobody starves, and noise moves nobody."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.leases import NO_BOOKS, Books, Claimant, fair_shares, leased

GIB = 2**30
CARD_BYTES = 24 * GIB

#: What may be missing from a fair share: what is spared of the card, and what is not worth moving a lease for.
NEARLY = 0.95

#: Rounds of reports after which shares are fair: two directives are under way when a lease is cut, bytes must have been
#: there for five seconds, and what is left untaken is lent out after five reports more.
ROUNDS = 16


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

    def may_hold_bytes(self) -> int:
        lease = self.leases[0]
        return self.cap_bytes if lease is None else min(lease, self.cap_bytes)


@dataclass
class World:
    """One card, on which only the workers and what is outside take memory. Each of them reports once a second."""

    people: list[Person]
    outside_bytes: int = 0
    now_s: float = 1000.0
    books: Books = field(default_factory=lambda: NO_BOOKS)
    leases: dict[str, int | None] = field(default_factory=dict)
    broken: int = 0
    """Promises that were not kept."""

    @property
    def there_bytes(self) -> int:
        return CARD_BYTES - self.outside_bytes

    @property
    def free_bytes(self) -> int:
        return self.there_bytes - sum(person.held_bytes for person in self.people)

    def report(self, person: Person, noise_bytes: int = 0) -> None:
        """Let its slice end: it reports, gets a directive, and begins the one that was queued."""
        person.reports += 1
        person.leases.pop(0)
        self.now_s += 1.0 / len(self.people)
        free_bytes = max(0, self.free_bytes + noise_bytes)
        self.lease([self.claimant(other, free_bytes if other is person else None) for other in self.people])
        while len(person.leases) < 2:
            person.leases.append(self.leases[person.slot])
        wanted_bytes = min(person.wants_bytes, person.may_hold_bytes())
        room_bytes = person.held_bytes + self.free_bytes
        self.broken += wanted_bytes > room_bytes
        person.held_bytes = min(wanted_bytes, room_bytes)

    def lease(self, claimants: list[Claimant]) -> None:
        self.books, self.leases = leased(self.books, claimants, self.now_s)

    def claimant(self, person: Person, free_bytes: int | None) -> Claimant:
        """Say what is known of a worker; what was free only if it has just looked."""
        allowed = [person.cap_bytes if lease is None else lease for lease in person.leases]
        return Claimant(
            slot=person.slot,
            card="GPU-1",
            cap_bytes=person.cap_bytes,
            granted_bytes=max(allowed, default=0),
            report=(0, person.reports) if person.reports else None,
            held_bytes=person.held_bytes,
            peak_bytes=person.held_bytes,
            free_bytes=free_bytes,
            total_bytes=CARD_BYTES,
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

    def fair(self) -> dict[str, int]:
        """Return the shares of those who would take all that they may have, and of the others what they want."""
        return fair_shares(self.there_bytes, {person.slot: person.wants_bytes for person in self.people})


def crowd(caps: list[int], wants: list[float] | None = None, outside: float = 0.0) -> World:
    wants = wants or [1.0] * len(caps)
    people = [
        Person(slot=f"pc1/{index}", cap_bytes=cap, wants_bytes=int(want * cap))
        for index, (cap, want) in enumerate(zip(caps, wants, strict=True))
    ]
    return World(people=people, outside_bytes=int(outside * CARD_BYTES))


def four(outside: float = 0.4) -> World:
    return crowd([int(0.24 * CARD_BYTES)] * 4, outside=outside)


caps = st.lists(st.integers(GIB, 12 * GIB), min_size=2, max_size=7)
worlds = st.builds(
    lambda caps, wants, outside: crowd(caps, wants[: len(caps)], outside),
    caps,
    st.lists(st.one_of(st.just(1.0), st.floats(0.05, 1.0)), min_size=7, max_size=7),
    st.floats(0.0, 0.7),
)
draws = st.integers(0, 2**32).map(Random)


@given(pool_bytes=st.integers(0, 30 * GIB), more_bytes=st.integers(0, GIB), wanted=caps)
def test_shares_are_max_min_fair_use_up_the_pool_and_grow_with_it(
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
def test_what_is_promised_is_there_and_a_lease_is_never_above_its_cap(world: World, draw: Random) -> None:
    for _ in range(12):
        for person in draw.sample(world.people, len(world.people)):
            world.report(person)
            leases = {other.slot: world.lease_of(other.slot) for other in world.people}
            assert sum(leases.values()) <= world.there_bytes
            assert all(0 <= leases[other.slot] <= other.cap_bytes for other in world.people)
            assert world.broken == 0


@given(world=worlds, draw=draws)
def test_shares_are_fair_after_some_rounds_and_stay_as_they_are(world: World, draw: Random) -> None:
    world.rounds(ROUNDS, draw)
    for person in world.people:
        assert person.held_bytes >= NEARLY * world.fair()[person.slot] - 0.01 * CARD_BYTES
    before = dict(world.leases)
    world.rounds(30, draw)
    for slot, lease in before.items():
        assert lease is not None
        assert abs(world.lease_of(slot) - lease) <= 0.05 * world.there_bytes
