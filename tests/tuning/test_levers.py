"""Which levers `tune` has, and which of them can run."""

from __future__ import annotations

import pytest

from orchestrator.errors import UsageError
from orchestrator.lab.tune import levers
from orchestrator.lab.tune.levers import Candidate
from workers.training.settings import TrainSettings


def candidates(*, on_card: bool = False, **train: object) -> dict[str, Candidate]:
    found = levers.train_candidates(TrainSettings.model_validate(train), on_card=on_card)
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def test_a_lever_that_the_file_has_on_is_tried_off() -> None:
    assert "precision=fp32" in candidates(precision="bf16")
    assert "precision=bf16" not in candidates(precision="bf16")
    assert "precision=bf16" in candidates(precision="fp32")


@pytest.mark.parametrize("key", ["micro", "recompute", "channels_last"])
def test_what_auto_stands_for_is_not_tried_again(key: str) -> None:
    usual = {"micro": 16, "recompute": "none", "channels_last": "false"}[key]
    train = TrainSettings.model_validate({key: "auto"})
    names = {each.name for each in levers.train_candidates(train, on_card=False)}
    assert f"{key}={usual}" not in names


def test_a_lever_brings_along_the_key_that_it_needs() -> None:
    assert candidates()["r_drop=0.5 with dropout 0.1"].changes == {"r_drop": 0.5, "dropout": 0.1}
    assert candidates(dropout=0.2)["r_drop=0.5"].changes == {"r_drop": 0.5}


def test_a_rehearsal_tries_a_dozen_keys_that_are_quick() -> None:
    found = levers.for_rehearsal(list(candidates().values()))
    assert len(found) >= 12
    assert len({each.lever for each in found}) == len(found)
    assert not any(each.slow or each.unavailable for each in found)


@pytest.mark.parametrize("on_card", [True, False])
def test_what_needs_a_card_says_so_without_one(*, on_card: bool) -> None:
    tf32 = candidates(on_card=on_card)["precision=tf32"]
    assert (tf32.unavailable is None) is on_card


def test_levers_are_named_by_key_or_by_key_and_value() -> None:
    found = list(candidates().values())
    named = levers.named(found, ["optimizer", "precision=fp32"], "--levers")
    assert {each.lever for each in named} == {"optimizer", "precision"}
    assert [each.setting for each in named if each.lever == "precision"] == ["fp32"]
    with pytest.raises(UsageError, match="--levers names 'precison', which is none; valid: micro"):
        levers.named(found, ["precison"], "--levers")


def test_matmul_is_tried_with_two_and_three_workers() -> None:
    found = {each.name: each.copies for each in levers.matmul_candidates()}
    assert found == {
        "workers=2": 2, "workers=3": 3, "dtype=tf32": 1, "dtype=fp16": 1, "dtype=bf16": 1
    }  # fmt: skip
