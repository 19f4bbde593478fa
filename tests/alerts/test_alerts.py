"""Alerts: each fires on its bad run and not on the similar one, and the rules name them all."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from render_observability import FOLDER, rendered

from orchestrator.core.slot import HeadState
from orchestrator.record.archive import Follower
from orchestrator.record.folders import Deliveries
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.view import alerts
from orchestrator.view.alerts import ALERTS, AlertWatch, badges, judge
from orchestrator.view.web.metrics import exposition
from tests.alerts.traces import Trace, frame_at, traces, verdicts
from tests.factories import FACTS, event, make_row, make_snapshot
from workers.messages import WorkerState

TRACES = traces()
RENDERED = rendered()


def fired(trace: Trace) -> set[str]:
    return {firing.alert.name for firing in verdicts(trace)[-1]}


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.alert}-{trace.fires}")
def test_an_alert_fires_on_its_bad_run_only(trace: Trace) -> None:
    assert (trace.alert in fired(trace)) is trace.fires


def test_every_alert_has_made_up_runs() -> None:
    assert [trace.alert for trace in TRACES if trace.fires] == [alert.name for alert in ALERTS]


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; on Debian: apt install prometheus",
)
def test_the_rules_are_valid() -> None:
    files = [FOLDER / "alerts.yml", FOLDER / "alerts_optional.yml"]
    done = subprocess.run(["promtool", "check", "rules", *files], capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_gauge_names_what_fires() -> None:
    frame = frame_at(0, on="pc1", state=HeadState.QUARANTINED, reason="gave up")
    _, firing = judge(AlertWatch(), frame, 0.0)
    text = exposition(frame, firing, Deliveries(), {}).decode()
    assert [line for line in text.splitlines() if line.startswith("orchestrator_alert{")] == [
        'orchestrator_alert{name="SlotQuarantined",node="pc1",severity="critical",'
        f'subject="{slot}"}} 1.0'
        for slot in ("pc1/0", "pc1/1")
    ]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    text = exposition(frame_at(0), (), Deliveries(), {}).decode()
    asked = set(re.findall(r"orchestrator_\w+", (FOLDER / "grafana.json").read_text()))
    assert asked <= set(re.findall(r"orchestrator_\w+", text))


@pytest.mark.parametrize("name", RENDERED)
def test_the_files_are_what_the_catalogue_makes(name: str) -> None:
    told = f"{name} is old: python scripts/render_observability.py"
    assert (FOLDER / name).read_text(encoding="utf-8") == RENDERED[name], told


@pytest.mark.parametrize(
    "trace", [trace for trace in TRACES if trace.fires], ids=lambda trace: trace.alert
)
def test_what_a_person_holds_never_alerts(trace: Trace) -> None:
    def held(snapshot: Snapshot) -> Snapshot:
        return replace(
            snapshot, rows=tuple(replace(row, state=HeadState.HELD) for row in snapshot.rows)
        )

    looks = tuple(
        (frame and replace(frame, snapshot=held(frame.snapshot)), told)
        for frame, told in trace.looks
    )
    firing = verdicts(replace(trace, looks=looks))[-1]
    assert {one.alert.scope for one in firing} <= {"run", "node", "job"}


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.alert} {trace.fires}")
def test_badges_show_what_fires_each_alert_once(trace: Trace) -> None:
    for firing in verdicts(trace):
        shown = badges(firing)
        loud = [one for one in firing if one.alert.severity != "info"]
        assert sorted(
            (badge.name, subject) for badge in shown for subject in badge.subjects
        ) == sorted((one.alert.name, one.subject.name) for one in loud)
        assert len({badge.name for badge in shown}) == len(shown)
        assert [badge.severity for badge in shown] == sorted(badge.severity for badge in shown), (
            "critical first"
        )


def test_a_run_that_was_not_good_says_why(tmp_path: Path) -> None:
    missed = ["pc1/0: no good step", "success rate 0.5 < run.min_success_rate 0.95"]
    store = RunStore(tmp_path / STORE_NAME)
    store.begin(FACTS)
    store.update(make_snapshot(make_row()))
    store.event(event(name="run_ended", missed=missed))
    store.end("degraded", 1, None, ())
    follower = Follower(tmp_path)
    for _ in range(2):
        _, firing = judge(AlertWatch(), follower.look(), 0.0)
        (badge,) = badges(firing)
        assert badge.words == f"the run has ended and was not good: {'; '.join(missed)}"


def test_an_alert_that_stops_before_its_time_begins_anew() -> None:
    def looked(watch: AlertWatch, second: float, state: WorkerState) -> tuple[AlertWatch, set[str]]:
        watch, firing = judge(watch, frame_at(second, state=state), second)
        return watch, {one.alert.name for one in firing}

    watch = AlertWatch()
    for second, state, expected in [
        (0, WorkerState.PAUSED, set()),
        (119, WorkerState.PAUSED, set()),
        (119.5, WorkerState.RUNNING, set()),
        (120, WorkerState.PAUSED, set()),
        (239, WorkerState.PAUSED, set()),
        (240, WorkerState.PAUSED, {"CardPaused"}),
        (241, WorkerState.RUNNING, set()),
    ]:
        watch, names = looked(watch, second, state)
        assert names == expected, second


def test_another_run_begins_with_nothing() -> None:
    watch, firing = judge(AlertWatch(), frame_at(0, state=HeadState.QUARANTINED), 0.0)
    assert [(one.alert.name, one.subject.name, one.text) for one in firing] == [
        ("SlotQuarantined", "pc1/0", "slot pc1/0 was given up: steady")
    ]
    other = frame_at(0)
    other = replace(other, run=replace(other.run, facts=replace(other.run.facts, run_id="other")))
    watch, firing = judge(watch, other, 1.0)
    assert (watch.run_id, firing, dict(watch.active)) == ("other", (), {})


@pytest.mark.torch
@pytest.mark.parametrize("what", ["loss", "norm of the gradient"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_reason_of_a_stopped_training_is_known(what: str, value: float) -> None:
    from workers.training.errors import NotFiniteError

    reason = f"pc1/0: {NotFiniteError(what, value, 3)}; no snapshot"
    row = Row(slot="pc1/0", node="pc1", state=HeadState.QUARANTINED, reason=reason)
    assert alerts.is_not_finite(row)
    assert not alerts.is_not_finite(replace(row, reason="5 processes died"))


def test_history_keeps_few_points() -> None:
    watch = AlertWatch()
    for second in range(0, 7200, 5):
        watch, _ = judge(watch, frame_at(second, oom_count=second), second)
    assert watch.history.growth("oom_count", "pc1/0") == pytest.approx(600, abs=20)
    assert max(map(len, watch.history.courses.values())) <= 62


def test_notifications_that_fail_are_told_of() -> None:
    watch, firing = judge(
        AlertWatch(), frame_at(0), 0.0, failed_notifications=Deliveries(5, 2).failed
    )
    assert firing == ()
    _, firing = judge(watch, frame_at(1), 1.0, failed_notifications=3)
    assert [one.alert.name for one in firing] == ["NotifyFailing"]
