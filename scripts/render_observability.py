"""Writes docs/observability from the catalogues of metrics and alerts: rules and the dashboard.

    python scripts/render_observability.py [FOLDER]

What a person may change, prometheus.yml and README.md, stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

# The script stands beside the packages, not in them, and they need not be installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.record.model import FIELDS, STATE_STYLES  # noqa: E402 - found since now
from orchestrator.view.alerts import ALERTS, WATCHER_DOWN, Alert  # noqa: E402

FOLDER = ROOT / "docs" / "observability"

_HEADER = "# Made by scripts/render_observability.py; changes here are lost.\n"
#: Of a page that does not answer Prometheus can know nothing else.
_UP = 'up{job="orchestrator"}'


_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_SLOT: Final = 'node=~"$node",slot=~"$slot"'
_NODE: Final = 'node=~"$node"'
_RATE: Final = "$__rate_interval"
_ON_SLOT: Final = "on (instance, node, slot)"
_HEIGHT: Final = 8
_WIDTH: Final = 24
#: Unit of a metric by the end of its name -> unit of Grafana.
_UNITS: Final[Mapping[str, str]] = {
    "_bytes": "bytes", "_ratio": "percentunit", "_celsius": "celsius", "_watts": "watt", "_hertz": "hertz",
    "_seconds": "s",
}  # fmt: skip
#: Colours of the table of slots, as Grafana names them.
_COLOURS: Final[Mapping[str, str]] = {
    "red": "red", "magenta": "purple", "yellow": "yellow", "cyan": "blue", "green": "green", "dim": "text",
}  # fmt: skip
_FLOPS: Final = f"rate(orchestrator_slot_work_flop_total{{{_SLOT}}}[{_RATE}])"
#: One number for each state, so that a slot is one line.
_STATE: Final = " or ".join(
    f'orchestrator_slot_state{{{_SLOT},state="{state.value.lower()}"}} * {rank}'
    for rank, state in enumerate(STATE_STYLES)
)
_STATE_WORDS: Final = {
    str(rank): {"text": state.value, "color": _COLOURS[style.split()[-1]], "index": rank}
    for rank, (state, style) in enumerate(STATE_STYLES.items())
}
_TABLE: Final = (
    ("is", f"max by (node, slot, state) (orchestrator_slot_state{{{_SLOT}}})"),
    ("FLOP/s", f"sum by (node, slot) ({_FLOPS})"),
    (
        "memory of cap",
        (
            f"sum by (node, slot) (orchestrator_slot_allocated_bytes{{{_SLOT}}} / "
            "orchestrator_slot_cap_bytes)"
        ),
    ),
    (
        "OOM/min",
        f"sum by (node, slot) (rate(orchestrator_slot_ooms_total{{{_SLOT}}}[{_RATE}])) * 60",
    ),
    (
        "duty",
        f"sum by (node, slot) (rate(orchestrator_slot_busy_seconds_total{{{_SLOT}}}[{_RATE}]))",
    ),
    ("restarts", f"sum by (node, slot) (orchestrator_slot_restarts_total{{{_SLOT}}})"),
    ("wrong results", f"sum by (node, slot) (orchestrator_slot_wrong_results_total{{{_SLOT}}})"),
)
#: Each query of a table brings its own columns with labels and times.
_UNSHOWN: Final = (
    "Value #A",
    *(f"{name} {index}" for name in ("Time", "node") for index in range(2, len(_TABLE) + 1)),
)
#: Memory of the workers of each card.
_OWN: Final = (
    "sum by (instance, node, gpu_uuid) (orchestrator_slot_reserved_bytes"
    f" * {_ON_SLOT} group_left (gpu_uuid) orchestrator_slot_info)"
)


def rules(*, opt_in: bool) -> str:
    """Return the rules file: of the alerts for all, or of those that people must ask for."""
    name = "orchestrator, optional" if opt_in else "orchestrator"
    told = [_rule(alert) for alert in ALERTS if alert.opt_in == opt_in]
    groups = [{"name": name, "interval": "15s", "rules": told}]
    return _HEADER + yaml.dump(
        {"groups": groups}, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True
    )


def _rule(alert: Alert) -> dict[str, Any]:
    """Return the rule of an alert; the page has judged for how long it must have held."""
    rule: dict[str, Any] = {
        "alert": alert.name,
        "expr": f'orchestrator_alert{{name="{alert.name}"}} == 1',
    }
    subject = "{{ $labels.subject }}"
    if alert is WATCHER_DOWN:
        rule |= {"expr": f"{_UP} == 0 or absent({_UP})", "for": f"{alert.for_s:.0f}s"}
        subject = "{{ $labels.instance }}"
    return rule | {
        "labels": {"severity": alert.severity},
        "annotations": {
            "summary": alert.summary.format(subject=subject),
            "description": alert.what_to_do,
        },
    }


class _Dumper(yaml.SafeDumper):
    """Indents lists, as people do."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        return super().increase_indent(flow, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `queries` are PromQL with the words of the legend."""

    title: str
    kind: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    width: int = 8
    options: Mapping[str, Any] | None = None
    transformations: Sequence[Mapping[str, Any]] = ()
    mappings: Sequence[Mapping[str, Any]] = ()


