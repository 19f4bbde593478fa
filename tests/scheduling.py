"""Which process runs which tests under `pytest -n`: a file to each, and to each a folder of those
that start Ray.

A test that starts Ray mostly waits, so it costs the others little. Within a folder they must not
meet: nodes started by hand are found and ended by their names, which are the same in all of
`tests/cluster/nodes`.
"""

from __future__ import annotations

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

#: The tests that start Ray; about half of their time is in its folder `nodes`.
RAY = "tests/cluster"

#: What takes longest, in this order; of the others a file takes some seconds.
_FIRST = (
    RAY,
    "tests/tuning",
    "tests/training",
    "tests/engine",
    "tests/hf",
    "tests/test_recipes.py",
)

#: Processes that share this machine's cores, at most: each loads the product, and some load torch.
_MOST = 4


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Answer `-n auto`: one for each core, and one for each folder of tests that wait for Ray."""
    return min(os.cpu_count() or 1, _MOST) + 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Give out the tests that start Ray by folders, and first; the others by files."""
    if config.getoption("dist") != "loadfile":
        return None
    config.option.loadscopereorder = (
        False  # it would begin with the files of many tests, which are the short ones
    )
    return _RayByFolders(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest, so that no process is left with it at the end."""
    items.sort(key=lambda item: _place(item.nodeid))


def _place(nodeid: str) -> int:
    places = (place for place, first in enumerate(_FIRST) if nodeid.startswith(first))
    return next(places, len(_FIRST))


class _RayByFolders(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return file.rpartition("/")[0] if file.startswith(RAY) else file
