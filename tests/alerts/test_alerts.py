"""Alerts: their conditions over frames and in PromQL say the same, and the rules file is made from them."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from observability import rules
from observability.traces import STEP_S, Trace, frame_at, traces
from render_observability import FOLDER, rendered

from orchestrator.core.slot import HeadState
from orchestrator.record.deliveries import Deliveries
from orchestrator.record.follow import Follower
from orchestrator.record.model import Row, Snapshot
from orchestrator.record.records import STORE_NAME
from orchestrator.record.store import RunStore
from orchestrator.view.alerts import facts
from orchestrator.view.alerts.badges import badges
from orchestrator.view.alerts.catalogue import ALERTS
from orchestrator.view.alerts.judge import AlertWatch, judge
from tests.watch.scene import FACTS, event, make_row, make_snapshot
from workers.messages import WorkerState

PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; on Debian: apt install prometheus",
)
TRACES = traces()
RENDERED = rendered()


def promtool(*arguments: str | Path) -> str:
    """Run promtool; return what it said."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def fired(trace: Trace) -> set[str]:
    return {firing.alert.name for firing in rules.verdicts(trace)[-1]}


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.alert}-{trace.fires}")
def test_an_alert_fires_on_its_bad_run_and_not_on_the_similar_one(trace: Trace) -> None:
    assert (trace.alert in fired(trace)) is trace.fires


def test_every_alert_has_made_up_runs() -> None:
    assert [trace.alert for trace in TRACES if trace.fires] == [alert.name for alert in ALERTS]


@PROMTOOL
def test_conditions_and_promql_agree_on_every_look_of_every_run(tmp_path: Path) -> None:
    tests = []
    for trace in TRACES:
        by_look = [
            {
                "expr": 'count by (alertname, node, slot, gpu_uuid) (ALERTS{alertstate="firing"})',
                "eval_time": f"{number * STEP_S}s",
                "exp_samples": [
                    {
                        "labels": _noted(
                            {"alertname": one.alert.name, **rules.subject_labels(one)}
                        ),
                        "value": 1,
                    }
                    for one in firing
                ],
            }
            for number, firing in enumerate(rules.verdicts(trace))
        ]
        series = rules.input_series(rules.series_of(trace))
        name = f"{trace.alert} {trace.fires}"
        tests.append(
            {
                "name": name,
                "interval": f"{STEP_S}s",
                "input_series": series,
                "promql_expr_test": by_look,
            }
        )
    files = ["alerts.yml", "alerts_optional.yml"]
    for file in files:
        shutil.copy(FOLDER / file, tmp_path)
    told = {"rule_files": files, "evaluation_interval": f"{STEP_S}s", "tests": tests}
    (tmp_path / "agree.yml").write_text(yaml.safe_dump(told, width=10**6))
    promtool("test", "rules", tmp_path / "agree.yml")


def _noted(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


@PROMTOOL
def test_the_rules_are_valid_and_pass_their_own_tests() -> None:
    promtool("check", "rules", FOLDER / "alerts.yml", FOLDER / "alerts_optional.yml")
    promtool("test", "rules", FOLDER / "alerts_test.yml")


@pytest.mark.parametrize("name", RENDERED)
def test_what_is_checked_in_is_what_the_catalogue_makes(name: str) -> None:
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
    firing = rules.verdicts(replace(trace, looks=looks))[-1]
    assert {one.alert.scope for one in firing} <= {"run", "node"}


@pytest.mark.parametrize("trace", TRACES, ids=lambda trace: f"{trace.alert} {trace.fires}")
def test_badges_show_what_fires_each_alert_once(trace: Trace) -> None:
    for firing in rules.verdicts(trace):
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
    assert facts.is_not_finite(row)
    assert not facts.is_not_finite(replace(row, reason="5 processes died"))


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
