"""Runs in which anything happens at any time: they come to their end, no step is counted twice, none is forgotten."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from orchestrator.core.slot import HeadState
from tests.run.conftest import RunMaker
from tests.run.scene import Run
from tests.run.scripted_fleet import START_S
from workers.messages import WorkerState

SLOTS = ("pc1/0", "pc1/1", "pc2/0", "pc2/1")
NODES = ("pc1", "pc2")

#: Nothing happens after this, so that what can recover does.
CALM_AFTER_S = 60


def happening(run: Run, drawn: random.Random) -> Callable[[], object]:
    """Draw something that can happen to a slot, to a node or to the head."""
    fleet, slot, node = run.fleet, drawn.choice(SLOTS), drawn.choice(NODES)
    to_slot = drawn.choice([fleet.kill, fleet.hang, fleet.corrupt])
    return drawn.choice(
        [
            lambda: to_slot(slot) if fleet.has_process(slot) else None,
            lambda: fleet.lose(node),
            lambda: fleet.leave(node),
            lambda: fleet.has_node(node) or fleet.join(node),
            lambda: fleet.silence(node, silent=drawn.random() < 0.5),
            lambda: fleet.head_stands_still(drawn.choice([2.0, 5.0, 30.0])),
        ]
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_run_ends_and_its_books_hold_whatever_happens_and_when(new_run: RunMaker, seed: int) -> None:
    drawn = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    patience = {"hang_timeout_s": 8, "stale_after_s": 3, "start_timeout_s": 15, "max_deaths": 8}
    run = new_run(pc1=2, pc2=2, duration="200s", **patience)
    for _ in range(drawn.randint(1, 12)):
        run.fleet.at(drawn.uniform(0, CALM_AFTER_S), happening(run, drawn))
    for node in NODES:
        run.fleet.at(CALM_AFTER_S + 1, lambda node=node: run.fleet.silence(node, silent=False))
        run.fleet.at(CALM_AFTER_S + 20, lambda node=node: run.fleet.has_node(node) or run.fleet.join(node))
    rows = run.finish()
    assert run.recorder.shown[-1].elapsed_s == 200
    for row in rows.values():
        assert row.state is WorkerState.RUNNING or (row.state is HeadState.QUARANTINED and row.restarts >= 3), row
    for slot in SLOTS:
        for name in ("steps_ok", "restarts"):
            values = [row.to_dict()[name] for row in run.shown(slot)]
            assert values == sorted(values), "no counter goes back"
    assert run.events("counting")[0]["at_s"] >= START_S
