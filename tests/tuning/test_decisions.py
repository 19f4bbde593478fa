"""What `tune` concludes from measurements, and the file that it writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.config.load import config_from_text, load_config
from orchestrator.errors import UsageError
from orchestrator.lab.tune import levers, passes
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import PassData
from orchestrator.lab.tune.report import (
    Measurements,
    Objective,
    SeedNoise,
    gain_of,
    gain_words,
    parity_of,
    rows_of,
)
from orchestrator.lab.tune.results import (
    LeverRow,
    LeverVerdict,
    ParityClass,
    TunedSubject,
    TuningResult,
    result_table,
)
from orchestrator.lab.tune.statistics import Effect
from orchestrator.lab.tune.tuning import notes_of, request_of, tuned_yaml
from tests.scene import ROOT
from workers.training.settings import TrainSettings
from workers.tuning.messages import Opened
from workers.units import GIB, MIB

BASE = levers.baseline_of(TrainSettings(), on_card=False)
SEEDS = [
    Opened(losses=(4.0, 3.0 + shift, 2.0 + shift), validation_loss=2.0 + shift)
    for shift in (0.0, 0.1, 0.2)
]


def candidate(key: str, value: object, **more: Any) -> Candidate:
    fields: dict[str, Any] = {"parity": ParityClass.NUMERIC, **more}
    return Candidate(lever=key, setting=str(value), changes={key: value}, **fields)


FAST, SLOW = candidate("precision", "bf16"), candidate("deterministic", True)
SMALL = candidate("recompute", "all", parity=ParityClass.EXACT, aim="memory")
WRONG = candidate("compile", "block")
DEAD = candidate("compile", "model")
NEVER = candidate("adapter", "lora")
ALL = [FAST, SLOW, SMALL, WRONG, DEAD, NEVER]


def opened(**fields: Any) -> Opened:
    steps = {"losses": (4.0, 3.0, 2.0), "weights_sha256": "a", "first_step_s": 1.1, "step_s": 0.1}
    return Opened(**{**steps, "host_bytes": 100, "peak_bytes": 100 * MIB, "flop": 2e9, **fields})


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
    )
    arms = {
        "baseline": opened(),
        "seed 1": opened(peak_bytes=101 * MIB),
        FAST.name: opened(
            losses=(4.0, 3.001, 2.001), weights_sha256="b", peak_bytes=90 * MIB, first_step_s=3.1
        ),
        SLOW.name: opened(),
        SMALL.name: opened(peak_bytes=60 * MIB, host_bytes=250),
        WRONG.name: opened(losses=(4.0, 3.2, 2.3), weights_sha256="c"),
        DEAD.name: opened(),
    }
    return Measurements(
        data=data,
        opened=arms,
        noise=SeedNoise.of(SEEDS),
        resolve=0.01,
        confidence=0.95,
        seed_names=["seed 1"],
    )


def test_each_lever_gets_the_verdict_of_what_it_is_for(found: Measurements) -> None:
    rows = rows_of(ALL, found, {NEVER.name: "this version has no key train.adapter"})
    assert [str(row.verdict) for row in rows] == [
        "CONFIRMED", "REFUTED", "CONFIRMED", "BROKEN", "UNDECIDED", "UNAVAILABLE",
    ]  # fmt: skip
    assert "SIGKILL" in rows[4].reason
    assert rows[5].reason == "this version has no key train.adapter"


def test_a_budget_in_which_no_lever_has_its_rounds_is_refused() -> None:
    path = ROOT / "cluster.yaml"
    with pytest.raises(
        UsageError, match="--budget 5s ends before any lever has had its rounds; the least is 60s"
    ):
        request_of(
            load_config(str(path)), path.read_text("utf-8"), rehearse=True, budget_s=5.0, names=()
        )


def test_a_lever_without_an_interval_of_speed_is_not_confirmed(found: Measurements) -> None:
    """Less memory at a cost that is not known is no gain yet."""
    few = replace(found.data, rounds=[{**each, SMALL.name: 1.0} for each in found.data.rounds[:2]])
    (row,) = rows_of([SMALL], replace(found, data=few), {})
    assert (row.speed_high, row.verdict) == (None, LeverVerdict.UNDECIDED)
    assert "-40.0 % peak memory" in row.reason
    (known,) = rows_of([SMALL], found, {})
    assert known.verdict is LeverVerdict.CONFIRMED


def gains(found: Measurements, objective: Objective) -> dict[str, Effect]:
    known = {each.name: found.gain(objective, each.name) for each in ALL if each is not DEAD}
    return {name: gain for name, gain in known.items() if gain is not None}


@pytest.mark.parametrize(
    ("objective", "names"),
    [
        ("speed", [FAST.name]),
        ("memory", [FAST.name, SMALL.name]),
        ("balanced", [FAST.name, SMALL.name]),
    ],
)
def test_levers_that_help_and_keep_the_result_are_stacked(
    found: Measurements, objective: Objective, names: list[str]
) -> None:
    """The third is 0.8 x as fast with 0.6 x the memory: 1.33 x the speed for each byte."""
    judged = list(zip(ALL, rows_of(ALL, found, {NEVER.name: ""}), strict=True))
    gained = gains(found, objective)
    assert [each.name for each in passes.winners(judged, gained, objective, 0.01)] == names
    assert passes.open_questions(judged, gained, objective, 0.01) == [DEAD.name], (
        "it died, and might be better"
    )


def test_figures_of_an_arm_stand_beside_the_baselines(found: Measurements) -> None:
    fast, _, small, *_ = rows_of(ALL, found, {NEVER.name: ""})
    assert fast.samples_per_s == pytest.approx(2.0, rel=0.01)
    assert fast.tflops == pytest.approx(2.0 * 2e9 / 1e12, rel=0.01)
    assert fast.mfu_pct is None, "no rating of a CPU is known"
    assert (fast.peak_bytes, fast.peak_delta_bytes) == (90 * MIB, -10 * MIB)
    assert (small.host_bytes, small.host_delta_bytes) == (250, 150)
    assert fast.once_s == pytest.approx(3.0)
    assert fast.pays_after_s == pytest.approx(5.0, rel=0.02), "2 (T - 3) = T - 1"
    assert small.pays_after_s is None, "it is slower"


@pytest.mark.parametrize(
    ("dtype", "clock_mhz", "rated"),
    [("bf16", 1695.0, 71.2), ("bf16", 1695.0 / 2, 71.2 / 2), ("fp32", 1695.0, 35.6)],
)
def test_mfu_is_of_the_cards_rating_at_its_clock(
    found: Measurements, dtype: str, clock_mhz: float, rated: float
) -> None:
    card = opened(
        card="GPU-1", device_name="NVIDIA GeForce RTX 3090", device_bytes=24 * GIB, flop=1e12
    )
    rounds = [{"baseline": 0.1, FAST.name: 0.05}] * 12
    data = PassData(rounds=list[Mapping[str, float]](rounds), clocks_mhz=[clock_mhz])
    measured = replace(
        found, data=data, opened={"baseline": card, FAST.name: card}, dtype_of=lambda _: dtype
    )
    (row,) = rows_of([FAST], measured, {})
    assert row.tflops == pytest.approx(20.0)
    assert row.mfu_pct == pytest.approx(100 * 20 / rated, rel=0.01)


def test_a_lever_that_needs_another_one_is_judged_against_that(found: Measurements) -> None:
    """On the host the average takes no memory of the device.

    With the baseline, it would take all of its own.
    """
    device = candidate("ema_decay", 0.99, parity=ParityClass.OBJECTIVE, aim="loss")
    (host,) = levers.named(levers.train_candidates(BASE), ["ema_on"])
    assert host.beside == "ema_decay=0.99"
    for each in found.data.rounds:
        each.update({device.name: 1.0, host.name: 1.3})  # type: ignore[attr-defined]
    arms = {
        **found.opened,
        device.name: opened(peak_bytes=140 * MIB),
        host.name: opened(peak_bytes=110 * MIB),
    }
    (row,) = rows_of([host], replace(found, opened=arms), {})
    assert row.verdict == "CONFIRMED"
    assert "-21.4 % peak memory; against ema_decay=0.99" in row.reason
    assert row.peak_delta_bytes == 10 * MIB
    (alone,) = rows_of(
        [host], replace(found, opened={**found.opened, host.name: arms[host.name]}), {}
    )
    assert alone.verdict == "REFUTED", "without the other arm the baseline stands for it"


@pytest.mark.parametrize("width", [None, 200, 120, 80, 60])
def test_a_table_has_the_columns_that_its_terminal_has_room_for(
    found: Measurements, width: int | None
) -> None:
    rows = rows_of(ALL, found, {})
    result = TuningResult(
        tune_id="t", subject=TunedSubject(card="cpu", driver=None, torch="2.13", model="gpt-nano"), device_name="CPU",
        created_at="", duration_s=1.0, rounds=12, rows=tuple(rows),
    )  # fmt: skip
    _, _, _, headings, first, *_ = result_table(result, width)
    assert {"lever", "setting", "speed x", "peak MiB", "verdict"} <= set(
        re.split(r"\s{2,}", headings)
    )
    assert ("once s" in headings) is (width is None or width >= 200)
    assert width is None or width == 60 or max(len(headings), len(first)) <= width


def test_of_two_levers_of_a_key_the_faster_one_is_taken() -> None:
    slower = candidate("precision", "fp16")
    other = candidate("optimizer", "adamw-fused")
    row = LeverRow(lever="", setting="", verdict=LeverVerdict.CONFIRMED, reason="")
    gained = {
        each.name: Effect(ratio=ratio, low=ratio - 0.05, high=ratio + 0.05, p=0.0, rounds=20)
        for each, ratio in ((slower, 1.1), (FAST, 1.2), (other, 1.3))
    }
    several = passes.winners([(each, row) for each in (slower, FAST, other)], gained, "speed", 0.01)
    assert [each.name for each in several] == [FAST.name, other.name]
    assert [dict(each.changes) for each in passes.cumulative(several)] == [
        {"precision": "bf16"},
        {"precision": "bf16", "optimizer": "adamw-fused"},
    ]
    assert {
        name: dict(rest.changes) for name, rest in passes.with_one_left_out(several).items()
    } == {FAST.name: {"optimizer": "adamw-fused"}, other.name: {"precision": "bf16"}}


@pytest.mark.parametrize(
    ("low", "high", "open_levers", "stays", "decided"),
    [
        (1.1, 1.2, [], False, True),
        (0.9, 1.2, [], True, False),
        (0.8, 0.9, [], True, True),
        (1.1, 1.2, ["micro=8"], False, False),
    ],
)
def test_the_users_file_stays_unless_a_set_is_surely_faster(
    low: float, high: float, open_levers: list[str], *, stays: bool, decided: bool
) -> None:
    own = {"optimizer": "adamw-loop"}
    yours = passes.your_file({"optimizer": "adamw-foreach"}, own)
    gain = Effect(ratio=(low + high) / 2, low=low, high=high, p=0.0, rounds=20)
    choice = passes.choose(FAST, yours, gain, open_levers, "speed")
    assert choice.changes == (own if stays else FAST.changes)
    assert choice.decided is decided


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
    arm = Opened(losses=losses, weights_sha256=bits, validation_loss=2.0)
    base = Opened(losses=(4.0, 3.0, 2.0), weights_sha256="a", validation_loss=2.0)
    assert parity_of(ParityClass(kind), arm, base, SeedNoise.of(SEEDS)).kept is kept
    assert (
        parity_of(ParityClass.NUMERIC, arm, base, SeedNoise(loss=None, validation=None)).kept
        is None
    )


def test_what_cannot_run_is_found_out_and_not_listed() -> None:
    future = candidate("no_such_key", True)
    assert (
        levers.unavailable(future, BASE, on_card=True)
        == "this version has no key train.no_such_key"
    )
    assert "fp32" in str(levers.unavailable(candidate("precision", "fp4"), BASE, on_card=True))
    (tf32,) = levers.named(levers.train_candidates(BASE), ["precision=tf32"])
    assert levers.unavailable(tf32, BASE, on_card=True) is None
    assert levers.unavailable(tf32, BASE, on_card=False) is not None
    with pytest.raises(UsageError, match="valid: micro, precision"):
        levers.check_names(levers.train_candidates(BASE), ["precison"], "--levers")


def test_tuned_yaml_is_the_users_file_with_other_values_of_train() -> None:
    path = ROOT / "cluster.yaml"
    text, config = path.read_text(encoding="utf-8"), load_config(str(path))
    changes = {"precision": "fp32", "optimizer": "adamw-loop"}
    edited = tuned_yaml(text, config, changes, {"precision": "tune x: 1.2 x\nthe speed"})
    wanted = {**config.train.model_dump(), **changes}
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(
        update={"train": TrainSettings(**wanted)}
    )
    differing = [line for line in edited.splitlines() if line not in text.splitlines()]
    assert differing == ["  precision: fp32  # tune x: 1.2 x the speed", "  optimizer: adamw-loop"]


@pytest.mark.parametrize(
    "section", ["", "train: {preset: gpt-mini, batch: 8}\n", "train:\n    preset: gpt-mini\n"]
)
def test_tuned_yaml_can_be_made_of_any_file(section: str) -> None:
    text = f"nodes:\n  pc1: {{gpu: rtx-3090, workers: 1, vram_per_worker_gib: 3}}\n{section}run: {{duration: 3}}\n"
    config = config_from_text(text, "x.yaml")
    edited = tuned_yaml(text, config, {"precision": "fp32"}, {})
    wanted = TrainSettings(**{**config.train.model_dump(), "precision": "fp32"})
    assert config_from_text(edited, "tuned.yaml") == config.model_copy(update={"train": wanted})


@pytest.mark.parametrize("on_card", [True, False])
def test_levers_of_matmul_that_cannot_be_measured_say_what_would(*, on_card: bool) -> None:
    several = levers.matmul_candidates(levers.matmul_baseline(4096), 0.7)
    why = levers.matmul_impossible(
        several,
        on_card=on_card,
        room_bytes=8 * 2**30,
        budget_bytes=2**31,
    )
    assert [each.setting for each in several if each.lever == "duty"] == ["0.7", "0.6"]
    assert ("dtype=tf32" in why) is not on_card
    assert "7 workers of 2.00 GiB do not fit 8.00 GiB" in why["workers=7"]
    assert "workers=3" not in why


def test_each_objective_has_its_own_gain_and_words() -> None:
    effect = Effect(ratio=1.1, low=1.0, high=1.2, p=0.01, rounds=20)
    speed, memory, balanced = (
        gain_of(each, effect, 80, 100, 0.01) for each in ("speed", "memory", "balanced")
    )
    assert speed is not None
    assert memory is not None
    assert balanced is not None
    assert (speed.ratio, memory.ratio, balanced.ratio) == (1.1, 1.25, pytest.approx(1.375))
    assert gain_words("memory", "recompute=all", memory) == (
        "recompute=all takes 0.800 x your file's peak memory, 0.792 to 0.808"
    )
    assert (
        gain_words("speed", "micro=4", speed)
        == "micro=4 has 1.100 x your file's speed, 1.000 to 1.200"
    )
    assert gain_of("memory", None, 80, 100, 0.01) == memory, "peaks need no rounds"
    assert gain_of("balanced", None, 80, 100, 0.01) is None
    assert gain_of("memory", effect, None, 100, 0.01) is None


def test_each_changed_key_of_tuned_yaml_has_its_own_measurement() -> None:
    row = LeverRow(
        lever="precision", setting="bf16", verdict=LeverVerdict.CONFIRMED, reason="", speed_ratio=1.5, speed_low=1.4,
        speed_high=1.6, peak_bytes=80 * MIB, peak_delta_bytes=-20 * MIB,
    )  # fmt: skip
    few = replace(row, lever="recompute", setting="all", speed_low=None, speed_high=None)
    changes = {"precision": "bf16", "recompute": "all", "optimizer": "adamw-foreach", "steps": 5}
    assert notes_of(changes, [row, few, replace(row, speed_ratio=9.9)], "t") == {
        "precision": "tune t: 1.500 x the baseline's speed (1.400 to 1.600), -20.0 MiB peak memory",
        "recompute": "tune t: -20.0 MiB peak memory",
        "optimizer": "tune t: as the baseline",
        "steps": "tune t: as it was measured",
    }
