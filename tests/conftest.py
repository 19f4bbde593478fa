"""What holds for every test: no test judges absolute time, Hypothesis included, and none knows what another learned."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from workers.learned_limits.store import STATE_DIR_VARIABLE

pytest_plugins = ["tests.in_child"]

settings.register_profile(
    "shared-machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # What passed here passes there; whoever looks for new counterexamples sets HYPOTHESIS_FRESH=1.
    derandomize=not os.environ.get("HYPOTHESIS_FRESH"),
)
settings.load_profile("shared-machine")


@pytest.fixture(scope="session", autouse=True)
def _state_of_nobody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep fixtures that outlive a test, and the processes they start, away from what the user's runs have learned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this test and the processes it starts keep what they learn; empty when the test begins."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(folder))
    return folder
