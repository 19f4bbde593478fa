"""Hostile configurations by the thousand: refused in words, or a plan that adds up; never a traceback, never a hang.

The inputs are those of `scripts/bench.py fuzz`, of which this runs a fixed part. What was once found is kept as a file
in `fuzz_seeds`: `NAME.yaml`, and `NAME.set` with an override on each line.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NoReturn

import pytest
from benches import fuzz
from benches.hostile import FAMILIES, SHIPPED, HostileInput, make

from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, NoClusterError, Problem, UsageError
from tests.scene import ROOT, orchestrator, python

pytestmark = pytest.mark.slow


SEEDS = (1, 2, 3)
INPUTS_PER_SEED = 300

#: What was found, and the words that refuse it now.
FOUND = {
    "alias-with-a-long-name": ":1: is not YAML: found undefined alias 'nnnn",
    "choice-of-a-4000-digit-number": ":2: memory.policy: a number of more than 18 digits is not one of the choices",
    "escape-far-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "escape-just-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "fraction-that-leaves-no-byte": "is 0.00 GiB; valid: a larger memory_fraction",
    "head-among-long-names": ":1: cluster.head: there is no node 'nobody'",
    "more-problems-than-a-screen-holds": ": has 203 more problems, not shown",
    "more-workers-than-a-head-can-ask": "1228800 workers on 1200 nodes are too many for one head; valid: at most 10000",
    "number-as-a-long-key": ":1: has the key 1111",
    "override-below-a-long-key": "… holds a single value or a list, no keys",
    "override-of-a-missing-node": "…; valid: pc1",
    "override-with-a-4000-digit-choice": "nodes.pc1.dtype: a number of more than 18 digits is not one of the choices",
    "tag-with-a-long-name": ":1: run: has the tag !tttt",
    "yaml-version-of-5000-digits": ":1: is not YAML: an escape or a version number in it is too large",
}
FOLDER = Path(__file__).parent / "fuzz_seeds"

GOOD = HostileInput(family="set", content=SHIPPED, overrides=())


def kept(name: str) -> HostileInput:
    path, overrides = FOLDER / f"{name}.yaml", FOLDER / f"{name}.set"
    texts = tuple(overrides.read_text(encoding="utf-8").splitlines()) if overrides.exists() else ()
    return HostileInput(family="kept", content=path.read_bytes(), overrides=texts)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_input_is_a_refusal_in_words_or_a_plan_that_adds_up(seed: int) -> None:
    tally = fuzz.judge_range(seed, range(INPUTS_PER_SEED))
    assert tally.findings == []
    assert tally.plans.total() + tally.refusals.total() == INPUTS_PER_SEED
    # Where all is refused (or nothing), the generator and not the product is what is tested.
    for family in FAMILIES:
        assert tally.plans[family] >= 3
        assert tally.refusals[family] >= 30


def test_every_kept_file_is_tried() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_refused_in_words(name: str, tmp_path: Path) -> None:
    hostile = kept(name)
    assert fuzz.judge(hostile, tmp_path) == "refusal"
    with pytest.raises(ConfigError) as caught:
        load_config(str(FOLDER / f"{name}.yaml"), hostile.overrides)
    assert FOUND[name] in str(caught.value)


def test_an_input_is_found_again_by_its_seed_and_number() -> None:
    inputs = [make(7, number) for number in range(60)]
    assert inputs == [make(7, number) for number in range(60)]
    assert [one.family for one in inputs[:3]] == list(FAMILIES)
    assert all(one != make(8, number) for number, one in enumerate(inputs))


def test_the_judge_lets_the_shipped_configuration_pass(tmp_path: Path) -> None:
    assert fuzz.judge(GOOD, tmp_path) == "scaled"
    assert fuzz.judge(HostileInput(family="set", content=SHIPPED, overrides=("nonsense",)), tmp_path) == "refusal"


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (RecursionError("too deep"), "raised RecursionError: too deep"),
        (MemoryError(), "raised MemoryError"),
        (KeyboardInterrupt(), "raised KeyboardInterrupt"),
        (UsageError(""), "a refusal without words"),
        (UsageError("\x1b[2J"), "a refusal with control characters"),
        (UsageError("right to left \u202e"), "a refusal with control characters"),
        (UsageError("x" * 9000), "a line of 9000 characters"),
        (ConfigError([Problem("f", 1, None, "x", None)] * 500), "a refusal of 500 lines"),
        (NoClusterError("there is none"), "exit code 3"),
        (None, "took more than 0.2 s"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_the_judge_sees_an_answer_that_is_none(
    error: BaseException | None, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> NoReturn:
        if error is None:
            time.sleep(60)
        raise error or AssertionError

    if error is None:
        monkeypatch.setattr(fuzz, "TIME_LIMIT_S", 0.2)
    monkeypatch.setattr(fuzz, "load_config", broken)
    assert fuzz.judge(GOOD, tmp_path).startswith(verdict)


@pytest.mark.parametrize(
    ("key", "value", "verdict"),
    [
        ("slot", "pc1/../../x", "the slots are not node/index"),
        ("cpus", 9, "pc1: CPUs"),
        ("card_allowed_bytes", 1, "pc1: a card is overbooked"),
        ("card_budget_bytes", 1, "pc1: bytes of a card"),
        ("gpu_fraction", 0.5, "pc1: fractions of"),
        ("card", 1, "pc1: workers on a card"),
        ("duty", 2, "pc1: duty 2"),
    ],
)
def test_the_judge_sees_a_plan_that_does_not_add_up(
    key: str, value: object, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fuzz.plan_json

    def forged(config: Config) -> str:
        plan = json.loads(right(config))
        where = plan["nodes"][0] if key in plan["nodes"][0] else plan["nodes"][0]["workers"][0]
        where[key] = value
        return json.dumps(plan)

    monkeypatch.setattr(fuzz, "plan_json", forged)
    assert fuzz.judge(GOOD, tmp_path).startswith(verdict)


def chosen() -> list[HostileInput]:
    """Return inputs that a command line can carry (no NUL, no lone surrogate), of each family and of what was found."""
    numbered = [make(11, number) for number in range(200)]
    fit = [one for one in numbered if all("\0" not in text and text.isascii() for text in one.overrides)]
    short = [one for one in fit if sum(map(len, one.overrides)) < 50_000]
    return [
        GOOD,
        *(one for family in FAMILIES for one in [one for one in short if one.family == family][:4]),
        *(kept(name) for name in ("head-among-long-names", "override-of-a-missing-node")),
    ]


@pytest.mark.parametrize("index", range(3))
def test_the_command_line_answers_as_its_parts_do(index: int, tmp_path: Path) -> None:
    """A third of the chosen inputs at a time, so that they may run side by side."""
    inputs = chosen()
    assert len(inputs) == 15
    for hostile in inputs[index::3]:
        expected = 2 if fuzz.judge(hostile, tmp_path) == "refusal" else 0
        file = tmp_path / "cluster.yaml"
        file.write_bytes(hostile.content)
        sets = [word for text in hostile.overrides for word in ("--set", text)]
        done = orchestrator("plan", "--config", str(file), *sets, cwd=tmp_path, PYTHONPATH=str(ROOT))
        assert done.returncode == expected, (hostile, done.stderr[-2000:])
        assert "Traceback" not in done.stderr
        assert (bool(done.stdout), bool(done.stderr)) == (expected == 0, expected == 2)
        assert [path.name for path in tmp_path.iterdir()] == ["cluster.yaml"], "an input made a file"


def test_the_verb_counts_every_input_once() -> None:
    done = python("scripts/bench.py", "fuzz", "--inputs", "90", "--seed", "5", "--processes", "1", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["bench"], result["inputs"], result["findings"], result["broken"]) == ("fuzz", 90, 0, [])
    assert result["plans"] + result["refusals"] == 90
    assert [row["plans"] + row["refusals"] for row in result["families"]] == [30, 30, 30]
    assert "structure" in done.stderr, "people get a table"
