"""The result as people and scripts get it: worst of each node, every reason, 80 columns, one exit code."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from orchestrator.config.load import config_from_data
from orchestrator.core.slot import HeadState
from orchestrator.lab.burn.phases import planned_runs
from orchestrator.lab.burn.results import BurnResult, JudgedRun, by_phase, result_dict, result_lines
from orchestrator.lab.burn.verdict import BurnPhase, JudgedWorker, judge
from orchestrator.record.summary import summary_text
from tests.burn.scene import ROW, SEEN, measured
from tests.factories import with_changes
from workers.messages import WorkerState

CONFIG = config_from_data(
    {"nodes": {"pc1": {"gpu": "rtx-3090", "workers": 1, "vram_per_worker_gib": 3.0}}}
)
TAKES = planned_runs(CONFIG, {"pc1": ("fp32", "fp16")}, 600.0, set(BurnPhase))


def worker(slot: str = "pc1/0", **changes: Any) -> JudgedWorker:
    row = {name: changes.pop(name) for name in list(changes) if name not in SEEN}
    return judge(
        measured(with_changes(ROW, slot=slot, node=slot.partition("/")[0], **row), **changes)
    )


def result(*workers: tuple[JudgedWorker, ...], **last: Any) -> BurnResult:
    """Return a burn-in of the first runs, each with its workers.

    `last` is what befell the last one.
    """
    taken = [
        JudgedRun(
            take=take, workers=judged, folder=Path("runs/20260101-000000-abcd"), elapsed_s=600.0
        )
        for take, judged in zip(TAKES, workers, strict=False)
    ]
    taken[-1] = replace(taken[-1], **last)
    return BurnResult(
        started_at="2026-01-01T00:00:00.000+00:00",
        mode="cluster",
        phases=by_phase(taken),
        interrupted=taken[-1].interrupted,
    )


def drawn(found: BurnResult, width: int = 80) -> list[str]:
    stream = io.StringIO()
    console = Console(
        file=stream, width=width, color_system=None, highlight=False, markup=False, emoji=False
    )
    for piece in result_lines(found, width):
        console.print(piece)
    return stream.getvalue().splitlines()


GOOD = (worker(), worker("pc2/0"))


def test_a_good_burn_in_passes_in_one_word_and_exits_with_0() -> None:
    found = result(GOOD, GOOD, GOOD, GOOD)
    lines = drawn(found)
    assert (found.outcome, found.exit_code, found.not_judged) == ("pass", 0, ())
    assert [line for line in lines if line.startswith("Phase")] == [
        "Phase 1, caps and precision, 20m: PASS",
        "Phase 2, heat, 10m: PASS",
        "Phase 3, full load, 10m: PASS",
    ]
    assert sum(line.startswith("pc1 fp") for line in lines) == 2
    assert lines[-1] == "PASS: all of it."
    assert not any("FAIL" in line for line in lines)


def test_a_hot_node_fails_its_phase_and_not_the_other_nodes() -> None:
    hot = worker(temperature_c=86.0)
    found = result(GOOD, GOOD, (hot, worker("pc1/1", temperature_c=85.0), worker("pc2/0")), GOOD)
    told = result_dict(found)
    assert (told["outcome"], told["exit_code"]) == ("fail", 1)
    assert [phase["verdict"] for phase in told["phases"]] == ["pass", "fail", "pass"]
    heat = told["phases"][1]
    assert heat["nodes"] == [{"node": "pc1", "verdict": "fail"}, {"node": "pc2", "verdict": "pass"}]
    assert [one["verdict"] for one in heat["workers"]] == ["fail", "fail", "pass"]
    assert heat["workers"][0]["temperature_max_c"] == 86.0
    assert heat["workers"][0]["hot_pct"] == 100.0
    lines = drawn(found)
    assert any(line.split()[:2] == ["pc1", "FAIL"] for line in lines)
    assert any(line.split()[:2] == ["pc2", "PASS"] for line in lines)
    reasons = [line for line in lines if line.startswith("  FAIL")]
    assert len(reasons) == 1, "what is true of two workers of a card is said once"
    assert reasons[0].startswith("  FAIL temperature, pc1/0: 86 C at most")
    assert "FAIL: phase 2" in lines


def test_a_node_shows_its_worst_worker() -> None:
    lines = drawn(
        result((worker(), worker("pc1/1", reserved_bytes=500, steps_error=2, verify_errors=1)))
    )
    (row,) = [line.split() for line in lines if line.startswith("pc1")]
    assert row[:7] == ["pc1", "fp32", "(fp16)", "FAIL", "50.0", "2", "1/20"], (
        "with the type that was really used"
    )


def test_what_nobody_could_judge_is_no_pass() -> None:
    blind = (worker(temperature_c=None, throttle_pct=None),)
    found = result(blind, blind, blind, blind)
    assert (found.outcome, found.exit_code) == ("not_judged", 1)
    lines = drawn(found)
    assert "Phase 2, heat, 10m: –" in lines  # noqa: RUF001 - what the table shows for unknown
    assert any("NOT JUDGED" in line and "phase 2" in line for line in lines)
    assert sum("temperature not judged: no sensor tells it" in line for line in lines) == 3
    assert result_dict(found)["phases"][1]["workers"][0]["temperature_verdict"] == "not_judged"


def test_a_pass_says_what_it_does_not_speak_of() -> None:
    slow = (worker(tflops=None),)
    found = result(slow, slow, slow, slow)
    assert result_dict(found)["not_judged"] == ["throughput"]
    assert drawn(found)[-1] == "PASS: nothing failed; not judged everywhere: throughput."
    assert found.exit_code == 0


def test_an_interrupted_one_has_its_own_exit_code_and_no_pass() -> None:
    found = result(GOOD, GOOD, GOOD, interrupted=True)
    assert (found.outcome, found.exit_code) == ("interrupted", 130)
    assert result_dict(found)["phases"][1]["verdict"] == "not_judged"
    assert result_dict(found)["phases"][1]["nodes"][0]["verdict"] == "not_judged"
    assert any(line.startswith("Interrupted") for line in drawn(found))


def test_a_run_that_an_error_ended_fails_its_phase() -> None:
    found = result(GOOD, GOOD, (), error="no Ray cluster runs on this machine", folder=None)
    assert (found.outcome, found.exit_code) == ("fail", 1)
    assert "  FAIL heat: no Ray cluster runs on this machine" in drawn(found)
    assert result_dict(found)["phases"][1]["runs"][0]["run_id"] is None


HOSTILE = (
    worker("pc1/0", reserved_bytes=10, temperature_c=99.0),
    worker(
        "a-node-with-a-name-that-is-much-too-long-for-any-table/0",
        state=WorkerState.PAUSED,
        tflops=1e6,
    ),
    judge(
        measured(
            replace(
                ROW,
                slot="pc3/0",
                node="pc3\x1b[2J",
                state=HeadState.LOST,
                reason="\x1b]0;x\x07 " * 50,
            )
        )
    ),
)


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_and_steers_no_terminal(width: int) -> None:
    lines = drawn(result(HOSTILE, HOSTILE, HOSTILE, HOSTILE), width)
    assert all(cell_len(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    titles = next(line for line in lines if line.startswith("node"))
    assert (
        " ".join(titles.split())
        == "node verdict VRAM % errors wrong max C hot % slow % TFLOP/s cv %"
    ), "none is cut"


def test_the_object_is_json_without_surprises() -> None:
    told = result_dict(result(GOOD, GOOD, HOSTILE))
    assert json.loads(summary_text(told)) == told
    assert told["schema"] == 1
    for phase in told["phases"]:
        for one in phase["workers"]:
            assert not any(isinstance(value, dict) for value in one.values())
            assert set(one) == set(told["phases"][0]["workers"][0])
