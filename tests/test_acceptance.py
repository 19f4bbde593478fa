"""The acceptance checks: made for real on the CPU device, scaled down, and each judgement shown what it must refuse.

No figure is judged here that another load on the machine could move: those checks may break, but
must have measured.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from acceptance import claims, suite

from tests.scene import ROOT, ran

pytestmark = pytest.mark.slow


Json: TypeAlias = dict[str, Any]

#: Which of them say the same however busy this machine is.
STEADY = {"cap", "side_by_side", "results", "a1_texts", "a7_budgets"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_acceptance.py"), *arguments]
    return ran(command)


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
        keys = {
            "check",
            "ok",
            "must_hold",
            "figures",
            "rows",
            "broken",
            "notes",
            "skipped",
            "took_s",
        }
        for name, check in checks.items():
            assert check.keys() == keys
            if name == "mps":
                assert (check["ok"], check["skipped"]) == (None, "no MPS here: the device is a CPU")
                continue
            if name in claims.CLAIMS and check["skipped"] is not None:
                assert check["skipped"].startswith("unproved: ")
            else:
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
        broken["results"] = [
            words for words in broken["results"] if not words.endswith("of the time")
        ]
        # On a CPU other threads of the process move what counts as held by a few percent; see the
        # test below.
        broken["side_by_side"] = [
            words for words in broken["side_by_side"] if "holds 0.9" not in words
        ]
        assert broken == {name: [] for name in STEADY}

    def test_each_check_measured_what_its_name_says(self, checks: dict[str, Json]) -> None:
        (cap,) = checks["cap"]["rows"]
        assert 0.99 <= cap["granted_to_cap"] <= 1.0 < cap["refused_at"] <= 1.01
        assert cap["refusal"] == "definite"
        recovery = checks["recovery"]["figures"]
        assert recovery["errors"] == 24
        assert 0 < recovery["recovery_p50_ms"] <= recovery["recovery_p99_ms"]
        assert recovery["descent_errors"] >= 1
        assert recovery["descent_to_size"] < recovery["descent_from_size"]
        beside = checks["side_by_side"]["rows"]
        assert [row["workers"] for row in beside] == [3, 7], "both of the guides' pairs"
        assert all(row["held_to_cap_least"] >= 0.9 and row["unrecovered"] == 0 for row in beside)
        totals = checks["totals"]["rows"]
        assert [(row["size"], row["workers"]) for row in totals] == [
            (n, k) for n in (512, 64) for k in (1, 3)
        ]
        assert [row["of_one_pct"] for row in totals if row["workers"] == 1] == pytest.approx(
            [100.0, 100.0]
        )
        speed = checks["speed"]["rows"]
        assert [row["dtype"] for row in speed] == ["fp32", "bf16"]
        assert all(row["product_tflops"] > 0 and row["bare_tflops"] > 0 for row in speed)
        assert all(row["peak_pct"] is None for row in speed), "a processor has no rating"
        alone = [
            row
            for row in checks["duty"]["rows"]
            if row["workers"] == 1 and row["duty_asked"] is not None
        ]
        assert [row["duty_asked"] for row in alone] == [0.3, 0.9]
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
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
def test_without_a_card_it_says_what_to_type() -> None:
    done = run("--quick", "--only", "cap")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "sees no CUDA card" in done.stderr
    assert "--device cpu" in done.stderr


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    script = (
        "import importlib.util as u, runpy, sys; f = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'pynvml' else f(name, *rest); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", script, str(ROOT / "scripts" / "gpu_acceptance.py")]
    done = ran(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install nvidia-ml-py" in done.stderr
