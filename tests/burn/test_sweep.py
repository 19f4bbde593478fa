"""A sweep: what may be asked for, which value comes next, where it stops, and which value is efficient."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.config.load import load_config
from orchestrator.errors import UsageError
from orchestrator.lab.burn import phases
from orchestrator.lab.burn.results import JudgedRun
from orchestrator.lab.burn.sweep import (
    Sweep,
    SweepPoint,
    SweepResult,
    SweptSetting,
    efficient,
    parse_sweep,
    points_of,
    sweep_dict,
    sweep_lines,
)
from orchestrator.lab.burn.verdict import judge
from orchestrator.record.model import Row
from tests.burn.scene import ROW, measured
from tests.scene import ROOT
from workers.messages import StepCounts
from workers.policy.thermal import SLOW_MEMORY

CONFIG = load_config(str(ROOT / "cluster.yaml"), [])
(TAKE,) = phases.at_one_value(CONFIG, 90.0)


def taken(
    *rows: Row, error: str | None = None, alarms: tuple[str, ...] = (), **seen: object
) -> JudgedRun:
    """Return a run of some workers that were seen like this."""
    workers = tuple(judge(measured(row, length_s=90.0, alarms=alarms, **seen)) for row in rows)
    return JudgedRun(take=TAKE, workers=workers, folder=Path("runs/x"), elapsed_s=90.0, error=error)


def at(value: int, watts: float, rate: float, stop: str | None = None) -> SweepPoint:
    return points_of(value, [taken(ROW, power_w=watts, tflops=rate)])[0] if stop is None else replace(
        at(value, watts, rate), stop=stop
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "lever", "values"),
    [
        ("power=200..350:50", SweptSetting.POWER, (350, 300, 250, 200)),
        ("memory-offset=0..500:100", SweptSetting.MEMORY_OFFSET, (0, 100, 200, 300, 400, 500)),
        ("memory-offset=-100..100:100", SweptSetting.MEMORY_OFFSET, (-100, 0, 100)),
    ],
)
def test_power_goes_down_and_an_offset_goes_up(
    text: str, lever: SweptSetting, values: tuple[int, ...]
) -> None:
    assert parse_sweep(text) == Sweep(lever=lever, values=values)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fan=20..30:1", "is no sweep; valid: power=200..350:25"),
        ("power=200..350", "is no sweep"),
        ("power=200..350:75", "the step must be 1 to 50 W, not 75"),
        ("memory-offset=0..500:500", "the step must be 1 to 100 MHz"),
        ("power=200..350:0", "the step must be"),
        ("power=350..200:25", "the lower end comes first"),
        ("power=0..100:25", "the lower end comes first, and is a value that a card can have"),
        ("memory-offset=0..9000:10", "901 values are too many"),
    ],
)
def test_what_is_no_sweep_or_no_small_step_is_refused(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        parse_sweep(text)


WRONG = replace(ROW, slot="pc1/1", counts=StepCounts(steps_ok=90, verify_checks=9, verify_errors=1))
UNCHECKED = replace(ROW, counts=StepCounts(steps_ok=90))
DEAD = replace(ROW, restarts=1)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (taken(ROW, WRONG), "pc1/1: 1 of 9 checked results were wrong"),
        (taken(UNCHECKED), "no result was checked"),
        (taken(ROW, alarms=(SLOW_MEMORY,)), "bandwidth"),
        (taken(DEAD), "1 restart"),
        (taken(ROW, error="the cluster is gone"), "the cluster is gone"),
    ],
)
def test_it_stops_at_the_first_value_that_goes_wrong(run: JudgedRun, words: str) -> None:
    sweep = parse_sweep("memory-offset=0..300:100")
    points = points_of(0, [taken(ROW)])
    assert SweepResult(sweep=sweep, points=points).stopped is None
    points += points_of(100, [run])
    result = SweepResult(sweep=sweep, points=points)
    assert words in (result.stopped or "")
    assert (result.exit_code, sweep_dict(result)["stopped"]) == (1, result.stopped)
    assert any("WRONG" in line for line in sweep_lines(result))
    assert all(point.value == 0 for point in efficient(points)), (
        "a value that went wrong is never recommended"
    )


def test_a_training_gives_the_rate_and_need_not_be_checked() -> None:
    config = CONFIG.model_copy(
        update={"workload": CONFIG.workload.model_copy(update={"name": "train"})}
    )
    checked, trained = phases.at_one_value(config, 90.0)
    assert (checked.config.workload.name, trained.config.workload.name) == ("matmul", "train")
    assert checked.config.verify.share >= 0.25
    assert {checked.config.compute_share_mode, trained.config.compute_share_mode} == {"none"}
    (point,) = points_of(300, [taken(ROW), taken(UNCHECKED, power_w=290.0, samples_per_s=12.0)])
    assert point.rate == 12.0
    assert point.rate_unit == "samples/s"
    assert point.watts == 290.0
    assert point.stop is None


def test_the_efficient_value_does_most_work_for_each_watt() -> None:
    points = (
        at(350, 350.0, 35.0),
        at(300, 300.0, 33.0),
        at(250, 250.0, 30.0),
        at(200, 200.0, 20.0),
    )
    other = replace(ROW, slot="pc2/0", node="pc2")
    points += points_of(350, [taken(other, power_w=None)])
    assert [(point.node, point.value) for point in efficient(points)] == [("pc1", 250)], (
        "no sensor, no efficiency"
    )
    result = SweepResult(sweep=parse_sweep("power=200..350:50"), points=points)
    text = "\n".join(sweep_lines(result))
    assert "efficient: 250 W: 86 % of the fastest (350 W) with 71 % of its watts" in text
    assert (result.exit_code, len(sweep_dict(result)["points"])) == (0, 5)


def test_workers_of_a_card_share_its_watts_and_add_their_work() -> None:
    (point,) = points_of(300, [taken(ROW, replace(ROW, slot="pc1/1"), power_w=300.0, tflops=15.0)])
    assert (point.watts, point.rate, point.checks) == (300.0, 30.0, 20)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--rehearse", "--sweep", "power=200..350:25"],
            "a rehearsal has none: add --fake-sensors",
        ),
        (["--local", "--sweep", "power=200..350:25", "--phase", "2"], "it excludes --phase"),
        (["--local", "--sweep", "volts=1..2:1"], "is no sweep"),
    ],
)
def test_an_impossible_sweep_is_refused_before_it_starts(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["burn", "--config", str(ROOT / "cluster.yaml"), *arguments])
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)
