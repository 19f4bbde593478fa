"""Which arms of a tuning take turns, on a simulated machine with a clock of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.lab.tune import levers, measuring, passes
from orchestrator.lab.tune.levers import TuningTask
from orchestrator.lab.tune.measuring import Journal
from orchestrator.lab.tune.report import Objective
from orchestrator.lab.tune.results import LeverRow, LeverVerdict, TuningResult
from workers.training.settings import TrainSettings
from workers.tuning.messages import ArmSpec, Done, Evaluated, Opened

BASE = levers.baseline_of(TrainSettings(), on_card=False)

#: Of a CPU without units for bf16, as measured there; other levers have the baseline's speed.
SPEEDS = {
    "precision": 0.23, "attention": 0.75, "optimizer": 1.05, "micro": 0.93, "recompute": 0.76,
    "activations_on_host": 0.8, "r_drop": 0.4, "dropout": 0.79, "adapter": 0.69, "batch": 1.05,
}  # fmt: skip


class Machine:
    """A clock, and arms that move it: the time of a step, of starting a process, and 3 % of noise a turn."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.draw = random.Random(1)  # noqa: S311 - a simulation
        self.alive: list[str] = []
        self.most_alive = 0
        self.slower_after_s, self.slower = math.inf, 1.0
        self.neighbour_share = 0.0

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds * (self.slower if self.now_s > self.slower_after_s else 1.0)

    def arm(self, spec: ArmSpec, patience_s: float, copies: int = 1) -> Arm:
        return Arm(self, spec.name)


class Arm:
    def __init__(self, machine: Machine, name: str) -> None:
        self.name = name
        self._machine = machine
        self._step_s = machine.step_s / SPEEDS.get(name.partition("=")[0], 1.0)
        machine.alive.append(name)
        machine.most_alive = max(machine.most_alive, len(machine.alive))

    def open(self, steps: int) -> Opened:
        self._machine.pass_by(0.5 + (steps + 2) * self._step_s)
        return Opened(
            losses=(3.0,) * steps, weights_sha256="a", step_s=self._step_s, first_step_s=self._step_s,
            validation_loss=2.0 + self._machine.draw.random(), peak_bytes=500, host_bytes=500,
        )  # fmt: skip

    def turn(self, seconds: float, least_steps: int) -> Done:
        self._machine.pass_by(0.03 + self._step_s + max(seconds, least_steps * self._step_s))
        noise = self._machine.draw.lognormvariate(0, 0.03)
        share = self._machine.neighbour_share
        return Done(samples=1.0, seconds=self._step_s * noise, neighbour_share=share)

    def evaluate(self) -> Evaluated:
        self._machine.pass_by(2 * self._step_s)
        return Evaluated(validation_loss=2.0, step=1)

    def close(self) -> None:
        self._machine.alive.remove(self.name)


def tuned(
    monkeypatch: pytest.MonkeyPatch, folder: Path, machine: Machine, budget_s: float, **plan: Any
) -> tuple[TuningResult, Journal]:
    """Tune all levers of a rehearsal on the machine."""
    monkeypatch.setattr(measuring, "Arm", machine.arm)
    candidates = levers.for_rehearsal(levers.train_candidates(BASE))
    reasons = {each.name: levers.unavailable(each, BASE, on_card=False) for each in candidates}

    def spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        return ArmSpec(name=name, spec=None, log=folder)  # type: ignore[arg-type]  # no arm looks at it

    task = TuningTask(
        model="gpt-nano", trains=True, dtype_key="precision", baseline=BASE, candidates=candidates,
        impossible={name: why for name, why in reasons.items() if why}, yours=None, make_spec=spec,
    )  # fmt: skip
    fields = {
        "turn_s": 0.2,
        "least_steps": 2,
        "resolve": 0.01,
        "confidence": 0.95,
        "at_once": 40,
        "seeds": 3,
    }
    how = measuring.Plan(budget_s=budget_s, **{**fields, **plan})
    journal = Journal(folder, lambda: machine.now_s)
    runner = measuring.Measuring(how, journal, spec, lambda _: None)
    return passes.Passes(task, how, "speed", journal, runner).run("t", ""), journal


