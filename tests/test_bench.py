"""The benchmarks' verbs, with arguments so small that only their mechanics are tested: no figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "scripts/bench.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.strip(), "people get a table"
    (line,) = done.stdout.splitlines()
    result: dict[str, Any] = json.loads(line)
    assert result["schema"] == 1
    assert result["bench"] == arguments[0]
    assert result["broken"] == []
    return result


@pytest.mark.parametrize("verb", ["oom-storm", "overhead", "startup", "recovery"])
def test_every_verb_explains_itself(verb: str) -> None:
    command = [sys.executable, "scripts/bench.py", verb, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert "default" in done.stdout


def test_a_wrong_number_is_refused_in_words() -> None:
    command = [sys.executable, "scripts/bench.py", "oom-storm", "--errors", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "must be at least 1" in done.stderr


def test_storm_in_a_plain_process() -> None:
    result = bench("oom-storm", "--bare", "--errors", "2000", "--budget-mib", "64")
    assert result["errors"] == 2000
    assert result["kinds"] == {"definite": 2000}
    assert result["blocks_granted"] > 2000, "most refusals come after something was granted"
    assert result["emergency_products"] == 2
    assert len(result["rss_bytes"]) == 10


def test_recovery() -> None:
    result = bench("recovery", "--errors", "8", "--budget-mib", "64", "--size", "256")
    assert result["errors"] == 8
    assert 0 < result["recovery_p50_s"] <= result["recovery_p99_s"]
    assert result["recovery_p50_in_steps"] == pytest.approx(result["recovery_p50_s"] / result["good_step_p50_s"])


@pytest.mark.ray
def test_storm_in_an_actor() -> None:
    result = bench("oom-storm", "--errors", "200", "--budget-mib", "64")
    assert result["where"] == "Ray actor"
    assert result["kinds"] == {"definite": 200}


@pytest.mark.ray
def test_overhead() -> None:
    result = bench("overhead", "--rounds", "1", "--seconds", "1.5", "--size", "512")
    (turn,) = result["rounds"]
    assert turn["ratio"] == pytest.approx(turn["product_gflops"] / turn["bare_gflops"])
    assert 0 < turn["in_steps"] <= turn["in_slices"] <= 1.05


@pytest.mark.ray
def test_startup() -> None:
    small = ["--set", "nodes.pc1.workers=1", "--set", "nodes.pc2.workers=1"]
    result = bench("startup", "--rounds", "1", *small)
    assert result["workers"] == 2
    assert result["rounds"][0]["product_s"] > 0
    assert result["rounds"][0]["bare_s"] > 0
