"""The classic policy against devices nobody would design: named invariants that hold whatever happens."""

from __future__ import annotations

import json

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from workers.policy.base import Decision, Emergency, Event, Pressure, Release, Run, StepOk, StepOom
from workers.policy.classic import MAX_FAILURES, ClassicPolicy
from workers.settings import MemorySettings, WorkloadSpec

memory_settings = st.builds(
    MemorySettings,
    first_fraction=st.just(0.2),
    retry_reduction=st.just(0.1),
    floor_bytes=st.just(100 << 20),
    size_decay=st.floats(min_value=0.05, max_value=1.0),
    size_floor=st.integers(min_value=1, max_value=512),
    batch_step=st.integers(min_value=0, max_value=64),
    batch_floor=st.integers(min_value=1, max_value=64),
    emergency_size=st.just(128),
    cleanup_every=st.integers(min_value=0, max_value=20),
)
workloads = st.builds(
    WorkloadSpec,
    name=st.just("matmul"),
    dtype=st.just("fp16"),
    size=st.integers(min_value=1, max_value=10_000),
    batch=st.integers(min_value=1, max_value=256),
    seed=st.just(0),
)


def need_bytes(step: Run) -> int:
    """Return what a step of the simulated workload takes: three half-precision squares and one row a sample."""
    return 6 * step.size**2 + 2 * step.size * step.batch


def ended_well(step: Run) -> StepOk:
    peak_bytes = need_bytes(step)
    return StepOk(
        at_s=0.0,
        peak_bytes=peak_bytes,
        allowed_bytes=None,
    )


def ran_out(step: Run, free_bytes: int, *, need_known: bool) -> StepOom:
    needed_bytes = need_bytes(step) if need_known else None
    return StepOom(
        at_s=0.0,
        needed_bytes=needed_bytes,
        at_least_bytes=0,
        free_bytes=free_bytes,
        allowed_bytes=0,
    )


def pressure(policy: ClassicPolicy, free_bytes: int, *, need_known: bool) -> Pressure:
    needed_bytes = need_bytes(policy.floor) if need_known else None
    return Pressure(
        at_s=0.0,
        allowed_bytes=free_bytes,
        free_bytes=free_bytes,
        needed_at_floor_bytes=needed_bytes,
    )


class ClassicMachine(RuleBasedStateMachine):
    """Plays the engine: asks, runs or fails the step as the rules please, and asks again."""

    @initialize(memory=memory_settings, workload=workloads)
    def start(self, memory: MemorySettings, workload: WorkloadSpec) -> None:
        self.policy = ClassicPolicy(memory, workload)
        self.base = Run(size=workload.size, batch=workload.batch)
        self.first_state = self.state = self.policy.initial(0, None)
        self.log: list[tuple[Event, Decision]] = []
        self.asked: list[Run] = []
        self.failures_seen: list[int] = [0]
        self.failed_in_a_row: list[Run] = []
        self.send(pressure(self.policy, 0, need_known=False))

    def send(self, event: Event) -> None:
        self.state, self.decision = self.policy.decide(self.state, event)
        self.log.append((event, self.decision))
        self.failures_seen.append(self.state.failures)
        if isinstance(self.decision, Run):
            self.asked.append(self.decision)
        if isinstance(self.decision, Emergency):
            self.failed_in_a_row = []

    @precondition(lambda self: isinstance(self.decision, Run))
    @rule(times=st.integers(min_value=1, max_value=25))
    def step_ends_well(self, times: int) -> None:
        for _ in range(times):
            if isinstance(self.decision, Run):
                self.failed_in_a_row = []
                self.send(ended_well(self.decision))

    @precondition(lambda self: isinstance(self.decision, Run))
    @rule(need_known=st.booleans(), free_bytes=st.integers(min_value=0, max_value=1 << 40))
    def step_runs_out_of_memory(self, need_known: bool, free_bytes: int) -> None:
        assert isinstance(self.decision, Run)
        self.failed_in_a_row.append(self.decision)
        self.send(ran_out(self.decision, free_bytes, need_known=need_known))

    @rule(need_known=st.booleans(), free_bytes=st.integers(min_value=0, max_value=1 << 40))
    def slice_begins(self, need_known: bool, free_bytes: int) -> None:
        """Answers a Release, ends an Emergency, and cuts a slice short at any other time."""
        self.send(pressure(self.policy, free_bytes, need_known=need_known))

    @rule()
    def process_dies_and_resumes(self) -> None:
        self.state = self.policy.load(self.policy.dump(self.state))

    @invariant()
    def a_dumped_state_loads_as_it_was(self) -> None:
        assert self.policy.load(json.loads(json.dumps(self.policy.dump(self.state)))) == self.state

    @invariant()
    def always_a_runnable_step_or_a_release_or_an_emergency(self) -> None:
        match self.decision:
            case Run(size=size, batch=batch):
                assert self.policy.floor.size <= size <= self.base.size
                assert self.policy.floor.batch <= batch <= self.base.batch
            case Emergency(reason=reason):
                assert self.state.emergency
                assert reason
            case Release():
                assert not self.state.emergency

    @invariant()
    def steps_never_grow(self) -> None:
        for before, after in zip(self.asked, self.asked[1:], strict=False):
            assert after.size <= before.size
            assert after.batch <= before.batch

    @invariant()
    def failures_are_monotonic_and_bounded(self) -> None:
        assert self.failures_seen == sorted(self.failures_seen)
        assert 0 <= self.state.failures <= MAX_FAILURES

    @invariant()
    def never_three_failures_in_a_row_at_one_step(self) -> None:
        for step in set(self.failed_in_a_row):
            assert self.failed_in_a_row.count(step) <= 2

    @invariant()
    def an_emergency_only_at_the_floor(self) -> None:
        if self.state.emergency:
            assert self.asked[-1] == self.policy.floor

    @invariant()
    def the_same_events_give_the_same_decisions(self) -> None:
        state = self.first_state
        for event, decision in self.log:
            state, again = self.policy.decide(state, event)
            assert again == decision
        assert state == self.state


ClassicMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
TestClassicMachine = ClassicMachine.TestCase
