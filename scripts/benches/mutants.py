"""How many small faults the tests notice: one operator or number of the product is changed at a
time, in a copy of the tree, and the tests of its folder run.

A mutant that no test notices is named with its line: either a test is missing, or the change means
the same (a bound that is never reached, a number without effect), which a person must judge. Tests
that start Ray do not run. One seed draws the same mutants of the same source, so that the tests of
another checkout can be asked about the same ones.
"""

from __future__ import annotations

import ast
import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.common import PATIENCE_S, ROOT, Result, progress
from workers.units import GIB

#: Folders of the product, and the tests that are to notice a fault in them.
TESTS: Mapping[str, tuple[str, ...]] = {
    "orchestrator/core": ("tests/core", "tests/run"),
    "workers/policy": ("tests/policy",),
    "workers/engine": ("tests/engine", "tests/policy"),
    "workers/training": ("tests/training", "tests/engine"),
}

_SWAPS: Mapping[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.And: ast.Or, ast.Or: ast.And, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}  # fmt: skip

#: A mutant with which the tests take so many times as long, and so many seconds, counts as noticed:
#: it makes one of them wait without end.
_TIMES_AS_LONG, _LONGER_S = 4.0, 60.0

#: One that fills the memory must not end other programs of this machine.
_MOST_BYTES = 8 * GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: the place of a node in the order of `ast.walk`, in one file."""

    path: str
    place: int
    line: int
    before: str
    after: str


def run(count: int, seed: int, folders: Sequence[str], tests: str) -> Result:
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    took_s: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as made:
        copy = Path(made, "tree")
        left_out = shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*cache")
        shutil.copytree(ROOT, copy, ignore=left_out)
        if tests:
            shutil.rmtree(copy / "tests")
            shutil.copytree(Path(tests, "tests"), copy / "tests", ignore=left_out)
        for folder in folders:
            began_s = time.monotonic()
            if not _passes(copy, TESTS[folder], PATIENCE_S * 4):
                broken.append(f"{folder}: its tests fail without any fault")
                continue
            took_s[folder] = time.monotonic() - began_s
            progress(f"{folder}: its tests take {took_s[folder]:.0f} s")
            found = [
                each
                for path in sorted((ROOT / folder).rglob("*.py"))
                for each in mutants(str(path.relative_to(ROOT)))
            ]
            drawn = random.Random(f"{seed} {folder}")  # noqa: S311 - repeatable is what is wanted
            for mutant in drawn.sample(found, min(count, len(found))):
                longest_s = _TIMES_AS_LONG * took_s[folder] + _LONGER_S
                with _put_in(copy, mutant):
                    noticed = not _passes(copy, TESTS[folder], longest_s)
                rows.append(
                    {
                        "place": f"{mutant.path}:{mutant.line}",
                        "change": f"{mutant.before} -> {mutant.after}"[:90],
                        "noticed": noticed,
                    }
                )
                progress(f"{'noticed' if noticed else 'SURVIVED'}  {rows[-1]['place']}")
    figures: dict[str, Any] = {"seed": seed}
    for folder in took_s:
        judged = [row["noticed"] for row in rows if row["place"].startswith(f"{folder}/")]
        figures[f"noticed in {folder}"] = f"{sum(judged)} of {len(judged)}"
    survivors = [row for row in rows if not row["noticed"]]
    figures |= {"mutants": len(rows), "survived": len(survivors), "rows": rows}
    return Result(bench="mutants", figures=figures, broken=broken)


def mutants(path: str) -> Iterator[Mutant]:
    """Yield every change that is made of one file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    for place, node in enumerate(ast.walk(tree)):
        changed = _changed(node)
        if changed is not None:
            before, after = ast.unparse(node), ast.unparse(changed)
            yield Mutant(
                path=path, place=place, line=getattr(node, "lineno", 0), before=before, after=after
            )


def _changed(node: ast.AST) -> Any:  # noqa: ANN401 - a node of the same kind, or None
    """Return the node with one operator or number changed; `None` where there is none."""
    changed = deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in _SWAPS:
        changed.ops[0] = _SWAPS[type(changed.ops[0])]()
    elif isinstance(changed, ast.BoolOp | ast.BinOp) and type(changed.op) in _SWAPS:
        changed.op = _SWAPS[type(changed.op)]()
    elif isinstance(changed, ast.Constant) and type(changed.value) is int:
        changed.value += 1
    else:
        return None
    return changed


@contextlib.contextmanager
def _put_in(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Change one file of the copy for a while."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    node = list(ast.walk(tree))[mutant.place]
    changed = _changed(node)
    for name in node._fields:
        setattr(node, name, getattr(changed, name))
    path.write_text(ast.unparse(tree), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def _passes(copy: Path, tests: Sequence[str], longest_s: float) -> bool:
    """Say whether the tests pass in this copy, in this time."""
    words = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not alone and not gpu")
    # A file changes within the second in which its cached bytecode would be written.
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *words, *tests],
        cwd=copy, env=environment, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
        return process.wait(longest_s) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        # What its tests have started, too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
