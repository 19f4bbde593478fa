"""Alerting rules of Prometheus, and the tests of `promtool` for them, made from the catalogue and
the made-up runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any, Final, TypeAlias

import yaml
from prometheus_client.parser import text_string_to_metric_families

from observability.traces import STEP_S, Trace, traces
from orchestrator.view.alerts.catalogue import ALERTS
from orchestrator.view.alerts.judge import AlertWatch, judge
from orchestrator.view.alerts.model import Alert, Firing
from orchestrator.view.web.metrics import exposition

INSTANCE: Final = "127.0.0.1:8470"
_TARGET: Final = {"instance": INSTANCE, "job": "orchestrator"}
_HEADER: Final = "# Made by scripts/render_observability.py; changes here are lost.\n"

#: Labels by which an alert names its subject.
_NAMES: Final[Mapping[str, str]] = {
    "run": "{{ $labels.instance }}",
    "node": "{{ $labels.node }}",
    "slot": "{{ $labels.slot }}",
    "card": "{{ $labels.gpu_uuid }} of {{ $labels.node }}",
}

Series: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...]], list[float | None]]


def rules(*, opt_in: bool) -> str:
    """Return the rules file: of the alerts for all, or of those that people must ask for."""
    chosen = [alert for alert in ALERTS if alert.opt_in == opt_in]
    name = "orchestrator, optional" if opt_in else "orchestrator"
    groups = [{"name": name, "interval": f"{STEP_S}s", "rules": [_rule(alert) for alert in chosen]}]
    return _HEADER + _yaml({"groups": groups})


def _rule(alert: Alert) -> dict[str, Any]:
    times = {"for": alert.for_s, "keep_firing_for": alert.keep_s}
    return {
        "alert": alert.name,
        "expr": alert.promql,
        **{key: f"{seconds:.0f}s" for key, seconds in times.items() if seconds},
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary.format(subject=_NAMES[alert.scope]),
            "description": alert.what_to_do,
        },
    }


def rule_tests() -> str:
    """Return the tests of the rules for `promtool test rules`: each alert on its two made-up runs."""
    tests = [_rule_test(trace) for trace in traces()]
    files = ["alerts.yml", "alerts_optional.yml"]
    return _HEADER + _yaml(
        {"rule_files": files, "evaluation_interval": f"{STEP_S}s", "tests": tests}
    )


def _rule_test(trace: Trace) -> dict[str, Any]:
    alert = next(alert for alert in ALERTS if alert.name == trace.alert)
    wanted = set(re.findall(r"\b(?:orchestrator_\w+|up)\b", alert.promql))
    series = {key: values for key, values in series_of(trace).items() if key[0] in wanted}
    expected = [_expected(firing) for firing in verdicts(trace)[-1] if firing.alert is alert]
    return {
        "name": f"{alert.name} {'fires' if trace.fires else 'stays silent'}",
        "interval": f"{STEP_S}s",
        "input_series": input_series(series),
        "alert_rule_test": [
            {
                "eval_time": f"{(len(trace.looks) - 1) * STEP_S}s",
                "alertname": alert.name,
                "exp_alerts": sorted(expected, key=str),
            }
        ],
    }


def _expected(firing: Firing) -> dict[str, Any]:
    """Return what Prometheus tells of an alert that fires.

    What it leaves out is known by the shape of its rule.
    """
    alert, subject = firing.alert, firing.subject
    labels = {"severity": alert.severity, **subject_labels(firing), **_more_labels(alert)}
    named = _NAMES[alert.scope].replace("{{ $labels.instance }}", INSTANCE)
    for label, value in (
        ("node", subject.node),
        ("slot", subject.name),
        ("gpu_uuid", subject.name),
    ):
        named = named.replace(f"{{{{ $labels.{label} }}}}", value)
    annotations = {"summary": alert.summary.format(subject=named), "description": alert.what_to_do}
    return {"exp_labels": labels, "exp_annotations": annotations}


def subject_labels(firing: Firing) -> dict[str, str]:
    """Return the labels that name the subject of an alert."""
    subject = firing.subject
    of_scope = {
        "run": {},
        "node": {"node": subject.node},
        "slot": {"node": subject.node, "slot": subject.name},
        "card": {"node": subject.node, "gpu_uuid": subject.card},
    }
    return of_scope[firing.alert.scope]


def _more_labels(alert: Alert) -> dict[str, str]:
    """Return the labels of an alert besides those of its subject: of the target, and those that its
    rule asks for.
    """
    is_by = re.match(r"(max|sum) by \(instance, node, slot\)", alert.promql)
    more = {"instance": INSTANCE} if is_by else dict(_TARGET)
    first = alert.promql.split(" unless ")[0].split(" and ")[0]
    if not is_by and "group_right" not in first:
        more |= dict(re.findall(r'(state|result|job)="(\w+)"', first))
    outcomes = {"RunEnded": "good", "RunDegraded": "degraded"}
    return more | ({"outcome": outcomes[alert.name]} if alert.name in outcomes else {})


def verdicts(trace: Trace) -> list[tuple[Firing, ...]]:
    """Return what the conditions over frames say, look by look."""
    watch, found = AlertWatch(alerts=ALERTS), []
    for number, (frame, deliveries) in enumerate(trace.looks):
        watch, firing = judge(watch, frame, number * STEP_S, failed_notifications=deliveries.failed)
        found.append(firing)
    return found


def series_of(trace: Trace) -> Series:
    """Return what Prometheus scrapes of a made-up run: for each series its values, `None` where it
    is absent.
    """
    series: Series = {("up", tuple(_TARGET.items())): []}
    for number, (frame, deliveries) in enumerate(trace.looks):
        samples = {("up", tuple(_TARGET.items())): float(frame is not None)}
        if frame is not None:
            for family in text_string_to_metric_families(
                exposition(frame, deliveries, {}).decode()
            ):
                for sample in family.samples:
                    samples[sample.name, tuple((_TARGET | sample.labels).items())] = sample.value
        for key in samples.keys() - series.keys():
            series[key] = [None] * number
        for key, values in series.items():
            values.append(samples.get(key))
    return series


def input_series(series: Series) -> list[dict[str, str]]:
    """Return series in the notation of `promtool`."""
    return [
        {
            "series": name + "{" + ",".join(f'{label}="{value}"' for label, value in labels) + "}",
            "values": " ".join(_noted(values)),
        }
        for (name, labels), values in sorted(series.items())
    ]


def _noted(values: Iterable[float | None]) -> Iterator[str]:
    was_there = False
    for value, same in groupby(values):
        count = len(list(same))
        if value is not None:
            yield f"{value:.15g}" if count == 1 else f"{value:.15g}+0x{count - 1}"
        else:
            # Without the first word the last value would count for five minutes more.
            yield " ".join([*(["stale"] if was_there else []), *["_"] * (count - was_there)])
        was_there = value is not None


class _Dumper(yaml.SafeDumper):
    """Indents lists, as people do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        return super().increase_indent(flow, False)


def _yaml(data: object) -> str:
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True)
