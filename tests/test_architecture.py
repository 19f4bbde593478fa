"""The imports that the layers may have, and the limits of their size.

The contracts in pyproject.toml (`lint-imports`) read the source; a test shows that each contract
fails on a planted import. Other tests import the folders in a fresh process and check the loaded
modules, which also finds imports of a package's `__init__`, a plug-in or a third party.
"""

from __future__ import annotations

import graphlib
import json
import shutil
import tomllib
from itertools import pairwise, permutations, product
from typing import Any

import grimp
import pytest

from tests.scene import ROOT, python

PACKAGES = ("orchestrator", "workers")

#: Imports the modules one after the other, and prints the first module that loaded each forbidden
#: one.
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
    """Return the importable modules of a package without one folder.

    `__main__` is left out, because it runs on import.
    """
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        relative = path.relative_to(ROOT).with_suffix("")
        parts = relative.parts[:-1] if relative.name == "__init__" else relative.parts
        if relative.name != "__main__" and (
            without is None or not relative.is_relative_to(without)
        ):
            found.append(".".join(parts))
    assert found, f"no modules below {folder}"
    return found


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (["workers.messages", "workers.oom", "workers.files"], ["torch", "ray"]),
        (modules_below("workers/policy"), ["torch", "ray", "orchestrator"]),
        (modules_below("workers"), ["ray", "orchestrator"]),
        # Including the command line, which loads the cluster folder only when a verb needs it.
        (modules_below("orchestrator", without="orchestrator/cluster"), ["ray", "torch"]),
    ],
    ids=["messages", "policy", "engine", "head outside the cluster folder"],
)
def test_a_fresh_process_that_imports_these_has_not_loaded_those(
    modules: list[str], forbidden: list[str]
) -> None:
    done = python("-c", PROBE, json.dumps(modules), json.dumps(forbidden), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {}, (
        "the forbidden ones, each with the module to blame"
    )


CONTRACTS: dict[str, dict[str, Any]] = {
    contract["name"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
}


def layers_of(contract: dict[str, Any]) -> list[list[str]]:
    return [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]


def planted(contract: dict[str, Any]) -> set[tuple[str, str]]:
    """Return (module, imported module) pairs that a contract must refuse. In layers these are
    imports of the layer above, and of modules in the same layer.
    """
    if contract["type"] == "layers":
        layers = layers_of(contract)
        pairs = {pair for names in layers for pair in permutations(names, 2)}
        for above, below in pairwise(layers):
            pairs |= set(product(below, above))
    else:
        sources, forbidden = contract["source_modules"], contract["forbidden_modules"]
        pairs = {*product(sources, forbidden[:1]), *product(sources[:1], forbidden)}
    return {(a_module_of(name), module) for name, module in pairs}


def a_module_of(name: str) -> str:
    """Return the last module of a package, or the name itself if it is a module."""
    folder = ROOT / name.replace(".", "/")
    return modules_below(name.replace(".", "/"))[-1] if folder.is_dir() else name


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the report of lint-imports about a copy with all planted imports."""
    copy = tmp_path_factory.mktemp("planted")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for name, module in set().union(*map(planted, CONTRACTS.values())):
        file = f"{name.replace('.', '/')}.py"
        with (copy / file).open("a", encoding="utf-8") as source:
            source.write(f"\nimport {module}\n")
    main = "from importlinter.cli import lint_imports_command as main; main()"
    done = python("-c", main, "--no-cache", cwd=copy)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("contract", CONTRACTS)
def test_a_contract_fails_on_a_planted_import(contract: str, report: str) -> None:
    assert f"{contract} BROKEN" in report
    _, _, explained = report.partition("Broken contracts")
    section = explained.partition(f"\n{contract}\n")[2].partition("\n---")[0]
    unseen = [
        each for each in planted(CONTRACTS[contract]) if f"{each[0]} -> {each[1]} (" not in section
    ]
    assert unseen == [], section


@pytest.mark.parametrize(
    ("package", "contract"),
    [("orchestrator", "Layers of the head"), ("workers", "Layers of the engine")],
)
def test_every_folder_and_module_of_a_package_is_a_layer(package: str, contract: str) -> None:
    """A folder that is in no layer could import anything."""
    named = {name for layer in layers_of(CONTRACTS[contract]) for name in layer}
    present = {
        f"{package}.{path.stem}" for path in (ROOT / package).iterdir() if path.suffix == ".py"
    }
    present |= {
        f"{package}.{path.name}"
        for path in (ROOT / package).iterdir()
        if (path / "__init__.py").exists()
    }
    assert present - {f"{package}.__init__", f"{package}.__main__"} == named


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the cycle


def test_no_file_of_the_product_is_beyond_700_lines() -> None:
    files = [
        path
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in {".py", ".c", ".h"}
    ]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in files
    }
    assert {path: length for path, length in lengths.items() if length > 700} == {}


def test_hardly_a_line_of_the_product_is_over_100_columns() -> None:
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 100
    ]
    assert len(wide) < 50, wide


@pytest.mark.parametrize(("package", "limit"), [("orchestrator", 4), ("workers", 8)])
def test_few_modules_stand_beside_the_folders(package: str, limit: int) -> None:
    assert len(list((ROOT / package).glob("*.py"))) <= limit