def narrow(rows: Sequence[LeverRow]) -> list[LeverRow]:
    """Those with an interval of at most 10 % of the ratio on either side."""
    return [
        each
        for each in rows
        if each.speed_ratio and each.speed_low and each.speed_high
        and each.speed_high - each.speed_low <= 0.2 * each.speed_ratio
    ]  # fmt: skip


@pytest.mark.parametrize("step_s", [0.05, 0.2])
def test_four_minutes_decide_a_dozen_levers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, step_s: float
) -> None:
    """On two cores a step takes 0.05 s; the other machine is four times slower."""
    machine = Machine(step_s)
    found, journal = tuned(monkeypatch, tmp_path, machine, 240.0)
    again, *rows = found.rows

    assert len(narrow(rows)) >= 12
    assert again.speed_low is not None
    assert again.speed_high is not None
    assert again.speed_low <= 1.0 <= again.speed_high
    assert machine.now_s <= 240
    assert machine.alive == []

    bf16 = next(each for each in rows if each.setting == "bf16")
    assert bf16.verdict is LeverVerdict.REFUTED
    assert sum("precision=bf16" in each for each in journal.passes["alone"].rounds) < 10


def test_a_short_budget_says_which_levers_it_did_not_begin(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It begins with those of which most is expected, and measures each that it begins."""
    found, _ = tuned(monkeypatch, tmp_path, Machine(0.2), 120.0)
    not_begun = [each for each in found.rows if each.reason.startswith("not begun")]
    assert {each.lever for each in not_begun} >= {"recompute", "dropout", "r_drop"}
    assert {each.verdict for each in not_begun} == {LeverVerdict.UNDECIDED}

    begun = [each for each in found.rows if each.speed_ratio is not None]
    assert "precision" in {each.lever for each in begun}
    assert all(each.speed_high is not None for each in begun)


def test_a_machine_that_slows_down_decides_fewer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Other programs take three quarters of it once all levers have begun."""
    machine = Machine(0.05)
    machine.slower_after_s, machine.slower = 70.0, 4.0
    found, _ = tuned(monkeypatch, tmp_path, machine, 240.0)
    assert len(narrow(found.rows[1:])) >= 8
    without = [each for each in found.rows if each.speed_high is None]
    assert "CONFIRMED" not in {each.verdict for each in without}
    assert machine.now_s <= 240


def test_a_machine_that_is_never_quiet_decides_as_many(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rounds beside other programs are dropped only while there is time for others."""
    machine = Machine(0.15)
    machine.neighbour_share = 0.5
    found, journal = tuned(monkeypatch, tmp_path, machine, 240.0)
    assert journal.passes["alone"].dropped
    assert len(narrow(found.rows[1:])) >= 12
    assert found.rows[0].speed_high is not None


def test_arms_that_leave_make_room_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Machine(0.05)
    found, _ = tuned(monkeypatch, tmp_path, machine, 600.0, at_once=9, resolve=0.1)
    assert machine.most_alive == 9 + 2
    assert not [each for each in found.rows if each.reason.startswith("not begun")]


def test_a_tuning_that_goes_on_does_not_begin_what_is_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tuned(monkeypatch, tmp_path, Machine(0.1), 160.0)
    journal = Journal(tmp_path)
    before = len(journal.passes["alone"].rounds)
    tuned(monkeypatch, tmp_path, Machine(0.1), 240.0)
    rounds = Journal(tmp_path).passes["alone"].rounds[before:]
    assert rounds
    assert not any("precision=bf16" in each for each in rounds)
    assert any("optimizer=adamw-fused" in each for each in rounds)


@pytest.mark.parametrize(
    ("objective", "first", "last"),
    [("speed", "precision", "r_drop"), ("memory", "recompute", "r_drop")],
)
def test_levers_come_in_the_order_of_expected_gain(
    objective: Objective, first: str, last: str
) -> None:
    order = passes.by_expected_gain(levers.train_candidates(BASE), objective)
    assert (order[0].lever, order[-1].lever) == (first, last)
    names = [each.name for each in order]
    assert all(
        names.index(each.beside) < names.index(each.name) for each in order if each.beside in names
    )
