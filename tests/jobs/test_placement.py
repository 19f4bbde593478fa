"""Which job starts on which card, and why the others wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.jobs.model import Card, Job, Kind
from orchestrator.jobs.placement import (
    LOOKAHEAD,
    Candidate,
    Plan,
    Resident,
    estimate,
    never_fits,
    plan,
)
from workers.units import GIB, MIB

FAST = Card(name="pc1", node="pc1", title="RTX 3090", room_bytes=23 * GIB, speed=1.75)
SLOW = Card(name="pc2", node="pc2", title="RTX 3070", room_bytes=6 * GIB - 200 * MIB, speed=1.0)
CARDS = (FAST, SLOW)
HOUR = 3600.0


def job_of(name: str, work_s: float = HOUR, **rest: object) -> Candidate:
    """Return a candidate that takes `work_s` on the slow card."""
    values: dict[str, object] = {"seconds": {"pc1": work_s / 1.75, "pc2": work_s}, **rest}
    return Candidate(name=name, **values)  # type: ignore[arg-type]


def running(end_s: float | None, name: str = "base", **rest: object) -> list[Resident]:
    values: dict[str, object] = {"budget_bytes": FAST.room_bytes, **rest}
    return [Resident(name=name, ends_at_s=end_s, **values)]  # type: ignore[arg-type]


def places(found: Plan) -> Mapping[str, str]:
    return {start.job: start.card for start in found.starts}


# --- where and when


def test_what_has_run_for_long_is_not_waited_for_beside_a_free_card() -> None:
    jobs = [job_of("long", 500.0), job_of("short", 2.0, nodes=("pc1",))]

    def starting(ran_s: float) -> Mapping[str, str]:
        return places(plan(jobs, CARDS, {"pc1": running(None, ran_s=ran_s)}, 0.0))

    assert starting(60.0) == {}
    assert starting(600.0) == {"long": "pc2"}


def test_a_job_waits_for_the_better_card_if_it_ends_earlier() -> None:
    found = plan([job_of("a")], CARDS, {"pc1": running(600.0)}, 0.0)

    assert found.starts == ()
    assert found.expected_start_s == {"a": 600.0}
    assert found.reasons == {
        "a": "pc1 runs base for about 10m more; pc2 is free, but it would end later there"
    }


def test_a_job_takes_the_slower_card_if_it_ends_earlier() -> None:
    found = plan([job_of("a")], CARDS, {"pc1": running(2000.0)}, 0.0)

    assert places(found) == {"a": "pc2"}


def test_short_jobs_share_the_slow_card_beside_a_long_one() -> None:
    jobs = [job_of("a", 100), job_of("b", 100), job_of("long", 1000), job_of("c", 100)]

    found = plan(jobs, CARDS, {}, 0.0)

    assert places(found) == {"long": "pc1", "a": "pc2"}
    assert found.reasons["c"] == "1 job goes first on pc2"
    assert found.expected_start_s == {"b": 100.0, "c": 200.0}


def test_unknown_lengths_are_equal_work_scaled_by_speed() -> None:
    jobs = [Candidate(name=f"job-{place}") for place in range(11)]

    found = estimate(jobs, CARDS, {})

    assert sum(each.card == "pc1" for each in found.jobs) == 7


def test_a_length_known_on_one_card_is_scaled_to_others() -> None:
    job = Candidate(name="a", seconds={"pc2": 175.0})

    found = estimate([job], CARDS, {})

    assert (found.jobs[0].card, found.makespan_s) == ("pc1", 100.0)


def test_higher_priority_starts_first() -> None:
    jobs = [job_of("low", 9 * HOUR), job_of("high", priority=1)]

    found = plan(jobs, (FAST,), {}, 0.0)

    assert places(found) == {"high": "pc1"}


def test_a_job_behind_uses_the_card_that_the_front_one_leaves() -> None:
    front = job_of("front", priority=1, memory_bytes=9 * GIB)
    behind = job_of("behind", 1.5 * HOUR)

    found = plan([front, behind], CARDS, {"pc1": running(600.0)}, 0.0)

    assert places(found) == {"behind": "pc2"}
    assert found.expected_start_s["front"] == 600.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30)), max_size=14))
def test_each_job_starts_once_or_has_one_reason(drawn: list[tuple[int, int]]) -> None:
    jobs = [
        job_of(f"job-{place}", priority=priority, memory_bytes=gib * GIB)
        for place, (priority, gib) in enumerate(drawn)
    ]

    found = plan(jobs, CARDS, {"pc2": running(None)}, 0.0)

    started = [start.job for start in found.starts]
    assert len(set(started)) == len(started)
    assert set(started) | set(found.reasons) == {each.name for each in jobs}
    assert not set(started) & set(found.reasons)
    assert all(found.reasons.values())


# --- what a card can hold


def test_a_card_that_is_too_small_is_said_to_be() -> None:
    found = plan([job_of("a", memory_bytes=9 * GIB)], CARDS, {"pc1": running(60.0)}, 0.0)

    assert found.starts == ()
    assert found.reasons["a"] == (
        "pc1 runs base for about 1m more; pc2 is free, but gives 5.8 GiB of the 9.0 GiB that it "
        "needs"
    )


def test_nodes_and_a_part_of_the_title_are_respected() -> None:
    jobs = [job_of("a", nodes=("pc2",)), job_of("b", card="3090")]

    assert places(plan(jobs, CARDS, {}, 0.0)) == {"a": "pc2", "b": "pc1"}


def test_a_closed_card_takes_nothing() -> None:
    closed = replace(FAST, closed="a game has it")

    found = plan([job_of("a", memory_bytes=9 * GIB), job_of("b")], (closed, SLOW), {}, 0.0)

    assert places(found) == {"b": "pc2"}
    assert found.reasons == {"a": "pc1 is closed: a game has it"}


def test_a_job_that_never_fits_is_told_the_sum() -> None:
    job = Job(name="a", id="1", kind=Kind.TRAIN)

    assert never_fits(job, 24 * GIB, CARDS) == (
        "needs at least 24.0 GiB; the largest card here gives 23.0 GiB (pc1)"
    )
    assert never_fits(replace(job, nodes=("pc2",)), int(5.9 * GIB), CARDS) == (
        "needs at least 5.9 GiB; the largest card that it may use gives 5.8 GiB (pc2)"
    )
    assert never_fits(job, 23 * GIB, CARDS) is None


def test_a_card_that_is_not_here_is_named() -> None:
    job = Job(name="a", id="1", kind=Kind.TRAIN, card="4090", nodes=("pc1",))

    assert never_fits(job, None, CARDS) == (
        "asks for a card called '4090' on pc1; the cards here: RTX 3090 (pc1), RTX 3070 (pc2)"
    )


# --- two on a card


def packable(name: str, **rest: object) -> Candidate:
    return job_of(name, memory_bytes=4 * GIB, shares={FAST.name: "", SLOW.name: ""}, **rest)


def test_a_pair_that_may_share_starts_together_with_its_own_budgets() -> None:
    found = plan([packable("a"), packable("b")], (FAST,), {}, 0.0)

    assert [(start.job, start.alone) for start in found.starts] == [("a", False), ("b", False)]
    assert all(4 * GIB < start.budget_bytes < 5 * GIB for start in found.starts)


def test_a_pair_of_which_one_may_not_share_stays_apart() -> None:
    found = plan([packable("a"), job_of("b", memory_bytes=4 * GIB)], (FAST,), {}, 0.0)

    assert [start.alone for start in found.starts] == [True]


def test_the_measured_bytes_are_what_a_packed_job_gets() -> None:
    jobs = [packable("a", measured_bytes=2 * GIB), packable("b", measured_bytes=12 * GIB)]

    found = plan(jobs, (FAST,), {}, 0.0)

    assert [start.budget_bytes // GIB for start in found.starts] == [2, 13]


def test_a_job_joins_one_that_is_packed() -> None:
    there = running(600.0, alone=False, shares="", budget_bytes=5 * GIB)

    found = plan([packable("b")], (FAST,), {"pc1": there}, 0.0)

    assert [(start.job, start.alone) for start in found.starts] == [("b", False)]


def test_no_job_joins_one_that_is_alone() -> None:
    there = running(600.0, alone=True, shares="", budget_bytes=5 * GIB)

    assert plan([packable("b")], (FAST,), {"pc1": there}, 0.0).starts == ()


# --- the estimate, and how good it is


def test_the_estimate_starts_a_follower_after_its_job() -> None:
    found = estimate([job_of("eval", 175), job_of("base", 350)], (FAST,), {"eval": ["base"]})

    assert [(each.job, each.start_s, each.end_s) for each in found.jobs] == [
        ("base", 0.0, 200.0),
        ("eval", 200.0, 300.0),
    ]
    assert found.makespan_s == 300.0


def test_the_estimate_says_what_never_starts() -> None:
    jobs = [job_of("big", memory_bytes=30 * GIB), job_of("eval")]

    found = estimate(jobs, CARDS, {"eval": ["big"]})

    assert found.left == {
        "big": "needs at least 30.0 GiB; the largest card here gives 23.0 GiB (pc1)",
        "eval": "comes after big, which never ends",
    }


def test_a_card_that_no_front_job_fits_gets_one_from_behind() -> None:
    jobs = [job_of(f"big-{place}", memory_bytes=9 * GIB) for place in range(LOOKAHEAD)]

    found = plan([*jobs, job_of("a"), job_of("b")], CARDS, {}, 0.0)

    assert places(found)["a"] == "pc2"
    assert found.reasons["b"] == f"{LOOKAHEAD - 1} jobs go first"
