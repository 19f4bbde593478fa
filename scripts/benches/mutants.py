"""How many small faults the tests notice: one operator or number of the product is changed at a
time, in a copy of the tree, and the tests of its folder run.

A mutant that no test notices is named with its line: either a test is missing, or the change means
the same (a bound that is never reached, a number without effect), which a person must judge. Tests
that start Ray do not run. One seed draws the same mutants of the same source.
"""

from __future__ import annotations

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benches.common import ROOT, Result, progress

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

#: A mutant that makes a test wait without end counts as noticed.
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One change: the place of a node in the order of `ast.walk`, in one file."""

    path: str
    place: int
    line: int
    before: str
    after: str


def run(count: int, seed: int, folders: Sequence[str]) -> Result:
    drawn = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as made:
        copy = Path(made, "tree")
        shutil.copytree(
            ROOT,
            copy,
            ignore=shutil.ignore_patterns(".venv", ".git", "runs", "__pycache__", ".*cache"),
        )
        for folder in folders:
            found = [
                each
                for path in sorted((ROOT / folder).rglob("*.py"))
                for each in mutants(str(path.relative_to(ROOT)))
            ]
            for mutant in drawn.sample(found, min(count, len(found))):
                noticed = _is_noticed(copy, mutant, TESTS[folder])
                rows.append(
                    {
                        "place": f"{mutant.path}:{mutant.line}",
                        "change": f"{mutant.before} -> {mutant.after}"[:90],
                        "noticed": noticed,
                    }
                )
                progress(f"{'noticed' if noticed else 'SURVIVED'}  {rows[-1]['place']}")
    survivors = [row for row in rows if not row["noticed"]]
    figures = {"seed": seed, "mutants": len(rows), "survived": len(survivors), "rows": rows}
    return Result(bench="mutants", figures=figures)


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


def _is_noticed(copy: Path, mutant: Mutant, tests: Sequence[str]) -> bool:
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    node = list(ast.walk(tree))[mutant.place]
    changed = _changed(node)
    for name in node._fields:
        setattr(node, name, getattr(changed, name))
    path.write_text(ast.unparse(tree), encoding="utf-8")
    words = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not ray and not alone and not gpu")
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *tests],
            cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, timeout=_LONGEST_S,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(text, encoding="utf-8")
    return done.returncode != 0
