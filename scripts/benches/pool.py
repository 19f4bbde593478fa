"""Four workers on one simulated card: what the head's leases are worth.

Each worker is driven by an `AdaptiveSize` of its own and reports once a second. The head leases
what the card has, and a lease travels with the next directive, behind one slice that runs and one
that is queued, as in a real run. The same scene of `pool_card.py` is played with leases and
without, by workers that keep what a step took (as torch does) and by such that give it back.
Virtual clock, no torch, no Ray.

Measured over a scene, the start included:

- `jain_bytes`, `jain_work`: Jain's index of what each worker holds, and does, as a share of what it
would with its
  max-min fair share of what tenants leave.
- `used`: bytes in use, of those that could be in use.
- `work`: as a share of what steps of the largest size that fits the fair share would do; the mean
over the workers.
- `failures_per_minute`: of all workers together.
- `changes_per_minute`, `quiet_changes_per_minute`: changes of a step's size by more than 2 %, of
the worker that has
  most; and those while nothing has happened for 20 s, per minute of such quiet.
- `tenants_waited_s_per_minute`: seconds in which a tenant lacked more than 1 % of the card.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benches.common import Result, judged
from benches.pool_card import CARD_BYTES, LEAVE_FREE_BYTES, Card, Scene, Worker, jobs, scenes
from benches.simulator import WOBBLE
from orchestrator.core.leases import NO_BOOKS, Books, Claimant, fair_shares, leased
from workers.messages import MemoryInfo
from workers.units import MIB

#: Share of the card that the budgets of all workers make up: 7 x 3.30 of 24 GiB, as in the guide
#: for the RTX 3090.
BUDGETED = 0.97
CONTEXT_BYTES = 300 * MIB
#: Loading torch takes a process so long; one at a time opens the card, which takes this.
START_S = 3.0
OPEN_S = 0.4
#: From the end of a slice to its report at the head.
TRAVEL_S = 0.005
TENANTS_LOOK_S = 0.1
SAMPLE_S = 0.25
#: Nothing counts as quiet sooner after a tenant came or went, or had to wait, or a process ended.
SETTLED_S = 20.0
#: A smaller change of size is the policy following the wobble of its own steps.
WORTH_COUNTING = 0.02
#: A tenant that lacks less of the card than this has what it wants.
NOISE = 0.01
#: What leases shall reach in every scene.
LEAST = {"jain_bytes": 0.95, "jain_work": 0.95, "used": 0.92}
MOST = {"quiet_changes_per_minute": 6.0}


class Play:
    """One scene, from beginning to end."""

    def __init__(
        self,
        scene: Scene,
        *,
        seed: int,
        workers: int,
        leasing: bool,
        keeps_pool: bool = True,
        looks_every_step: bool = True,
    ) -> None:
        self._scene = scene
        self._draw = random.Random(f"{seed}/{scene.name}/play")  # noqa: S311 - a simulation, no secret
        self._now_s = 0.0
        budget_bytes = int(BUDGETED * CARD_BYTES / workers)
        self.workers = [
            Worker(
                slot=f"pc1/{index}",
                job=job,
                budget_bytes=budget_bytes,
                context_bytes=CONTEXT_BYTES,
                draw=random.Random(self._draw.random()),  # noqa: S311
                clock=lambda: self._now_s,
                keeps_pool=keeps_pool,
                looks_every_step=looks_every_step,
            )
            for index, job in enumerate(
                jobs(seed, workers, budget_bytes - CONTEXT_BYTES, modest=scene.modest)
            )
        ]
        self.card = Card(wishes=scene.tenants, workers=self.workers)
        self._leasing = leasing and workers > 1
        self._books: Books = NO_BOOKS
        self._said: dict[str, Claimant] = {}
        self._leases: dict[str, int | None] = {}
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._card_is_taken_until_s = 0.0
        self._disturbed_at_s = 0.0
        self._used_bytes = self._usable_bytes = self._tenants_waited_s = 0.0
        self._quiet_at: list[bool] = []
        self._held, self._fair, self._best_items = (
            defaultdict[str, float](float) for _ in range(3)
        )

    def run(self) -> dict[str, float]:
        self._look_after_tenants()
        for worker in self.workers:
            self._start(worker)
        for at_s, index in self._scene.deaths:
            self._note(at_s, partial(self._die, self.workers[index]))
        for at_s in self._scene.disturbed_at_s:
            self._note(at_s, self._disturb)
        self._sample()
        while self._agenda[0][0] < self._scene.duration_s:
            self._now_s, _, what = heapq.heappop(self._agenda)
            what()
        return self._figures()

    def _note(self, at_s: float, what: Callable[[], None]) -> None:
        # What is due at the same moment is done in the order in which it was noted.
        heapq.heappush(self._agenda, (at_s, next(self._numbers), what))

    def _disturb(self) -> None:
        self._disturbed_at_s = self._now_s

    def _look_after_tenants(self) -> None:
        if self.card.serve_tenants(self._now_s) > NOISE * CARD_BYTES:
            self._tenants_waited_s += TENANTS_LOOK_S
            self._disturb()
        self._note(self._now_s + TENANTS_LOOK_S, self._look_after_tenants)

    def _lease(self) -> None:
        """Share the card out anew, as the head does after each thing it hears."""
        if not self._leasing:
            return
        claimants = []
        for worker in self.workers:
            if (said := self._said.get(worker.slot)) is not None:
                under_way = (
                    worker.cap_bytes if lease is None else lease for lease in worker.leases
                )
                claimants.append(replace(said, granted_bytes=max(under_way, default=0)))
        self._books, self._leases = leased(self._books, claimants, self._now_s)

    def _start(self, worker: Worker) -> None:
        self._go_on(worker, worker.incarnation, self._life(worker))

    def _go_on(self, worker: Worker, incarnation: int, life: Iterator[float]) -> None:
        if worker.incarnation == incarnation:
            self._note(next(life), partial(self._go_on, worker, incarnation, life))

    def _life(self, worker: Worker) -> Iterator[float]:
        """Be a worker's process from its start on.

        Yield each time until which it does what it does.
        """
        # A process that is about to start is asked to open the card, and to hold nothing yet.
        self._said[worker.slot] = Claimant(
            slot=worker.slot,
            card="card",
            cap_bytes=worker.cap_bytes,
            unopened_bytes=worker.context_bytes,
        )
        worker.leases.append(0 if self._leasing else None)
        self._lease()
        loaded_s = self._now_s + START_S + self._draw.uniform(0.0, 1.0)
        self._card_is_taken_until_s = max(loaded_s, self._card_is_taken_until_s) + OPEN_S
        yield self._card_is_taken_until_s
        while not worker.open(self.card):
            yield self._now_s + OPEN_S
        while True:
            yield from worker.work(self.card)
            arrives_s = self._now_s + TRAVEL_S
            self._note(
                arrives_s, partial(self._arrive, worker, worker.incarnation, self._report(worker))
            )
            if not worker.leases:
                yield arrives_s

    def _report(self, worker: Worker) -> Claimant:
        return Claimant(
            slot=worker.slot,
            card="card",
            cap_bytes=worker.cap_bytes,
            leave_free_bytes=LEAVE_FREE_BYTES,
            report=(worker.incarnation, worker.sequence),
            memory=MemoryInfo(
                device_total_bytes=CARD_BYTES,
                device_used_bytes=CARD_BYTES - self.card.free_bytes,
                free_bytes=self.card.free_bytes,
                allocated_bytes=worker.held_bytes,
                reserved_bytes=worker.held_bytes,
                peak_bytes=worker.peak_bytes,
                alloc_retries=0,
            ),
            starving=worker.starving,
        )

    def _arrive(self, worker: Worker, incarnation: int, claimant: Claimant) -> None:
        if worker.incarnation != incarnation:
            return
        self._said[worker.slot] = claimant
        self._lease()
        while len(worker.leases) < 2:
            worker.leases.append(self._leases.get(worker.slot))

    def _die(self, worker: Worker) -> None:
        worker.die()
        del self._said[worker.slot]
        self._lease()
        self._disturb()
        self._start(worker)

    def _sample(self) -> None:
        card = self.card
        wants = {worker.slot: worker.wants_bytes for worker in self.workers}
        fair = fair_shares(CARD_BYTES - card.taken_bytes, wants)
        self._used_bytes += CARD_BYTES - card.free_bytes
        self._usable_bytes += min(CARD_BYTES, card.taken_bytes + sum(wants.values()))
        self._quiet_at.append(self._now_s >= self._disturbed_at_s + SETTLED_S)
        for worker in self.workers:
            # Where nothing is kept between steps, the most of a slice stands for what is held in
            # it.
            self._held[worker.slot] += worker.held_bytes if worker.keeps_pool else worker.peak_bytes
            self._fair[worker.slot] += fair[worker.slot]
            best = worker.job.largest_within(fair[worker.slot] / (1 + WOBBLE))
            self._best_items[worker.slot] += best / worker.job.step_s(best) * SAMPLE_S
        self._note(self._now_s + SAMPLE_S, self._sample)

    def _figures(self) -> dict[str, float]:
        minutes = self._scene.duration_s / 60
        quiet_minutes = sum(self._quiet_at) * SAMPLE_S / 60
        changes = [_changes(worker.sizes) for worker in self.workers]
        quiet_changes = max(
            sum(self._quiet_at[int(at_s / SAMPLE_S)] for at_s in times) for times in changes
        )
        works = [worker.items / self._best_items[worker.slot] for worker in self.workers]
        return {
            "jain_bytes": jain([self._held[slot] / self._fair[slot] for slot in self._held]),
            "jain_work": jain(works),
            "used": self._used_bytes / self._usable_bytes,
            "work": statistics.fmean(works),
            "failures_per_minute": sum(worker.failures for worker in self.workers) / minutes,
            "changes_per_minute": max(map(len, changes)) / minutes,
            "quiet_changes_per_minute": quiet_changes / quiet_minutes if quiet_minutes else 0.0,
            "quiet_minutes": quiet_minutes,
            "tenants_waited_s_per_minute": self._tenants_waited_s / minutes,
        }


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def run(seed: int, workers: int = 4, minutes: float = 10.0) -> Result:
    rows: list[dict[str, Any]] = []
    drawn = scenes(seed, workers, 60.0 * minutes)
    for keeps_pool, scene, leasing in itertools.product((True, False), drawn, (True, False)):
        play = Play(scene, seed=seed, workers=workers, leasing=leasing, keeps_pool=keeps_pool)
        ways = {
            "memory": "kept" if keeps_pool else "given back",
            "leases": "yes" if leasing else "no",
        }
        rows.append({"scene": scene.name, **ways, **play.run()})
    # The worst of the plays with leases is judged.
    with_leases = [row for row in rows if row["leases"] == "yes"]
    targets = [
        *(
            judged(key, min(row[key] for row in with_leases), at_least=least)
            for key, least in LEAST.items()
        ),
        *(
            judged(key, max(row[key] for row in with_leases), at_most=most)
            for key, most in MOST.items()
        ),
    ]
    figures = {
        "seed": seed,
        "workers": workers,
        "minutes": minutes,
        "pool": rows,
        "pool_targets": targets,
    }
    return Result(bench="pool", figures=figures)


def _changes(sizes: Sequence[tuple[float, int]]) -> list[float]:
    """Return when a worker's size moved by more than the policy does to follow the wobble of its
    steps.
    """
    moments_s: list[float] = []
    last = sizes[0][1] if sizes else 0
    for at_s, size in sizes:
        if abs(size - last) > WORTH_COUNTING * max(size, last):
            moments_s.append(at_s)
            last = size
    return moments_s
