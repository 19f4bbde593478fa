"""Which job starts on which card, why the others wait, and when all of them end."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.jobs.model import AttemptStatus, Card, Job, JobState, Standing
from orchestrator.jobs.places import Candidate, Place, Plan, choices, never_fits, plan
from tests.jobs.scene import BIG, SMALL, Scene, training
from workers.units import GIB, MIB

FAST = Card(name="pc1", node="pc1", title="RTX 3090", room_bytes=23 * GIB, speed=1.75)
SLOW = Card(name="pc2", node="pc2", title="RTX 3070", room_bytes=6 * GIB - 200 * MIB, speed=1.0)
CARDS = (FAST, SLOW)
HOUR = 3600.0


def unknown(name: str, **of_job: object) -> Candidate:
    """Return a candidate of unknown length."""
    return Candidate(job=training(name, **of_job))


def job_of(name: str, work_s: float = HOUR, **of_job: object) -> Candidate:
    """Return a candidate that needs `work_s` seconds on the slow card."""
    return replace(unknown(name, **of_job), seconds={"pc1": work_s / 1.75, "pc2": work_s})


def running(end_s: float | None, name: str = "base", **rest: object) -> list[Place]:
    """Return the places of a job on the fast card."""
    values: dict[str, object] = {"card": "pc1", "budget_bytes": FAST.room_bytes, **rest}
    return [Place(job=name, ends_at_s=end_s, **values)]  # type: ignore[arg-type]


def places(found: Plan) -> Mapping[str, str]:
    return {start.job: start.card for start in found.starts}


# --- where and when


def test_what_has_run_for_long_is_not_waited_for_beside_a_free_card() -> None:
    jobs = [job_of("long", 500.0), job_of("short", 2.0, nodes=("pc1",))]

    def starting(ran_s: float) -> Mapping[str, str]:
        return places(plan(jobs, CARDS, running(None, ran_s=ran_s), 0.0))

    assert starting(60.0) == {}
    assert starting(600.0) == {"long": "pc2"}


def test_a_job_waits_for_the_better_card_if_it_ends_earlier() -> None:
    found = plan([job_of("a")], CARDS, running(600.0), 0.0)

    assert found.starts == ()
    assert found.expected_start_s == {"a": 600.0}
    assert found.reasons == {
        "a": "pc1 runs base for about 10m more; pc2 is free, but it would end later there"
    }


def test_a_length_known_on_one_card_is_scaled_to_others() -> None:
    (found,) = plan([replace(unknown("a"), seconds={"pc2": 175.0})], CARDS, (), 0.0).starts

    assert (found.card, found.ends_at_s) == ("pc1", 100.0)


def test_a_job_behind_uses_the_card_that_the_front_one_leaves() -> None:
    front = job_of("front", priority=1, memory_bytes=9 * GIB)
    behind = job_of("behind", 1.5 * HOUR)

    found = plan([front, behind], CARDS, running(600.0), 0.0)

    assert places(found) == {"behind": "pc2"}
    assert found.expected_start_s["front"] == 600.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=14))
def test_each_job_starts_once_or_has_one_reason(drawn: list[tuple[int, int]]) -> None:
    jobs = [
        job_of(f"job-{place}", priority=priority, memory_bytes=gib * GIB)
        for place, (priority, gib) in enumerate(drawn)
    ]

    found = plan(jobs, CARDS, running(None, card="pc2"), 0.0)

    started = [start.job for start in found.starts]
    assert len(set(started)) == len(started)
    assert set(started) | set(found.reasons) == {each.job.name for each in jobs}
    assert not set(started) & set(found.reasons)
    assert all(found.reasons.values())


# --- what a card can hold


def test_a_card_that_is_too_small_is_said_to_be() -> None:
    found = plan([job_of("a", memory_bytes=9 * GIB)], CARDS, running(60.0), 0.0)

    assert found.starts == ()
    assert found.reasons["a"] == (
        "pc1 runs base for about 1m more; pc2 is free, but gives 5.8 GiB of the 9.0 GiB that it "
        "needs"
    )


def test_nodes_and_a_part_of_the_title_are_respected() -> None:
    jobs = [job_of("a", nodes=("pc2",)), job_of("b", card="3090")]

    assert places(plan(jobs, CARDS, (), 0.0)) == {"a": "pc2", "b": "pc1"}


def test_a_job_that_never_fits_is_told_the_sum() -> None:
    job = Job(name="a", id="1")

    assert never_fits(job, 24 * GIB, CARDS) == (
        "needs at least 24.0 GiB; the largest card here gives 23.0 GiB (pc1)"
    )
    assert never_fits(replace(job, nodes=("pc2",)), int(5.9 * GIB), CARDS) == (
        "needs at least 5.9 GiB; the largest card that it may use gives 5.8 GiB (pc2)"
    )
    assert never_fits(job, 23 * GIB, CARDS) is None


def test_a_card_that_is_not_here_is_named() -> None:
    job = Job(name="a", id="1", card="4090", nodes=("pc1",))

    assert never_fits(job, None, CARDS) == (
        "asks for a card called '4090' on pc1; the cards here: RTX 3090 (pc1), RTX 3070 (pc2)"
    )


# --- teams


def of_team(name: str, pcs: tuple[str, ...] = ("pc1", "pc2"), **more: object) -> Candidate:
    overrides = {"train.team": list(pcs)}
    return unknown(name, overrides=overrides, nodes=pcs, **more)


def test_a_team_starts_on_all_of_its_cards_or_none() -> None:
    team = of_team("team")
    (start,) = plan([team], CARDS, (), 0.0).starts
    assert (start.card, start.budget_bytes, start.alone) == ("pc1+pc2", SLOW.room_bytes, True)
    assert plan([team], CARDS, running(600.0), 0.0).reasons == {
        "team": "pc1+pc2 runs base for about 10m more"
    }
    away = (FAST, replace(SLOW, closed="pc2 is not there"))
    assert plan([team], away, (), 0.0).reasons == {"team": "pc1+pc2 is closed: pc2 is not there"}


def test_what_comes_after_a_team_waits_for_its_cards_and_others_do_not() -> None:
    third = replace(SLOW, name="pc3", node="pc3")
    jobs = [of_team("team", priority=1), job_of("a", nodes=("pc2",)), unknown("b", nodes=("pc3",))]
    found = plan(jobs, (*CARDS, third), running(600.0), 0.0)
    assert places(found) == {"b": "pc3"}
    assert found.reasons["a"] == "1 job goes first on pc2"
    # A card that is absent for days keeps no other card free.
    away = (FAST, replace(SLOW, closed="pc2 is not there"))
    assert places(plan([jobs[0], job_of("a")], away, (), 0.0)) == {"a": "pc1"}


def test_a_card_that_waits_for_a_team_gets_what_is_known_to_end_before() -> None:
    busy = running(600.0, card="pc2")
    team = of_team("team", priority=1)
    short = job_of("short", 875.0)
    long = job_of("long", 1225.0)
    found = plan([team, long, short, unknown("unknown")], CARDS, busy, 0.0)
    assert places(found) == {"short": "pc1"}
    (start,) = found.starts
    assert start.ends_at_s == 500.0
    assert found.expected_start_s["team"] == 600.0
    # A second team would begin after the end of the first.
    again = job_of("again", 87.5)
    assert places(plan([team, short, again], CARDS, busy, 0.0)) == {"short": "pc1"}


@given(st.lists(st.tuples(st.sampled_from(["12", "23", "31", "1", "2", "3"]), st.integers(0, 2))))
def test_no_two_teams_wait_for_each_other(drawn: list[tuple[str, int]]) -> None:
    cards = [replace(SLOW, name=f"pc{n}", node=f"pc{n}") for n in (1, 2, 3)]
    left = {
        f"j{n}": (of_team if len(on) > 1 else unknown)(f"j{n}", **{"priority": priority, **_on(on)})
        for n, (on, priority) in enumerate(drawn)
    }
    there: list[Place] = []
    while left or there:
        starts = plan([*left.values()], cards, there, 0.0).starts
        there += starts
        for start in starts:
            del left[start.job]
        taken = [card for place in there for card in place.cards]
        assert len(set(taken)) == len(taken)
        assert there, "nothing runs, and nothing starts"
        del there[0]


def _on(numbers: str) -> dict[str, tuple[str, ...]]:
    return {"pcs" if len(numbers) > 1 else "nodes": tuple(f"pc{n}" for n in numbers)}


def test_a_team_leaves_as_one_and_all_leave_for_it() -> None:
    urgent = unknown("urgent", priority=1, preempt=True, nodes=("pc2",))
    team = running(HOUR, "team", card="pc1+pc2", yields=True)
    assert plan([urgent], CARDS, team, 0.0).recalls == {"team": "urgent"}
    first = of_team("first", priority=1, preempt=True)
    both = [*running(HOUR, "a", yields=True), *running(HOUR, "b", card="pc2", yields=True)]
    assert plan([first], CARDS, both, 0.0).recalls == {"a": "first", "b": "first"}
    both[1] = replace(both[1], yields=False)
    assert not plan([first], CARDS, both, 0.0).recalls


def test_each_card_of_a_team_must_hold_its_model() -> None:
    job = of_team("team").job
    assert never_fits(job, 5 * GIB, CARDS) is None
    assert never_fits(job, 9 * GIB, CARDS) == (
        "needs at least 9.0 GiB; the smallest card of its team gives 5.8 GiB (pc1+pc2); with "
        "train.split: layers both would hold it together"
    )
    assert never_fits(job, None, (FAST,)) is not None


def test_cards_that_divide_a_model_hold_it_together_and_the_larger_one_leads() -> None:
    job = replace(of_team("team").job, overrides={"train.team": "all", "train.split": "layers"})
    (card,) = choices(job, (SLOW, FAST))
    assert (card.name, card.room_bytes) == ("pc1+pc2", FAST.room_bytes + SLOW.room_bytes)
    assert card.speed == (FAST.speed + SLOW.speed) / 2  # only one of them computes at a time
    assert never_fits(job, 28 * GIB, CARDS) is None
    assert never_fits(job, 31 * GIB, CARDS) == (
        "needs at least 31.0 GiB; the cards of its team give 28.8 GiB (pc1+pc2)"
    )


# --- two on a card


def packable(name: str, **rest: object) -> Candidate:
    return job_of(name, **{"memory_bytes": 4 * GIB, "pack": True, **rest})  # type: ignore[arg-type]


def test_no_two_share_a_card_where_one_does_not_say_so() -> None:
    for jobs in ([packable("a"), job_of("b", memory_bytes=4 * GIB)], [job_of("a"), packable("b")]):
        assert len(plan(jobs, (FAST,), (), 0.0).starts) == 1


def test_no_job_joins_before_one_that_waits_for_the_card() -> None:
    there = running(600.0, alone=False, budget_bytes=5 * GIB)

    assert plan([job_of("a", priority=1), packable("b")], (FAST,), there, 0.0).starts == ()


def test_one_that_had_too_little_room_packed_is_alone_the_next_time() -> None:
    job = replace(packable("a"), least_room_bytes=8 * GIB)

    assert [(each.alone, each.budget_bytes) for each in plan([job], CARDS, (), 0.0).starts] == [
        (True, FAST.room_bytes)
    ]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ({"train.lr": 3e-4, "train.batch": 16}, True),
        ({"train.lr": 1e-4, "train.batch": 32}, False),
        ({"train.lr": 1e-4, "train.batch": 16, "train.preset": "gpt2-small"}, False),
    ],
)
def test_jobs_are_alike_whose_steps_cost_the_same(other: dict[str, object], same: bool) -> None:
    one = training("a", overrides={"train.lr": 1e-4, "train.batch": 16})
    assert (one.likeness == training("b", overrides=other).likeness) is same


# --- a job that may preempt


def urgent(**of_job: object) -> Candidate:
    return job_of("urgent", **{"priority": 1, "preempt": True, **of_job})  # type: ignore[arg-type]


def on_both(**of_both: object) -> list[Place]:
    """Return the places of two jobs that can save, one on each card."""
    values = {"yields": True, **of_both}
    return [*running(9 * HOUR, "a", **values), *running(9 * HOUR, "b", card="pc2", **values)]


def test_jobs_of_lower_priority_leave_the_card_on_which_it_ends_first() -> None:
    found = plan([urgent(), job_of("other")], CARDS, on_both(), 0.0)

    assert (found.starts, found.recalls) == ((), {"a": "urgent"})
    assert found.reasons["other"] != "", "it does not take the place meanwhile"


@pytest.mark.parametrize(
    ("candidate", "there"),
    [
        (urgent(preempt=False), on_both()),
        (urgent(priority=0), on_both()),
        (urgent(), on_both(yields=False)),
        (urgent(), on_both(yields=False, leaves=True)),
        (urgent(), on_both()[:1]),
        (urgent(), [*running(10.0, "a", yields=True), *on_both()[1:]]),
    ],
    ids=["does not say so", "equal", "cannot save", "leaves already", "a card is free", "ends soon"],
)  # fmt: skip
def test_none_has_to_leave(candidate: Candidate, there: list[Place]) -> None:
    assert plan([candidate], CARDS, there, 0.0).recalls == {}


def test_both_of_a_shared_card_leave() -> None:
    shared = {"alone": False, "budget_bytes": GIB, "yields": True}
    there = [*running(9 * HOUR, "a", **shared), *running(9 * HOUR, "b", **shared, leaves=True)]

    assert plan([urgent()], (FAST,), there, 0.0).recalls == {"a": "urgent"}


# --- how long all take

DRAWS = 100
SPEEDS = {BIG.name: BIG.speed, SMALL.name: SMALL.speed}


def drawn(seed: int) -> list[int]:
    """Return the steps of 4 to 8 similar trainings; a step takes 1 s on the slow card."""
    draw = random.Random(seed)  # noqa: S311 - lengths, not secrets
    return [1 + round(1000 * draw.lognormvariate(0, 1)) for _ in range(draw.randint(4, 8))]


def seen_ends_s(scene: Scene) -> dict[str, float]:
    """Report the current status of all jobs on cards; return the end of each job in seconds."""
    ends_s = {}
    for name in sorted(scene.on_card):
        standing = scene.standing(name)
        speed = SPEEDS[str(standing.card)]
        ends_s[name] = standing.since_s + (standing.job.steps or 0) / speed
        left_s = ends_s[name] - scene.now_s
        scene.seen[name] = AttemptStatus(attempt=1, steps_per_s=speed, eta_s=left_s)
    return ends_s


def makespan_s(lengths: list[int], *, is_known: bool) -> float:
    """Return the virtual time of the queue; `is_known`: a similar job ran on each card before."""
    scene = Scene()
    for card in scene.cards if is_known else ():
        scene.put(
            Standing(
                job=training(f"before-{card.name}"),
                state=JobState.DONE,
                reason="done",
                since_s=scene.now_s,
                speeds={card.title: card.speed},
            )
        )
    scene.submit(*(training(f"j{number}", steps=steps) for number, steps in enumerate(lengths)))
    scene.turn()
    began_s = scene.now_s
    while ends_s := seen_ends_s(scene):
        scene.turn()
        if ends_s.keys() == {*scene.on_card}:  # otherwise a job began when a speed became known
            scene.now_s, first = min((end_s, name) for name, end_s in ends_s.items())
            seen_ends_s(scene)
            scene.end(first)
    assert scene.queue.is_over
    return scene.now_s - began_s


def optimum_s(lengths: list[int]) -> float:
    """Return the shortest time of all assignments of the jobs to the cards."""
    return min(
        max(
            sum(itertools.compress(lengths, on_fast)) / BIG.speed,
            sum(length for length, is_fast in zip(lengths, on_fast, strict=True) if not is_fast),
        )
        for on_fast in itertools.product((0, 1), repeat=len(lengths))
    )


def first_come_s(lengths: list[int]) -> float:
    """Return the time if each job in turn takes the card that is free first."""
    free_s = dict.fromkeys(SPEEDS, 0.0)
    for length in lengths:
        card = min(free_s, key=free_s.__getitem__)  # the fast card if both are free
        free_s[card] += length / SPEEDS[card]
    return max(free_s.values())


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "unknown until the first begin"])
def test_all_jobs_end_soon(is_known: bool) -> None:
    every = [drawn(seed) for seed in range(DRAWS)]
    took_s = [makespan_s(lengths, is_known=is_known) for lengths in every]

    of_optimum = statistics.fmean(map(float.__truediv__, took_s, map(optimum_s, every)))
    of_first_come = statistics.fmean(map(float.__truediv__, took_s, map(first_come_s, every)))

    assert of_optimum <= (1.03 if is_known else 1.12), of_optimum
    assert of_first_come <= (0.90 if is_known else 0.95), of_first_come
