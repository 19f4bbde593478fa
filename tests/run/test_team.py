"""A team under the real supervisor, on a scripted fleet in virtual time: killed leaders and heads,
held members, and what users and the next head see.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.record.archive import read_run
from orchestrator.run.resume import past_of
from tests.run.conftest import RunMaker
from tests.run.scene import Asked, Run
from tests.run.scripted_fleet import Process, ScriptedFleet, VirtualClock
from workers.messages import Orders, TeamOrders, TeamPace, TeamState, TeamStatus, WorkerState
from workers.settings import WorkerSpec

STEPS = 400


class TeamFleet(ScriptedFleet):
    """Members report that they lead, follow a live leader, or have lost it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.specs: list[WorkerSpec] = []
        self.ordered: list[tuple[float, str, TeamOrders]] = []
        """Time, slot and orders of each change of orders."""
        self.on_order = self._note
        self.paces: dict[str, TeamPace] = {}
        """The pace that members report after they have joined."""

    def place(self, spec: WorkerSpec, num_cpus: float, num_gpus: float) -> None:
        self.specs.append(spec)
        self.trains.add(spec.slot)
        super().place(spec, num_cpus, num_gpus)

    def end_program(self, slot: str, text: str = "killed by signal 9") -> None:
        super().end_program(slot, text)
        for other in self.trains - {slot}:
            if self.has_process(other):
                self._answer_soon(other)

    def _note(self, slot: str, orders: Orders) -> None:
        last = [told for _, name, told in self.ordered if name == slot][-1:]
        if orders.team is not None and last != [orders.team]:
            self.ordered.append((self.clock.now_s - self.began_s, slot, orders.team))

    def _more(self, slot: str, process: Process) -> dict[str, Any]:
        orders = self._actors[slot].orders
        team = None if orders is None else orders.team
        generation = None if team is None else team.generation
        leads = team is not None and team.leader == slot
        is_lost = team is not None and not leads and not self.has_process(team.leader)
        state = TeamState.REJOINING if team is None or is_lost else TeamState.TOGETHER
        return {
            "team": TeamStatus(
                state=state,
                listens=f"{slot}:1",
                generation=generation,
                step=process.train_step,
                lost=generation if is_lost else None,
                share_pct=50.0,
                wire_s=0.25,
                members=sum(map(self.has_process, self.trains)),
                pace=self.paces.get(slot),
            )
        }


class TeamRun(Run):
    """A run of a team of two PCs."""

    fleet: TeamFleet
    fleet_type = TeamFleet

    def __init__(self, folder: Path, split: str = "data", **settings: object) -> None:
        train = {"team": "all", "steps": STEPS, "split": split}
        sections = {"workload": {"name": "train"}, "train": train}
        usual = {"pc1": 2, "pc2": 2, "duration": "30s"}
        super().__init__(folder, sections=sections, **{**usual, **settings})  # type: ignore[arg-type]

    def told_pace(self, step_s: float, **alone_s: float) -> None:
        """Set the reported times of a step, together and alone."""
        for name, each_s in alone_s.items():
            self.fleet.paces[f"{name}/0"] = TeamPace(
                steps=9, step_s=step_s, alone_s=each_s, update_s=0.0
            )

    def leaders(self) -> list[tuple[str, int]]:
        """Return each named leader with its generation."""
        return [(event["slot"], event["generation"]) for event in self.events("team_leader")]


Maker = Callable[..., TeamRun]


@pytest.fixture
def new_team(new_run: RunMaker) -> Maker:
    return partial(cast("Maker", new_run), kind=TeamRun)


def test_the_first_that_comes_up_leads_and_all_get_the_same_orders(new_team: Maker) -> None:
    run = new_team()
    run.fleet.start_s["pc1/0"] = 6.0
    rows = run.finish()
    assert run.leaders() == [("pc2/0", 1)]
    told = {orders for _, _, orders in run.fleet.ordered}
    assert len(told) == 1
    (orders,) = told
    assert (orders.leader, orders.address, len(orders.secret)) == ("pc2/0", "pc2/0:1", 32)
    # The PCs of this fleet have the same address.
    assert [spec.team.listen for spec in run.fleet.specs if spec.team] == ["10.0.0.1:6390"] * 2
    assert {(row.team_state, row.team_share_pct, row.team_wire_s) for row in rows.values()} == {
        (TeamState.TOGETHER, 50.0, 0.25)
    }


def test_when_the_leader_dies_the_other_leads_at_once(new_team: Maker) -> None:
    run = new_team()
    run.fleet.at(15, lambda: run.fleet.end_program("pc1/0"))
    run.finish()
    assert run.leaders() == [("pc1/0", 1), ("pc2/0", 2)]
    at_s = [at_s for at_s, _, orders in run.fleet.ordered if orders.generation == 2]
    assert 15 <= min(at_s) < 15.2
    assert run.events("team_leader")[1]["cause"] == "pc1/0: its process has ended"


def test_a_held_leader_hands_over_and_comes_back_as_a_helper(new_team: Maker) -> None:
    run = new_team()
    Asked(run, 10, "pause", "pc1/0")
    Asked(run, 20, "unpause", "pc1/0")
    run.finish()
    (first, second, *_) = run.events("team_leader")
    assert (first["slot"], second["slot"]) == ("pc1/0", "pc2/0")
    assert second["cause"] == "pc1/0: it is held"
    shown = [row for each in run.recorder.shown for row in each.rows if row.slot == "pc1/0"]
    states = [(row.state, row.team_state) for row in shown]
    assert (HeadState.HELD, None) in states
    assert (WorkerState.RUNNING, TeamState.TOGETHER) in states[
        states.index((HeadState.HELD, None)) :
    ]


