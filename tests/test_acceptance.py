"""The acceptance checks: made for real on the CPU device, scaled down, and each judgement shown what it must refuse.

No figure is judged here that another load on the machine could move: those checks may break, but must have measured.
"""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

from acceptance import (  # noqa: E402 - the scripts are in no package
    caps,
    mps_shares,
    page,
    recovery,
    results,
    sampling,
    shares,
    side_by_side,
    speed,
    suite,
    totals,
)
from acceptance.outcome import Outcome  # noqa: E402

from workers.readings import SensorReading  # noqa: E402

Json: TypeAlias = dict[str, Any]

#: Which of them say the same however busy this machine is.
STEADY = {"cap", "side_by_side", "results"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_acceptance.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, str, str]:
    """All checks once: the object, what people see, and the results page."""
    markdown = tmp_path_factory.mktemp("acceptance") / "page.md"
    done = run("--device", "cpu", "--quick", "--markdown", str(markdown))
    assert done.returncode in {0, 1}, done.stderr[-4000:]
    (line,) = done.stdout.splitlines()
    answer: Json = json.loads(line)
    assert done.returncode == (0 if answer["ok"] else 1)
    return answer, done.stderr, markdown.read_text(encoding="utf-8")


@pytest.mark.torch
class TestOnTheProcessor:
    @pytest.fixture
    @staticmethod
    def checks(made: tuple[Json, str, str]) -> dict[str, Json]:
        return {check["check"]: check for check in made[0]["checks"]}

    def test_it_says_where_and_with_what(self, made: tuple[Json, str, str]) -> None:
        answer = made[0]
        assert answer["schema"] == 1
        assert (answer["acceptance"], answer["quick"]) == ("cpu", True)
        for key in ("card", "torch", "python", "system", "date", "command"):
            assert answer[key], key
        assert "gpu_acceptance.py --device cpu --quick" in answer["command"]
        assert answer["driver"] is None
        assert answer["took_s"] > 0

    def test_every_check_was_made_and_has_measured(self, checks: dict[str, Json]) -> None:
        assert list(checks) == list(suite.CHECKS)
        for name, check in checks.items():
            assert check.keys() == {
                "check", "ok", "must_hold", "figures", "rows", "broken", "notes", "skipped", "took_s",
            }  # fmt: skip
            if name == "mps":
                assert (check["ok"], check["skipped"]) == (None, "no MPS here: the device is a CPU")
                continue
            assert check["ok"] is (not check["broken"]), name
            numbers = [
                value
                for values in (check["figures"], *check["rows"])
                for value in values.values()
                if isinstance(value, (int, float)) and not isinstance(value, bool)
            ]
            assert numbers, f"{name} has measured nothing: {check['broken']}"
            assert all(math.isfinite(number) for number in numbers)

    def test_what_the_machines_load_cannot_move_holds(self, checks: dict[str, Json]) -> None:
        broken = {name: checks[name]["broken"] for name in STEADY}
        broken["results"] = [words for words in broken["results"] if not words.endswith("of the time")]
        # On a CPU other threads of the process move what counts as held by a few percent; see the test below.
        broken["side_by_side"] = [words for words in broken["side_by_side"] if "holds 0.9" not in words]
        assert broken == {name: [] for name in STEADY}

    def test_the_cap_was_met_from_both_sides(self, checks: dict[str, Json]) -> None:
        (row,) = checks["cap"]["rows"]
        assert 0.99 <= row["granted_to_cap"] <= 1.0 < row["refused_at"] <= 1.01
        assert row["refusal"] == "definite"

    def test_every_error_was_provoked_and_survived(self, checks: dict[str, Json]) -> None:
        figures = checks["recovery"]["figures"]
        assert figures["errors"] == 24
        assert 0 < figures["recovery_p50_ms"] <= figures["recovery_p99_ms"]
        assert figures["descent_errors"] >= 1
        assert figures["descent_to_size"] < figures["descent_from_size"]

    def test_both_of_the_guides_pairs_stood_side_by_side(self, checks: dict[str, Json]) -> None:
        rows = checks["side_by_side"]["rows"]
        assert [row["workers"] for row in rows] == [3, 7]
        assert all(row["held_to_cap_least"] >= 0.9 and row["unrecovered"] == 0 for row in rows)

    def test_totals_for_each_number_of_workers_and_both_sizes(self, checks: dict[str, Json]) -> None:
        rows = checks["totals"]["rows"]
        assert [(row["size"], row["workers"]) for row in rows] == [(n, k) for n in (512, 64) for k in (1, 2, 3, 7)]
        assert [row["of_one_pct"] for row in rows if row["workers"] == 1] == pytest.approx([100.0, 100.0])

    def test_each_type_raced_a_bare_loop(self, checks: dict[str, Json]) -> None:
        rows = checks["speed"]["rows"]
        assert [row["dtype"] for row in rows] == ["fp32", "bf16"]
        assert all(row["product_tflops"] > 0 and row["bare_tflops"] > 0 for row in rows)
        assert all(row["peak_pct"] is None for row in rows), "nobody rates a processor"

    def test_duties_follow_what_was_asked(self, checks: dict[str, Json]) -> None:
        alone = [row for row in checks["duty"]["rows"] if row["workers"] == 1 and row["duty_asked"] is not None]
        assert [row["duty_asked"] for row in alone] == [0.3, 0.6, 0.9]
        measured = [row["duty_measured_median"] for row in alone]
        assert measured == sorted(measured)

    def test_people_get_tables_and_the_page_has_them_all(self, made: tuple[Json, str, str]) -> None:
        answer, told, markdown = made
        for name in suite.CHECKS:
            assert f"\n{name}: " in told
            assert f"## {name}: " in markdown
        assert answer["card"] in markdown.splitlines()[0]
        assert f"`{answer['command']}`" in markdown


