"""Commands to a run with real workers: typed, sent by the page, and kept after a killed head."""

from __future__ import annotations

import json

import pytest

from orchestrator.record.archive import read_run
from tests.cluster.conftest import RESTING, SMALL, Head, Starter
from tests.scene import ROOT, orchestrator, wait_for
from tests.web.scene import serving
from workers.units import MIB

pytestmark = pytest.mark.ray

#: A training that never saves by itself.
TRAINING = (
    "--workload",
    "train",
    "--set",
    "train.save_every_s=36000",
    "--set",
    "train.steps=1000000",
)


def typed(head: Head, *arguments: str) -> tuple[int, str]:
    done = orchestrator(*arguments, "--run-dir", str(head.runs), cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def wait_for_state(head: Head, state: str, *slots: str) -> None:
    head.wait(lambda: {head.rows()[slot]["state"] for slot in slots} == {state}, f"{slots} {state}")


def sent_by_page(head: Head, do: str, *slots: str) -> int:
    with serving(head.folder(), control=True) as server:
        told = {"id": "of the page", "do": do, "names": list(slots)}
        return server.ask("/api/v1/commands", json=told).status


def test_slots_are_held_capped_and_saved_also_by_the_next_head(start: Starter) -> None:
    head = start("--rehearse", "--duration", "10m", *SMALL, *RESTING, *TRAINING)
    head.wait_until_running(3)
    budget_bytes = head.rows()["pc1/0"]["budget_bytes"]
    assert typed(head, "pause", "pc2/0") == (
        0,
        "pc2/0: held when its step ends; its process and its memory stay\n",
    )
    assert typed(head, "drain", "pc1/1")[0] == 0
    assert typed(head, "cap", "pc1/0", f"{3 * budget_bytes // 4 // MIB}MiB") == (
        0,
        "pc1/0: capped from its next step on\n",
    )
    assert typed(head, "save", "pc1/0")[0] == 0
    code, said = typed(head, "save", "pc2/0")
    assert code == 2
    assert (
        "pc2/0 is held and does no work that it could save: `unpause pc2/0` first; nothing was changed"
        in said
    )
    wait_for_state(head, "HELD", "pc1/1", "pc2/0")
    head.wait(lambda: (head.rows()["pc1/0"].get("saved_step") or 0) > 0, "a saved state")
    rows = head.rows()
    assert rows["pc2/0"]["reserved_bytes"] is not None
    assert rows["pc1/1"]["reserved_bytes"] is None
    assert all("saved_step" in rows[slot] for slot in ("pc1/1", "pc2/0")), "what rests has saved"
    steps = {slot: rows[slot]["steps_ok"] for slot in ("pc1/1", "pc2/0")}
    head.kill()
    # The killed head cannot clean up, but its cluster ends.
    wait_for(lambda: not list(head.runs.parent.glob("orch-*")), "end of the rehearsal's folder")
    run_id, left = head.folder().name, read_run(head.folder())

    code, said = typed(head, "unpause", "pc2/0", "--run", "latest")
    assert (code, "run --resume" in said) == (2, True)
    assert f"run --resume {run_id}" in typed(head, "runs")[1]
    (listed,) = json.loads(typed(head, "runs", "--json")[1])["runs"]
    assert (listed["run_id"], listed["outcome"]) == (run_id, "interrupted")
    before = len(head.events())
    again = start("--resume", run_id, "--json", runs=head.runs)
    again.wait_until_running(1, after=before)
    code, said = typed(head, "run", "--resume", run_id)
    assert (code, "is under way" in said) == (2, True)
    trained = again.rows()["pc1/0"]["train_step"]
    again.wait(lambda: again.rows()["pc1/0"]["train_step"] > trained + 5, "more training")
    rows = again.rows()
    assert {slot: rows[slot]["steps_ok"] for slot in steps} == steps
    assert [rows[slot]["state"] for slot in steps] == ["HELD", "HELD"]
    assert rows["pc1/0"]["cap_bytes"] == 3 * budget_bytes // 4 // MIB * MIB
    assert sent_by_page(again, "unpause", "pc1/1", "pc2/0") == 200
    wait_for_state(again, "RUNNING", "pc1/1", "pc2/0")
    summary = again.interrupt_when(
        lambda: all(again.rows()[slot]["steps_ok"] > steps[slot] for slot in steps), "more steps"
    )
    assert (summary["run_id"], read_run(head.folder()).facts.heads) == (run_id, 2)
    after = {row["slot"]: row for row in summary["workers"]}
    for slot in left.slots:
        assert after[slot.slot]["steps_ok"] > slot.row.counts.steps_ok > 0
