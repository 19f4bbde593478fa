"""Fixtures that run each scenario in its own process.

The CPU device caps its whole process for good, so no scenario may run in the process of the tests.
"""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.fork_server import ForkServer

InChild: TypeAlias = Callable[..., Any]

#: Importing these takes half of the time of a small training in a new process.
HF_MODULES = (
    "torch._dynamo",
    "transformers.models.auto.modeling_auto",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.tokenization_utils_tokenizers",
    "transformers.trainer",
)

#: Imports a test's module by its name, so that pickled objects and names in a spec can be found.
CHILD = """
import importlib, os, pickle, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
folder, module, function, given, wanted = sys.argv[1:]
if "NVML_SCRIPT" in os.environ:  # torch has imported nvidia-ml-py, in whose place there is a stub
    del sys.modules["pynvml"]
sys.path.insert(0, folder)
arguments = pickle.loads(Path(given).read_bytes())
result = getattr(importlib.import_module(module), function)(*arguments)
Path(wanted).write_bytes(pickle.dumps(result))
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start a process with torch, so that `make check` can leave them to
    `make test`.
    """
    for item in items:
        if {"in_child", "hf_child", "fork_server", "hf_fork_server"} & set(
            getattr(item, "fixturenames", ())
        ):
            item.add_marker("torch")


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Start code in a process that is like a fresh one and has imported torch."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def hf_fork_server() -> Iterator[ForkServer]:
    """The same as `fork_server`, with the modules for models and trainers of transformers."""
    server = ForkServer(*HF_MODULES)
    yield server
    server.close()


@pytest.fixture(scope="session")
def in_child(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer) -> InChild:
    """Run a function of a test's module in a fresh process, and return its result."""
    return runner(tmp_path_factory, partial(fork_server.run, CHILD))


@pytest.fixture(scope="session")
def hf_child(tmp_path_factory: pytest.TempPathFactory, hf_fork_server: ForkServer) -> InChild:
    """The same as `in_child`, in a process that has imported transformers."""
    return runner(tmp_path_factory, partial(hf_fork_server.run, CHILD))


def runner(
    tmp_path_factory: pytest.TempPathFactory,
    run_child: Callable[..., subprocess.CompletedProcess[str]],
) -> InChild:
    """Return a function that runs a function of a test's module with `run_child`."""

    def run(function: Callable[..., Any], *arguments: object) -> Any:
        folder = tmp_path_factory.mktemp("child")
        given, wanted = folder / "given", folder / "wanted"
        given.write_bytes(pickle.dumps(arguments))
        source = Path(function.__code__.co_filename)
        names = [str(source.parent), source.stem, function.__name__, str(given), str(wanted)]
        done = run_child(*names)
        assert done.returncode == 0, (
            f"{function.__name__} ended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
        return pickle.loads(wanted.read_bytes())  # noqa: S301 - written by our own child

    return run
