"""The benchmarks' verbs, with arguments so small that only their mechanics are tested: no figure is judged here."""

from __future__ import annotations

import importlib.util
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import psutil
import pytest
from benches import pressure_caps
from benches.heads import facts
from benches.outside import Ledger

from orchestrator.config.load import load_config
from orchestrator.record.store import STORE_NAME, RunStore, SlotRecord
from tests.bench_command import bench, typed
from tests.fork_server import ForkServer
from tests.scene import PATIENCE_S, ROOT
from workers.messages import WorkerState

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "verb",
    [
        "oom-storm",
        "overhead",
        "startup",
        "recovery",
        "soak",
        "kills",
        "head-kills",
        "rejoin",
        "cuts",
        "pressure",
        "train-pressure",
        "head",
    ],
)
def test_every_verb_explains_itself(verb: str) -> None:
    done = typed(verb, "--help")
    assert (done.returncode, "default" in done.stdout) == (0, True)


@pytest.mark.skipif(
    "BENCHES" not in os.environ, reason="a bench of half a minute; BENCHES=1 runs it, too"
)
def test_the_page_answers_beside_slow_and_malformed_requests() -> None:
    result = bench("web-flood")
    assert result["held_at_once_most"] == 2000
    assert result["answer_most_s"] <= 1.0


def test_a_wrong_number_is_refused_in_words() -> None:
    done = typed("oom-storm", "--errors", "0")
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr


def test_storm_in_a_plain_process() -> None:
    result = bench("oom-storm", "--bare", "--errors", "2000", "--budget-mib", "64")
    assert result["errors"] == 2000
    assert result["kinds"] == {"definite": 2000}
    assert result["blocks_granted"] > 2000, "most refusals come after something was granted"
    assert result["emergency_products"] == 2
    assert len(result["rss_bytes"]) == 10


def test_head() -> None:
    result = bench("head", "--workers", "4", "40", "--jump", "--warm-up-s", "5", "--window-s", "8")
    small, large = result["rows"]
    assert small.keys() >= {"workers", "store_bytes_per_s", "reports_per_s"}
    assert (small["workers"], large["workers"]) == (4, 40)
    for row in (small, large):
        assert 0.5 * row["workers"] < row["reports_per_s"] < 1.5 * row["workers"], (
            "each reports once a second"
        )
        assert row["core_pct"] > 0
        assert row["core_pct_with_table"] > 0
        assert row["store_bytes_per_s"] >= 0
        assert row["times_bare"] == pytest.approx(row["core_pct"] / row["bare_core_pct"])
    assert row["times_bare"] > 1
    assert large["core_pct"] < 50 * small["core_pct"], (
        "ten times the workers, and not a hundred times the work"
    )


def test_recovery() -> None:
    result = bench("recovery", "--errors", "8", "--budget-mib", "64", "--size", "256")
    assert result["errors"] == 8
    assert 0 < result["recovery_p50_s"] <= result["recovery_p99_s"]
    assert result["recovery_p50_in_steps"] == pytest.approx(
        result["recovery_p50_s"] / result["good_step_p50_s"]
    )


def test_watching() -> None:
    result = bench("watching", "--rounds", "1", "--seconds", "0.3", "--size", "256")
    (row,) = result["rounds"]
    assert row["look_us"] == result["look_us"] > 0
    assert row["checks"] > 0
    assert 0 < result["checks_share_median"] < 1


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    """A run of one slot, whose witness has noted 30 steps."""
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "0.steps").write_bytes(b"." * 30)
    one = load_config(str(ROOT / "cluster.yaml"), ["nodes.pc1.workers=1"])
    kept = RunStore(tmp_path / STORE_NAME)
    kept.begin(facts(one, 0.0, 60.0))
    return kept


