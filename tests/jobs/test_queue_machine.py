"""The invariants of the queue under any order of messages, attempts and states of cards."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from orchestrator.jobs.model import ENDED, JobOrder, JobState, Standing, UserOrder
from tests.jobs.scene import ASHA, Scene, command, starts, training
from workers.messages import Cause
from workers.units import GIB

OF_JOBS = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 2),
        "retries": st.integers(0, 2),
        "preempt": st.booleans(),
        "pack": st.booleans(),
        "memory_bytes": st.sampled_from([None, 2 * GIB, 9 * GIB]),
        "hours": st.sampled_from([None, (0, 720), (720, 0)]),
        "overrides": st.sampled_from([{}, {"train.team": "all"}]),
        "milestones": st.sampled_from([None, ASHA]),
    }
)


class AnyQueue(RuleBasedStateMachine):
    """A queue and a head that may be replaced after each turn."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene()
        self.before: dict[str, Standing] = {}
        self.was_held = False
        self.order: tuple[JobOrder, str] | None = None

    @rule(keys=OF_JOBS, is_command=st.booleans(), follows=st.booleans())
    def submit(self, keys: dict[str, object], is_command: bool, follows: bool) -> None:
        names = [*self.scene.queue.standings]
        after = tuple(names[-1:]) if follows else ()
        make, sweep = (command, None) if is_command else (training, "lr")
        self.scene.submit(make(f"j{len(names)}", after=after, sweep=sweep, **keys))
        self.turn()

    @precondition(lambda self: self.scene.queue.standings)
    @rule(order=st.sampled_from(JobOrder), draw=st.integers(0, 50))
    def say(self, order: JobOrder, draw: int) -> None:
        names = [*self.scene.queue.standings]
        self.order = order, names[draw % len(names)]
        self.begin()
        self.check(starts(self.scene.say(*self.order)))

    @rule(order=st.sampled_from([JobOrder.HOLD, JobOrder.RELEASE]), number=st.integers())
    def hold(self, order: JobOrder, number: int) -> None:
        said = UserOrder(id=f"hold-{number}", order=order, job=None, by="ann")
        self.scene.send(said)
        self.turn()

    @precondition(lambda self: self.scene.on_card)
    @rule(
        draw=st.integers(0, 9),
        cause=st.sampled_from([None, *Cause]),
        rests=st.booleans(),
        step=st.integers(0, 1000),
        is_full=st.booleans(),
    )
    def see(self, draw: int, cause: Cause | None, rests: bool, step: int, is_full: bool) -> None:
        name = self.scene.on_card[draw % len(self.scene.on_card)]
        rests = rests and self.scene.queue.standings[name].recalled_to is not None
        told = {"step": step, "value": 1.0 / (1 + step), "steps_per_s": 2.0, "peak_bytes": 3 * GIB}
        self.order = None
        self.begin()
        seen = self.scene.see(
            name, cause=cause, text="it ended", is_at_rest=rests, has_no_room=is_full, **told
        )
        self.check(starts(seen))

    @rule(seconds=st.sampled_from([0.0, 10.0, 700.0]), minute=st.integers(0, 1439))
    def wait(self, seconds: float, minute: int) -> None:
        self.scene.minute = minute
        self.scene.now_s += seconds
        self.turn()

    @rule(is_open=st.booleans())
    def close(self, is_open: bool) -> None:
        first, *others = self.scene.cards
        self.scene.cards = (replace(first, closed=None if is_open else "it is away"), *others)
        self.turn()

    @rule()
    def next_head(self) -> None:
        self.scene.next_head()

    def begin(self) -> None:
        self.before = dict(self.scene.queue.standings)
        self.was_held = self.scene.queue.facts.held is not None

    def turn(self) -> None:
        self.order = None
        self.begin()
        self.check(starts(self.scene.turn()))

    def check(self, started: dict[str, str]) -> None:
        """Check that all changes of the turn are allowed."""
        order, name = self.order or (None, "")
        if self.was_held and self.scene.queue.facts.held is not None:
            assert not started
        for job, was in self.before.items():
            now = self.scene.queue.standings[job]
            is_asked = order is not None and (job == name or was.state is JobState.SKIPPED)
            if was.state in ENDED - {JobState.SKIPPED} and not is_asked:
                assert now.state is was.state, "what has ended begins only where a user asks for it"
            if was.state is JobState.HELD and not is_asked:
                assert now.state is JobState.HELD
            assert now.attempt >= was.attempt

    @invariant()
    def cards_hold_what_is_on_them(self) -> None:
        standings = [self.scene.queue.standings[name] for name in self.scene.on_card]
        for card in self.scene.cards:
            there = [each for each in standings if card.name in each.places.values()]
            assert len(there) <= 2
            assert len(there) <= 1 or not any(each.alone for each in there)
            assert sum(each.budget_bytes or 0 for each in there) <= card.room_bytes

    @invariant()
    def only_what_has_a_place_or_is_held_is_sent_somewhere(self) -> None:
        for name, standing in self.scene.queue.standings.items():
            if standing.recalled_to is not None:
                assert name in self.scene.on_card or standing.state is JobState.HELD


TestAnyQueue = AnyQueue.TestCase
TestAnyQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
