"""Alerts: each is told of its bad run and not of the similar one."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any, Final

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.view.alerts import KINDS, Alert, FirstSeen, Freshness, alerts
from orchestrator.view.web.metrics import exposition
from tests.alerts.traces import frame_at
from tests.scene import ROOT
from workers.messages import Progress, WorkerState
from workers.units import GIB

FOLDER: Final = ROOT / "docs" / "observability"
RUN: Final = "20231114-221320-0b76"
GONE: Final = {"nodes_seen": ("pc2",), "on": "pc1", "state": HeadState.LOST}
HELD_WRONG: Final = {"verify_errors": 1, "state": HeadState.HELD}

#: Name, subject, for how long it must be wrong, a run with it, a similar one without.
CASES: Final[list[tuple[str, str, float, dict[str, Any], dict[str, Any]]]] = [
    ("HeadGone", RUN, 30, {"freshness": Freshness.HEAD_GONE}, {"freshness": Freshness.ENDED}),
    ("HeadGone", RUN, 30, {"late_s": 20.0}, {"late_s": 10.0}),
    ("RecordsIncomplete", RUN, 0, {"incomplete": True}, {"late_s": 10.0}),
    ("RecordsIncomplete", RUN, 0, {"disk_free_bytes": GIB // 2}, {"disk_free_bytes": 2 * GIB}),
    ("NodeMissing", "pc1", 0, GONE, {"on": "pc1", "state": HeadState.LOST}),
    ("SlotQuarantined", "pc1/0", 0, {"state": HeadState.QUARANTINED}, {"state": HeadState.HELD}),
    ("SlotNotWorking", "pc1/0", 300, {"state": WorkerState.BACKOFF}, {"state": HeadState.HELD}),
    ("SlotNotWorking", "pc1/0", 300, {"state": HeadState.STARTING}, GONE),
    ("WrongResults", "pc1/0", 0, {"state": WorkerState.CORRUPT}, HELD_WRONG),
    ("WrongResults", "pc1/0", 0, {"verify_errors": 1}, {"verify_checks": 1}),
    ("CardPaused", "GPU-pc1", 0, {"state": WorkerState.PAUSED}, {"state": WorkerState.THROTTLED}),
    ("CardSlowed", "GPU-pc1", 300, {"throttle_pct": 35.0}, {"throttle_pct": 15.0}),
    ("QueueHeld", RUN, 0, {"held": "three jobs failed alike"}, {"jobs": ["HELD"]}),
    ("JobFailed", "lr-0", 0, {"jobs": ["FAILED"]}, {"jobs": ["CANCELLED"]}),
]


def told_after(seconds: float, **changed: Any) -> tuple[Alert, ...]:
    """Return what is told of a run that has been so for some time."""
    _, since = alerts(frame_at(0, **changed), 0.0)
    told, _ = alerts(frame_at(seconds, **changed), seconds, since)
    return told


@pytest.mark.parametrize(
    ("name", "subject", "lasts_s", "bad", "good"), CASES, ids=lambda case: str(case)[:40]
)
def test_an_alert_is_told_of_its_bad_run_only(
    name: str, subject: str, lasts_s: float, bad: dict[str, Any], good: dict[str, Any]
) -> None:
    found = {alert.name: alert for alert in told_after(lasts_s, **bad)}
    assert found[name].subject == subject
    assert found[name].since_unix_s == 0.0
    assert name not in {alert.name for alert in told_after(lasts_s, **good)}
    assert lasts_s == 0 or name not in {alert.name for alert in told_after(lasts_s - 1, **bad)}


def test_every_rule_has_a_bad_run() -> None:
    assert {name for name, *_ in CASES} == set(KINDS)


def test_a_healthy_run_has_no_alert() -> None:
    assert told_after(10_000) == ()


@pytest.mark.parametrize("freshness", [Freshness.HEAD_GONE, Freshness.ENDED])
def test_without_a_head_nothing_is_said_of_slots(freshness: Freshness) -> None:
    told = told_after(600, freshness=freshness, state=HeadState.QUARANTINED, verify_errors=1)
    assert {alert.name for alert in told} <= {"HeadGone"}


def test_what_stops_before_its_time_begins_anew() -> None:
    since: FirstSeen = {}
    for second, state, is_told in (
        (0, WorkerState.BACKOFF, False),
        (299, WorkerState.WARMING, False),
        (299.5, WorkerState.RUNNING, False),
        (300, WorkerState.BACKOFF, False),
        (599, WorkerState.BACKOFF, False),
        (600, WorkerState.EMERGENCY, True),
    ):
        told, since = alerts(frame_at(second, state=state), second, since)
        assert bool(told) is is_told, second


def test_the_severest_comes_first_and_text_is_harmless() -> None:
    hostile = "gone\x1b[31m\nand red"
    told = told_after(0, incomplete=True, state=HeadState.QUARANTINED, reason=hostile)
    assert [alert.to_json()["severity"] for alert in told] == ["critical", "warning"]
    assert told[0].to_json() == {
        "name": "SlotQuarantined",
        "severity": "critical",
        "tone": "bad",
        "subject": "pc1/0",
        "node": "pc1",
        "text": "slot pc1/0 was given up: gone [31m and red",
        "what_to_do": "See docs/troubleshooting.md#quarantined, then type: python -m orchestrator "
        "reinstate pc1/0",
        "since_unix_s": 0.0,
    }


def test_the_gauge_names_what_is_wrong() -> None:
    frame = frame_at(0, on="pc1", state=HeadState.QUARANTINED)
    text = exposition(replace(frame, alerts=alerts(frame, 0.0)[0])).decode()
    assert [line for line in text.splitlines() if line.startswith("orchestrator_alert{")] == [
        'orchestrator_alert{name="SlotQuarantined",severity="critical",'
        f'subject="{slot}",node="pc1"}} 1'
        for slot in ("pc1/0", "pc1/1")
    ]


def test_shipped_rules_and_panels_ask_for_metrics_that_are_there() -> None:
    told = Progress(train_step=30, loss=2.5, saved_step=20, samples_per_s=4.0)
    sensors = {"memory_temperature_c": 80.0, "throttle_pct": 35.0, "heartbeat_age_s": 0.2}
    frame = frame_at(60, on="pc1", progress=told, incomplete=True, **sensors)
    text = exposition(replace(frame, alerts=alerts(frame, 0.0)[0])).decode()
    there = re.findall(r"^(orchestrator_\w+)", text, re.MULTILINE)
    files = (FOLDER / "alerts.yml", FOLDER / "grafana.json")
    asked = {name for file in files for name in re.findall(r"orchestrator_\w+", file.read_text())}
    assert asked - set(there) == set()


@pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; on Debian: apt install prometheus",
)
def test_the_rules_are_valid() -> None:
    command = ["promtool", "check", "rules", str(FOLDER / "alerts.yml")]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