@pytest.mark.torch
def test_without_a_card_it_says_what_to_type() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a card here")
    done = run("--quick", "--only", "cap")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "sees no CUDA card" in done.stderr
    assert "--device cpu" in done.stderr


@pytest.mark.torch
def test_a_check_that_is_not_there_is_refused_with_those_that_are() -> None:
    done = run("--device", "cpu", "--only", "heat")
    assert done.returncode == 2
    assert "side_by_side" in done.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    script = (
        "import importlib.util as u, runpy, sys; f = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'pynvml' else f(name, *rest); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(ROOT / "scripts" / "gpu_acceptance.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "pip install nvidia-ml-py" in done.stderr


# --- the judgements ----------------------------------------------------------------------------------------------


WALL = caps.Wall(
    budget_bytes=1000,
    cap_bytes=900,
    context_bytes=100,
    granted_bytes=898,
    refused_bytes=902,
    refusal="definite",
    too_large_refused=True,
    process_used_bytes=998,
    card_grown_bytes=1200,
)


@pytest.mark.parametrize(
    ("wall", "words"),
    [
        (replace(WALL, granted_bytes=880), "refused at 0.97"),
        (replace(WALL, refused_bytes=920), "granted more than"),
        (replace(WALL, too_large_refused=False), "granted more than"),
        (replace(WALL, refusal="other"), "classified as 'other'"),
        (replace(WALL, process_used_bytes=1020), "holds 1.0200 of its budget"),
        (replace(WALL, process_used_bytes=980), "holds 0.9800 of its budget"),
    ],
)
def test_cap(wall: caps.Wall, words: str) -> None:
    assert caps.judge([WALL]).ok
    refuses(caps.judge([WALL, wall]), words)


def test_a_driver_that_does_not_tell_is_said_so() -> None:
    outcome = caps.judge([replace(WALL, process_used_bytes=None)])
    assert outcome.ok
    assert "does not tell" in outcome.notes[0]


DESCENT = recovery.Descent(
    asked_size=65536,
    ended_size=11014,
    state="RUNNING",
    verdict="ok",
    steps_ok=1,
    recoveries_s=(0.01, 0.02),
    kinds=("definite", "definite"),
)
RECOVERED = recovery.Recovered(
    figures={"errors": 200, "recovery_p50_s": 0.01, "recovery_p99_s": 0.09},
    asked_errors=200,
    unrecovered=(),
    descent=DESCENT,
)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(RECOVERED, figures={**RECOVERED.figures, "recovery_p99_s": 0.11}), "up to 110.0 ms"),
        (replace(RECOVERED, figures={**RECOVERED.figures, "errors": 199}), "199 of 200"),
        (replace(RECOVERED, figures={"errors": 0}), "0 of 200"),
        (replace(RECOVERED, unrecovered=["slice 3 ended poisoned"]), "slice 3"),
        (replace(RECOVERED, descent=replace(DESCENT, recoveries_s=(), kinds=())), "was meant not to fit"),
        (replace(RECOVERED, descent=replace(DESCENT, state="EMERGENCY", steps_ok=0)), "ended ok EMERGENCY"),
        (replace(RECOVERED, descent=replace(DESCENT, kinds=("definite", "probable"))), "probable"),
    ],
)
def test_recovery(found: recovery.Recovered, words: str) -> None:
    assert recovery.judge(RECOVERED).ok
    refuses(recovery.judge(found), words)


