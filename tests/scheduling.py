"""Distributes tests to processes under `pytest -n`: file by file, and folder by folder for tests
that start Ray.

A test that starts Ray mostly waits, so it costs the others little. Tests of one such folder must
not run at the same time: nodes started by hand are found and ended by their names, which are the
same in all of `tests/cluster/nodes`.
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

#: The tests that start Ray; its folder `nodes` takes about half of their time.
RAY = "tests/cluster"

#: The slowest tests, in this order; each other file takes a few seconds.
_FIRST = (
    RAY,
    "tests/tuning",
    "tests/training",
    "tests/engine",
    "tests/hf",
    "tests/test_recipes.py",
)

#: Limit of processes that compute on this machine: each loads the product, and some load torch.
_MOST = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Answer `-n auto`: one process for each core, and one for each folder of tests with Ray."""
    return min(os.cpu_count() or 1, _MOST) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Distribute the tests that start Ray first and by folders, and the others by files."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = (
        False  # reordering would begin with files of many tests, which are the short ones
    )
    return _RayByFolders(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slowest tests, so that no process runs them alone at the end."""
    items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, first in enumerate(_FIRST) if nodeid.startswith(first))
    return next(places, len(_FIRST))


class _RayByFolders(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return file.rpartition("/")[0] if file.startswith(RAY) else file
