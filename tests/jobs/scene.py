"""Jobs, cards and worlds as tests of the queue want them, and a head that does what it is told."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from orchestrator.jobs.codec import as_json, from_json
from orchestrator.jobs.model import (
    AttemptBegun,
    AttemptStatus,
    Card,
    Cause,
    Job,
    JobOrder,
    JobState,
    Milestones,
    Record,
    Standing,
    Submitted,
    UserOrder,
    World,
)
from orchestrator.jobs.queue import Queue, QueueFacts
from workers.settings import CommandSpec
from workers.units import GIB

BIG = Card(name="pc1", node="pc1", title="RTX 3090", room_bytes=20 * GIB, speed=1.75)
SMALL = Card(name="pc2", node="pc2", title="RTX 3070", room_bytes=6 * GIB, speed=1.0)
ASHA = Milestones(metric="loss", is_min=True, first=100, factor=3, last=900)


def training(name: str, **more: Any) -> Job:
    return Job(**{"name": name, "id": f"id-{name}", "steps": 1000, **more})


def command(name: str, **more: Any) -> Job:
    spec = CommandSpec(argv=("python", "train.py"))
    return Job(**{"name": name, "id": f"id-{name}", "command": spec, **more})


class Scene:
    """A queue, and a head that applies at once what follows, until nothing does."""

    def __init__(self, *jobs: Job, cards: tuple[Card, ...] = (BIG, SMALL), least: int = 0) -> None:
        self.queue = Queue()
        self.cards = cards
        self.now_s = 1000.0
        self.minute = 12 * 60
        self.disk_full: str | None = None
        self.records: list[Record] = []
        self.seen: dict[str, AttemptStatus] = {}
        self.submit(*jobs, least=least)

    def submit(self, *jobs: Job, least: int = 0) -> None:
        for job in jobs:
            self.take(Submitted(at_s=self.now_s, job=job, least_bytes=least or None))

    def take(self, *records: Record) -> None:
        for record in records:
            self.records.append(record)
            self.queue.apply(record)

    def world(self) -> World:
        left = dict.fromkeys(self.queue.saving, (JobState.DONE, "done"))
        return World(
            now_s=self.now_s,
            minute_of_day=self.minute,
            cards=self.cards,
            seen=self.seen,
            left=left,
            disk_full=self.disk_full,
        )

    def turn(self, seconds: float = 0.0) -> list[Record]:
        """Return all that follows now; `seconds` pass before."""
        self.now_s += seconds
        found: list[Record] = []
        while records := self.queue.next_records(self.world()):
            self.take(*records)
            found += records
            assert len(found) < 10_000, "it never comes to rest"
        return found

    def see(self, job: str, **what: Any) -> list[Record]:
        """Return what follows from what is seen of a job's attempt."""
        attempt = what.pop("attempt", self.queue.standings[job].attempt)
        self.seen[job] = AttemptStatus(job=job, attempt=attempt, **what)
        return self.turn()

    def end(self, job: str, cause: Cause = Cause.DONE, text: str = "", **what: Any) -> list[Record]:
        return self.see(job, cause=cause, text=text, **what)

    def next_head(self) -> None:
        """Go on with the queue as another head reads it."""
        before = self.queue
        texts = [as_json(each) for each in before.standings.values()]
        rows = [from_json(Standing, text) for text in texts]
        facts = from_json(QueueFacts, as_json(before.facts))
        self.queue = Queue(rows, facts)
        assert texts == [as_json(each) for each in self.queue.standings.values()]

    def say(self, order: JobOrder, job: str, message: str = "") -> list[Record]:
        id_ = message or f"message-{len(self.records)}"
        self.take(UserOrder(at_s=self.now_s, id=id_, order=order, job=job, by="ann"))
        return self.turn()

    def close(self, name: str, why: str | None) -> list[Record]:
        self.cards = tuple(
            replace(card, closed=why) if card.name == name else card for card in self.cards
        )
        return self.turn()

    def standing(self, job: str) -> Standing:
        return self.queue.shown(job)

    def state(self, job: str) -> str:
        return self.queue.standings[job].state.value


def starts(records: Iterable[Record]) -> dict[str, str]:
    """Return the cards of the jobs that start."""
    return {each.job: each.card for each in records if isinstance(each, AttemptBegun)}
