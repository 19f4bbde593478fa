"""A card in a world of obedient workers: they report once a second, and hold what they want as far as they may.

Shared by the tests of the leases. Knows nothing of how leases come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

from orchestrator.core.leases import NO_BOOKS, Books, Claimant, divide, fair_shares
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
        """Return the share of somebody whose neighbours are all left the room above what they want."""
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