def test_the_generation_rises_after_a_head_was_killed(new_team: Maker, tmp_path: Path) -> None:
    first, copy = new_team(duration="60s"), tmp_path / "killed"
    first.fleet.at(10, lambda: first.fleet.end_program("pc1/0"))
    first.fleet.at(14, lambda: shutil.copytree(first.folder, copy))
    first.finish()
    left = read_run(copy)
    assert left.team_generation == 2
    run = new_team(folder=copy, past=past_of(left), duration="60s")
    # The head waits for the other member, which may have a newer state.
    run.fleet.start_s["pc2/0"] = 5.0
    run.fleet.saved |= {"pc1/0": 100, "pc2/0": 500}
    run.finish()
    assert run.leaders()[2] == ("pc2/0", 3)
    assert first.fleet.ordered[-1][2].secret != run.fleet.ordered[-1][2].secret
    records = [path.read_bytes() for path in copy.rglob("*") if path.is_file()]
    for _, _, orders in (*first.fleet.ordered, *run.fleet.ordered):
        assert not any(orders.secret in record for record in records)
        assert not any(orders.secret.hex().encode() in record for record in records)
        assert "secret" not in repr(orders)


def test_it_is_over_once_one_is_done_whom_the_others_cannot_follow(new_team: Maker) -> None:
    run = new_team(duration="10m")
    run.fleet.finished_after |= {"pc1/0": STEPS, "pc2/0": STEPS}
    run.fleet.at(15, lambda: run.fleet.lose("pc2"))
    rows = run.finish()
    assert rows["pc1/0"].state is WorkerState.DONE
    assert run.leaders() == [("pc1/0", 1)]
    assert run.recorder.shown[-1].elapsed_s < 60
    (missed,) = run.supervisor.shortfalls()
    assert missed == "pc2/0: ended in LOST: its node does not answer"
    assert read_run(run.folder).is_done


NO_GAIN = "pc2/0 alone 1 s a step, together 0.75 + 0.25 s on the wire: no gain, pc2/0 alone"


@pytest.mark.parametrize(
    ("split", "step_s", "rests"), [("auto", 1.0, True), ("auto", 0.9, False), ("data", 1.0, False)]
)
def test_one_member_trains_alone_where_the_team_gains_too_little(
    new_team: Maker, split: str, step_s: float, rests: bool
) -> None:
    run = new_team(split=split, duration="10m")
    run.fleet.finished_after |= {"pc1/0": STEPS, "pc2/0": STEPS}
    run.told_pace(step_s, pc1=1.6, pc2=1.0)
    rows = run.finish()
    (measured,) = run.events("team_times")
    assert measured["gain_pct"] == pytest.approx(100 * (1.0 / step_s - 1))
    assert (measured["cause"] == NO_GAIN) is (step_s == 1.0)
    assert rows["pc2/0"].state is WorkerState.DONE
    # The leader was the slower one: the other member continues from the same state.
    assert [slot for slot, _ in run.leaders()] == ["pc1/0", "pc2/0"][: 1 + rests]
    notices = " ".join(run.recorder.shown[-1].notices)
    assert (NO_GAIN in notices) is (step_s == 1.0)
    if rests:
        assert rows["pc1/0"].state is HeadState.HELD
        assert rows["pc1/0"].reason == f"{NO_GAIN}; `unpause` makes it train anyway"
    else:
        assert rows["pc1/0"].state is WorkerState.DONE
        assert run.recorder.shown[-1].counts.steps_ok == STEPS, "a step of both counts once"
    assert run.supervisor.shortfalls() == ()
    assert read_run(run.folder).is_done


def test_who_rests_does_so_under_the_next_head_until_a_person_lets_it_go_on(
    new_team: Maker, tmp_path: Path
) -> None:
    first, copy = new_team(split="auto", duration="60s"), tmp_path / "killed"
    first.told_pace(1.0, pc1=1.0, pc2=1.6)
    first.fleet.at(14, lambda: shutil.copytree(first.folder, copy))
    first.finish()
    run = new_team(folder=copy, past=past_of(read_run(copy)), split="auto", duration="60s")
    Asked(run, 20, "unpause", "pc2/0")
    rows = run.finish()
    held = [row for each in run.recorder.shown for row in each.rows if row.slot == "pc2/0"]
    assert held[0].state is HeadState.HELD
    assert "`unpause` makes it train anyway" in {row.reason.partition("; ")[2] for row in held}
    assert rows["pc2/0"].team_state is TeamState.TOGETHER


def test_half_a_model_that_was_given_up_is_no_success(new_team: Maker) -> None:
    run = new_team(split="layers", duration="60s")
    broken = {"error": "Traceback …", "reason": "no such column", "steps_error": 1}
    run.fleet.at(5, lambda: run.fleet.says.update({"pc2/0": broken}))
    assert run.finish()["pc2/0"].state is HeadState.QUARANTINED
    (shortfall, *_) = run.supervisor.shortfalls()
    assert shortfall.startswith("pc2/0: ended in QUARANTINED: ")
    assert "no such column" in shortfall