STAND = side_by_side.Stand(
    slot="w/0",
    verdict="ok",
    state="RUNNING",
    reason="",
    cap_bytes=1000,
    reserved_bytes=960,
    budget_bytes=1100,
    process_used_bytes=1060,
    steps_ok=5,
    steps_oom=1,
    steps_error=0,
    flop_per_s=1e12,
)
SCENE = side_by_side.Scene(
    policy="adaptive", workers=2, asked_budget_bytes=1100, stands=(STAND, STAND), scaled=None, died=None
)


@pytest.mark.parametrize(
    ("stand", "words"),
    [
        (replace(STAND, reserved_bytes=949), "holds 0.949 of its cap"),
        (replace(STAND, steps_error=1), "1 failures left standing"),
        (replace(STAND, steps_ok=0), "no good step"),
        (replace(STAND, state="EMERGENCY", reason="nothing fits"), "ended ok EMERGENCY: nothing fits"),
        (replace(STAND, verdict="poisoned"), "ended poisoned"),
        (replace(STAND, cap_bytes=0), "holds 0.000"),
    ],
)
def test_side_by_side(stand: side_by_side.Stand, words: str) -> None:
    assert side_by_side.judge([SCENE]).ok
    refuses(side_by_side.judge([SCENE, replace(SCENE, stands=(STAND, stand))]), words)


def test_side_by_side_tells_of_the_dead_and_of_what_was_scaled() -> None:
    refuses(side_by_side.judge([replace(SCENE, stands=(), died="the process of w/1 ended with -9")]), "ended with -9")
    outcome = side_by_side.judge([replace(SCENE, scaled="scaled to 2 x 0.50 GiB")])
    assert outcome.ok
    assert outcome.notes == ["scaled to 2 x 0.50 GiB"]


RACE = speed.Race(
    dtype="fp16",
    size=8192,
    product_flop_per_s=(98e12, 50e12, 97e12),
    bare_flop_per_s=(100e12, 100e12, 100e12),
    failures=0,
    rated_tflops=200.0,
    peak_at_clock_tflops=100.0,
    sm_clock_mhz=900.0,
    temperature_most_c=70.0,
    power_most_w=300.0,
    alarms_pct=0.0,
)


def test_speed() -> None:
    good = speed.judge([RACE])
    assert good.ok, "the middle round is at 0.97"
    assert (good.rows[0]["rated_pct"], good.rows[0]["peak_pct"]) == (pytest.approx(48.5), pytest.approx(97.0))
    refuses(speed.judge([RACE, replace(RACE, product_flop_per_s=(96e12,) * 3)]), "0.9600 of a bare loop")
    refuses(speed.judge([replace(RACE, failures=2)]), "2 steps failed")


def test_totals_publish_what_is_true_and_judge_failures_alone() -> None:
    found = [totals.Total(size=64, workers=k, flop_per_s=f, failures=0) for k, f in ((1, 1e12), (2, 1.1e12), (3, 3e12))]
    outcome = totals.judge(found)
    assert outcome.ok
    assert [row["of_one_pct"] for row in outcome.rows] == pytest.approx([100.0, 110.0, 300.0])
    assert outcome.notes == ["2 workers of size 64 do 110 % of one's work, not the guides' 180 %"]
    refuses(totals.judge([*found, replace(found[0], failures=1)]), "1 steps failed")
    refuses(totals.judge([replace(found[0], flop_per_s=0.0)]), "no work was done")


def test_duty() -> None:
    free = shares.Share(workers=1, asked=None, measured=(0.99,), flop_per_s=2e12)
    kept = shares.Share(workers=2, asked=0.6, measured=(0.58, 0.64), flop_per_s=1e12)
    assert shares.judge([free, kept]).ok
    assert shares.judge([free, kept]).rows[1]["of_unlimited_pct"] == pytest.approx(50.0)
    refuses(shares.judge([free, replace(kept, measured=(0.6, 0.7))]), "up to 0.100 off")


def test_mps() -> None:
    whole, half = mps_shares.MpsShare(asked=1.0, flop_per_s=50e12), mps_shares.MpsShare(asked=0.5, flop_per_s=27e12)
    assert mps_shares.judge([whole, half]).ok
    refuses(mps_shares.judge([whole, replace(half, flop_per_s=50e12)]), "did 1.0 of the work")
    refuses(mps_shares.judge([half]), "did None of the work")


