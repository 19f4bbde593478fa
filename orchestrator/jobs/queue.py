"""One turn of the queue: from the standings of all jobs and a `World` of observations and messages
to the next standings and the events that log the changes. Pure.

The caller stores the changes in one transaction and acts only afterwards: the standings say which
attempts begin and which must end. So a head that is killed before decides the same again. A turn
processes the messages of users and the attempts that have ended. Then it moves each job to its next
state (`_RULES`) until no rule applies, and starts the jobs that have a place. `lifecycle.py`
applies each of these changes to a job.

Duties of the caller: `World.cards` has every card of the configuration, closed while its node is
away. A job whose node does not answer has no entry in `World.statuses`; once that has lasted for
`node_lost_s` of the job, it has one with `node_lost`.

Does not choose cards (`places.py`), members that continue at a milestone (`milestones.py`), or
causes of failure (`causes.py`), and stores nothing (`record/store.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from orchestrator.jobs import causes, lifecycle, milestones, places
from orchestrator.jobs.lifecycle import TAKEN_S, Event, Goal, is_better
from orchestrator.jobs.model import (
    ENDED,
    IN_LINE,
    ON_CARD,
    AttemptStatus,
    Card,
    Job,
    JobOrder,
    JobState,
    Sent,
    Standing,
    Submitted,
    UserOrder,
    World,
)
from orchestrator.jobs.places import Plan, place_of
from workers.messages import Cause
from workers.units import GIB

#: A node that is away for this time is lost, and its trainings continue on other nodes: a worker
#: that has no head stops training.
NODE_LOST_S = 30.0

#: A node ends a program that has had no contact with the head for this time. After it, and a
#: reserve for the end of the program and for late messages, the job may begin on another node.
COMMAND_LEASE_S = 60.0
_LEASE_RESERVE_S = 15.0

#: A longer time between two turns means that no head ran, or that the PC was suspended.
_AWAY_S = 60.0

#: Relative change of a speed that is logged again, and shortest time between two logs of a job.
_SPEED_CHANGE, _BEST_EVERY_S = 0.2, 60.0

#: A card on which other programs leave a job too little memory is closed for this time.
_CARD_TAKEN_S = 300.0

#: Consecutive attempts with a driver fault that close a card, and for how long. Then one job tries
#: it. A single such attempt may come from a program that hides the card from itself.
_FAULTS, _FAULTY_S = 2, 600.0

#: This many jobs that fail with the same text, each within this time of its start, hold the queue.
_ALIKE_JOBS, _ALIKE_WITHIN_S = 3, 60.0
#: Causes that never hold the queue, however many jobs they concern. Some of them close a card.
_OF_ONE_JOB = frozenset(
    {
        *(Cause.DONE, Cause.PARKED, Cause.OUT_OF_MEMORY, Cause.KILLED, Cause.DIED),
        *(Cause.CARD_TAKEN, Cause.DRIVER),
    }
)

#: How often a training without room on the largest card is tried there. If it was alone on the
#: card, it waits this time first, doubled for each consecutive try.
_NO_ROOM_TRIES, _NO_ROOM_BACK_OFF_S = 6, 60.0

#: Number of the latest orders whose ids are kept: an order that arrives twice is obeyed once.
_OBEYED_KEPT = 1_000


def node_lost_s(job: Job) -> float:
    """Return how long a job's node must be away before the job may continue on another node."""
    return NODE_LOST_S if job.command is None else COMMAND_LEASE_S + _LEASE_RESERVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The stored state of a queue besides its jobs."""

    held: str | None = None
    """Why no job starts; `None`: jobs start."""
    obeyed: tuple[str, ...] = ()
    """The ids of the latest orders of users."""
    alike: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Jobs that failed soon after their start, keyed by cause and error text."""
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Keyed by card: the jobs of its latest attempts, all of which ended with a driver fault."""
    closed: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Keyed by closed card: until when, and why (other programs fill it, or its driver fails)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The stored state of the queue: all jobs of a run at one moment."""

    standings: Mapping[str, Standing] = field(default_factory=dict)
    """Keyed by job name, in order of submission."""
    facts: QueueFacts = QueueFacts()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, in order of submission."""
        return tuple(standing.job for standing in self.standings.values())

    def in_states(self, states: Iterable[JobState]) -> dict[str, Standing]:
        """Return the jobs that are in one of `states`."""
        return {name: each for name, each in self.standings.items() if each.state in states}

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return all(standing.state in ENDED for standing in self.standings.values())

    def unchosen(self, count: int) -> Iterator[tuple[Job, list[Standing]]]:
        """Yield the member of each optuna sweep that needs settings next, if fewer than `count` of
        the sweep's members are active; with it, the members that have settings.
        """
        ready: dict[str, Job] = {}
        left = Counter[str]()
        for standing in self.standings.values():
            job, sweep = standing.job, standing.job.sweep or ""
            if _awaits_settings(standing, self.standings):
                ready.setdefault(sweep, job)
            elif standing.state not in {*ENDED, JobState.PAUSED}:
                left[sweep] += 1
        for sweep, job in ready.items():
            if left[sweep] < count:
                members = (each for each in self.standings.values() if each.job.sweep == sweep)
                yield job, [each for each in members if not each.job.awaits_settings]


def decide(queue: Queue, world: World) -> tuple[Queue, tuple[Event, ...]]:
    """Return the queue after a turn, and the events that log the changes.

    Raises:
        IllegalMoveError: A rule here contradicts the lifecycle.
    """
    turn = _Turn(queue, world)
    turn.leave_out_gap()
    turn.hear()
    turn.choose()
    turn.observe()
    turn.settle()
    turn.hold_itself()
    turn.place()
    return turn.queue, tuple(turn.events)


def with_messages(queue: Queue, sent: Sequence[Sent], now_s: float) -> Queue:
    """Return the queue with the messages `sent` applied, without the rest of a turn."""
    turn = _Turn(queue, World(now_s=now_s, minute_of_day=0, cards=(), sent=sent))
    turn.hear()
    return turn.queue


def with_ends(queue: Queue, world: World) -> tuple[Queue, tuple[Event, ...]]:
    """Return the queue with the ends of attempts applied, without the rest of a turn."""
    turn = _Turn(queue, world)
    turn.observe()
    return turn.queue, tuple(turn.events)


def outlook(queue: Queue, world: World) -> dict[str, tuple[str, float | None]]:
    """Return why each job in line waits, and when it is expected to start; for display only."""
    held, in_line = queue.facts.held, queue.in_states(IN_LINE)
    if held is not None:
        return dict.fromkeys(in_line, (f"the queue is held: {held}", None))
    plan, found = _Turn(queue, world).plan(), {}
    for name, standing in in_line.items():
        why = standing.job.out_of_hours(world.minute_of_day) or plan.reasons.get(name)
        found[name] = why or standing.reason, plan.expected_start_s.get(name)
    return found


class _Turn:
    """The working copy of a queue during one turn."""

    def __init__(self, queue: Queue, world: World) -> None:
        self._world, self._now_s = world, world.now_s
        self._standings = dict(queue.standings)
        self._facts = queue.facts
        self.events: list[Event] = []

    @property
    def queue(self) -> Queue:
        return Queue(standings=self._standings, facts=self._facts)

    def _apply(self, standing: Standing, event: Event) -> None:
        self._standings[standing.job.name] = standing
        self._log(event.name, event.job, job=event.job, **event.details)

    def _log(self, event: str, about: str | None = None, **details: object) -> None:
        known = {key: value for key, value in details.items() if value is not None}
        self.events.append(Event(event, about, {"at_s": self._now_s, **known}))

    def _note(self, **changes: object) -> None:
        self._facts = replace(self._facts, **changes)  # type: ignore[arg-type]

    def _in(self, states: Iterable[JobState]) -> list[Standing]:
        return [standing for standing in self._standings.values() if standing.state in states]

    def _cards(self) -> tuple[Card, ...]:
        """Return the cards, including the closures by the queue."""
        closed = {
            name: why
            for name, (until_s, why) in self._facts.closed.items()
            if self._now_s < until_s
        }
        return tuple(
            replace(card, closed=card.closed or closed.get(card.name)) for card in self._world.cards
        )

    # Input

    def leave_out_gap(self) -> None:
        """Exclude time without a head from the jobs' running time, and forget faults of cards."""
        away_s = self._world.away_s
        if away_s <= _AWAY_S:
            return
        self._log("job_head_away", away_s=away_s)
        self._note(faults={}, closed={})
        for standing in self._in(ON_CARD):
            if standing.since_s <= self._now_s - away_s:
                later = replace(standing, since_s=standing.since_s + away_s)
                self._standings[standing.job.name] = later

    def hear(self) -> None:
        """Process the messages of users; a refused message changes nothing."""
        for sent in self._world.sent:
            why_not = self._submit(sent) if isinstance(sent, Submitted) else self._obey(sent)
            if why_not is not None:
                self.events.append(Event("job_message_refused", None, {"reason": why_not}))

    def _submit(self, sent: Submitted) -> str | None:
        """Add a job to the queue, or return why it is refused."""
        name, there = sent.job.name, self._standings.get(sent.job.name)
        if there is None:
            self._apply(*lifecycle.submitted(sent, len(self._standings), self._now_s))
            return None
        if there.job.id == sent.job.id:
            return f"{name} has been submitted already"
        return f"there is another job called {name} ({there.job.origin})"

    def _obey(self, sent: UserOrder) -> str | None:
        """Obey an order, or return why it is refused."""
        if sent.id in self._facts.obeyed:
            return "it has been obeyed already"
        if sent.job is None:
            is_held = sent.order is JobOrder.HOLD
            self._hold(f"{sent.by} holds it" if is_held else None, id=sent.id)
        elif sent.job in self._standings:
            self._apply(*lifecycle.ordered(self._standings[sent.job], sent, self._now_s))
        else:
            return f"there is no job called {sent.job}"
        self._note(obeyed=(*self._facts.obeyed, sent.id)[-_OBEYED_KEPT:])
        return None

    def _hold(self, reason: str | None, **details: str | None) -> None:
        self._note(held=reason, alike={})
        self._log("job_queue_held", reason=reason, **details)

    def choose(self) -> None:
        """Set the chosen settings of members of optuna sweeps."""
        for name, answer in self._world.chosen.items():
            standing = self._standings[name]
            if not _awaits_settings(standing, self._standings):
                continue  # an order of a user came first
            if isinstance(answer, str):
                self._send(standing, Goal(to=JobState.FAILED, reason=answer))
            else:
                self._apply(*lifecycle.with_settings(standing, *answer))

    # Attempts that have ended

    def observe(self) -> None:
        """Apply the ends of present attempts, and close cards that other programs fill."""
        for standing in self._in(ON_CARD):
            status = self._status(standing)
            if status is not None and status.taken is not None:
                self._close(standing, _CARD_TAKEN_S, status.taken)
            if status is not None and (
                status.cause is not None or status.is_at_rest or status.node_lost
            ):
                self._apply(*lifecycle.ended(standing, status, self._now_s))
                if status.cause is not None:
                    self._note_fault(standing, status, status.cause)
                    self._note_early_failure(standing, status, status.cause)

    def _status(self, standing: Standing) -> AttemptStatus | None:
        status = self._world.statuses.get(standing.job.name)
        return status if status is not None and status.attempt == standing.attempt else None

    def _close(self, standing: Standing, for_s: float, why: str) -> None:
        closed = dict.fromkeys(standing.places.values(), (self._now_s + for_s, why))
        self._note(closed={**self._facts.closed, **closed})

    def _note_fault(self, standing: Standing, status: AttemptStatus, cause: Cause) -> None:
        """Close the card of an attempt for a while if the card or its driver is at fault."""
        card, job = str(standing.last_card), standing.job
        faults = dict(self._facts.faults)
        jobs = (*faults.pop(card, ()), job.name)
        if cause is Cause.DRIVER:
            faults[card] = jobs
        self._note(faults=faults)
        is_of_card = job.command is None or len(set(jobs)) > 1
        if cause is Cause.DRIVER and len(jobs) >= _FAULTS and is_of_card:
            why = (
                f"{len(jobs)} attempts, one after the other, ended with a driver fault "
                f"({status.text[-200:]}); look for Xid in dmesg; it is tried again every "
                f"{_FAULTY_S / 60:.0f} min"
            )
            self._close(standing, _FAULTY_S, why)
            self._log("card_closed", card=card, reason=why)

    def _note_early_failure(self, standing: Standing, status: AttemptStatus, cause: Cause) -> None:
        """Record a job that failed soon after its start; a full disk holds the queue at once."""
        name, ran_s = standing.job.name, self._now_s - standing.since_s
        if cause is Cause.DISK_FULL:
            if self._facts.held is None:
                self._hold(f"the disk was full for {name}: {status.text or cause}")
        elif cause is Cause.DONE or ran_s > _ALIKE_WITHIN_S:
            self._note(alike={})
        elif cause not in _OF_ONE_JOB and standing.recalled_to is None:
            text = f"{cause}: {causes.likened(status.text.replace(name, 'JOB').lower())[:300]}"
            jobs = dict.fromkeys((*self._facts.alike.get(text, ()), name))
            self._note(alike={**self._facts.alike, text: tuple(jobs)})

    # The next state of each job: the goal, or `None` if the job keeps its state

    def _next_on_card(self, standing: Standing) -> Goal | None:
        """Return the goal of a job on a card, and record its milestone or speed."""
        job, status = standing.job, self._status(standing)
        if status is None or standing.recalled_to is not None:
            return None
        cards = [each for each in self._cards() if each.name in standing.places.values()]
        if not cards:
            return Goal(to=JobState.PARKED, reason=f"{standing.card} is not there")
        if (goal := self._why_leave(standing, status, cards)) is not None:
            return goal
        milestone = milestones.next_of(standing, status.step)
        if job.sweep is not None and milestone is not None and status.value is not None:
            return self._reach(standing, job.sweep, milestone, status.value)
        self._measure(standing, status, places.joint(job, cards))
        return None

    def _why_leave(
        self, standing: Standing, status: AttemptStatus, cards: Sequence[Card]
    ) -> Goal | None:
        """Return the goal of an attempt that must leave its card; `None`: it may stay."""
        if (hours := standing.job.out_of_hours(self._world.minute_of_day)) is not None:
            return Goal(to=JobState.PARKED, reason=hours)
        if status.taken is not None:
            return Goal(to=JobState.PARKED, reason=status.taken, wait_s=TAKEN_S)
        if all(card.closed is not None for card in cards):
            return Goal(to=JobState.PARKED, reason=str(cards[0].closed))
        return self._more_room(standing) if status.has_no_room else None

    def _more_room(self, standing: Standing) -> Goal:
        job, budget = standing.job, standing.budget_bytes or 0
        why = f"not even its smallest step fits in {budget / GIB:.1f} GiB of {standing.card}"
        cards = places.choices(job, self._world.cards)
        if any(places.suits(job, card) and card.room_bytes > budget for card in cards):
            return Goal(to=JobState.QUEUED, reason=why, least_room_bytes=budget + 1)
        why += ", and no card here has more"
        wait_s = _NO_ROOM_BACK_OFF_S * 2**standing.no_room if standing.alone else 0.0
        return Goal(to=JobState.PARKED, reason=why, wait_s=wait_s, least_room_bytes=budget)

    def _reach(self, standing: Standing, sweep: str, milestone: int, value: float) -> Goal | None:
        """Record a milestone of a sweep's member; it pauses if better members go first."""
        self._apply(*lifecycle.reached(standing, milestone, value, self._now_s))
        rule, name = standing.job.milestones, standing.job.name
        if rule is None or milestones.promotable(rule, self._reached(sweep), {name}) == name:
            return None
        why = f"{rule.metric} {value:.4g} at step {milestone}: others go first"
        return Goal(to=JobState.PAUSED, reason=why)

    def _reached(self, sweep: str) -> list[milestones.Reach]:
        """Return the reached milestones of a sweep, earliest first."""
        found = [
            (at_s, standing.number, (standing.job.name, milestone, value))
            for standing in self._standings.values()
            if standing.job.sweep == sweep
            for milestone, value, at_s in standing.reached
        ]
        return [reach for _, _, reach in sorted(found, key=lambda each: each[:2])]

    def _measure(self, standing: Standing, status: AttemptStatus, card: Card) -> None:
        """Record a new best value of an attempt, or a speed that has changed.

        On a card that two jobs may share, the speed of one depends on the other and is not kept.
        """
        speed, known = status.steps_per_s, standing.speeds.get(card.title)
        if speed is None or self._now_s < standing.measured_at_s + _BEST_EVERY_S:
            return
        is_known = known is not None and abs(speed - known) <= _SPEED_CHANGE * known
        has_better = status.value is not None and is_better(standing, status.value)
        if has_better or (standing.alone and not is_known):
            own = speed if standing.alone else None
            self._apply(*lifecycle.measured(standing, card.title, own, status, self._now_s))

    def _send(self, standing: Standing, goal: Goal) -> None:
        self._apply(*lifecycle.sent(standing, goal, self._now_s))

    def settle(self) -> None:
        """Move jobs to their next states until no rule applies."""
        while found := self._due():
            for name, goal in found.items():
                self._send(self._standings[name], goal)

    def _due(self) -> dict[str, Goal]:
        found: dict[str, Goal] = {}
        for name, standing in self._standings.items():
            rule = _RULES.get(standing.state)
            if rule is not None and (goal := rule(self, standing)) is not None:
                found[name] = goal
        for goals in self._promoted():
            found |= goals
        return found

    def _next_waiting(self, standing: Standing) -> Goal | None:
        """Return the goal of a job that waits for others."""
        goal = self._never_fits(standing) or _after(standing.job, self._standings)
        is_next = goal is not None and goal.to is JobState.QUEUED
        return None if is_next and standing.job.awaits_settings else goal

    def _next_skipped(self, standing: Standing) -> Goal | None:
        """Return the goal of a skipped job: WAITING, once the jobs before it may end well again."""
        goal = _after(standing.job, self._standings)
        if goal is not None and goal.to is JobState.SKIPPED:
            return None
        why = f"waits for {', '.join(standing.job.after)}"
        return Goal(to=JobState.WAITING, reason=why)

    def _never_fits(self, standing: Standing) -> Goal | None:
        """Return the goal of a job that no card here can ever hold."""
        cards, least_bytes = self._world.cards, standing.least_room_bytes
        why = places.never_fits(standing.job, least_bytes, cards) if cards else None
        return None if why is None else Goal(to=JobState.INFEASIBLE, reason=why)

    def _next_saving(self, standing: Standing) -> Goal | None:
        """Return the goal of a job whose files are being copied; SAVING if the reason is new."""
        now = JobState.SAVING, standing.reason
        to, why = self._world.left.get(standing.job.name, now)
        return None if (to, why) == now else Goal(to=to, reason=why)

    def _next_parked(self, standing: Standing) -> Goal | None:
        """Return the goal of a parked job."""
        job, least_bytes = standing.job, standing.least_room_bytes or 0
        is_time = self._now_s >= standing.wake_at_s
        if is_time and job.out_of_hours(self._world.minute_of_day) is None:
            if standing.no_room >= _NO_ROOM_TRIES:
                why = f"{standing.reason}; tried {standing.no_room} times"
                return Goal(to=JobState.INFEASIBLE, reason=why)
            there = self._free_cards() if standing.no_room else self._open_cards()
            for card in places.choices(job, there):
                if places.suits(job, card) and card.room_bytes >= least_bytes:
                    return Goal(to=JobState.QUEUED, reason="in line again")
        return self._never_fits(standing)

    def _promoted(self, *, is_idle: bool = False) -> Iterator[dict[str, Goal]]:
        """Yield for each sweep the paused member that continues, or all of them as STOPPED."""
        rules = {
            each.job.sweep or "": rule
            for each in self._in({JobState.PAUSED})
            if (rule := each.job.milestones) is not None
        }
        for sweep, rule in rules.items():
            members = [each for each in self._standings.values() if each.job.sweep == sweep]
            paused = [each.job.name for each in members if each.state is JobState.PAUSED]
            is_last = all(each.state in {*ENDED, JobState.PAUSED} for each in members)
            reached = self._reached(sweep)
            name = milestones.promotable(rule, reached, paused, is_idle=is_idle or is_last)
            if name is not None:
                why = "continues: now among the best at its milestone"
                yield {name: Goal(to=JobState.QUEUED, reason=why)}
            elif is_last:
                why = f"others of {sweep} were better, and all have ended"
                yield dict.fromkeys(paused, Goal(to=JobState.STOPPED, reason=why))

    # Places

    def hold_itself(self) -> None:
        """Hold the queue if the next jobs would fail too."""
        why = self._world.disk_full
        for jobs in self._facts.alike.values():
            if len(jobs) >= _ALIKE_JOBS:
                named, last = ", ".join(jobs[:_ALIKE_JOBS]), self._standings[jobs[-1]].last_error
                why = why or f"{named} failed alike within a minute of their start: {last}"
        if why is not None and self._facts.held is None:
            self._hold(why)

    def place(self) -> None:
        """Start jobs that have a place; if none has, let a paused one use a free card."""
        is_shared = any(not standing.alone for standing in self._in(ON_CARD))
        may_preempt = any(standing.job.preempt for standing in self._in(IN_LINE))
        free = self._free_cards()
        if self._facts.held is not None or not (free or is_shared or may_preempt):
            return
        plan = self.plan()
        for start in plan.starts:
            self._apply(*lifecycle.begun(self._standings[start.job], start, self._now_s))
        for name, other in plan.recalls.items():
            goal = Goal(to=JobState.PREEMPTED, reason=f"makes room for {other}")
            self._send(self._standings[name], goal)
        if free and not plan.starts and not plan.recalls:
            # No job in line can use the free card: one more paused member continues.
            for name, goal in next(self._promoted(is_idle=True), {}).items():
                self._send(self._standings[name], goal)

    def _open_cards(self) -> list[Card]:
        return [card for card in self._cards() if card.closed is None]

    def _free_cards(self) -> list[Card]:
        taken = {card for each in self._in(ON_CARD) for card in each.places.values()}
        return [card for card in self._open_cards() if card.name not in taken]

    def plan(self) -> Plan:
        """Return the places of jobs that start now, and why and how long the others wait."""
        cards, minute = self._cards(), self._world.minute_of_day
        in_line = [each for each in self._in(IN_LINE) if each.job.out_of_hours(minute) is None]
        candidates = places.candidates(self._standings.values(), in_line, cards)
        taken = [
            place_of(standing, self._status(standing), self._now_s)
            for standing in self._in(ON_CARD)
        ]
        return places.plan(candidates, cards, taken, self._now_s)


