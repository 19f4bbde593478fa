"""The acceptance checks run for real on the CPU device, scaled down, and each judgement refuses
what it must refuse.

These tests judge no figure that other load on the machine could change: such checks may be broken,
but must have measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from acceptance import memory, throughput
from acceptance.outcome import Outcome

from tests.scene import ROOT, ran

pytestmark = pytest.mark.slow


Json: TypeAlias = dict[str, Any]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_acceptance.py"), *arguments]
    return ran(command)


@pytest.mark.torch
def test_each_check_measured_what_its_name_says() -> None:
    """Two checks are enough: the same program runs each."""
    done = run("--device", "cpu", "--quick", "--only", "cap", "recovery")
    assert done.returncode in {0, 1}, done.stderr[-4000:]
    (line,) = done.stdout.splitlines()
    answer: Json = json.loads(line)
    assert done.returncode == (0 if answer["ok"] else 1)
    checks = {check["check"]: check for check in answer["checks"]}
    assert list(checks) == ["cap", "recovery"]
    assert all(check["ok"] is (not check["broken"]) for check in checks.values())
    (cap,) = checks["cap"]["rows"]
    assert checks["cap"]["ok"]
    assert 0.99 <= cap["granted_to_cap"] <= 1.0 < cap["refused_at"] <= 1.01
    assert cap["refusal"] == "definite"
    recovery = checks["recovery"]["figures"]
    assert recovery["errors"] == 24
    assert 0 < recovery["recovery_p50_ms"] <= recovery["recovery_p99_ms"]
    assert recovery["descent_errors"] >= 1
    assert recovery["descent_to_size"] < recovery["descent_from_size"]


@pytest.mark.torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_what_to_type() -> None:
    done = run("--quick", "--only", "cap")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "sees no CUDA card" in done.stderr
    assert "--device cpu" in done.stderr


# --- the judgements
# ----------------------------------------------------------------------------------------------


WALL: Json = {
    "budget_mib": 1000, "granted_to_cap": 0.998, "refused_at": 1.002, "refusal": "definite",
    "one_block_of_1.01_refused": True, "process_to_budget": 0.998,
}  # fmt: skip
RECOVERED: Json = {
    "errors": 200, "errors_asked": 200, "recovery_p99_ms": 90.0, "unrecovered": [], "descent_from_size": 65536,
    "descent_errors": 2, "descent_ended": "ok RUNNING, 1 steps", "descent_kinds": ["definite"],
}  # fmt: skip
STAND: Json = {
    "slot": "w/0", "ended": "ok RUNNING: ", "budget_mib": 1100, "cap_mib": 1000, "held_to_cap": 0.96,
    "process_to_budget": 0.96, "steps_ok": 5, "steps_oom": 1, "unrecovered": 0, "tflops": 1.0,
}  # fmt: skip
SCENE: Json = {
    "what": "2 x 1.07 GiB", "policy": "adaptive", "workers": 2, "stands": [STAND, STAND], "scaled": None, "died": None,
}  # fmt: skip
RACE: Json = {"dtype": "fp16", "ratio_median": 0.97, "failures": 0}
FREE: Json = {"workers": 1, "duty_asked": None, "tflops": 2.0}
KEPT: Json = {
    "workers": 2, "duty_asked": 0.6, "duty_measured_least": 0.58, "duty_measured_most": 0.64, "tflops": 1.0,
}  # fmt: skip
ONE: Json = {"size": 64, "workers": 1, "tflops": 1.0, "failures": 0}

#: Each judges a good measurement with some figures changed.
JUDGED: dict[str, Callable[[Json], Outcome]] = {
    "cap": lambda found: memory.judge_cap([WALL, WALL | found]),
    "recovery": lambda found: memory.judge_recovery(RECOVERED | found),
    "side_by_side": lambda found: memory.judge_side_by_side(
        [SCENE, SCENE | {"stands": [STAND, STAND | found]}]
    ),
    "dead": lambda found: memory.judge_side_by_side([SCENE | found]),
    "totals": lambda found: throughput.judge_totals([ONE | found]),
    "speed": lambda found: throughput.judge_speed([RACE, RACE | found]),
    "duty": lambda found: throughput.judge_duty([FREE, KEPT | found]),
    "mps": lambda found: throughput.judge_mps(list(({1.0: 50e12, 0.5: 27e12} | found).items())),
}


@pytest.mark.parametrize(
    ("check", "found", "words"),
    [
        ("cap", {"granted_to_cap": 0.978}, "refused at 0.97"),
        ("cap", {"refused_at": 1.02}, "granted more than"),
        ("cap", {"refusal": "other"}, "classified as 'other'"),
        ("recovery", {"recovery_p99_ms": 110.0}, "up to 110.0 ms"),
        ("recovery", {"errors": 0, "recovery_p99_ms": None}, "0 of 200"),
        ("recovery", {"descent_errors": 0}, "was meant not to fit"),
        ("recovery", {"descent_kinds": ["definite", "probable"]}, "probable"),
        ("side_by_side", {"held_to_cap": 0.949}, "holds 0.949 of its cap"),
        ("side_by_side", {"steps_ok": 0}, "no good step"),
        ("dead", {"stands": [], "died": "the process of w/1 ended with -9"}, "ended with -9"),
        ("totals", {"tflops": 0.0}, "no work was done"),
        ("mps", {0.5: 50e12}, "did 1.0 of the work"),
        ("speed", {"ratio_median": 0.96}, "0.9600 of a bare loop"),
        ("duty", {"duty_measured_most": 0.7}, "up to 0.100 off"),
    ],
)
def test_a_judgement_holds_until_one_figure_breaks_it(check: str, found: Json, words: str) -> None:
    assert JUDGED[check]({}).ok
    outcome = JUDGED[check](found)
    assert outcome.ok is False
    assert words in " ".join(outcome.broken)
    assert outcome.as_json()["broken"]