LOOKS = sampling.Looks(when="busy", costs_s=(0.004, 0.006), first_s=0.1, last=SensorReading(temperature_c=50.0))


def test_sampler() -> None:
    good = sampling.judge([LOOKS])
    assert good.ok
    assert good.figures["reading_temperature_c"] == 50.0
    refuses(sampling.judge([LOOKS, replace(LOOKS, costs_s=(0.01, 0.02))]), "1.50%")
    refuses(sampling.judge([replace(LOOKS, last=SensorReading(lost=True))]), "the card is lost")


COST = results.Cost(size=64, worked_s=9.9, checked_s=0.1, checks=10, longest_s=0.01, product_s=0.005, refused=0)
VERIFIED = results.Verified(
    dtype="bf16",
    products=100,
    false_alarms=0,
    largest_ratio=0.6,
    flips=32,
    flips_large=20,
    found_large=20,
    found_by_freivalds=22,
    found_by_repeat=32,
    cost=COST,
)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (replace(VERIFIED, false_alarms=1), "1 right products were refused"),
        (replace(VERIFIED, cost=replace(COST, refused=2)), "2 right products were refused"),
        (replace(VERIFIED, found_large=19), "1 large flips were missed"),
        (replace(VERIFIED, found_by_repeat=31), "the repeat missed 1"),
        (replace(VERIFIED, cost=replace(COST, checked_s=0.5)), "of the time"),
    ],
)
def test_results(found: results.Verified, words: str) -> None:
    assert results.judge([VERIFIED]).ok
    refuses(results.judge([VERIFIED, found]), words)


def test_numbers_that_json_does_not_have_are_unknown() -> None:
    outcome = Outcome(check="x", must_hold="y", figures={"a": math.inf, "b": [math.nan, 1.5]})
    assert outcome.as_json()["figures"] == {"a": None, "b": [None, 1.5]}


def test_a_page_says_what_is_broken_and_what_was_skipped() -> None:
    outcomes = [
        Outcome(check="cap", must_hold="so", broken=["too much"]),
        Outcome(check="mps", must_hold="so", skipped="no MPS | here"),
        Outcome(check="duty", must_hold="so", rows=[{"a|b": None}]),
    ]
    keys = (
        "card", "total_bytes", "free_bytes", "compute_capability", "multiprocessors", "driver", "context_bytes",
        "context_source", "torch", "cuda", "python", "system", "cores", "command",
    )  # fmt: skip
    text = page.page({**dict.fromkeys(keys, "k"), "date": "2026-11-20 12:00 UTC"}, outcomes)
    assert "1 of 3 checks hold; broken: cap; skipped: mps." in text
    assert "- too much" in text
    assert "| cap | BROKEN | so |" in text
    assert "| a/b |" in text, "a bar would end the cell"


def refuses(outcome: Outcome, words: str) -> None:
    assert outcome.ok is False
    assert words in " ".join(outcome.broken)
    assert outcome.as_json()["broken"]


# --- the MPS daemon ----------------------------------------------------------------------------------------------

#: As the real one does: leaves a process that keeps its standard output, and finds it again by the folder.
CONTROL = """#!/bin/sh
case "$1" in
  -d) sleep 300 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/pid" ;;
  *) read word rest
     case "$word" in
       get_server_list) cat "$CUDA_MPS_PIPE_DIRECTORY/pid" ;;
       quit) kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")" ;;
     esac ;;
esac
"""


def program(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-cuda-mps-control"
    path.write_text(text, encoding="ascii")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def ended(process: psutil.Process) -> bool:
    """Wait for a process that is nobody's child here; where nobody reaps it, a zombie is what is left."""
    until_s = time.monotonic() + 30.0
    while time.monotonic() < until_s:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_a_daemon_is_started_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, CONTROL, monkeypatch)
    with mps_shares.mps_daemon() as (environment, servers):
        (pid,) = servers()
        daemon = psutil.Process(pid)
        assert daemon.is_running()
        assert Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    assert ended(daemon)
    assert not Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).exists()


def test_a_daemon_that_does_not_start_is_told_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "#!/bin/sh\necho Cannot find MPS control daemon process\nexit 3\n", monkeypatch)
    with pytest.raises(mps_shares.NoMpsError, match="ended with 3: Cannot find"), mps_shares.mps_daemon():
        pytest.fail("it did not start")


def test_no_daemon_no_mps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(mps_shares.NoMpsError, match="not on PATH"), mps_shares.mps_daemon():
        pytest.fail("there is none")