@pytest.mark.parametrize(
    ("books", "broken"),
    [
        ([(30, 0, 0)], []),
        ([(20, 6, 4)], []),
        ([(31, 0, 0)], ["counted too often"]),
        ([(20, 6, 3)], ["sent before it was written down"]),
        ([(28, 0, 10), (27, 0, 10)], ["pc1/0: steps_ok went back from 28 to 27"]),
    ],
)
def test_the_ledger_is_held_against_the_witness_and_against_itself(
    store: RunStore, tmp_path: Path, books: list[tuple[int, int, int]], broken: list[str]
) -> None:
    """Each entry of the books: good steps, steps lost at most, steps at risk."""
    ledger = Ledger(tmp_path / "steps")
    for steps_ok, lost, at_risk in books:
        counters = {"steps_ok": steps_ok, "steps_lost_upper_bound": lost, "restarts": 0}
        slot = SlotRecord(
            slot="pc1/0",
            node="pc1",
            state=WorkerState.RUNNING.value,
            reason="",
            incarnation=0,
            next_sequence=7,
            steps_at_risk=at_risk,
            counters=counters,
        )
        store.slots([slot])
        store.commit()
        run = ledger.look(tmp_path)
        assert run is not None
        assert ledger.rows(run)[0]["witnessed"] == 30
    assert len(ledger.broken) == len(broken)
    assert all(words in sentence for words, sentence in zip(broken, ledger.broken, strict=True))


def test_the_witness_has_every_step_of_a_process_that_was_killed(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    code = """
import os, signal, torch, warnings
warnings.simplefilter("ignore")
from scripts.benches.witness import Witness
from workers.workloads.base import WorkloadContext
witness = Witness(WorkloadContext(device=torch.device("cpu"), dtype=torch.float32, seed=3))
witness.resize(2**20)
for _ in range(5):
    witness.step(64, 4)
os.kill(os.getpid(), signal.SIGKILL)
"""
    for lives in (1, 2):
        environment = {**os.environ, "ORCH_WITNESS_DIR": str(tmp_path)}
        assert (
            fork_server.run(code, cwd=ROOT, environment=environment).returncode == -signal.SIGKILL
        )
        assert (tmp_path / "3.steps").stat().st_size == 5 * lives


def test_two_games_take_most_of_the_memory_and_end() -> None:
    course = pressure_caps.game(Random(1), 60.0)  # noqa: S311 - repeatable is what is wanted
    assert course == sorted(course)
    assert course[0][0] == 0.0
    assert all(0 < share <= 1 for _, share in course)
    quiet, first, between, second = ((1, 14), (18, 24), (26, 36), (40, 47))
    for from_s, to_s in (quiet, between):
        assert pressure_caps.least_between(course, from_s, to_s) >= 0.96
    for (from_s, to_s), left in ((first, 0.22), (second, 0.30)):
        shares = [share for at_s, share in course if from_s <= at_s <= to_s]
        assert shares
        assert all(0.96 * left <= share <= left + 1e-9 for share in shares)


def test_the_cap_of_another_process_moves_and_its_hard_limit_stays() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            before = resource.prlimit(process.pid, resource.RLIMIT_DATA)
            cap = pressure_caps.KernelCap(process.pid, 2**20)
            cap.leave(2**24)
            assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (2**20 + 2**24, before[1])
            cap.close()
            assert resource.prlimit(process.pid, resource.RLIMIT_DATA) == (before[1], before[1])
        finally:
            process.kill()
    cap.leave(2**24)  # it has ended: whoever waits for its words will tell


PRESSURE = ("pressure", "--rounds", "1", "--memory-mib", "16")


@pytest.mark.torch
def test_pressure() -> None:
    result = bench(*PRESSURE, "--contestants", "ours", "ideal", "--seconds", "1")
    assert {(row["course"], row["contestant"]) for row in result["turns"]} == {
        (course, who) for course in ("game", "release") for who in ("ours", "ideal")
    }
    assert all(row["items"] > 0 and row["ended"] is None for row in result["turns"])
    assert result["target_met"] is None, "accelerate and toma were not there"


@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is not None, reason="accelerate is installed"
)
def test_pressure_says_what_to_install() -> None:
    done = typed(*PRESSURE, "--contestants", "accelerate")
    assert done.returncode == 2
    assert "pip install '.[bench]'" in done.stderr


@pytest.mark.torch
def test_an_interrupt_leaves_no_contestant_behind() -> None:
    command = [
        sys.executable,
        "scripts/bench.py",
        *PRESSURE,
        "--contestants",
        "ideal",
        "--seconds",
        "300",
    ]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            # The scout tells the throughput by size when it is done; then the first contestant
            # begins.
            assert process.stderr is not None
            assert any(" items: " in line for line in process.stderr)
            deadline_s = time.monotonic() + 60.0
            while not (children := psutil.Process(process.pid).children(recursive=True)):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
            assert psutil.wait_procs(children, timeout=PATIENCE_S)[1] == []
        finally:
            process.kill()
