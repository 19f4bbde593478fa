"""The arrows between the rooms, seen from outside: what a fresh process has loaded after an import.

The linter contracts in pyproject.toml read the source; these tests run it, and so also see what a package's
`__init__`, a plug-in or a third party drags in.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: Imports the modules one after the other and says after which of them a forbidden one was there for the first time.
PROBE = """
import importlib, json, sys, warnings
warnings.simplefilter("ignore")
modules, forbidden = json.loads(sys.argv[1]), json.loads(sys.argv[2])
culprits = {}
for module in modules:
    importlib.import_module(module)
    for name in forbidden:
        if name in sys.modules:
            culprits.setdefault(name, module)
print(json.dumps(culprits))
"""


def modules_below(folder: str, *, without: str | None = None) -> list[str]:
    """Find the importable modules of a package, or of all its rooms but one; `__main__` would run on import."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        if relative.name != "__main__" and (without is None or not relative.is_relative_to(without)):
            found.append(".".join(parts))
    assert found, f"no modules below {folder}"
    return found


def culprits(modules: list[str], *forbidden: str) -> dict[str, str]:
    """Import `modules` in a fresh process; return the forbidden ones it loaded, each with the module to blame."""
    command = [sys.executable, "-c", PROBE, json.dumps(modules), json.dumps(forbidden)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return loaded


@pytest.mark.parametrize("module", ["workers.policy.registry", "workers.messages", "workers.oom", "workers.errors"])
def test_the_pure_part_of_the_engine_loads_neither_torch_nor_ray(module: str) -> None:
    assert culprits([module], "torch", "ray") == {}


def test_no_policy_loads_torch_or_ray() -> None:
    assert culprits(modules_below("workers/policy"), "torch", "ray", "orchestrator") == {}


def test_the_engine_knows_neither_ray_nor_the_head() -> None:
    assert culprits(modules_below("workers"), "ray", "orchestrator") == {}


def test_the_head_outside_the_cluster_room_loads_neither_ray_nor_torch() -> None:
    """The command line included: it may load the cluster room only when a verb needs it."""
    assert culprits(modules_below("orchestrator", without="orchestrator/cluster"), "ray", "torch") == {}


def test_policies_name_no_clock_chance_log_or_device() -> None:
    """Read from the source, because a fresh interpreter has loaded `time` already."""
    impure = {"torch", "ray", "time", "datetime", "random", "secrets", "logging", "structlog", "os", "pathlib"}
    for path in sorted((ROOT / "workers" / "policy").rglob("*.py")):
        named: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                named |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named.add(node.module.partition(".")[0])
        assert not named & impure, path
