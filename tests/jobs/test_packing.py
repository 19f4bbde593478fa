"""Whether two jobs on one card do more together than one after the other."""

from __future__ import annotations

import pytest
from benches import jobs_decisions

from orchestrator.jobs.model import Job, Kind
from orchestrator.jobs.packing import (
    Speeds,
    fingerprint,
    gain_of,
    judge,
    packed_budgets,
    pair_of,
    trial_pays,
)
from workers.settings import CommandSpec
from workers.units import GIB


def pays(**changes: float | None) -> bool:
    values: dict[str, float | None] = {
        "busy_share": 0.3,
        "remaining_s": 7200,
        "second_remaining_s": 7200,
        "save_s": 5,
        "load_s": 10,
        "spent_s": 0,
        "cards_s": 14_400,
        **changes,
    }
    return trial_pays(**values)  # type: ignore[arg-type]


def test_a_card_below_half_is_worth_a_trial() -> None:
    assert pays()
    assert not pays(busy_share=0.5)
    assert not pays(busy_share=None)


@pytest.mark.parametrize("which", ["remaining_s", "second_remaining_s"])
def test_a_pair_that_soon_ends_does_not_pay_for_the_restart(which: str) -> None:
    # 30 s of trial, and 5 + 10 s twice: a tenth of 600 s is as much.
    assert not pays(**{which: 599})
    assert pays(**{which: 601})


def test_trials_stay_below_two_percent_of_the_cards_time() -> None:
    assert pays(cards_s=6000, spent_s=60)
    assert not pays(cards_s=6000, spent_s=61)


def test_packed_jobs_get_what_was_measured_and_a_reserve() -> None:
    assert packed_budgets([4 * GIB, GIB], 6 * GIB) == (4 * GIB + 429496730, GIB + GIB // 4)


def test_no_budgets_beyond_the_room_or_without_measure() -> None:
    assert packed_budgets([4 * GIB, GIB], 5 * GIB) is None
    assert packed_budgets([4 * GIB, None], 23 * GIB) is None


def test_a_pair_that_does_more_together_is_kept() -> None:
    speeds = Speeds(alone=[10.0, 10.1, 9.9], together=[6.0, 6.1, 5.9])

    verdict = judge("pair", speeds, speeds, at_s=5.0)

    assert verdict.is_kept
    assert verdict.gain == pytest.approx(1.2)


def test_a_gain_below_a_tenth_is_not_kept() -> None:
    speeds = Speeds(alone=[10.0, 10.0], together=[5.45, 5.45])

    assert not judge("pair", speeds, speeds, at_s=5.0).is_kept


def test_a_gain_within_the_noise_is_not_kept() -> None:
    speeds = Speeds(alone=[10.0, 10.0, 10.0], together=[3.0, 6.0, 9.0])

    gain, low = gain_of(speeds, speeds)

    assert gain == pytest.approx(1.2)
    assert low < 1.0


def test_a_job_that_came_to_nothing_together_is_not_kept() -> None:
    good = Speeds(alone=[10.0, 10.0], together=[10.0, 10.0])

    assert not judge("pair", good, Speeds(alone=[10.0], together=[5.0]), at_s=5.0).is_kept
    assert not judge("pair", good, Speeds(alone=[], together=[5.0, 5.0]), at_s=5.0).is_kept
    assert not judge("pair", good, Speeds(alone=[10.0], together=[0.0, 0.0]), at_s=5.0).is_kept


def test_members_that_differ_in_their_rate_share_a_verdict() -> None:
    job = Job(
        name="lr-1",
        id="1",
        kind=Kind.TRAIN,
        overrides={"train.preset": "gpt-mini", "train.batch": 64},
        settings={"train.lr": 1e-4},
    )
    other = Job(
        name="b-2",
        id="2",
        kind=Kind.TRAIN,
        overrides={"train.preset": "gpt-mini"},
        settings={"train.batch": 128},
    )

    assert fingerprint(job) == "train.batch=64 train.preset=gpt-mini"
    assert fingerprint(other) == "train.batch=128 train.preset=gpt-mini"


def test_a_command_is_told_by_its_words() -> None:
    job = Job(
        name="eval", id="1", kind=Kind.COMMAND, command=CommandSpec(argv=("python", "eval.py"))
    )

    assert fingerprint(job) == "python eval.py"


def test_a_pair_is_the_same_in_either_order() -> None:
    assert pair_of("a", "b", "RTX 3090", "580.1") == pair_of("b", "a", "RTX 3090", "580.1")
    assert pair_of("a", "b", "RTX 3090", "580.1") != pair_of("a", "b", "RTX 3090", "581.0")


def test_null_pairs_are_refused_and_good_ones_found() -> None:
    assert jobs_decisions.kept_share(1.0, pairs=200, drift=0.02) <= 0.05
    assert jobs_decisions.kept_share(1.2, pairs=200, drift=0.02) >= 0.90


def test_trials_of_a_night_take_at_most_two_percent() -> None:
    assert max(jobs_decisions.trials_share(seed)[0] for seed in range(20)) <= 0.02
