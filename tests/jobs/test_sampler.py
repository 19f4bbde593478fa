"""Settings that Optuna proposes from what the journal knows; without the extra `sweep`, one sentence."""

from __future__ import annotations

import math
import sys

import pytest

from orchestrator.errors import UsageError
from orchestrator.jobs.entries import Sweep
from orchestrator.jobs.sampler import Sampler, Trial
from orchestrator.jobs.sweep import Settings

SWEEP = Sweep(
    method="optuna",
    over={"lr": {"log": ["1e-5", 1.0]}, "batch": [8, 16], "warmup_steps": {"integer": [1, 9]}},
    count=30,
)


def loss(settings: Settings) -> float:
    """Return what is smallest at a learning rate of 1e-3, whatever the rest."""
    rate = settings["train.lr"]
    assert isinstance(rate, float)
    return (math.log10(rate) + 3) ** 2


def ended(settings: Settings, value: float | None) -> Trial:
    return Trial(settings=settings, value=value, has_ended=True)


def sampled(count: int, *, is_min: bool = True) -> list[Trial]:
    """Ask for members one after the other, each after the one before has ended."""
    sampler, trials = Sampler(SWEEP, is_min=is_min, is_train=True), list[Trial]()
    for _ in range(count):
        settings = sampler.ask(trials)
        trials.append(ended(settings, loss(settings) if is_min else -loss(settings)))
    return trials


def test_without_the_extra_the_user_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r"type: pip install '\.\[sweep\]'"):
        Sampler(SWEEP, is_min=True, is_train=True)


class TestWithOptuna:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("optuna", reason="optuna is not installed (extra sweep)")

    @pytest.mark.parametrize("is_min", [True, False])
    def test_later_settings_are_better_than_the_first(self, is_min: bool) -> None:
        losses = [loss(trial.settings) for trial in sampled(30, is_min=is_min)]
        assert sorted(losses[-10:])[5] < sorted(losses[:10])[5]

    def test_another_process_asks_for_the_same(self) -> None:
        trials = sampled(15)
        again = Sampler(SWEEP, is_min=True, is_train=True)
        assert [again.ask(trials[:n]) for n in (3, 14)] == [trials[n].settings for n in (3, 14)]

    def test_two_at_a_time_do_not_try_the_same(self) -> None:
        sampler, trials = Sampler(SWEEP, is_min=True, is_train=True), sampled(12)
        first = sampler.ask(trials)
        assert sampler.ask([*trials, Trial(settings=first)])["train.lr"] != first["train.lr"]

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_a_failed_member_teaches_nothing(self, value: float | None) -> None:
        sampler, trials = Sampler(SWEEP, is_min=True, is_train=True), sampled(12)
        bad = ended({**trials[0].settings, "train.lr": 0.5}, value)
        assert sampler.ask([*trials, bad]) == sampler.ask([*trials, ended(bad.settings, None)])

    def test_members_of_other_ranges_are_left_out(self) -> None:
        sampler, trials = Sampler(SWEEP, is_min=True, is_train=True), sampled(3)
        odd = ended({**trials[0].settings, "train.batch": 64}, 0.0)
        assert sampler.ask([*trials, odd])["train.batch"] in {8, 16}
