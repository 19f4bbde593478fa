"""Which levers `tune` has, and which of them can run."""

from __future__ import annotations

from orchestrator.lab import levers
from orchestrator.lab.levers import CHOSEN, LeverVerdict, Trial
from workers.training.settings import TrainSettings


def trials(*, on_card: bool = False, **train: object) -> dict[str, Trial]:
    found = levers.train_trials(TrainSettings.model_validate(train), on_card=on_card)
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def test_what_the_file_has_is_tried_off_and_auto_stands_for_the_usual() -> None:
    assert "precision=fp32" in trials(precision="bf16")
    assert "precision=bf16" not in trials(precision="bf16")
    for key, usual in (("micro", "16"), ("recompute", "none")):
        assert f"{key}={usual}" not in trials(**{key: "auto"})


def test_a_lever_brings_along_the_key_that_it_needs() -> None:
    assert trials()["r_drop=0.5 with dropout 0.1"].changes == {"r_drop": 0.5, "dropout": 0.1}
    assert trials(dropout=0.2)["r_drop=0.5"].changes == {"r_drop": 0.5}


def test_a_rehearsal_tries_a_dozen_levers_that_are_quick_and_may_be_chosen() -> None:
    found = levers.for_rehearsal(list(trials().values()))
    assert len(found) >= 12
    assert all(each.parity_class in CHOSEN and each.lever != "compile" for each in found)
    assert not any(each.verdict is LeverVerdict.UNAVAILABLE for each in found)
