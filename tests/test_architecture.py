"""What the layers may import, and how large they may get.

The contracts in pyproject.toml (`lint-imports`) read the source. Each of them is shown to fail on a
planted import. Other tests import the folders in a fresh process and look at what was loaded, which
also shows what a package's `__init__`, a plug-in or a third party loads.
"""

from __future__ import annotations

import graphlib
import json
import shutil
import tomllib
from typing import Any

import grimp
import pytest

from tests.scene import ROOT, python

PACKAGES = ("orchestrator", "workers")

#: For each contract the imports that it must refuse: the file that gets the line, and the module
#: that it imports.
PLANTED = {
    "Layers of the head": [
        ("orchestrator/doctor/report.py", "orchestrator.cli.loading"),
        ("orchestrator/run/terminal.py", "orchestrator.lab.burn"),
        ("orchestrator/lab/burn.py", "orchestrator.doctor.report"),
        ("orchestrator/view/notify/digest.py", "orchestrator.lab.burn"),
        ("orchestrator/view/web/guard.py", "orchestrator.lab.tune"),
        ("orchestrator/view/cells.py", "orchestrator.run.terminal"),
        ("orchestrator/control/slots.py", "orchestrator.run.terminal"),
        ("orchestrator/control/slots.py", "orchestrator.view.cells"),
        ("orchestrator/record/model.py", "orchestrator.control.slots"),
        ("orchestrator/cluster/connect.py", "orchestrator.view.cells"),
        ("orchestrator/core/slot.py", "orchestrator.cluster.connect"),
        ("orchestrator/config/duration.py", "orchestrator.core.slot"),
        ("orchestrator/errors.py", "orchestrator.config.duration"),
    ],
    "Layers of the engine": [
        ("workers/engine/between_steps.py", "workers.tuning.messages"),
        ("workers/card_settings.py", "workers.engine.engine"),
        ("workers/devices/base.py", "workers.card_settings"),
        ("workers/team/shares.py", "workers.hf.folder"),
        ("workers/training/schedule.py", "workers.devices.base"),
        ("workers/resilience/decorator.py", "workers.training.schedule"),
        ("workers/elastic/loop.py", "workers.resilience.decorator"),
        ("workers/policy/base.py", "workers.elastic.loop"),
        ("workers/host/processes.py", "workers.policy.base"),
        ("workers/nvml/queries.py", "workers.host.processes"),
        ("workers/learned_limits.py", "workers.nvml.queries"),
        ("workers/messages.py", "workers.oom"),
        ("workers/keeper/log.py", "workers.oom"),
    ],
    "The engine knows neither Ray nor the head": [
        ("workers/host/processes.py", "ray"),
        ("workers/units.py", "orchestrator.errors"),
    ],
    "Keepers use the standard library alone": [("workers/keeper/keeper.py", "psutil")],
    "The head never imports torch": [("orchestrator/core/slot.py", "torch")],
    "Only the cluster folder imports ray": [
        ("orchestrator/run/terminal.py", "ray"),
        ("orchestrator/view/cells.py", "ray"),
    ],
    "What watches a run from outside never imports what makes it": [
        ("orchestrator/view/notify/notifier.py", "orchestrator.run.supervisor"),
        ("orchestrator/view/notify/digest.py", "torch"),
        ("orchestrator/view/document.py", "orchestrator.cluster.connect"),
        ("orchestrator/control/queue.py", "orchestrator.cluster.connect"),
    ],
    "alerts, core and policy are pure: no clock, randomness, I/O or torch": [
        ("orchestrator/view/advice.py", "time"),
        ("orchestrator/view/alerts.py", "time"),
        ("orchestrator/core/slot.py", "time"),
        ("workers/policy/base.py", "random"),
    ],
}

#: Imports the modules one after the other and says after which of them a forbidden one was there
#: for the first time.
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
    """Find the importable modules of a package, or of all its folders but one.

    `__main__` would run on import.
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
        # The command line included: it may load the cluster folder only when a verb needs it.
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


def contracts() -> list[dict[str, Any]]:
    """Return the contracts of pyproject.toml."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return list(tools["importlinter"]["contracts"])


def test_each_contract_has_a_planted_import() -> None:
    assert [contract["name"] for contract in contracts()] == list(PLANTED)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What lint-imports says of a copy with all of the planted imports."""
    copy = tmp_path_factory.mktemp("planted")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", copy)
    for file, module in (each for planted in PLANTED.values() for each in planted):
        with (copy / file).open("a", encoding="utf-8") as source:
            source.write(f"\nimport {module}\n")
    main = "from importlinter.cli import lint_imports_command as main; main()"
    done = python("-c", main, "--no-cache", cwd=copy)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("contract", PLANTED)
def test_a_contract_fails_on_a_planted_import(contract: str, told: str) -> None:
    assert f"{contract} BROKEN" in told
    _, _, explained = told.partition("Broken contracts")
    section = explained.partition(f"\n{contract}\n")[2].partition("\n---")[0]
    for file, module in PLANTED[contract]:
        importer = file.removesuffix(".py").replace("/", ".")
        assert f"{importer} -> {module} (" in section, section


@pytest.mark.parametrize(
    ("package", "contract"),
    [("orchestrator", "Layers of the head"), ("workers", "Layers of the engine")],
)
def test_every_folder_and_module_of_a_package_is_a_layer(package: str, contract: str) -> None:
    """Else a new folder could import anything."""
    (layers,) = (each["layers"] for each in contracts() if each["name"] == contract)
    named = {name.strip() for layer in layers for name in layer.split("|")}
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
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


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
