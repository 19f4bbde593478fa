"""What `tune` concludes from measurements, and the file that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.load import config_from_text, load_config
from orchestrator.errors import UsageError
from orchestrator.tuning import levers, passes, products
from orchestrator.tuning.journal import PassData
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.parity import Course, Noise, noise_of, parity_of
from orchestrator.tuning.report import Measurements, pareto_names, rows_of
from orchestrator.tuning.rows import ParityClass, Row
from orchestrator.tuning.statistics import Effect
from orchestrator.tuning.tuned_yaml import tuned
from tests.scene import ROOT
from workers.training.settings import TrainSettings
from workers.tuning.messages import Opened

BASE = levers.baseline_of(TrainSettings(), on_card=False)
SEEDS = [Course(losses=[4.0, 3.0 + shift, 2.0 + shift], validation_loss=2.0 + shift) for shift in (0.0, 0.1, 0.2)]


def candidate(key: str, value: object, **more: Any) -> Candidate:  # noqa: ANN401 - fields of a candidate
    fields: dict[str, Any] = {"parity": ParityClass.NUMERIC, **more}
    return Candidate(lever=key, setting=str(value), changes={key: value}, **fields)


FAST, SLOW = candidate("precision", "bf16"), candidate("deterministic", True)
SMALL = candidate("checkpoint", "all", parity=ParityClass.EXACT, aim="memory")
WRONG = candidate("compile", "block")
DEAD = candidate("compile", "model")
NEVER = candidate("adapter", "lora")
ALL = [FAST, SLOW, SMALL, WRONG, DEAD, NEVER]


def opened(**fields: Any) -> Opened:  # noqa: ANN401 - fields of a message
    return Opened(**{"losses": (4.0, 3.0, 2.0), "weights_sha256": "a", "host_bytes": 100, **fields})


@pytest.fixture
def found() -> Measurements:
    """Of twelve rounds of arms whose speeds are known."""
    speeds = {"baseline": 1.0, FAST.name: 2.0, SLOW.name: 0.5, SMALL.name: 0.8, WRONG.name: 3.0}
    wobble = [1 + 0.001 * (number % 5) for number in range(12)]
    rounds = [{arm: factor / speed for arm, speed in speeds.items()} for factor in wobble]
    for number, each in enumerate(rounds):
        each[FAST.name] *= wobble[-number]
    data = PassData(
        rounds=list[Mapping[str, float]](rounds),
        lost={DEAD.name: "its process was ended by SIGKILL"},
        peaks={"baseline": 100, FAST.name: 90, SLOW.name: 100, SMALL.name: 60, WRONG.name: 100},
    )
    arms = {
        "baseline": opened(),
        FAST.name: opened(losses=(4.0, 3.001, 2.001), weights_sha256="b"),
        SLOW.name: opened(),
        SMALL.name: opened(),
        WRONG.name: opened(losses=(4.0, 3.2, 2.3), weights_sha256="c"),
        DEAD.name: opened(),
    }
    return Measurements(data=data, opened=arms, noise=noise_of(SEEDS), resolve=0.01, confidence=0.95)


def test_each_lever_gets_the_verdict_of_what_it_is_for(found: Measurements) -> None:
    rows = rows_of(ALL, found, {NEVER.name: "this version has no key train.adapter"})
    assert [str(row.verdict) for row in rows] == [
        "CONFIRMED", "REFUTED", "CONFIRMED", "BROKEN", "UNDECIDED", "UNAVAILABLE",
    ]  # fmt: skip
    assert "SIGKILL" in rows[4].reason
    assert rows[5].reason == "this version has no key train.adapter"
    assert pareto_names(ALL, rows, found.opened) == (FAST.name, SMALL.name)


def test_only_levers_that_are_faster_and_keep_the_result_are_stacked(found: Measurements) -> None:
    rows = rows_of(ALL, found, {NEVER.name: ""})
    assert [each.name for each in passes.winners(list(zip(ALL, rows, strict=True)))] == [FAST.name]


def test_of_two_levers_of_a_key_the_faster_one_is_taken() -> None:
    slower = candidate("precision", "fp16")
    other = candidate("optimizer", "adamw-fused")
    row = Row(lever="", setting="", verdict="CONFIRMED", reason="")  # type: ignore[arg-type]  # equal to its text
    judged = [
        (slower, replace(row, speed_ratio=1.1)),
        (FAST, replace(row, speed_ratio=1.2)),
        (other, replace(row, speed_ratio=1.3)),
    ]
    several = passes.winners(judged)
    assert [each.name for each in several] == [FAST.name, other.name]
    assert [dict(each.changes) for each in passes.cumulative(several)] == [
        {"precision": "bf16"},
        {"precision": "bf16", "optimizer": "adamw-fused"},
    ]
    assert {name: dict(rest.changes) for name, rest in passes.with_one_left_out(several).items()} == {
        FAST.name: {"optimizer": "adamw-fused"},
        other.name: {"precision": "bf16"},
    }


@pytest.mark.parametrize(
    ("low", "high", "open_levers", "name", "decided"),
    [
        (1.1, 1.2, [], FAST.name, True),
        (0.9, 1.2, [], "your file=optimizer adamw-loop", False),
        (0.8, 0.9, [], "your file=optimizer adamw-loop", True),
        (1.1, 1.2, ["micro=8"], FAST.name, False),
    ],
)
def test_the_users_file_stays_unless_a_set_is_faster_beyond_doubt(
    low: float, high: float, open_levers: list[str], name: str, *, decided: bool
) -> None:
    yours = passes.your_file({"optimizer": "adamw-foreach"}, {"optimizer": "adamw-loop"})
    effect = Effect(ratio=(low + high) / 2, low=low, high=high, p=0.0, rounds=20)
    choice = passes.choose(FAST, yours, effect, open_levers)
    assert (choice.name, choice.decided) == (name, decided)


@pytest.mark.parametrize(
    ("kind", "losses", "bits", "kept"),
    [
        ("exact", (4.0, 3.0, 2.0), "a", True),
        ("exact", (4.0, 3.000001, 2.0), "b", True),
        ("exact", (4.0, 3.00001, 2.0), "b", False),
        ("numeric", (4.0, 3.0, 2.01), "b", True),
        ("numeric", (4.0, 3.0, 2.05), "b", False),
        ("objective", (9.0, 9.0, 9.0), "b", None),
    ],
)
def test_a_parity_class_says_how_far_losses_may_differ(
    kind: str, losses: tuple[float, ...], bits: str, *, kept: bool | None
) -> None:
    """Three seeds differ by 0.133 in the mean of their last half, so a numeric lever may by 0.0133."""
    arm = Course(losses=losses, weights_sha256=bits, validation_loss=2.0)
    base = Course(losses=(4.0, 3.0, 2.0), weights_sha256="a", validation_loss=2.0)
    assert parity_of(ParityClass(kind), arm, base, noise_of(SEEDS)).kept is kept
    assert parity_of(ParityClass.NUMERIC, arm, base, Noise(loss=None, validation=None)).kept is None


def test_what_cannot_run_is_found_out_and_not_listed() -> None:
    future = candidate("no_such_key", True)
    assert levers.unavailable(future, BASE, on_card=True) == "this version has no key train.no_such_key"
    assert "fp32" in str(levers.unavailable(candidate("precision", "fp4"), BASE, on_card=True))
    (tf32,) = levers.chosen(levers.train_candidates(BASE), ["precision=tf32"])
    assert levers.unavailable(tf32, BASE, on_card=True) is None
    assert levers.unavailable(tf32, BASE, on_card=False) is not None
    with pytest.raises(UsageError, match="valid: micro, precision"):
        levers.chosen(levers.train_candidates(BASE), ["precison"])


def test_tuned_yaml_is_the_users_file_with_other_values_of_train() -> None:
    path = ROOT / "cluster.yaml"
    text, config = path.read_text(encoding="utf-8"), load_config(str(path))
    changes = {"precision": "fp32", "optimizer": "adamw-loop"}
    edited = tuned(text, config, changes, {"precision": "tune x: 1.2 x\nthe speed"})
    wanted = {**config.train.model_dump(), **changes}
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(update={"train": TrainSettings(**wanted)})
    differing = [line for line in edited.splitlines() if line not in text.splitlines()]
    assert differing == ["  precision: fp32  # tune x: 1.2 x the speed", "  optimizer: adamw-loop"]


@pytest.mark.parametrize("section", ["", "train: {preset: gpt-mini, batch: 8}\n", "train:\n    preset: gpt-mini\n"])
def test_tuned_yaml_can_be_made_of_any_file(section: str) -> None:
    text = f"nodes:\n  pc1: {{gpu: rtx-3090, workers: 1, vram_per_worker_gib: 3}}\n{section}run: {{duration: 3}}\n"
    config = config_from_text(text, "x.yaml")
    edited = tuned(text, config, {"precision": "fp32"}, {})
    wanted = TrainSettings(**{**config.train.model_dump(), "precision": "fp32"})
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(update={"train": wanted})


@pytest.mark.parametrize("on_card", [True, False])
def test_levers_of_matmul_that_cannot_be_measured_say_what_would(*, on_card: bool) -> None:
    several = products.candidates(products.baseline_of(4096), 0.7)
    why = products.impossible(several, on_card=on_card, mps_obstacle=None, room_bytes=8 * 2**30, budget_bytes=2**31)
    assert [each.setting for each in several if each.lever == "duty"] == ["0.7", "0.6"]
    assert ("dtype=tf32" in why) is not on_card
    assert "7 workers of 2.00 GiB do not fit 8.00 GiB" in why["workers=7"]
    assert "workers=3" not in why
    assert "compute_share_mode=mps" in why["compute_share_mode=mps"]
    assert ("burn --sweep" in why["power_limit_w=lower"]) is on_card
