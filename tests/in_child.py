"""A process of its own for each scenario, and the spec of one worker.

The CPU device caps its whole process and there is no way back, so no scenario may run in the process of the tests.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.fork_server import ForkServer
from tests.scene import GUIDES, MIB
from workers.settings import WorkerSpec, WorkloadSpec

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]

#: Imports a test's module by its name, so that what it pickles and what a spec names are found again.
CHILD = """
import importlib, pickle, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
folder, module, function, given, wanted = sys.argv[1:]
sys.path.insert(0, folder)
arguments = pickle.loads(Path(given).read_bytes())
result = getattr(importlib.import_module(module), function)(*arguments)
Path(wanted).write_bytes(pickle.dumps(result))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts a process that loads torch, so that `make check` can leave it to `make test`."""
    for item in items:
        if {"in_child", "fork_server"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("torch")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Start code in a process that is as good as fresh and has imported torch."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def in_child(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> InChild:
    """Run a function of a test's module in a fresh process and return what it returns."""

    def run(function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - whatever the function returns
        folder = tmp_path_factory.mktemp("child")
        given, wanted = folder / "given", folder / "wanted"
        given.write_bytes(pickle.dumps(arguments))
        source = Path(function.__code__.co_filename)
        names = [str(source.parent), source.stem, function.__name__, str(given), str(wanted)]
        done = fork_server.run(CHILD, *names)
        assert done.returncode == 0, f"{function.__name__} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        return pickle.loads(wanted.read_bytes())  # noqa: S301 - written by our own child

    return run


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    """Return a maker of specs: a lone worker with the guides' settings; name what is different."""

    def make(
        *,
        budget_bytes: int = 96 * MIB,
        name: str = "matmul",
        dtype: str = "fp32",
        size: int = 512,
        batch: int = 128,
        duty: float | None = None,
        policy: str = "classic",
        **memory: object,
    ) -> WorkerSpec:
        return WorkerSpec(
            slot="pc1/0",
            node="pc1",
            device="cpu",
            budget_bytes=budget_bytes,
            card_budget_bytes=budget_bytes,
            memory_fraction=1.0,
            workers_on_host=1,
            duty=duty,
            policy=policy,
            memory=replace(GUIDES, **{"floor_bytes": 4 * MIB, **memory}),
            workload=WorkloadSpec(name=name, dtype=dtype, size=size, batch=batch, seed=7),
        )

    return make
