"""The queue of jobs in a simulated night: two cards, everything goes wrong, and the head dies.

A virtual clock jumps from event to event. What happens to an attempt (its speed, an exception, a
kill, out-of-memory) is drawn from the seed, its job and its number, never from the order in which
the head asks. So a course whose head dies must have the same journal as the undisturbed one, byte
by byte. `Night` is the cluster and the head that does what the records say; it checks at each step
that no job runs twice at a time and that no card gives more than it has, and at the end that each
job ended exactly once.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self

from orchestrator.jobs import model
from orchestrator.jobs.journal import JOURNAL_NAME, Journal, decoded, encoded, queue_of
from orchestrator.jobs.model import ENDED, ON_CARD, Assigned, Cause, JobState, Kind, Record, Word
from orchestrator.jobs.packing import WINDOWS
from orchestrator.jobs.queue import NODE_LOST_S, Queue
from workers.settings import CommandSpec
from workers.units import GIB

CARDS = (
    model.Card(name="pc1", node="pc1", title="RTX 3090", room_bytes=20 * GIB, speed=1.75),
    model.Card(name="pc2", node="pc2", title="RTX 3070", room_bytes=6 * GIB, speed=1.0),
)
_STEPS_PER_S = 10.0  # of every training, on a card of speed 1
_LOAD_S, _SAVE_S, _SAVED_EVERY_S = 8.0, 6.0, 60.0
# A trial of two on a card is over after so long.
_TRIAL_S = 30.0
_NEEDS_GIB = (1, 2, 4, 5, 7, 8, 8, 14, 19, 26)
#: Of a training with its smallest micro-batch, and what is predicted of it: less than the truth.
_SMALLEST, _PREDICTED = 0.8, 0.5
_LONGEST_WAIT_S = 300.0  # between two looks of the head
_RULE = model.Milestones(rule="asha", metric="loss", is_min=True, first=2000, factor=3, last=54000)


def _draws(key: str) -> Random:
    """Return a generator that draws the same for the same key."""
    return Random(key)  # noqa: S311 - repeatable is what is wanted


def in_memory() -> tempfile.TemporaryDirectory[str]:
    """Make a folder in memory: nothing here is about how long a disk takes."""
    is_there = os.access("/dev/shm", os.W_OK)
    return tempfile.TemporaryDirectory(dir="/dev/shm" if is_there else None)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise BrokenError(otherwise)


class BrokenError(Exception):
    """The queue did what it must never do."""


def jobs_of(seed: int, count: int) -> list[model.Job]:
    """Draw jobs: six in ten train, some in sweeps with milestones; others are commands."""
    rng = _draws(f"jobs {seed}")
    jobs: list[model.Job] = []
    for number in range(count):
        name = f"j{number}"
        is_training = rng.random() < 0.6
        in_sweep = is_training and number % 5 == 0
        sweep = f"sweep{number * 3 // count}" if in_sweep else None
        steps = int(min(60_000, 300 * _STEPS_PER_S * rng.lognormvariate(0.0, 1.0)))
        after: tuple[str, ...] = ()
        if jobs and rng.random() < 0.2:
            after = tuple({rng.choice(jobs).name for _ in range(rng.randint(1, 2))})
        jobs.append(
            model.Job(
                name=name, id=f"{seed}-{name}", sweep=sweep, after=after,
                kind=Kind.TRAIN if is_training else Kind.COMMAND,
                command=None if is_training else CommandSpec(argv=("python", f"{name}.py")),
                after_any=rng.random() < 0.3, priority=rng.choice([0, 0, 0, 1, -1]),
                retries=rng.choice([0, 1, 2]),
                nodes=rng.choice([(), (), (), (), ("pc1",), ("pc2",)]),
                hours=(22 * 60, 7 * 60) if rng.random() < 0.05 else None,
                milestones=_RULE if in_sweep else None,
                steps=_RULE.last if in_sweep else max(50, steps),
            )
        )  # fmt: skip
    # Some that cost the same, and take so long that two side by side are worth a trial.
    alike: dict[str, Any] = {
        "after": (),
        "nodes": (),
        "hours": None,
        "priority": 2,
        "steps": 60_000,
    }
    return [
        replace(job, **alike)
        if number % 20 in {11, 12, 13, 14} and job.kind is Kind.TRAIN and job.sweep is None
        else job
        for number, job in enumerate(jobs)
    ]


@dataclass(slots=True)
class _Process:
    """An attempt as it really is."""

    job: model.Job
    attempt: int
    card: str
    budget_bytes: int
    began_s: float
    from_step: float
    steps_per_s: float
    ends: tuple[float, Cause, str]
    """After so many seconds it ends by itself, why, and what it says."""
    no_room_after_s: float | None
    rests_at_s: float | None = None
    """When it will have saved; `None` while it was not recalled."""

    def step(self, now_s: float) -> float:
        stops_s = now_s if self.rests_at_s is None else min(now_s, self.rests_at_s - _SAVE_S)
        ran_s = max(0.0, stops_s - self.began_s - _LOAD_S)
        return min(self.job.steps or 0, self.from_step + ran_s * self.steps_per_s)


class DeadHeadError(Exception):
    """The head was killed."""


class Night:
    """The cluster, its users, and a head that can be killed at any line of its journal."""

    def __init__(self, seed: int, count: int, folder: Path) -> None:
        self.seed, self.folder = seed, folder
        self.jobs = jobs_of(seed, count)
        self.now_s = 0.0
        self.processes: dict[str, _Process] = {}
        #: Steps by job, in the state that the head has of it; attempts that came to their end.
        self.saved, self.done = Counter[str](), Counter[str]()
        #: Nodes that do not answer, and since when; why cards are closed.
        self.away, self.closed = dict[str, float](), dict[str, str]()
        #: Attempts whose process ended with its node, and where.
        self.lost: dict[str, tuple[int, str]] = {}
        #: Attempts that ended by themselves and were not told yet.
        self.ended: dict[str, tuple[int, Cause, str, int]] = {}
        self.inbox: list[tuple[Record, ...]] = []
        self.agenda = sorted(self._agenda(count), key=lambda each: each[0])
        self.worlds: list[model.World] = []
        self.lines: list[bytes] = []
        self.deaths = 0
        self.is_written = True  # although the head died, the last batch is in the journal
        self.journal = Journal(folder / JOURNAL_NAME)
        self.queue = queue_of(folder)

    def _agenda(self, count: int) -> Iterator[tuple[float, Callable[[], object]]]:
        """Return what users and the world do, and when."""
        rng = _draws(f"agenda {self.seed}")
        length_s = count * 200.0
        first = [
            model.Submitted(at_s=0.0, job=job, least_bytes=self._least(job)) for job in self.jobs
        ]
        late = len(first) * 3 // 4
        yield 0.0, partial(self.inbox.append, tuple(first[:late]))
        for record in first[late:]:
            at_s = rng.random() * length_s / 2
            yield at_s, partial(self.inbox.append, (replace(record, at_s=at_s),))
        for number in range(count // 4):
            at_s, name = rng.random() * length_s, rng.choice(self.jobs).name
            word = rng.choice([Word.HOLD, Word.HOLD, Word.CANCEL, Word.RETRY, Word.RELEASE])
            said = model.Said(at_s=at_s, id=f"m{number}", word=word, job=name, by="ann")
            yield at_s, partial(self._say, said, of_running=number % 2 == 0)
        for _ in range(2):
            at_s = rng.random() * length_s
            yield at_s, partial(self.inbox.append, (model.QueueHeld(at_s=at_s, reason="wait"),))
        for number in range(1, 500):  # the user looks twice an hour
            yield number * 1800.0, self._release
        for _ in range(count // 5):
            at_s, card = rng.random() * length_s, rng.choice(CARDS)
            gone_s = rng.choice([10.0, 20.0, 120.0, 900.0])
            yield at_s, partial(self._lose, card.node)
            yield at_s + gone_s, partial(self._return, card.node)
            at_s = rng.random() * length_s
            yield at_s, partial(self.closed.__setitem__, card.name, "a game has it")
            yield at_s + 600.0, partial(self.closed.pop, card.name, None)

    def _say(self, said: model.Said, *, of_running: bool) -> None:
        """Leave a word in the inbox, and the opposite a while later."""
        if of_running and self.processes:
            running = sorted(self.processes)
            said = replace(said, job=running[len(said.id + said.job) % len(running)])
        self.inbox.append((said,))

    def _release(self) -> None:
        """Release what is held."""
        if self.queue.held is not None:
            self.inbox.append((model.QueueHeld(at_s=self.now_s, reason=None),))
        for name, standing in self.queue.standings.items():
            if standing.state is JobState.HELD:
                id_ = f"{name} {self.now_s}"
                said = model.Said(at_s=self.now_s, id=id_, word=Word.RELEASE, job=name, by="ann")
                self.inbox.append((said,))

    def _needs(self, job: model.Job) -> int:
        """Return what a job really takes; a few take more than any card has."""
        return int(GIB * _draws(f"memory {self.seed} {job.name}").choice(_NEEDS_GIB))

    def _least(self, job: model.Job) -> int | None:
        rng = _draws(f"least {self.seed} {job.name}")
        if rng.random() < 0.02:
            return 30 * GIB
        return int(self._needs(job) * _PREDICTED) if job.kind is Kind.TRAIN else None

    def _lose(self, node: str) -> None:
        self.away.setdefault(node, self.now_s)
        for name, process in list(self.processes.items()):
            if process.card == node:
                self.lost[name] = (process.attempt, node)
                self._keep(process)
                del self.processes[name]

    def _return(self, node: str) -> None:
        self.away.pop(node, None)
        for name, (attempt, lost_on) in list(self.lost.items()):
            if lost_on == node:
                del self.lost[name]
                standing = self.queue.standings[name]
                if standing.state in ON_CARD and standing.attempt == attempt:
                    self._start(name)  # its slot gets a new process, which goes on

    def _keep(self, process: _Process, *, whole: bool = False) -> None:
        """Keep the state that a process saved last."""
        if process.job.kind is Kind.TRAIN:
            step, since = process.step(self.now_s), process.from_step
            every = process.steps_per_s * _SAVED_EVERY_S
            saved = step if whole else since + (step - since) // every * every
            self.saved[process.job.name] = max(self.saved[process.job.name], int(saved))

    def _start(self, name: str) -> None:
        standing = self.queue.standings[name]
        job, attempt, card_name = standing.job, standing.attempt, standing.card or ""
        there = self.processes.get(name)
        if there is not None and there.attempt == attempt:
            return
        _require(there is None, f"{name} runs twice at a time")
        card = next(each for each in CARDS if each.name == card_name)
        if card.node in self.away:
            self.lost[name] = (attempt, card.node)
            return
        budget, there_now = standing.budget_bytes or 0, self.processes.values()
        others = sum(each.budget_bytes for each in there_now if each.card == card_name)
        _require(budget + others <= card.room_bytes, f"{card_name} gives more than it has")
        rng = _draws(f"{self.seed} {name} {attempt}")
        speed = _STEPS_PER_S * card.speed * rng.uniform(0.9, 1.1)
        left = (job.steps or 0) - self.saved[name]
        ends: tuple[float, Cause, str] = (_LOAD_S + left / speed, Cause.DONE, "")
        fate, at = rng.random(), rng.random()
        has_room = self._needs(job) <= budget
        if fate < 0.15:
            failures = [
                (Cause.KILLED, "SIGKILL"),
                (Cause.HOST_MEMORY, "the PC's RAM was full"),
                (Cause.EXCEPTION, f"ValueError: bad batch {rng.randint(0, 9)} in {name}"),
                (Cause.EXCEPTION, "RuntimeError: no such file"),
                (Cause.NAN_LOSS, "loss is nan"),
                (Cause.DRIVER, "driver fault"),
            ]
            ends = (ends[0] * at, *rng.choice(failures))
        elif fate < 0.18 and job.kind is Kind.COMMAND:
            ends = (ends[0] * at, Cause.PARKED, "exit code 75")
        elif not has_room and job.kind is Kind.COMMAND:
            ends = (_LOAD_S + 5.0, Cause.OUT_OF_MEMORY, "CUDA out of memory")
        no_room = None
        if not has_room and job.kind is Kind.TRAIN and self._needs(job) * _SMALLEST > budget:
            no_room = _LOAD_S + 10.0
        self.processes[name] = _Process(
            job=job, attempt=attempt, card=card_name, budget_bytes=budget, began_s=self.now_s,
            from_step=self.saved[name], steps_per_s=speed, ends=ends, no_room_after_s=no_room,
            rests_at_s=None if standing.recalled_to is None else self.now_s + _SAVE_S,
        )  # fmt: skip

    # What the head sees and does

    def world(self) -> model.World:
        seen: dict[str, model.Seen] = {}
        for name, (attempt, node) in self.lost.items():
            if self.now_s >= self.away[node] + NODE_LOST_S:
                seen[name] = model.Seen(
                    job=name, attempt=attempt, node_lost=True, step=self.saved[name]
                )
        for name, (attempt, cause, text, step) in self.ended.items():
            seen[name] = model.Seen(
                job=name, attempt=attempt, cause=cause, text=text, step=step, peak_bytes=GIB
            )
        for name, process in self.processes.items():
            step = int(process.step(self.now_s) + 1e-6)
            rests_at_s, no_room_s = process.rests_at_s, process.no_room_after_s
            ran_s = self.now_s - process.began_s
            pair = [each for each in self.processes.values() if each.card == process.card]
            is_tried = all(self.now_s - each.began_s > 2 * _LOAD_S + _TRIAL_S for each in pair)
            # What sharing does on these cards.
            share = 1.0 if len(pair) == 1 else 0.65 if self.seed % 2 else 0.52
            seen[name] = model.Seen(
                job=name, attempt=process.attempt, step=step, steps=process.job.steps,
                is_at_rest=rests_at_s is not None and self.now_s >= rests_at_s,
                value=self._value(process.job, step), eta_s=process.ends[0] - ran_s,
                steps_per_s=process.steps_per_s if ran_s > 2 * _LOAD_S else None,
                paces=(share * process.steps_per_s,) * WINDOWS if is_tried else (),
                has_no_room=no_room_s is not None and ran_s >= no_room_s,
            )  # fmt: skip
        closed = self.closed | {
            card.name: "its node is away" for card in CARDS if card.node in self.away
        }
        cards = tuple(replace(card, closed=closed.get(card.name)) for card in CARDS)
        minute = int(20 * 60 + self.now_s / 60) % (24 * 60)
        return model.World(now_s=self.now_s, minute_of_day=minute, cards=cards, seen=seen)

    def _value(self, job: model.Job, step: int) -> float | None:
        """Return the loss: curves that cross, with noise."""
        if job.milestones is None or step == 0:
            return None
        rng = _draws(f"curve {self.seed} {job.name}")
        floor, pace = rng.uniform(1.0, 2.0), rng.uniform(500.0, 3000.0)
        noise = _draws(f"noise {self.seed} {job.name} {step // 500}").gauss(0.0, 0.02)
        return floor + 3.0 * math.exp(-step / pace) + noise

    def take(self, records: Sequence[Record]) -> None:
        """Write a batch, apply it and carry it out; the head may die at it."""
        self.lines.append(encoded(records).encode() + b"\n")
        try:
            self.written(records)
            for record in records:
                self.queue.apply(record)
            for record in records:
                self.perform(record)
        except DeadHeadError:
            self.deaths += 1
            self.journal.close()
            self.journal = Journal(self.folder / JOURNAL_NAME)
            lived, self.queue = self.queue, queue_of(self.folder)
            for record in records if self.is_written else ():
                lived.apply(record)
            world = self.world()
            _require(
                list(self.queue.condensed()) == list(lived.condensed())
                and self.queue.next_records(world) == lived.next_records(world),
                f"line {len(self.lines)}: replayed, the queue is another",
            )
            self.resume()

    def written(self, records: Sequence[Record]) -> None:
        """Write a batch. Courses with deaths replace it."""
        self.journal.append(records)

    def perform(self, record: Record) -> None:
        if isinstance(record, Assigned):
            self.ended.pop(record.job, None)
            self._start(record.job)
        elif isinstance(record, model.Recalled) and record.job in self.processes:
            process = self.processes[record.job]
            if process.rests_at_s is None:
                process.rests_at_s = self.now_s + _SAVE_S
        elif isinstance(record, model.Rested | model.AttemptEnded):
            self._clear(record.job)

    def _clear(self, name: str) -> None:
        """Its attempt has ended: nothing of it is there any more."""
        self.ended.pop(name, None)
        self.lost.pop(name, None)
        process = self.processes.pop(name, None)
        if process is not None:
            self._keep(process, whole=True)

    def resume(self) -> None:
        """Do what a head does that comes up again: what runs and what the queue says must agree."""
        for name in {*self.processes, *self.ended, *self.lost}:
            if self.queue.standings[name].state not in ON_CARD:
                self._clear(name)
        for name, standing in self.queue.standings.items():
            if standing.state in ON_CARD:
                if name not in self.ended and name not in self.lost:
                    self._start(name)
                process = self.processes.get(name)
                # What a user said before is recalled by the queue itself.
                if process is not None and process.rests_at_s is None and self._is_told(name):
                    process.rests_at_s = self.now_s + _SAVE_S

    def _is_told(self, name: str) -> bool:
        """Return whether the journal has the recall of a job's attempt."""
        return self.queue.standings[name].recalled_to is not None and not any(
            isinstance(record, model.Recalled) and record.job == name
            for record in self.queue.next_records(self.world())
        )

    # The clock

    def turn(self) -> None:
        """Let the head answer to what is so now."""
        while self.inbox:
            message = [record for record in self.inbox[0] if self.queue.why_refused(record) is None]
            if message:
                self.take(message)
            # It is removed only once it is in the journal.
            if not message or self.is_written:
                self.inbox.pop(0)
        for _ in range(1000):
            world = self.world()
            records = self.queue.next_records(world)
            if not records:
                return
            self.worlds.append(world)
            self.take(records)
        raise BrokenError("the queue never comes to rest")

    def play(self) -> Self:
        """Play until all jobs have ended."""
        while len(self.queue.standings) < len(self.jobs) or not self.queue.is_over:
            self.turn()
            if self.now_s > 5e6:
                left = {
                    name: each.reason
                    for name, each in self.queue.standings.items()
                    if each.state not in ENDED
                }
                raise BrokenError(f"never over: {left}")
            self._advance()
        self.turn()
        self.journal.close()
        self.check()
        return self

    def _advance(self) -> None:
        """Go to the next moment at which something happens by itself."""
        at = [self.now_s + _LONGEST_WAIT_S]
        if self.agenda:
            at.append(self.agenda[0][0])
        at += [since_s + NODE_LOST_S for since_s in self.away.values()]
        for process in self.processes.values():
            at += [
                process.began_s + (process.no_room_after_s or process.ends[0]),
                process.began_s + process.ends[0],
                process.rests_at_s or self.now_s,
            ]
            if process.job.milestones is not None:
                step = process.step(self.now_s)
                for milestone in (2000, 6000, 18000):
                    if step < milestone:
                        left_s = (milestone - process.from_step) / process.steps_per_s
                        at.append(process.began_s + _LOAD_S + left_s)
        self.now_s = min(each for each in at if each > self.now_s)
        while self.agenda and self.agenda[0][0] <= self.now_s:
            self.agenda.pop(0)[1]()
        for name, process in list(self.processes.items()):
            ends_s, cause, text = process.ends
            is_at_rest = process.rests_at_s is not None and process.rests_at_s <= self.now_s
            if self.now_s >= process.began_s + ends_s and not is_at_rest:
                self._keep(process, whole=cause is Cause.DONE)
                del self.processes[name]
                self.ended[name] = (process.attempt, cause, text, int(process.step(self.now_s)))
                if cause is Cause.DONE and process.rests_at_s is None:
                    left = (process.job.steps or 0) - process.step(self.now_s)
                    _require(left < 1, f"{name} is done with {left} steps left")
                self.done[name] += cause is Cause.DONE

    def check(self) -> None:
        """Compare what the journal says with what really happened."""
        _require(not self.processes, f"still run: {sorted(self.processes)}")
        _require(set(self.queue.standings) == {job.name for job in self.jobs}, "a job was lost")
        queue, ends, again = Queue(), Counter[str](), Counter[str]()
        for line in (self.folder / JOURNAL_NAME).read_bytes().splitlines()[1:]:
            for record in decoded(line):
                name: Any = getattr(record, "job", None)
                is_job = isinstance(name, str)  # `Submitted` has the job itself
                before = queue.standings[name].state if is_job else None
                queue.apply(record)
                if is_job and (after := queue.standings[name].state) is not before:
                    ends[name] += after in ENDED
                    again[name] += before in ENDED
        for name, standing in self.queue.standings.items():
            _require(ends[name] == 1 + again[name], f"{name} ended {ends[name]} times")
            if standing.state is JobState.DONE:
                _require(self.done[name] == 1, f"{name} was done {self.done[name]} times")


class DyingNight(Night):
    """A night whose head dies before a line of its journal is written, in it, or after it."""

    def __init__(self, seed: int, count: int, folder: Path, dies_at: Callable[[int], bool]) -> None:
        super().__init__(seed, count, folder)
        self.dies_at = dies_at
        self.line = 0
        self.died_at = -1

    def take(self, records: Sequence[Record]) -> None:
        deaths = self.deaths
        super().take(records)
        if self.deaths > deaths and not self.is_written:
            self.lines.pop()  # it was never written; the queue decides again
        else:
            self.line += 1

    def written(self, records: Sequence[Record]) -> None:
        self.is_written = True
        if self.died_at == self.line or not self.dies_at(self.line):
            self.journal.append(records)
            return
        self.died_at = self.line
        kind = _draws(f"{self.seed} {self.line}").randrange(3)
        if kind == 2:
            self.journal.append(records)
            raise DeadHeadError
        self.is_written = False
        if kind == 1:
            line = encoded(records).encode() + b"\n"
            part = line[: _draws(f"{self.seed} {self.line} torn").randrange(1, len(line))]
            with (self.folder / JOURNAL_NAME).open("ab") as file:
                file.write(part)
        raise DeadHeadError
