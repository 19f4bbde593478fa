"""Shares of a card's memory: the sum of leases never exceeds the memory, shares are fair and
stable, unused memory is lent and returned, and a process begins without a lease.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.memory_shares import MemoryShares, fair_shares
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot, UserOrders
from tests.factories import CPU, MEMORY, status_of
from tests.scene import spec_of
from workers.messages import WorkerState
from workers.units import GIB, MIB

CARD_BYTES = 24 * GIB
CONTEXT_BYTES = 400 * MIB
LEAVE_BYTES = 128 * MIB

#: Smallest part of a fair share that a job must get: leases do not change for smaller differences.
NEARLY = 0.94

#: Seconds until shares are fair: others shrink, three statuses must allow a raise, and unused
#: memory is lent after 20 s.
SETTLED_S = 45


@dataclass
class Person:
    """A job that holds the memory that it wants, up to its lease."""

    slot: str
    cap_bytes: int
    wants_bytes: int
    lease_bytes: int = 0
    """The lease that it obeys."""
    told_bytes: int = 0
    """The lease that it obeys from its next status on."""
    held_bytes: int = 0
    is_open: bool = False
    incarnation: int = 1


@dataclass
class World:
    """One card whose memory only jobs and outside programs use; jobs report once a second."""

    people: list[Person]
    outside_bytes: int = 0
    now_s: float = 1000.0
    slots: dict[str, Slot] = field(default_factory=dict)
    broken: int = 0
    """Number of times that a job lacked memory within its lease."""

    def __post_init__(self) -> None:
        total_bytes = sum(person.cap_bytes + CONTEXT_BYTES for person in self.people)
        self.shares = MemoryShares({p.slot: plan_of(p, total_bytes) for p in self.people})
        for person in self.people:
            self.start(person)

    @property
    def there_bytes(self) -> int:
        contexts = CONTEXT_BYTES * len(self.people)
        return CARD_BYTES - self.outside_bytes - LEAVE_BYTES - contexts

    @property
    def free_bytes(self) -> int:
        used = sum(person.held_bytes + CONTEXT_BYTES * person.is_open for person in self.people)
        return CARD_BYTES - self.outside_bytes - used

    def start(self, person: Person) -> None:
        """Start a process of the slot, whose last process has ended."""
        person.held_bytes, person.is_open = 0, False
        person.incarnation += 1
        self.slots[person.slot] = Slot(
            slot=person.slot,
            phase=Phase.WORKING,
            incarnation=person.incarnation,
            runs=True,
            working_since_s=self.now_s,
        )
        if len(self.slots) == len(self.people):
            self.shares.update(self.slots, self.now_s)
        person.lease_bytes = person.told_bytes = self.shares.grant(self.slots[person.slot]) or 0

    def report(self, person: Person, noise_bytes: int = 0, *, starving: bool = False) -> None:
        """Obey the last lease, report a status, and receive the next lease."""
        person.is_open = True
        self.now_s += 1.0 / len(self.people)
        free_bytes = max(0, self.free_bytes + noise_bytes)
        memory = replace(
            MEMORY,
            device_total_bytes=CARD_BYTES,
            device_used_bytes=CARD_BYTES - free_bytes,
            reserved_bytes=person.held_bytes,
            peak_bytes=person.held_bytes,
        )
        card = replace(
            CPU, kind="cuda", uuid="GPU-1", context_bytes=CONTEXT_BYTES, cap_bytes=person.cap_bytes
        )
        state = WorkerState.EMERGENCY if starving else WorkerState.RUNNING
        status = status_of(
            person.slot,
            person.incarnation,
            device=card,
            memory=memory,
            state=state,
            lease_bytes=person.lease_bytes,
        )
        slot = replace(self.slots[person.slot], status=status, device=card)
        self.slots[person.slot] = slot
        self.shares.update(self.slots, self.now_s)
        # The job obeys the lease of its previous status only now: no lease may rely on more.
        person.lease_bytes = person.told_bytes
        lease_bytes = self.shares.grant(slot)
        person.told_bytes = person.cap_bytes if lease_bytes is None else lease_bytes
        wanted_bytes = min(person.wants_bytes, person.lease_bytes)
        room_bytes = max(0, person.held_bytes + self.free_bytes)
        self.broken += wanted_bytes > room_bytes
        person.held_bytes = min(wanted_bytes, room_bytes)

    def seconds(self, count: int, draw: Random, noise: float = 0.0) -> None:
        """Let all jobs report `count` times, in random order."""
        for _ in range(count):
            for person in draw.sample(self.people, len(self.people)):
                self.report(person, int(draw.uniform(-noise, noise) * CARD_BYTES))

    def may_hold_bytes(self) -> int:
        """Return the most that all jobs may hold before the next status of each."""
        return sum(max(p.lease_bytes, p.told_bytes, p.held_bytes) for p in self.people)

    def least_fair_bytes(self, person: Person) -> float:
        """Return the share of a job if each neighbour gets its wish and some room above it."""
        others = {
            other.slot: min(other.cap_bytes, int(1.3 * other.wants_bytes + other.cap_bytes / 30))
            for other in self.people
            if other is not person
        }
        return (
            NEARLY
            * fair_shares(self.there_bytes, {**others, person.slot: person.wants_bytes})[
                person.slot
            ]
        )


def plan_of(person: Person, card_budget_bytes: int) -> SlotPlan:
    budget_bytes = person.cap_bytes + CONTEXT_BYTES
    spec = spec_of(
        device="cuda", budget_bytes=budget_bytes, policy="adaptive", leave_free_bytes=LEAVE_BYTES
    )
    spec = replace(spec, slot=person.slot, card_budget_bytes=card_budget_bytes)
    return SlotPlan(spec=spec, num_cpus=1, num_gpus=0.1, gpu=None)


def crowd(caps: list[int], wants: list[float] | None = None, outside: float = 0.0) -> World:
    wants = wants or [1.0] * len(caps)
    people = [
        Person(slot=f"pc1/{index}", cap_bytes=cap, wants_bytes=int(want * cap))
        for index, (cap, want) in enumerate(zip(caps, wants, strict=False))
    ]
    return World(people=people, outside_bytes=int(outside * CARD_BYTES))


def four(outside: float = 0.4) -> World:
    return crowd([int(0.22 * CARD_BYTES)] * 4, outside=outside)


def seeded(seed: int) -> Random:
    return Random(seed)  # noqa: S311 - the order of reports is no secret


caps = st.lists(st.integers(GIB, 12 * GIB), min_size=2, max_size=7)
worlds = st.builds(
    crowd,
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
    # No share exceeds that of a job with an unmet wish, except for one byte of rounding.
    assert all(share <= least + 1 for least in unmet for share in shares.values())
    larger = fair_shares(pool_bytes + more_bytes, wants)
    assert all(larger[slot] >= shares[slot] for slot in wants)


@settings(max_examples=40)
@given(world=worlds, draw=draws, dies=st.integers(0, 30))
def test_what_all_may_hold_is_never_more_than_the_card_has(
    world: World, draw: Random, dies: int
) -> None:
    for second in range(30):
        for person in draw.sample(world.people, len(world.people)):
            world.report(person)
            assert world.may_hold_bytes() <= world.there_bytes
            assert all(0 <= p.told_bytes <= p.cap_bytes for p in world.people)
            assert world.broken == 0
        if second == dies:
            world.start(world.people[0])


@settings(max_examples=15)
@given(world=worlds, draw=draws)
def test_shares_are_fair_after_a_while_and_stay_as_they_are(world: World, draw: Random) -> None:
    world.seconds(3 * SETTLED_S, draw)
    for person in world.people:
        assert person.held_bytes >= world.least_fair_bytes(person)
    before = [person.told_bytes for person in world.people]
    world.seconds(20, draw)
    assert [person.told_bytes for person in world.people] == before


def test_small_noise_moves_next_to_no_lease() -> None:
    world, draw, moves = four(), seeded(1), 0
    world.seconds(SETTLED_S, draw, 0.01)
    for _ in range(300):
        before = [person.told_bytes for person in world.people]
        world.seconds(1, draw, 0.01)
        moves += before != [person.told_bytes for person in world.people]
    assert moves <= 10, "in five minutes"


def test_a_process_begins_with_nothing_and_is_given_its_share_as_others_shrink() -> None:
    world, draw = four(), seeded(1)
    newcomer = world.people[0]
    world.seconds(SETTLED_S, draw)
    world.start(newcomer)
    others = world.people[1:]
    for _ in range(10):
        for person in others:
            world.report(person)
    assert newcomer.told_bytes == 0
    assert sum(p.held_bytes for p in others) < 0.8 * world.there_bytes, "its share is kept for it"
    world.seconds(8, draw)
    assert world.broken == 0
    assert newcomer.held_bytes >= world.least_fair_bytes(newcomer)


def test_a_short_lack_lowers_at_once_and_raises_after_three_statuses() -> None:
    world, draw = four(0.3), seeded(1)
    world.seconds(SETTLED_S, draw)
    share_bytes = world.people[0].told_bytes
    world.outside_bytes += int(0.2 * CARD_BYTES)
    for person in world.people:
        person.held_bytes = min(person.held_bytes, world.there_bytes // 4)
    world.seconds(3, draw)
    assert all(person.told_bytes < 0.8 * share_bytes for person in world.people)
    world.outside_bytes -= int(0.2 * CARD_BYTES)
    world.seconds(2, draw)
    assert all(person.told_bytes < 0.8 * share_bytes for person in world.people)
    world.seconds(4, draw)
    assert all(person.told_bytes >= NEARLY * share_bytes for person in world.people)


def test_what_a_modest_job_leaves_is_lent_and_given_back() -> None:
    world, draw = four(), seeded(1)
    modest = world.people[0]
    modest.wants_bytes = GIB
    world.seconds(SETTLED_S, draw)
    assert modest.told_bytes < 1.3 * GIB + modest.cap_bytes / 30
    assert all(person.told_bytes > 0.15 * CARD_BYTES for person in world.people[1:])
    modest.wants_bytes = modest.cap_bytes
    world.seconds(20, draw)
    assert world.broken == 0
    assert modest.held_bytes >= world.least_fair_bytes(modest)


def test_a_starved_job_lends_its_share_and_is_asked_again_each_minute() -> None:
    world, draw = four(), seeded(1)
    starved = world.people[0]
    starved.wants_bytes = 0
    shares = []
    for _ in range(280):
        for person in draw.sample(world.people, 4):
            world.report(person, starving=person is starved)
        shares.append(starved.told_bytes / CARD_BYTES)
    assert min(shares[SETTLED_S:]) < 0.02
    asked = [
        second
        for second, (before, after) in enumerate(pairwise(shares))
        if second >= SETTLED_S and before < 0.1 < after
    ]
    assert 2 <= len(asked) <= 4
    # The job is offered its whole share for 20 statuses, and then lends it for 60.
    assert {later - sooner for sooner, later in pairwise(asked)} == {81}


def test_the_users_cap_bounds_a_lease_and_leaves_the_rest_to_the_others() -> None:
    world, draw = four(), seeded(1)
    world.seconds(SETTLED_S, draw)
    before = world.people[1].told_bytes
    slot = world.slots["pc1/0"]
    world.slots["pc1/0"] = replace(slot, orders=UserOrders(cap_bytes=GIB))
    world.seconds(10, draw)
    assert world.people[0].told_bytes == GIB
    assert world.people[1].told_bytes > 1.1 * before


def test_new_plans_cost_the_others_no_lease() -> None:
    world, draw = four(), seeded(1)
    plans = {p.slot: plan_of(p, 4 * CARD_BYTES) for p in world.people}
    world.shares.replan(plans)
    world.seconds(SETTLED_S, draw)
    before = [person.told_bytes for person in world.people]
    world.shares.replan({**plans, "pc1/0": replace(plans["pc1/0"], num_cpus=2)})
    assert world.shares.update(world.slots, world.now_s) == {}
    assert [world.shares.grant(world.slots[p.slot]) for p in world.people] == before
