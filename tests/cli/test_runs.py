"""The output of `runs` and `report` for runs that ended, continue, were killed, or left nothing."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli.printing import text_lines
from orchestrator.cli.runs import report_json, report_text, runs_parts
from orchestrator.record.folders import find_run, list_runs
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.model import Snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.record.summary import summary_dict
from orchestrator.view.terminal import plain_text
from tests.cli.conftest import Command
from tests.factories import FACTS, add_event, begun_run, event, make_row, make_snapshot, record
from tests.scene import ROOT, only_object
from workers.keeper.processes import start_time

RUN_ID = "20261120-051500-0b76"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "x.py", line 3, in step\n    boom()\n'
    "ValueError: no good\nmore\n"
)


def snapshot_of(run_id: str) -> Snapshot:
    row = make_row(restarts=2, steps_ok=990, steps_oom=10, oom_count=10, verify_checks=0)
    return make_snapshot(
        row,
        run_id=run_id,
        elapsed_s=125.0,
        duration_s=300.0,
        notices=("pc1 runs hot",),
    )


def written(runs: Path, run_id: str = RUN_ID, **changed: Any) -> RunStore:
    """Write a run as a head does, without its end."""
    usual = {"duration_s": 300.0, "head_started": "1", "host": socket.gethostname()}
    store = begun_run(runs / run_id, replace(FACTS, run_id=run_id, **{**usual, **changed}))
    snapshot = snapshot_of(run_id)
    store.slots([record(row=snapshot.rows[0])])
    fallen = {"to_state": "RESTARTING", "cause": "killed\x1b[2J"}
    add_event(store, event(name="state", slot="pc1/0", **fallen))
    add_event(store, event(name="state", slot="pc1/0", to_state="RUNNING", cause="steady"))
    add_event(store, event(name="node_left", node="pc2"))
    add_event(store, event(name="workload_error", slot="pc1/0", traceback=TRACEBACK))
    store.update(snapshot)
    assert store.commit()
    return store


def runs_text(runs: Path) -> str:
    return plain_text([*text_lines(runs_parts(tuple(list_runs(runs)), runs), None)])


def test_the_list_is_one_line_for_each_run_the_newest_first(tmp_path: Path) -> None:
    written(tmp_path).end("good", 0, None, [])
    written(tmp_path, "20261121-000000-0001", mode="local").end("degraded", 1, None, [])
    (tmp_path / "20261119-000000-0002").mkdir()
    (tmp_path / "20261119-000000-0002" / "head.json").write_text('{"pid": 999999999}')
    (tmp_path / "20261121-000000-0001" / QUEUE_NAME).mkdir()  # an empty queue ends its run
    (tmp_path / "20261118-000000-0003").mkdir()
    (tmp_path / "20261118-000000-0003" / STORE_NAME).write_text("no database" * 100)

    title, *lines = [line.split() for line in runs_text(tmp_path).split("\n\n")[0].splitlines()]
    assert title[:4] == ["run", "started", "mode", "outcome"]
    assert [line[0][-4:] for line in lines] == ["0001", "0b76", "0002", "0003"]
    assert lines[0][3:] == ["local", "degraded", "1", "02:05", "1", "990", "99.0", "10", "2"]
    assert lines[1][6] == "02:05/05:00"
    assert lines[2][3:5] == ["–", "interrupted"]  # noqa: RUF001 - an en dash is what is shown for unknown
    assert lines[3][4] == "unreadable"


@pytest.mark.parametrize(
    "changed", [{"elapsed_s": 299.5}, {"head_started": start_time(os.getpid())}]
)
def test_only_the_newest_run_with_time_left_is_offered(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    written(tmp_path, "20261119-000000-0001")
    assert "resume" in runs_text(tmp_path)
    written(tmp_path, **changed)
    assert "resume" not in runs_text(tmp_path)
    assert "resume" not in report_text(tmp_path / RUN_ID, 100)


@pytest.mark.parametrize(
    ("outcome", "typed", "said"),
    [
        (None, "runs", ""),
        ("degraded", "my  runs; rm", " --run-dir 'my  runs; rm'"),
        ("good", "it's", """ --run-dir 'it'"'"'s'"""),
        ("good", "a\x1b[2J\nb", " --run-dir 'a [2J b'"),
    ],
)
def test_a_run_with_time_left_is_offered_with_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str | None, typed: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    store = written(Path(typed))
    if outcome is not None:
        store.end(outcome, 1, None, [])
    hint = f"resume: python -m orchestrator run --resume {RUN_ID}{said}"
    assert runs_text(Path(typed)).splitlines()[-1] == hint
    assert hint in report_text(Path(typed) / RUN_ID, 100).splitlines()


def test_a_run_is_resumed_without_a_cluster_yaml(nowhere: Path, command: Command) -> None:
    written(Path("runs"), elapsed_s=299.5).end("good", 0, None, [])
    done = command("run", "--resume", RUN_ID)
    assert done.returncode == 2
    assert f"run {RUN_ID} has worked all of its 300 s" in " ".join(done.stderr.split())


def test_a_run_that_was_refused_is_neither_offered_nor_the_newest(tmp_path: Path) -> None:
    written(tmp_path)
    refused = tmp_path / f"2999{RUN_ID[4:]}"
    store = begun_run(refused)
    assert find_run(tmp_path, "latest") == refused, "it may still get workers"
    store.end("failed", 3, "no cluster", [])
    assert find_run(tmp_path, "latest") == tmp_path / RUN_ID
    assert "resume" not in runs_text(tmp_path)
    assert "resume" not in report_text(refused, 100)


def test_an_empty_list_says_what_to_type(command: Command, nowhere: Path) -> None:
    place = ("--run-dir", "nowhere")
    assert "`python -m orchestrator run` makes one" in command("runs", *place).stdout
    assert json.loads(command("runs", "--json", *place).stdout) == {"schema": 1, "runs": []}


def test_a_killed_run_is_told_with_all_that_happened(tmp_path: Path) -> None:
    written(tmp_path)
    text = report_text(tmp_path / RUN_ID, 100)
    assert "outcome: interrupted; its head was killed, or the machine went down" in text
    assert f"resume: python -m orchestrator run --resume {RUN_ID}" in text
    assert "worked 2m 5s of 5m" in text
    assert "! pc1 runs hot" in text
    assert "pc1/0  RTX 3090  RUNNING" in text
    (fallen,) = [line for line in text.splitlines() if "RESTARTING" in line]
    assert fallen.endswith("pc1/0 state: None to RESTARTING: killed [2J")
    assert "node left: node pc2" in text
    assert "\n\n\n" not in text, "one blank line between sections"
    (error,) = [line for line in text.splitlines() if "ValueError" in line]
    assert error.endswith("pc1/0 workload error: ValueError: no good")
    assert "\x1b" not in text
    table = text[text.index("nodes ") : text.index("what happened")]
    assert max(map(len, table.splitlines())) <= 100


def test_what_a_slot_printed_last_is_shown(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where there is no cluster.yaml
    written(tmp_path).commit()
    kept = tmp_path / RUN_ID / "output" / "pc1" / "0.log"
    kept.parent.mkdir(parents=True)
    kept.write_text(
        "".join(f"line {number}\n" for number in range(150)) + "\x1b[31mred\n", encoding="utf-8"
    )
    shown = command("logs", "pc1/0", "--run-dir", str(tmp_path))
    assert (shown.returncode, shown.stdout.splitlines()[::99]) == (0, ["line 51", "red"])
    assert "pc1/0 red" in report_text(tmp_path / RUN_ID, 100)
    kept.unlink()
    os.mkfifo(kept)  # for which the command must not wait
    assert command("logs", "pc1/0", "--run-dir", str(tmp_path)).stdout.endswith("printed nothing\n")
    unknown = command("logs", "pc9/0", "--run-dir", str(tmp_path))
    assert unknown.returncode == 2
    assert "has no slot 'pc9/0'; valid: " in unknown.stderr


def test_faults_are_grouped_by_what_became_of_them(tmp_path: Path) -> None:
    store = written(tmp_path, chaos="seed=1,kill=3")
    faults = [{"kind": "kill", "fate": fate, "recovered_s": took_s, "target": "pc1/0", "at_unix_s": 1.0, "count": 1}
              for fate, took_s in (("recovered", 4.0), ("recovered", 6.0), ("not_back", None))]  # fmt: skip
    store.end("good", 0, None, [*faults, {"kind": "oom"}])
    text = report_text(tmp_path / RUN_ID, 100)
    assert "faults asked for: seed=1,kill=3" in text
    assert "injected faults" in text
    assert "2 kill recovered" in text
    assert "1 oom unknown" in text
    assert "outcome: good, exit code 0" in text


def test_a_bad_night_is_told_by_its_last_lines(tmp_path: Path) -> None:
    store = written(tmp_path)
    for number in range(100):
        add_event(store, event(name="workload_error", slot="pc1/0", traceback=f"E: {number}"))
    store.commit()
    text = report_text(tmp_path / RUN_ID, 100)
    assert "E: 99" in text
    assert "E: 50" not in text
    assert "71 before these, in events.jsonl" in text


def test_the_object_is_the_summary_that_the_run_wrote(tmp_path: Path) -> None:
    store = written(tmp_path)
    told = json.loads(report_json(tmp_path / RUN_ID))
    assert (told["outcome"], told["exit_code"], told["steps_ok"]) == ("interrupted", None, 990)

    add_event(store, event(name="run_ended", missed=["too few good steps"]))
    store.end("degraded", 1, None, [])
    snapshot = snapshot_of(RUN_ID)
    snapshot = replace(snapshot, notices=(*snapshot.notices, "too few good steps"))
    summary = summary_dict(snapshot, "degraded", 1, "2023-11-14T22:13:20.000+00:00")
    assert json.loads(report_json(tmp_path / RUN_ID)) == summary


def test_the_verbs_tell_a_run_under_way(command: Command, tmp_path: Path) -> None:
    written(tmp_path, head_started=start_time(os.getpid()))
    place = ("--run-dir", str(tmp_path))
    assert "running" in command("runs", *place).stdout
    said = f"outcome: running (process {os.getpid()})"
    assert said in command("report", "0b76", *place).stdout
    assert only_object(command("report", "--json", *place).stdout)["outcome"] == "running"


@pytest.mark.parametrize("verb", [["report"], ["top", "--once"], ["stop"], ["pause", "pc1/0"]])
def test_a_verb_that_only_reads_needs_no_cluster_yaml(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str]
) -> None:
    written(tmp_path / "of\U0001f600").end("good", 0, None, [])
    monkeypatch.chdir(tmp_path)
    done = command(*verb, "--run-dir", "of\U0001f600")
    assert "no such file" not in done.stderr
    assert RUN_ID in done.stdout or "pc1/0" in done.stdout or verb[0] in {"stop", "pause"}


@pytest.mark.parametrize(
    "typed",
    [
        ["init", "-o", "x" * 300],
        ["stop", "-c", str(ROOT / "cluster.yaml"), "--run-dir", "x" * 300],
    ],
)
def test_a_name_that_is_too_long_is_refused_in_words(command: Command, typed: list[str]) -> None:
    done = command(*typed)
    assert "File name too long" in done.stdout + done.stderr
    assert "internal error" not in done.stderr


def test_a_run_that_began_where_no_calendar_goes_is_told(tmp_path: Path) -> None:
    written(tmp_path, started_at_unix_s=1e300)
    assert "started at second 1" in report_text(tmp_path / RUN_ID, 100)
    assert json.loads(report_json(tmp_path / RUN_ID))["started_at"] is None
