"""Figures that a redesign must not make worse, one for each gate; a higher figure is better.

    python scripts/bench.py gates                              # fills docs/results/baseline.json
    python scripts/bench.py gates --against ../parent --rounds 4

A turn is one bench in its own process, in this checkout or in the one it is compared with, in the
order A B B A. Each turn is stored with its commit when it ends, and a second call measures only the
missing turns. A figure is valid while the files that its gate names are unchanged, so turns of
another commit with the same files count.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benches.common import ROOT, Result, progress
from workers.files import replace_whole

#: A redesign keeps at least this share of each figure.
LEAST_RATIO = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One bench, the figure read from its JSON, and the files that the figure depends on."""

    words: tuple[str, ...]
    """The command line after `bench.py`."""
    figure: Callable[[Mapping[str, Any]], float | None]
    files: tuple[str, ...]


def _policy(told: Mapping[str, Any]) -> float:
    names = ("precious", "saturating", "precious_shapes", "saturating_shapes")
    return statistics.fmean(row["mean"] for name in names for row in told[name])


def _pressure(told: Mapping[str, Any]) -> float:
    return statistics.fmean(
        row["to_ideal"] for row in told["totals"] if row["contestant"] == "ours"
    )


def _kills(told: Mapping[str, Any]) -> float | None:
    ratio = told.get("ratio_of_medians")
    return None if ratio is None else 1 / float(ratio)


def _train_kills(told: Mapping[str, Any]) -> float | None:
    equal = told["share_of_equal_weights"]
    return None if equal is None else float(equal)


def _own(told: Mapping[str, Any]) -> float:
    return float(told["spare"][0]["ratio"])


def _jobs(told: Mapping[str, Any]) -> float:
    useful = {row["queue"]: float(row["useful_samples_per_s"]) for row in told["rows"]}
    return useful["ours"] / useful["loop"]


GATES: Mapping[str, Gate] = {
    "policy": Gate(
        words=("policy", "--seeds", "1", "--rules", "adaptive"),
        figure=_policy,
        files=("workers/policy", "scripts/benches/simulator.py", "scripts/benches/policy.py"),
    ),
    "pressure": Gate(
        words=("pressure", "--contestants", "ours", "ideal", "--rounds", "1", "--seconds", "20"),
        figure=_pressure,
        files=("workers/policy", "workers/engine", "workers/devices", "workers/oom"),
    ),
    "kills": Gate(
        words=("kills", "--kills", "10"),
        figure=_kills,
        files=("orchestrator/core", "orchestrator/run", "orchestrator/cluster", "workers/engine"),
    ),
    "train-kills": Gate(
        words=("matrix", "--jobs", "--kills", "8", "--steps", "1500", "--out", ""),
        figure=_train_kills,
        files=("orchestrator/run", "orchestrator/cluster", "workers/training", "workers/engine"),
    ),
    "own": Gate(
        words=("own", "--models", "tiny", "--rounds", "6", "--seconds", "3"),
        figure=_own,
        files=("workers/training", "workers/hf", "workers/engine", "workers/devices"),
    ),
    "jobs": Gate(
        words=("jobs", "--contestants", "ours", "loop", "--jobs", "4", "--steps", "60"),
        figure=_jobs,
        files=("orchestrator/jobs", "orchestrator/run", "orchestrator/cluster", "workers/training"),
    ),
}


def run(only: Sequence[str], against: str, rounds: int, out: str) -> Result:
    """Measure the turns that are missing in `out`; `against` is another checkout, or empty."""
    sides = {"this": ROOT} | ({"parent": Path(against).resolve()} if against else {})
    book = Path(out) if Path(out).is_absolute() else ROOT / out
    kept: dict[str, Any] = json.loads(book.read_text(encoding="utf-8")) if book.exists() else {}
    kept |= {"schema": 1, "machine": _machine()}
    changed = [str(tree) for tree in sides.values() if _git(tree, "status", "--porcelain", "-uno")]
    if changed:
        return Result(
            bench="gates",
            figures={},
            broken=[f"{each}: commit its changes first" for each in changed],
        )
    broken: list[str] = []
    for name in only:
        turns = kept.setdefault("gates", {}).setdefault(name, [])
        for side in _order(list(sides), rounds):
            tree = _files(sides[side], GATES[name].files)
            wanted = _order(list(sides), rounds).count(side)
            if sum(turn["files"] == tree for turn in turns) >= wanted:
                continue
            turns.append({**_turn(name, sides[side]), "files": tree})
            broken += [f"{name}, {side}: {each}" for each in turns[-1]["broken"]]
            _write(book, kept)
            progress(f"{name}, {side}: {turns[-1]['figure']}")
    rows = [_row(name, kept["gates"].get(name, []), sides) for name in only]
    missed = [
        f"{row['gate']} is {row['ratio']:.3f} of the parent's, under {LEAST_RATIO}"
        for row in rows
        if row["ratio"] is not None and row["ratio"] < LEAST_RATIO
    ]
    return Result(bench="gates", figures={"gates": rows}, broken=[*broken, *missed])


def _order(sides: Sequence[str], rounds: int) -> list[str]:
    return [
        side for turn in range(rounds) for side in (reversed(sides) if turn % 2 else list(sides))
    ]


def _turn(name: str, tree: Path) -> dict[str, Any]:
    load, began_s = os.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        [sys.executable, "scripts/bench.py", *GATES[name].words], cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)}, stdout=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    took_s = round(time.monotonic() - began_s, 1)
    header = {"commit": _git(tree, "rev-parse", "--short", "HEAD"), "took_s": took_s, "load": load}
    try:
        result = json.loads(done.stdout)
    except ValueError:
        return {**header, "figure": None, "broken": [f"exit {done.returncode} without a result"]}
    return {**header, "figure": GATES[name].figure(result), "broken": result["broken"]}


def _row(
    name: str, turns: Sequence[Mapping[str, Any]], sides: Mapping[str, Path]
) -> dict[str, Any]:
    medians = {}
    for side, tree in sides.items():
        files = _files(tree, GATES[name].files)
        mine = [turn for turn in turns if turn["files"] == files]
        known = [turn["figure"] for turn in mine if turn["figure"] is not None]
        medians[side] = statistics.median(known) if known else None
    ours, theirs = medians["this"], medians.get("parent")
    ratio = ours / theirs if ours is not None and theirs else None
    return {"gate": name, "this": ours, "parent": theirs, "ratio": ratio, "turns": len(turns)}


def _files(tree: Path, files: Sequence[str]) -> dict[str, str]:
    """Return git's hash of each folder or file in the current commit."""
    return {each: _git(tree, "rev-parse", "--short=12", f"HEAD:{each}") for each in files}


def _git(tree: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


def _machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _write(book: Path, kept: Mapping[str, Any]) -> None:
    at = datetime.now(UTC).isoformat(timespec="seconds")
    replace_whole(book, json.dumps({**kept, "at": at}, indent=1) + "\n")