#: The rule for each state: it returns the next state of a job, or `None`.
_RULES: Final[Mapping[JobState, Callable[[_Turn, Standing], Goal | None]]] = {
    JobState.WAITING: _Turn._next_waiting,
    JobState.SKIPPED: _Turn._next_skipped,
    **dict.fromkeys(IN_LINE, _Turn._never_fits),
    JobState.SAVING: _Turn._next_saving,
    JobState.PARKED: _Turn._next_parked,
    **dict.fromkeys(ON_CARD, _Turn._next_on_card),
}


def _awaits_settings(standing: Standing, standings: Mapping[str, Standing]) -> bool:
    """Return whether a job waits only for its settings."""
    if standing.state is not JobState.WAITING or not standing.job.awaits_settings:
        return False
    goal = _after(standing.job, standings)
    return goal is not None and goal.to is JobState.QUEUED


def _after(job: Job, standings: Mapping[str, Standing]) -> Goal | None:
    """Return the goal of a WAITING job; `None`: it keeps waiting.

    A predecessor that was STOPPED at its milestone counts as ended well if another predecessor of
    the same sweep is DONE.
    """
    missing = next((name for name in job.after if name not in standings), None)
    if missing is not None:
        why = f"it comes after {missing}, and this queue has no such job"
        return Goal(to=JobState.SKIPPED, reason=why)
    known = [standings[name] for name in job.after]
    done = {other.job.sweep for other in known if other.state is JobState.DONE}
    under_way = {other.job.sweep for other in known if other.state not in ENDED}
    for other in () if job.after_any else known:
        stopped = other.state is JobState.STOPPED
        if other.state not in ENDED - {JobState.DONE} or (stopped and other.job.sweep in done):
            continue
        if stopped and other.job.sweep in under_way:
            return None
        why = f"{other.job.name} is {other.state.value}: {other.reason}"
        return Goal(to=JobState.SKIPPED, reason=why)
    return None if under_way else Goal(to=JobState.QUEUED, reason="in line")
