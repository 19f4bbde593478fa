"""Fixtures and settings for every test: no test, Hypothesis included, judges absolute time, and no
test sees learned limits of another test.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.reaper import Reaper, reaper
from tests.scene import ROOT
from workers.learned_limits import STATE_DIR_VARIABLE

pytest_plugins = ["tests.in_child", "tests.scheduling"]

# A suite in the background of a script ignores SIGINT, and the processes that it starts would
# inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "shared-machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples on each machine. HYPOTHESIS_FRESH=1 searches for new counterexamples.
    derandomize=not os.environ.get("HYPOTHESIS_FRESH"),
)
settings.load_profile("shared-machine")

# Hypothesis since 6.131 also draws constants from the loaded modules, so that examples would depend
# on the tests before them. It has no setting against that.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need the machine to themselves if other programs use it."""
    if marker := item.get_closest_marker("alone"):
        reason = _what_disturbs(**marker.kwargs)
        if reason:
            pytest.skip(reason)


def _what_disturbs(free_ram_gib: float, look_s: float = 2.0) -> str | None:
    """Measure the load of other programs for a while; this process and its children are idle."""
    idle, began_s = psutil.cpu_times().idle, time.monotonic()
    free_bytes = psutil.virtual_memory().available
    while (looked_s := time.monotonic() - began_s) < look_s:
        time.sleep(0.1)
        free_bytes = min(free_bytes, psutil.virtual_memory().available)
    busy = (psutil.cpu_count() or 1) - (psutil.cpu_times().idle - idle) / looked_s
    if busy > 0.5:
        return f"needs the machine to itself: other programs keep {busy:.1f} cores busy"
    if free_bytes < free_ram_gib * 2**30:
        return f"needs {free_ram_gib} GiB of free RAM, and there are {free_bytes / 2**30:.1f} GiB"
    return None


@pytest.fixture(scope="session", autouse=True)
def session_reaper() -> Iterator[Reaper]:
    """End all processes that the tests have started when the test process ends in any way."""
    with reaper() as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the learned limits of the user's runs from fixtures that outlive a test, and from the
    processes that they start.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder for the learned limits of this test and its processes.

    It is empty when the test begins.
    """
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: more threads may add up a sum in another order."""
    import torch  # imported late, because most tests do not need it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty working folder without a cluster or settings of the user, also for commands
    that the test starts.
    """
    monkeypatch.chdir(tmp_path)
    for name in (
        "RAY_ADDRESS",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "CUDA_VISIBLE_DEVICES",
        "FORCE_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path
