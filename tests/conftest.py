"""What holds for every test: no test judges absolute time, Hypothesis included, and none knows what
another learned.
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

# A suite that is started in the background of a script ignores SIGINT, and so would every process
# that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "shared-machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # What passed here passes there. To look for new counterexamples, set HYPOTHESIS_FRESH=1.
    derandomize=not os.environ.get("HYPOTHESIS_FRESH"),
)
settings.load_profile("shared-machine")

# Hypothesis also draws constants that it finds in the modules loaded so far, so that an example
# would depend on which tests ran before it. There is no setting for that. Versions before 6.131 do
# not do it.
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = providers.Constants


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs the machine to itself where something else is at work on it."""
    if marker := item.get_closest_marker("alone"):
        reason = _what_disturbs(**marker.kwargs)
        if reason:
            pytest.skip(reason)


def _what_disturbs(free_ram_gib: float, look_s: float = 2.0) -> str | None:
    """Look for a while at what others do; this process and its children are idle meanwhile."""
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
    """End what the tests have started when their process ends, however it ends."""
    with reaper() as session:
        yield session


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep fixtures that outlive a test, and the processes they start, away from what the user's
    runs have learned.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this test and the processes it starts keep what they learn.

    Empty when the test begins.
    """
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
    return folder


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread: with more, a sum may be added up in another order."""
    import torch  # most tests do without it

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, in which every command starts and finds no cluster and no setting of the
    user's.
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
