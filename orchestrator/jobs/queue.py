"""One turn of the queue: from how all jobs stand, and what is seen and asked, to how they stand
then, and what is told of that. Pure.

The caller stores what has changed at once, and only then acts: which attempts begin and which are
to rest follows from how the jobs stand. So a head that is killed before decides the same again. A
turn takes what users send, follows the attempts that have ended, looks at each job by its state
(`_LOOKS`) and sends it where it is to go by now, until none is to go anywhere, and starts what has
a place. How each of these changes a job is in `lifecycle.py`.

What the caller owes: every card of the configuration is in `World.cards`, closed while its node is
away; a job whose node does not answer has no entry in `World.seen`, and one with `node_lost` once
that has lasted `node_lost_s` of it.

Does not decide where a job goes (`places.py`), who goes on at a milestone (`milestones.py`), or
what a cause of failure means (`causes.py`), and stores nothing (`record/store.py`).
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

#: A node that is away for so long is lost, and its trainings go on elsewhere: without a head, a
#: worker there trains no more.
NODE_LOST_S = 30.0

#: A program that hears nothing of the head for so long is ended by its own node; after that, and
#: what it is given to end, with a reserve for late news, it may begin elsewhere.
COMMAND_LEASE_S = 60.0
_LEASE_RESERVE_S = 15.0

#: A longer time between two turns was one without a head, or the PC was suspended.
_AWAY_S = 60.0

#: A speed is told again when it differs by so much, a better value of the metric so often.
_SPEED_CHANGE, _BEST_EVERY_S = 0.2, 60.0

#: A card on which other programs leave a job too little memory is tried again after so long.
_CARD_TAKEN_S = 300.0

#: A card on which so many attempts, one after the other, have ended with a driver fault gets no job
#: for so long; then it is tried by one. Less is the fault of a program that hides the card itself.
_FAULTS, _FAULTY_S = 2, 600.0

#: So many different jobs that fail alike, each so soon after its start, hold the queue.
_ALIKE_JOBS, _ALIKE_WITHIN_S = 3, 60.0
#: Causes that say nothing about the queue as a whole, however many jobs they meet. For some of them
#: a card is closed.
_OF_ONE_JOB = frozenset(
    {
        *(Cause.DONE, Cause.PARKED, Cause.OUT_OF_MEMORY, Cause.KILLED, Cause.DIED),
        *(Cause.CARD_TAKEN, Cause.DRIVER),
    }
)

#: A training that had no room on the largest card is tried there so often; where it was alone,
#: after so long, doubled each time in a row.
_NO_ROOM_TRIES, _NO_ROOM_BACK_OFF_S = 6, 60.0

#: Orders of a user that are known, so that one that comes twice is obeyed once.
_OBEYED_KEPT = 1_000


def node_lost_s(job: Job) -> float:
    """Return how long the node of a job is away before the job may go on elsewhere."""
    return NODE_LOST_S if job.command is None else COMMAND_LEASE_S + _LEASE_RESERVE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """What there is of a queue besides its jobs, as it is stored."""

    held: str | None = None
    """Why nothing starts; `None`: it does."""
    obeyed: tuple[str, ...] = ()
    """The ids of the last orders of users."""
    alike: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Jobs that failed soon after their start, by the cause and what they said."""
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By card, the jobs whose attempts have ended with a driver fault since any other end."""
    closed: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    """Until when a card gets no job, and why: other programs have it, or its driver fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """All jobs of a run as they stand at one moment. This is what is stored."""

    standings: Mapping[str, Standing] = field(default_factory=dict)
    """By job, in order of submission."""
    facts: QueueFacts = QueueFacts()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them, in order of submission."""
        return tuple(standing.job for standing in self.standings.values())

    def in_states(self, states: Iterable[JobState]) -> dict[str, Standing]:
        """Return the jobs that are in one of these states."""
        return {name: each for name, each in self.standings.items() if each.state in states}

    @property
    def is_over(self) -> bool:
        """Whether every job has ended."""
        return all(standing.state in ENDED for standing in self.standings.values())

    def unchosen(self, count: int) -> Iterator[tuple[Job, list[Standing]]]:
        """Yield the next member of each sweep of method optuna of which fewer than `count` are at
        work, with the members that have their settings already.
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
    """Return the queue after a turn, and what is told of it.

    Raises:
        IllegalMoveError: A rule here contradicts one of the lifecycle.
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


def heard(queue: Queue, sent: Sequence[Sent], now_s: float) -> Queue:
    """Return the queue with what users have sent, and nothing that follows from it."""
    turn = _Turn(queue, World(now_s=now_s, minute_of_day=0, cards=(), sent=sent))
    turn.hear()
    return turn.queue


def only_ends(queue: Queue, world: World) -> tuple[Queue, tuple[Event, ...]]:
    """Return the queue with the attempts that have ended, and nothing that follows from it."""
    turn = _Turn(queue, world)
    turn.observe()
    return turn.queue, tuple(turn.events)


def outlook(queue: Queue, world: World) -> dict[str, tuple[str, float | None]]:
    """Return why each job in line waits, and when it is expected to start: for those who look."""
    held, in_line = queue.facts.held, queue.in_states(IN_LINE)
    if held is not None:
        return dict.fromkeys(in_line, (f"the queue is held: {held}", None))
    plan, told = _Turn(queue, world).plan(), {}
    for name, standing in in_line.items():
        why = standing.job.out_of_hours(world.minute_of_day) or plan.reasons.get(name)
        told[name] = why or standing.reason, plan.expected_start_s.get(name)
    return told


class _Turn:
    """The queue while a turn changes it."""

    def __init__(self, queue: Queue, world: World) -> None:
        self._world, self._now_s = world, world.now_s
        self._standings = dict(queue.standings)
        self._facts = queue.facts
        self.events: list[Event] = []

    @property
    def queue(self) -> Queue:
        return Queue(standings=self._standings, facts=self._facts)

    def _do(self, standing: Standing, event: Event) -> None:
        self._standings[standing.job.name] = standing
        self._tell(event.name, event.job, job=event.job, **event.details)

    def _tell(self, event: str, about: str | None = None, **details: object) -> None:
        known = {key: value for key, value in details.items() if value is not None}
        self.events.append(Event(event, about, {"at_s": self._now_s, **known}))

    def _note(self, **changes: object) -> None:
        self._facts = replace(self._facts, **changes)  # type: ignore[arg-type]

    def _in(self, states: Iterable[JobState]) -> list[Standing]:
        return [standing for standing in self._standings.values() if standing.state in states]

    def _cards(self) -> tuple[Card, ...]:
        """Return the cards as they are, and closed where the queue has closed them."""
        closed = {
            name: why
            for name, (until_s, why) in self._facts.closed.items()
            if self._now_s < until_s
        }
        return tuple(
            replace(card, closed=card.closed or closed.get(card.name)) for card in self._world.cards
        )

    # What has come in

    def leave_out_gap(self) -> None:
        """Have a time without a head not count as worked. What was seen of cards is forgotten."""
        away_s = self._world.away_s
        if away_s <= _AWAY_S:
            return
        self._tell("job_head_away", away_s=away_s)
        self._note(faults={}, closed={})
        for standing in self._in(ON_CARD):
            if standing.since_s <= self._now_s - away_s:
                later = replace(standing, since_s=standing.since_s + away_s)
                self._standings[standing.job.name] = later

    def hear(self) -> None:
        """Take what users send; what is refused changes nothing."""
        for sent in self._world.sent:
            why_not = self._taken(sent) if isinstance(sent, Submitted) else self._obeyed(sent)
            if why_not is not None:
                self.events.append(Event("job_message_refused", None, {"reason": why_not}))

    def _taken(self, sent: Submitted) -> str | None:
        """Take a job in, or return why not."""
        name, there = sent.job.name, self._standings.get(sent.job.name)
        if there is None:
            self._do(*lifecycle.submitted(sent, len(self._standings), self._now_s))
            return None
        if there.job.id == sent.job.id:
            return f"{name} has been submitted already"
        return f"there is another job called {name} ({there.job.origin})"

    def _obeyed(self, sent: UserOrder) -> str | None:
        """Obey an order, or return why not."""
        if sent.id in self._facts.obeyed:
            return "it has been obeyed already"
        if sent.job is None:
            is_held = sent.order is JobOrder.HOLD
            self._hold(f"{sent.by} holds it" if is_held else None, id=sent.id)
        elif sent.job in self._standings:
            self._do(*lifecycle.ordered(self._standings[sent.job], sent, self._now_s))
        else:
            return f"there is no job called {sent.job}"
        self._note(obeyed=(*self._facts.obeyed, sent.id)[-_OBEYED_KEPT:])
        return None

    def _hold(self, reason: str | None, **told: str | None) -> None:
        self._note(held=reason, alike={})
        self._tell("job_queue_held", reason=reason, **told)

    def choose(self) -> None:
        """Give members of sweeps of method optuna their settings."""
        for name, answer in self._world.chosen.items():
            standing = self._standings[name]
            if not _awaits_settings(standing, self._standings):
                continue  # a user has said otherwise meanwhile
            if isinstance(answer, str):
                self._send(standing, Goal(to=JobState.FAILED, reason=answer))
            else:
                self._do(*lifecycle.with_settings(standing, *answer))

    # Attempts that have ended

    def observe(self) -> None:
        """Follow the ends of present attempts, and close cards that other programs have."""
        for standing in self._in(ON_CARD):
            seen = self._seen(standing)
            if seen is not None and seen.taken is not None:
                self._close(standing, _CARD_TAKEN_S, seen.taken)
            if seen is not None and (seen.cause is not None or seen.is_at_rest or seen.node_lost):
                self._do(*lifecycle.ended(standing, seen, self._now_s))
                if seen.cause is not None:
                    self._note_fault(standing, seen, seen.cause)
                    self._note_alike(standing, seen, seen.cause)

    def _seen(self, standing: Standing) -> AttemptStatus | None:
        seen = self._world.seen.get(standing.job.name)
        return seen if seen is not None and seen.attempt == standing.attempt else None

    def _close(self, standing: Standing, for_s: float, why: str) -> None:
        closed = dict.fromkeys(standing.places.values(), (self._now_s + for_s, why))
        self._note(closed={**self._facts.closed, **closed})

    def _note_fault(self, standing: Standing, seen: AttemptStatus, cause: Cause) -> None:
        """Close the card of an attempt for a while if the card, or its driver, is what fails."""
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
                f"({seen.text[-200:]}); look for Xid in dmesg; it is tried again every "
                f"{_FAULTY_S / 60:.0f} min"
            )
            self._close(standing, _FAULTY_S, why)
            self._tell("card_closed", card=card, reason=why)

    def _note_alike(self, standing: Standing, seen: AttemptStatus, cause: Cause) -> None:
        """Note a job that failed soon after its start; a full disk holds the queue at once."""
        name, ran_s = standing.job.name, self._now_s - standing.since_s
        if cause is Cause.DISK_FULL:
            if self._facts.held is None:
                self._hold(f"the disk was full for {name}: {seen.text or cause}")
        elif cause is Cause.DONE or ran_s > _ALIKE_WITHIN_S:
            self._note(alike={})
        elif cause not in _OF_ONE_JOB and standing.recalled_to is None:
            text = f"{cause}: {causes.likened(seen.text.replace(name, 'JOB').lower())[:300]}"
            jobs = dict.fromkeys((*self._facts.alike.get(text, ()), name))
            self._note(alike={**self._facts.alike, text: tuple(jobs)})

    # Where each job is to go by now

    def _works(self, standing: Standing) -> Goal | None:
        """Look at an attempt that goes on, and note how far it is."""
        job, seen = standing.job, self._seen(standing)
        if seen is None or standing.recalled_to is not None:
            return None
        cards = [each for each in self._cards() if each.name in standing.places.values()]
        if not cards:
            return Goal(to=JobState.PARKED, reason=f"{standing.card} is not there")
        if (goal := self._leaves(standing, seen, cards)) is not None:
            return goal
        milestone = milestones.next_of(standing, seen.step)
        if job.sweep is not None and milestone is not None and seen.value is not None:
            return self._reach(standing, job.sweep, milestone, seen.value)
        self._measure(standing, seen, places.joint(job, cards))
        return None

    def _leaves(
        self, standing: Standing, seen: AttemptStatus, cards: Sequence[Card]
    ) -> Goal | None:
        """Return where an attempt goes that is not to go on where it is."""
        if (hours := standing.job.out_of_hours(self._world.minute_of_day)) is not None:
            return Goal(to=JobState.PARKED, reason=hours)
        if seen.taken is not None:
            return Goal(to=JobState.PARKED, reason=seen.taken, wait_s=TAKEN_S)
        if all(card.closed is not None for card in cards):
            return Goal(to=JobState.PARKED, reason=str(cards[0].closed))
        return self._more_room(standing) if seen.has_no_room else None

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
        """Note the milestone of a sweep's member, which rests if others go first."""
        self._do(*lifecycle.reached(standing, milestone, value, self._now_s))
        rule, name = standing.job.milestones, standing.job.name
        if rule is None or milestones.promotable(rule, self._reached(sweep), {name}) == name:
            return None
        why = f"{rule.metric} {value:.4g} at step {milestone}: others go first"
        return Goal(to=JobState.PAUSED, reason=why)

    def _reached(self, sweep: str) -> list[milestones.Reach]:
        """Return the milestones of a sweep, in the order in which they were reached."""
        found = [
            (at_s, standing.number, (standing.job.name, milestone, value))
            for standing in self._standings.values()
            if standing.job.sweep == sweep
            for milestone, value, at_s in standing.reached
        ]
        return [reach for _, _, reach in sorted(found, key=lambda each: each[:2])]

    def _measure(self, standing: Standing, seen: AttemptStatus, card: Card) -> None:
        """Note the speed and the best value of an attempt, where they are worth telling.

        On a card that it may share its speed is that of both.
        """
        speed, known = seen.steps_per_s, standing.speeds.get(card.title)
        if speed is None or self._now_s < standing.measured_at_s + _BEST_EVERY_S:
            return
        is_known = known is not None and abs(speed - known) <= _SPEED_CHANGE * known
        has_better = seen.value is not None and is_better(standing, seen.value)
        if has_better or (standing.alone and not is_known):
            own = speed if standing.alone else None
            self._do(*lifecycle.measured(standing, card.title, own, seen, self._now_s))

    def _send(self, standing: Standing, goal: Goal) -> None:
        self._do(*lifecycle.sent(standing, goal, self._now_s))

    def settle(self) -> None:
        """Send jobs where they are to go, until none is to go anywhere."""
        while found := self._due():
            for name, goal in found.items():
                self._send(self._standings[name], goal)

    def _due(self) -> dict[str, Goal]:
        found: dict[str, Goal] = {}
        for name, standing in self._standings.items():
            look = _LOOKS.get(standing.state)
            if look is not None and (goal := look(self, standing)) is not None:
                found[name] = goal
        for goals in self._promoted():
            found |= goals
        return found

    def _waits(self, standing: Standing) -> Goal | None:
        """Look at a job that waits for others."""
        goal = self._never_fits(standing) or _after(standing.job, self._standings)
        is_next = goal is not None and goal.to is JobState.QUEUED
        return None if is_next and standing.job.awaits_settings else goal

    def _skipped(self, standing: Standing) -> Goal | None:
        """Look at a job that was skipped for the sake of others."""
        goal = _after(standing.job, self._standings)
        if goal is not None and goal.to is JobState.SKIPPED:
            return None
        why = f"waits for {', '.join(standing.job.after)}"
        return Goal(to=JobState.WAITING, reason=why)

    def _never_fits(self, standing: Standing) -> Goal | None:
        """Look whether a job can ever run here."""
        cards, least_bytes = self._world.cards, standing.least_room_bytes
        why = places.never_fits(standing.job, least_bytes, cards) if cards else None
        return None if why is None else Goal(to=JobState.INFEASIBLE, reason=why)

    def _saves(self, standing: Standing) -> Goal | None:
        """Look at what is known of the files of a job whose work is done."""
        now = JobState.SAVING, standing.reason
        to, why = self._world.left.get(standing.job.name, now)
        return None if (to, why) == now else Goal(to=to, reason=why)

    def _wakes(self, standing: Standing) -> Goal | None:
        """Look at a job that has given its card back."""
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
        """Yield of each sweep the paused member that goes on by now, or all of them as stopped."""
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
                why = "goes on: among the best at its milestone by now"
                yield {name: Goal(to=JobState.QUEUED, reason=why)}
            elif is_last:
                why = f"others of {sweep} were better, and all have ended"
                yield dict.fromkeys(paused, Goal(to=JobState.STOPPED, reason=why))

    # Places

    def hold_itself(self) -> None:
        """Hold the queue where all that starts would fail."""
        why = self._world.disk_full
        for jobs in self._facts.alike.values():
            if len(jobs) >= _ALIKE_JOBS:
                named, last = ", ".join(jobs[:_ALIKE_JOBS]), self._standings[jobs[-1]].last_error
                why = why or f"{named} failed alike within a minute of their start: {last}"
        if why is not None and self._facts.held is None:
            self._hold(why)

    def place(self) -> None:
        """Start what has a place, or else make use of a card that stays free."""
        is_shared = any(not standing.alone for standing in self._in(ON_CARD))
        may_preempt = any(standing.job.preempt for standing in self._in(IN_LINE))
        free = self._free_cards()
        if self._facts.held is not None or not (free or is_shared or may_preempt):
            return
        plan = self.plan()
        for start in plan.starts:
            self._do(*lifecycle.begun(self._standings[start.job], start, self._now_s))
        for name, other in plan.recalls.items():
            goal = Goal(to=JobState.PREEMPTED, reason=f"makes room for {other}")
            self._send(self._standings[name], goal)
        if free and not plan.starts and not plan.recalls:
            # A card is free that nothing in line can use: one more may go on.
            for name, goal in next(self._promoted(is_idle=True), {}).items():
                self._send(self._standings[name], goal)

    def _open_cards(self) -> list[Card]:
        return [card for card in self._cards() if card.closed is None]

    def _free_cards(self) -> list[Card]:
        taken = {card for each in self._in(ON_CARD) for card in each.places.values()}
        return [card for card in self._open_cards() if card.name not in taken]

    def plan(self) -> Plan:
        """Return where jobs go, and why and how long the others wait."""
        cards, minute = self._cards(), self._world.minute_of_day
        in_line = [each for each in self._in(IN_LINE) if each.job.out_of_hours(minute) is None]
        candidates = places.candidates(self._standings.values(), in_line, cards)
        taken = [
            place_of(standing, self._seen(standing), self._now_s) for standing in self._in(ON_CARD)
        ]
        return places.plan(candidates, cards, taken, self._now_s)


#: What a job is looked at for, by its state: where it is to go by now.
_LOOKS: Final[Mapping[JobState, Callable[[_Turn, Standing], Goal | None]]] = {
    JobState.WAITING: _Turn._waits,
    JobState.SKIPPED: _Turn._skipped,
    **dict.fromkeys(IN_LINE, _Turn._never_fits),
    JobState.SAVING: _Turn._saves,
    JobState.PARKED: _Turn._wakes,
    **dict.fromkeys(ON_CARD, _Turn._works),
}


def _awaits_settings(standing: Standing, standings: Mapping[str, Standing]) -> bool:
    """Return whether a job waits for nothing but its settings."""
    if standing.state is not JobState.WAITING or not standing.job.awaits_settings:
        return False
    goal = _after(standing.job, standings)
    return goal is not None and goal.to is JobState.QUEUED


def _after(job: Job, standings: Mapping[str, Standing]) -> Goal | None:
    """Return what a WAITING job comes to; `None`: it goes on waiting.

    A job that was STOPPED by its milestone counts as ended well where another of its sweep, which
    the job also comes after, is DONE.
    """
    missing = next((name for name in job.after if name not in standings), None)
    if missing is not None:
        why = f"there is no job {missing} in this queue, which it comes after"
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
