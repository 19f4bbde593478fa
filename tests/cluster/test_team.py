"""One training over two rehearsed PCs on real Ray equals that of one process, even if the leader's
process and the head are killed.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.cluster.conftest import Head, Starter, at_unix_s, short_folder, starting
from tests.cluster.conftest import undisturbed as trained_alone
from tests.reaper import Reaper
from workers.learned_limits import STATE_DIR_VARIABLE

pytestmark = pytest.mark.ray

#: Each member computes one part of a step, and a single process computes two, so no bit differs.
KEYS: dict[str, Any] = {
    "steps": 300, "batch": 8, "micro": 4, "exact": True, "seq": 16, "precision": "fp32", "dropout": 0.1,
    "save_every_s": 0.5,
}  # fmt: skip
TEAM = (
    "--workload=train",
    "--set=train.team=[pc1, pc2]",
    *(f"--set=train.{key}={json.dumps(value)}" for key, value in KEYS.items()),
)


@dataclass
class Trained:
    """The summary and the events of a team's training."""

    summary: dict[str, Any]
    events: list[dict[str, Any]]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["slot"]: row for row in self.summary["workers"]}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]


def steps_of(head: Head) -> int:
    """Return the newest step of a member."""
    return max((row["train_step"] or 0 for row in head.rows().values()), default=0)


def together(head: Head, after: int) -> bool:
    """Return whether both members make the steps after step `after`."""
    states = [row["team_state"] for row in head.rows().values()]
    return states == ["TOGETHER"] * 2 and steps_of(head) > after


@pytest.fixture(scope="module")
def start(session_reaper: Reaper, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with pytest.MonkeyPatch.context() as patch, short_folder(session_reaper) as folder:
        patch.setenv(STATE_DIR_VARIABLE, str(tmp_path_factory.mktemp("state")))
        with starting(folder) as starter:
            yield starter


@pytest.fixture(scope="module")
def trained(start: Starter) -> Trained:
    """A run that continues after the leader's process, and then the head, was killed."""
    head = start("--rehearse", "--duration", "30m", "--json", *TEAM)
    head.wait(lambda: together(head, 10), "both members")
    leader, at_step = head.events("team_leader")[-1]["slot"], steps_of(head)
    os.kill(head.opened(leader)[-1], signal.SIGKILL)
    head.wait(lambda: together(head, at_step + 10), "both members again")
    head.kill()
    code, out, err = start("--resume", head.folder().name, "--json", runs=head.runs).finish()
    assert code == 0, out + err
    return Trained(summary=json.loads(out), events=head.events())


def test_a_team_trains_as_one_process_does(trained: Trained) -> None:
    rows = trained.rows
    assert {row["state"] for row in rows.values()} == {"DONE"}
    alone_sha256, alone = trained_alone(KEYS)
    assert {row["weights_sha256"] for row in rows.values()} == {alone_sha256}
    assert [row["loss"] for row in rows.values()] == pytest.approx([alone] * 2, abs=1e-6)
    assert sum(row["team_share_pct"] for row in rows.values()) == pytest.approx(100, abs=25)
    # A step of all members counts once.
    assert trained.summary["steps_ok"] == KEYS["steps"]


def test_neither_the_leader_nor_the_head_is_needed(trained: Trained) -> None:
    assert {row["train_step"] for row in trained.rows.values()} == {KEYS["steps"]}
    leaders = trained.named("team_leader")
    assert [event["generation"] for event in leaders] == list(range(1, len(leaders) + 1))
    assert len(leaders) >= 3
    # The other member continues with the trained weights, and waits for no process.
    assert leaders[1]["slot"] != leaders[0]["slot"]
    assert leaders[1]["step"] > 0
    (ended,) = trained.named("process_ended")[:1]
    opened = [event for event in trained.named("device_opened") if event["slot"] == ended["slot"]]
    assert at_unix_s(ended) <= at_unix_s(leaders[1]) < at_unix_s(opened[1])
