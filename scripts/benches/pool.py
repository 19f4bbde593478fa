"""Four workers on one simulated card: what the head's leases are worth.

Each worker is driven by an `AdaptiveSize` of its own and reports once a second; the head leases what the card has, and
a lease travels with the next directive, behind one slice that runs and one that is queued, as in a real run. Played with
leases and without, on the same card with the same tenants. Virtual clock, no torch, no Ray; the card is told in
`pool_card.py`, what happens on it in `pool_scenes.py`.
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benches.pool_card import CARD_BYTES, MIB, Card, Tenant, Worker
from benches.pool_scenes import Scene, jobs, scenes
from orchestrator.leases import NO_BOOKS, Books, Claimant, fair_shares, leased

#: Share of the card that the budgets of all workers make up: 7 x 3.33 of 24 GiB, as in the guide for the RTX 3090.
BUDGETED = 0.97
CONTEXT_BYTES = 300 * MIB

#: Loading torch takes a process so long; opening the card is done by one worker at a time.
START_S = 3.0
OPEN_S = 0.4
#: From the end of a slice to its report at the head.
TRAVEL_S = 0.005

TENANTS_LOOK_S = 0.1
SAMPLE_S = 0.25

#: Nothing counts as quiet sooner after somebody outside took or gave more than noise, or a process ended.
SETTLED_S = 20.0
#: A smaller change of size is the policy following the wobble of its own steps.
WORTH_COUNTING = 0.02
#: A tenant that lacks less of the card than this has what it wants.
NOISE = 0.01


class Head:
    """Sends directives, with leases or without."""

    def __init__(self, workers: Sequence[Worker], *, leasing: bool) -> None:
        self._workers = workers
        self._leasing = leasing and len(workers) > 1
        self._books: Books = NO_BOOKS
        self._said: dict[str, Claimant] = {}
        self._leases: dict[str, int | None] = {}

    def send_for(self, worker: Worker, now_s: float) -> None:
        """Ask a process that is about to start to open the card, and to hold nothing yet."""
        self._said[worker.slot] = Claimant(
            slot=worker.slot, card="card", cap_bytes=worker.cap_bytes, unopened_bytes=worker.context_bytes
        )
        worker.leases.append(0 if self._leasing else None)
        self._lease(now_s)

    def lose(self, worker: Worker, now_s: float) -> None:
        """Note that a process has ended."""
        del self._said[worker.slot]
        self._lease(now_s)

    def hear(self, worker: Worker, claimant: Claimant, now_s: float) -> None:
        """Take in a report, and send what comes next."""
        self._said[worker.slot] = claimant
        self._lease(now_s)
        while len(worker.leases) < 2:
            worker.leases.append(self._leases.get(worker.slot))

    def _lease(self, now_s: float) -> None:
        if not self._leasing:
            return
        claimants = []
        for worker in self._workers:
            said = self._said.get(worker.slot)
            if said is not None:
                under_way = (worker.cap_bytes if lease is None else lease for lease in worker.leases)
                claimants.append(replace(said, granted_bytes=max(under_way, default=0)))
        self._books, self._leases = leased(self._books, claimants, now_s)


@dataclass(slots=True)
class Sums:
    """What is added up over the samples of a play."""

    samples: int = 0
    used_bytes: float = 0.0
    usable_bytes: float = 0.0
    tenants_waited_s: float = 0.0
    quiet_at: list[bool] = field(default_factory=list)
    held_bytes: dict[str, float] = field(default_factory=dict)
    fair_bytes: dict[str, float] = field(default_factory=dict)
    oracle_items: dict[str, float] = field(default_factory=dict)


class Play:
    """One scene, from beginning to end."""

    def __init__(self, scene: Scene, *, seed: int, workers: int, leasing: bool, looks_every_step: bool) -> None:
        self._scene = scene
        self._now_s = 0.0
        draw = random.Random(f"{seed}/{scene.name}/steps")  # noqa: S311 - a simulation, no secret
        budget_bytes = int(BUDGETED * CARD_BYTES / workers)
        self.workers = [
            Worker(
                slot=f"pc1/{index}",
                job=job,
                budget_bytes=budget_bytes,
                context_bytes=CONTEXT_BYTES,
                draw=random.Random(draw.random()),  # noqa: S311
                clock=lambda: self._now_s,
                looks_every_step=looks_every_step,
            )
            for index, job in enumerate(jobs(seed, workers, modest=scene.modest))
        ]
        self._card = Card(
            total_bytes=CARD_BYTES, tenants=[Tenant(wishes=wishes) for wishes in scene.tenants], workers=self.workers
        )
        self._head = Head(self.workers, leasing=leasing)
        self._draw = draw
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._card_is_opened_until_s = 0.0
        self._disturbed_at_s = 0.0
        self.sums = Sums()

    def run(self) -> Play:
        """Play it."""
        for tenant in self._card.tenants:
            tenant.taken_bytes = tenant.wants_bytes(0.0)
        for worker in self.workers:
            self._start(worker)
        for at_s, index in self._scene.deaths:
            self._at(at_s, lambda worker=self.workers[index]: self._die(worker))
        for at_s in self._scene.disturbed_at_s:
            self._at(at_s, self._disturb)
        self._tenants_look()
        self._sample()
        while self._heap[0][0] < self._scene.duration_s:
            self._now_s, _, what = heapq.heappop(self._heap)
            what()
        return self

    def _at(self, at_s: float, what: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (at_s, self._order, what))

    def _disturb(self) -> None:
        self._disturbed_at_s = self._now_s

    def _tenants_look(self) -> None:
        self._card.serve_tenants(self._now_s)
        if any(
            tenant.wants_bytes(self._now_s) - tenant.taken_bytes > NOISE * CARD_BYTES for tenant in self._card.tenants
        ):
            self.sums.tenants_waited_s += TENANTS_LOOK_S
            self._disturb()
        self._at(self._now_s + TENANTS_LOOK_S, self._tenants_look)

    def _start(self, worker: Worker) -> None:
        self._head.send_for(worker, self._now_s)
        ready_s = self._now_s + START_S + self._draw.uniform(0.0, 1.0)
        self._card_is_opened_until_s = max(ready_s, self._card_is_opened_until_s) + OPEN_S
        incarnation = worker.incarnation
        self._at(self._card_is_opened_until_s, lambda: self._open(worker, incarnation))

    def _open(self, worker: Worker, incarnation: int) -> None:
        if worker.incarnation != incarnation:
            return
        if worker.open(self._card):
            self._go_on(worker, incarnation)
        else:
            self._at(self._now_s + 1.0, lambda: self._open(worker, incarnation))

    def _die(self, worker: Worker) -> None:
        worker.die()
        self._head.lose(worker, self._now_s)
        self._disturb()
        self._start(worker)

    def _go_on(self, worker: Worker, incarnation: int) -> None:
        if worker.incarnation != incarnation:
            return
        again_s, reported = worker.go_on(self._card, self._now_s)
        if not reported:
            self._at(again_s, lambda: self._go_on(worker, incarnation))
            return
        claimant = Claimant(
            slot=worker.slot,
            card="card",
            cap_bytes=worker.cap_bytes,
            report=(worker.incarnation, worker.sequence),
            held_bytes=worker.held_bytes,
            free_bytes=self._card.free_bytes,
            total_bytes=CARD_BYTES,
            starving=worker.starving,
        )
        idle = not worker.leases
        self._at(again_s + TRAVEL_S, lambda: self._arrive(worker, claimant, idle=idle))
        if not idle:
            self._go_on(worker, incarnation)

    def _arrive(self, worker: Worker, claimant: Claimant, *, idle: bool) -> None:
        assert claimant.report is not None
        if claimant.report[0] != worker.incarnation:
            return
        self._head.hear(worker, claimant, self._now_s)
        if idle:
            self._go_on(worker, worker.incarnation)

    def _sample(self) -> None:
        sums, card = self.sums, self._card
        wants = {worker.slot: worker.wants_bytes for worker in self.workers}
        contexts = sum(worker.open_bytes for worker in self.workers)
        fair = fair_shares(CARD_BYTES - card.outside_bytes - contexts, wants)
        sums.samples += 1
        sums.used_bytes += CARD_BYTES - card.free_bytes
        sums.usable_bytes += min(CARD_BYTES, card.outside_bytes + contexts + sum(wants.values()))
        sums.quiet_at.append(self._now_s >= self._disturbed_at_s + SETTLED_S)
        for worker in self.workers:
            slot, share = worker.slot, fair[worker.slot]
            sums.held_bytes[slot] = sums.held_bytes.get(slot, 0.0) + worker.held_bytes
            sums.fair_bytes[slot] = sums.fair_bytes.get(slot, 0.0) + share
            items = worker.job.items_per_s(worker.job.largest_in(share)) * SAMPLE_S
            sums.oracle_items[slot] = sums.oracle_items.get(slot, 0.0) + items
        self._at(self._now_s + SAMPLE_S, self._sample)

    def figures(self) -> dict[str, Any]:
        """Return what came out."""
        sums, minutes = self.sums, self._scene.duration_s / 60
        quiet_minutes = sum(sums.quiet_at) * SAMPLE_S / 60
        changes = [self._changes(worker) for worker in self.workers]
        works = [worker.items / sums.oracle_items[worker.slot] for worker in self.workers]
        return {
            "jain_bytes": jain([sums.held_bytes[slot] / sums.fair_bytes[slot] for slot in sums.held_bytes]),
            "jain_work": jain(works),
            "used": sums.used_bytes / sums.usable_bytes,
            "work": statistics.fmean(works),
            "failures_per_minute": sum(len(worker.failed_at_s) for worker in self.workers) / minutes,
            "changes_per_minute": max(len(moments) for moments in changes) / minutes,
            "quiet_changes_per_minute": (
                max(sum(map(self._is_quiet, moments)) for moments in changes) / quiet_minutes if quiet_minutes else 0.0
            ),
            "quiet_minutes": quiet_minutes,
            "tenants_waited_s_per_minute": sums.tenants_waited_s / minutes,
        }

    def _is_quiet(self, at_s: float) -> bool:
        return self.sums.quiet_at[min(int(at_s / SAMPLE_S), len(self.sums.quiet_at) - 1)]

    def _changes(self, worker: Worker) -> list[float]:
        moments, last = [], None
        for at_s, size in worker.sizes:
            if last is not None and abs(size - last) > WORTH_COUNTING * max(size, last):
                moments.append(at_s)
            elif last is not None:
                continue
            last = size
        return moments


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def run(seed: int, workers: int = 4, minutes: float = 10.0, *, looks_every_step: bool = True) -> dict[str, Any]:
    """Play every scene of a seed with leases and without.

    Args:
        seed: Another one, other jobs and tenants.
        workers: On the card.
        minutes: Length of each scene.

    Returns:
        The arguments, and under `scenes` a row for each scene and way, numbers flat.
    """
    rows = []
    for scene in scenes(seed, workers, 60.0 * minutes):
        for leasing in (True, False):
            play = Play(scene, seed=seed, workers=workers, leasing=leasing, looks_every_step=looks_every_step).run()
            rows.append({"scene": scene.name, "leases": "yes" if leasing else "no", **play.figures()})
    return {"seed": seed, "workers": workers, "minutes": minutes, "scenes": rows}