def _stat(title: str, expression: str, unit: str = "short") -> Panel:
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
    }
    return Panel(
        title=title, kind="stat", queries=[(expression, "")], unit=unit, width=4, options=options
    )


def _lines(title: str, *queries: tuple[str, str], unit: str = "short", width: int = 8) -> Panel:
    return Panel(title=title, kind="timeseries", queries=queries, unit=unit, width=width)


def _of(key: str, *more: str) -> Panel:
    """Return the course of what the catalogue has under some keys: of the same slots or cards, in
    the same unit.
    """
    queries = []
    for each in (key, *more):
        field = FIELDS[each]
        assert field.metric is not None  # noqa: S101 - only what is exported is drawn
        is_card = field.of == "card"
        where, name = (_NODE, "{{node}} {{gpu_uuid}}") if is_card else (_SLOT, "{{slot}}")
        queries.append((f"{field.metric.name}{{{where}}}", f"{name} {each}" if more else name))
    metric = FIELDS[key].metric
    assert metric is not None  # noqa: S101 - as above
    unit = next((unit for end, unit in _UNITS.items() if metric.name.endswith(end)), "short")
    return _lines(metric.help.removesuffix("."), *queries, unit=unit)


_OVERVIEW: Final = (
    _stat("Nodes up", f"sum(orchestrator_node_up{{{_NODE}}})"),
    _stat("Slots", f"count(orchestrator_slot_info{{{_SLOT}}})"),
    _stat("FLOP/s", f"sum({_FLOPS})", "flops"),
    _stat(
        "Out-of-memory a minute",
        f"sum(rate(orchestrator_slot_ooms_total{{{_SLOT}}}[{_RATE}])) * 60",
    ),
    _stat("Wrong results", f"sum(orchestrator_slot_wrong_results_total{{{_SLOT}}})"),
    _stat("Records are old by", "max(orchestrator_frame_age_seconds)", "s"),
    Panel(
        title="States of slots",
        kind="state-timeline",
        queries=[(f"max by (node, slot) ({_STATE})", "{{slot}}")],
        width=16,
        options={"mergeValues": True, "showValue": "never", "rowHeight": 0.9},
        mappings=[{"type": "value", "options": _STATE_WORDS}],
    ),
    _lines("Slots by state", (f"sum by (state) (orchestrator_slot_state{{{_SLOT}}})", "{{state}}")),
)
_SLOTS: Final = (
    Panel(
        title="Slots",
        kind="table",
        queries=[(expression, title) for title, expression in _TABLE],
        width=_WIDTH,
        transformations=[
            {"id": "joinByField", "options": {"byField": "slot", "mode": "outer"}},
            {
                "id": "organize",
                "options": {
                    "excludeByName": dict.fromkeys(_UNSHOWN, True),
                    "renameByName": {
                        f"Value #{chr(65 + index)}": title
                        for index, (title, _) in enumerate(_TABLE)
                    },
                },
            },
        ],
    ),
    _lines("FLOP/s", (_FLOPS, "{{slot}}"), unit="flops"),
    _of("allocated_bytes", "cap_bytes"),
    _lines(
        "Share of time that the device was busy",
        (f"rate(orchestrator_slot_busy_seconds_total{{{_SLOT}}}[{_RATE}])", "{{slot}}"),
        unit="percentunit",
    ),
    _lines(
        "Steps a second",
        (f"sum by (slot, result) (rate(orchestrator_slot_steps_total{{{_SLOT}}}[{_RATE}]))", ""),
    ),
    _of("baseline_pct", "peak_pct"),
    _of("size"),
)
_CARDS: Final = (
    _of("temperature_c", "memory_temperature_c"),
    _of("margin_c"),
    _of("power_w", "power_limit_w"),
    _of("sm_clock_mhz"),
    _of("throttle_pct"),
    _lines(
        "Memory used by other programs",
        (
            (
                f"orchestrator_card_memory_used_bytes{{{_NODE}}} - on (instance, node, gpu_uuid) "
                f"{_OWN}"
            ),
            "{{node}} {{gpu_uuid}}",
        ),
        unit="bytes",
    ),
)
_TRAINING: Final = (_of("loss"), _of("train_step", "saved_step"), _of("samples_per_s"))
_ROWS: Final = {"Overview": _OVERVIEW, "Slots": _SLOTS, "Cards": _CARDS, "Training": _TRAINING}


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the PromQL of each query, with the title of its panel."""
    for panel in (panel for panels in _ROWS.values() for panel in panels):
        for expression, _ in panel.queries:
            yield panel.title, expression


def dashboard() -> str:
    """Return the dashboard to import."""
    told = {
        "title": "Orchestrator",
        "uid": "orchestrator",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "tags": ["orchestrator"],
        "templating": {"list": list(_variables())},
        "annotations": {"list": [_annotation()]},
        "panels": list(_placed(_ROWS)),
    }
    return json.dumps(told, indent=1) + "\n"


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}
    for name, query in (
        ("node", "label_values(orchestrator_slot_info, node)"),
        ("slot", 'label_values(orchestrator_slot_info{node=~"$node"}, slot)'),
    ):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "sort": 7,
        }


def _annotation() -> dict[str, Any]:
    return {
        "name": "Restarts",
        "datasource": _SOURCE,
        "enable": True,
        "expr": f"increase(orchestrator_slot_restarts_total{{{_SLOT}}}[{_RATE}]) > 0.5",
        "titleFormat": "restart of {{slot}}",
        "iconColor": "purple",
    }


def _placed(rows: Mapping[str, Iterable[Panel]]) -> Iterator[dict[str, Any]]:
    number = top = 0
    for title, panels in rows.items():
        number += 1
        place = {"x": 0, "y": top, "w": _WIDTH, "h": 1}
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        top, left, height = top + 1, 0, _HEIGHT
        for panel in panels:
            height = _HEIGHT // 2 if panel.kind == "stat" else _HEIGHT
            if left + panel.width > _WIDTH:
                left = 0
            number += 1
            yield _panel(panel, number, {"x": left, "y": top, "w": panel.width, "h": height})
            left += panel.width
            if left >= _WIDTH:
                left, top = 0, top + height
        top += height if left else 0


def _panel(panel: Panel, number: int, place: Mapping[str, int]) -> dict[str, Any]:
    is_table, is_now = panel.kind == "table", panel.kind in {"table", "stat"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": dict(place),
        "targets": [
            {
                "refId": chr(65 + index),
                "datasource": _SOURCE,
                "expr": expression,
                "legendFormat": legend,
                "instant": is_now,
                "range": not is_now,
                "format": "table" if is_table else "time_series",
            }
            for index, (expression, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "mappings": list(panel.mappings)},
            "overrides": [],
        },
        "options": dict(panel.options or {}),
        "transformations": list(panel.transformations),
    }


def rendered() -> Mapping[str, str]:
    """Return each file's text by its name."""
    return {
        "alerts.yml": rules(opt_in=False),
        "alerts_optional.yml": rules(opt_in=True),
        "grafana.json": dashboard(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write docs/observability.")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in rendered().items():
        (folder / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
