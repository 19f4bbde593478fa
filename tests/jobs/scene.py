"""Jobs, cards and worlds for tests of the queue, and a head that follows the queue's decisions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from orchestrator.jobs.lifecycle import Event
from orchestrator.jobs.model import (
    ON_CARD,
    AttemptStatus,
    Card,
    Job,
    JobOrder,
    JobState,
    Milestones,
    Sent,
    Settings,
    Standing,
    Submitted,
    UserOrder,
    World,
)
from orchestrator.jobs.queue import Queue, QueueFacts, decide, outlook
from orchestrator.record.store import as_json, from_json
from workers.messages import Cause
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
    """A queue, and a head that lets it decide until there are no more events."""

    def __init__(self, *jobs: Job, cards: tuple[Card, ...] = (BIG, SMALL), least: int = 0) -> None:
        self.queue = Queue()
        self.cards = cards
        self.now_s = 1000.0
        self.minute = 12 * 60
        self.disk_full: str | None = None
        self.seen: dict[str, AttemptStatus] = {}
        self._sent: list[Sent] = []
        self._orders = 0
        self.submit(*jobs, least=least)

    def submit(self, *jobs: Job, least: int = 0) -> None:
        """Submit jobs in the next turn."""
        for job in jobs:
            self._sent.append(Submitted(job=job, least_bytes=least or None))

    def send(self, *sent: Sent) -> None:
        """Send messages of users in the next turn."""
        self._sent += sent

    def put(self, standing: Standing) -> None:
        """Set the standing of a job."""
        known = self.queue.standings
        name, number = standing.job.name, len(known)
        number = known[name].number if name in known else number
        changed = {**known, name: replace(standing, number=number)}
        self.queue = replace(self.queue, standings=changed)

    def world(self) -> World:
        saving = self.queue.in_states({JobState.SAVING})
        return World(
            now_s=self.now_s,
            minute_of_day=self.minute,
            cards=self.cards,
            statuses=self.seen,
            left=dict.fromkeys(saving, (JobState.DONE, "done")),
            chosen=self.chosen(),
            sent=tuple(self._sent),
            disk_full=self.disk_full,
        )

    def chosen(self) -> dict[str, tuple[Settings, int | None] | str]:
        return {}

    def turn(self, seconds: float = 0.0) -> list[Event]:
        """Let `seconds` pass, and take a turn; return its events."""
        self.now_s += seconds
        found: list[Event] = []
        while True:
            self.queue, events = self.decide(self.world())
            self._sent.clear()
            found += events
            assert len(found) < 10_000, "it never comes to rest"
            if not events:
                return found

    def decide(self, world: World) -> tuple[Queue, tuple[Event, ...]]:
        return decide(self.queue, world)

    def see(self, job: str, **what: Any) -> list[Event]:
        """Report a status of a job's attempt; return the events that follow."""
        attempt = what.pop("attempt", self.queue.standings[job].attempt)
        self.seen[job] = AttemptStatus(attempt=attempt, **what)
        return self.turn()

    def end(self, job: str, cause: Cause = Cause.DONE, text: str = "", **what: Any) -> list[Event]:
        return self.see(job, cause=cause, text=text, **what)

    def next_head(self) -> None:
        """Continue with the queue as the next head reads it."""
        before = self.queue
        texts = [as_json(each) for each in before.standings.values()]
        rows = [from_json(Standing, text) for text in texts]
        facts = from_json(QueueFacts, as_json(before.facts))
        self.queue = Queue(standings={each.job.name: each for each in rows}, facts=facts)
        assert texts == [as_json(each) for each in self.queue.standings.values()]

    def say(self, order: JobOrder, job: str | None, message: str = "") -> list[Event]:
        self._orders += 1
        id_ = message or f"message-{self._orders}"
        self._sent.append(UserOrder(id=id_, order=order, job=job, by="ann"))
        return self.turn()

    def standing(self, job: str) -> Standing:
        """Return the standing of a job, with the reason why it waits."""
        standing = self.queue.standings[job]
        reason, start_s = outlook(self.queue, self.world()).get(job, (standing.reason, None))
        return replace(standing, reason=reason, expected_start_s=start_s)

    def state(self, job: str) -> str:
        return self.queue.standings[job].state.value

    @property
    def on_card(self) -> list[str]:
        return [*self.queue.in_states(ON_CARD)]


def starts(events: Iterable[Event]) -> dict[str, Any]:
    """Return the cards of the jobs that start, keyed by job."""
    return {
        str(each.job): each.details["card"] for each in events if each.name == "job_attempt_begun"
    }
