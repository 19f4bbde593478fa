"""What `runs` and `report` print of runs that ended, are under way, were killed, or left next to nothing."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.runs import report_json, report_text, runs_json, runs_text
from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.watch.cells import ASCII
from orchestrator.watch.model import Row, Snapshot
from orchestrator.watch.records import STORE_NAME, RunFacts, SlotRecord
from orchestrator.watch.store import RunStore
from orchestrator.watch.summary import summary_dict, write_summary
from tests.scene import orchestrator
from workers.messages import StepCounts, WorkerState

ROOT = Path(__file__).parents[2]
RUN_ID = "20261120-051500-0b76"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 3, in step\n    boom()\nValueError: no good\nmore\n'
)


def facts(run_id: str, **changed: object) -> RunFacts:
    usual: dict[str, Any] = {
        "run_id": run_id, "started_at_unix_s": 1_700_000_000.0, "duration_s": 300.0, "min_success_rate": 0.95,
        "mode": "rehearse", "device": "cpu", "one_machine": True, "config_yaml": "", "chaos": None,
        "nodes_planned": ("pc1",), "head_pid": os.getpid(), "head_started": "1", "host": socket.gethostname(),
    }  # fmt: skip
    return RunFacts(**{**usual, **changed})


def snapshot_of(run_id: str, **changed: object) -> Snapshot:
    row = Row(slot="pc1/0", node="pc1", state=WorkerState.RUNNING, reason="steady", restarts=2,
              counts=StepCounts(steps_ok=990, steps_oom=10, oom_count=10))  # fmt: skip
    usual: dict[str, Any] = {
        "run_id": run_id, "started_at": 1_700_000_000.0, "now_unix_s": 1_700_000_130.0, "elapsed_s": 125.0,
        "duration_s": 300.0, "nodes_planned": ("pc1",), "nodes_seen": ("pc1",), "rows": (row,), "restart_count": 2,
        "notices": ("pc1 runs hot",),
    }  # fmt: skip
    return Snapshot(**{**usual, **changed})


def written(runs: Path, run_id: str = RUN_ID, **changed: object) -> RunStore:
    """Write a run as a head does, up to but not including its end."""
    (runs / run_id).mkdir(parents=True)
    store = RunStore(runs / run_id / STORE_NAME)
    store.begin(facts(run_id, **changed))
    snapshot = snapshot_of(run_id)
    (row,) = snapshot.rows
    store.slots([
        SlotRecord(slot=row.slot, node=row.node, state=row.state.value, reason=row.reason, incarnation=2,
                   next_sequence=9, steps_at_risk=40, counters={"restarts": 2}, resume=None, row=row.to_dict())
    ])  # fmt: skip
    at = "2023-11-14T22:13:20.123Z"
    for details in (
        {
            "event": "state",
            "slot": "pc1/0",
            "from_state": "RUNNING",
            "to_state": "RESTARTING",
            "cause": "killed\x1b[2J",
        },
        {"event": "state", "slot": "pc1/0", "from_state": "RESTARTING", "to_state": "RUNNING", "cause": "steady"},
        {"event": "node_left", "slot": None, "node": "pc2"},
        {"event": "workload_error", "slot": "pc1/0", "traceback": TRACEBACK},
    ):
        store.event({"at": at, **details})
    store.update(snapshot)
    assert store.problem is None
    return store


def test_the_list_is_one_line_for_each_run_the_newest_first(tmp_path: Path) -> None:
    written(tmp_path).end("good", 0, None, [])
    written(tmp_path, "20261121-000000-0001", mode="local").end("degraded", 1, None, [])
    (tmp_path / "20261119-000000-0002").mkdir()
    (tmp_path / "20261119-000000-0002" / "head.json").write_text('{"pid": 999999999}')
    (tmp_path / "20261118-000000-0003").mkdir()
    (tmp_path / "20261118-000000-0003" / STORE_NAME).write_text("no database" * 100)

    title, *lines = [line.split() for line in runs_text(tmp_path).split("\n\n")[0].splitlines()]
    assert title[:4] == ["run", "started", "mode", "outcome"]
    assert [line[0][-4:] for line in lines] == ["0001", "0b76", "0002", "0003"]
    assert lines[0][3:] == ["local", "degraded", "1", "02:05/05:00", "1", "990", "99.0", "10", "2"]
    assert lines[2][3:5] == ["–", "interrupted"]  # noqa: RUF001 - an en dash is what is shown for unknown
    assert lines[3][4] == "unreadable"
    assert runs_text(tmp_path, ASCII).isascii()


def test_the_list_says_how_to_go_on_with_the_newest(tmp_path: Path) -> None:
    written(tmp_path)
    hint = f"resume: python -m orchestrator run --resume {RUN_ID} --run-dir {tmp_path}"
    assert runs_text(tmp_path).splitlines()[-1] == hint
    written(tmp_path, "20261121-000000-0001", elapsed_s=300.0)
    assert "resume" not in runs_text(tmp_path)


@pytest.mark.parametrize("outcome", ["interrupted", "failed", "degraded", "good"])
def test_every_run_with_time_left_is_offered_to_be_gone_on_with(tmp_path: Path, outcome: str) -> None:
    written(tmp_path).end(outcome, 1, None, [])
    hint = f"resume: python -m orchestrator run --resume {RUN_ID} --run-dir {tmp_path}"
    assert hint in runs_text(tmp_path).splitlines()
    assert hint in report_text(tmp_path / RUN_ID, 100).splitlines()


@pytest.mark.parametrize("changed", [{"elapsed_s": 299.5}, {"head_started": start_time(os.getpid())}])
def test_no_run_under_way_or_without_time_is_offered(tmp_path: Path, changed: dict[str, Any]) -> None:
    written(tmp_path, **changed)
    assert "resume" not in runs_text(tmp_path)
    assert "resume" not in report_text(tmp_path / RUN_ID, 100)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("runs", ""),
        ("./runs/", ""),
        ("night", " --run-dir night"),
        ("my  runs; rm", " --run-dir 'my  runs; rm'"),
        ("it's", """ --run-dir 'it'"'"'s'"""),
        ("a\x1b[2J\nb", " --run-dir 'a [2J b'"),
    ],
)
def test_the_hint_names_the_folder_as_a_shell_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path(typed))
    hint = f"resume: python -m orchestrator run --resume {RUN_ID}{said}"
    assert runs_text(Path(typed)).splitlines()[-1] == hint
    assert hint in report_text(Path(typed) / RUN_ID, 100).splitlines()


def test_an_empty_list_says_what_to_type(tmp_path: Path) -> None:
    assert "python -m orchestrator run" in runs_text(tmp_path / "nowhere")
    assert json.loads(runs_json(tmp_path / "nowhere")) == {"schema": 1, "runs": []}


def test_the_list_as_an_object(tmp_path: Path) -> None:
    written(tmp_path)
    (told,) = json.loads(runs_json(tmp_path))["runs"]
    assert told["run_id"] == RUN_ID
    assert (told["outcome"], told["exit_code"]) == ("interrupted", None)
    assert (told["elapsed_s"], told["remaining_s"], told["workers"]) == (125.0, 175.0, 1)
    assert (told["steps_ok"], told["steps_lost_upper_bound"], told["incomplete"]) == (990, 40, False)


def test_a_killed_run_is_told_with_all_that_happened(tmp_path: Path) -> None:
    written(tmp_path)
    text = report_text(tmp_path / RUN_ID, 100)
    assert "outcome: interrupted; its head ended without a summary" in text
    assert f"resume: python -m orchestrator run --resume {RUN_ID}" in text
    assert "worked 2m 5s of 5m" in text
    assert "990 good steps counted, at most 40 lost" in text
    assert "! pc1 runs hot" in text
    assert "pc1/0  RUNNING" in text
    (fallen,) = [line for line in text.splitlines() if "RESTARTING" in line]
    assert fallen.endswith("pc1/0 RESTARTING: killed [2J")
    assert "pc2 has left" in text
    (error,) = [line for line in text.splitlines() if "ValueError" in line]
    assert error.endswith("pc1/0 ValueError: no good")
    assert "\x1b" not in text
    table = text[text.index("nodes ") : text.index("total ")]
    assert max(map(len, table.splitlines())) <= 100


def test_faults_are_grouped_by_what_became_of_them(tmp_path: Path) -> None:
    store = written(tmp_path, chaos="seed=1,kill=3")
    faults = [{"kind": "kill", "fate": fate, "recovered_s": took_s, "target": "pc1/0", "at_unix_s": 1.0, "count": 1}
              for fate, took_s in (("recovered", 4.0), ("recovered", 6.0), ("not_back", None))]  # fmt: skip
    store.end("good", 0, None, [*faults, {"kind": "oom"}])
    text = report_text(tmp_path / RUN_ID, 100)
    assert "faults asked for: seed=1,kill=3" in text
    assert "injected faults" in text
    assert "3 kill: 2 recovered after 5.0 s (median), 1 not back" in text
    assert "1 oom: 1 unknown" in text
    assert "outcome: good, exit code 0: it ran to its end" in text


def test_a_bad_night_is_told_by_its_last_lines(tmp_path: Path) -> None:
    store = written(tmp_path)
    for number in range(100):
        store.event({"at": "now", "event": "workload_error", "slot": "pc1/0", "traceback": f"E: {number}"})
    store.commit()
    text = report_text(tmp_path / RUN_ID, 100)
    assert "E: 99" in text
    assert "E: 50" not in text
    assert "71 before these, in events.jsonl" in text


def test_the_object_is_the_summary_that_was_written_else_one_from_the_store(tmp_path: Path) -> None:
    written(tmp_path)
    told = json.loads(report_json(tmp_path / RUN_ID))
    summary = summary_dict(snapshot_of(RUN_ID), "good", 0, "2023-11-14T22:13:20.000+00:00")
    assert set(summary) <= set(told)
    assert (told["outcome"], told["exit_code"], told["steps_ok"]) == ("interrupted", None, 990)
    assert told["workers"][0]["slot"] == "pc1/0"
    assert told["started_at"] == summary["started_at"]

    write_summary(tmp_path / RUN_ID / "summary.json", summary)
    assert json.loads(report_json(tmp_path / RUN_ID)) == summary


def test_a_run_that_only_left_a_summary_is_told_from_it(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).mkdir()
    summary = summary_dict(snapshot_of(RUN_ID), "failed", 3, "2023-11-14T22:13:20.000+00:00", "no cluster\x1b")
    write_summary(tmp_path / RUN_ID / "summary.json", summary)
    text = report_text(tmp_path / RUN_ID, 100)
    assert "outcome: failed, exit code 3: an error ended it (no cluster )" in text
    assert "pc1/0  RUNNING" in text
    (tmp_path / RUN_ID / "summary.json").write_text('{"outcome": "failed"}')
    assert "the rest of summary.json cannot be read" in report_text(tmp_path / RUN_ID, 100)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_verbs_tell_a_run_under_way(tmp_path: Path, encoding: str) -> None:
    written(tmp_path, head_started=start_time(os.getpid()))
    place = ("--run-dir", str(tmp_path))
    listed = orchestrator("runs", *place, PYTHONIOENCODING=encoding)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert "running" in listed.stdout
    told = orchestrator("report", "0b76", "--text", *place, PYTHONIOENCODING=encoding, COLUMNS="70")
    assert (told.returncode, told.stderr) == (0, "")
    assert f"outcome: running (process {os.getpid()})" in told.stdout
    as_object = orchestrator("report", "--json", *place, PYTHONIOENCODING=encoding)
    assert json.loads(as_object.stdout)["outcome"] == "running"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("report",), "there is no run in"),
        (("report", "../x"), "there is no run in"),
        (("report", "--text", "--json"), "exclude each other"),
    ],
)
def test_a_wrong_request_is_a_sentence(tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    done = orchestrator(*arguments, "--run-dir", str(tmp_path))
    assert done.returncode == 2
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if "--json" in arguments:
        assert json.loads(done.stdout)["outcome"] == "failed"


def test_a_damaged_store_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / RUN_ID).mkdir()
    (tmp_path / RUN_ID / STORE_NAME).write_bytes(b"\0" * 4096)
    done = orchestrator("report", "--run-dir", str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert STORE_NAME in done.stderr
