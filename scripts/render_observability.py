"""Writes the alerting rules of docs/observability from the catalogue of alerts.

    python scripts/render_observability.py

What a person may change, the dashboard, prometheus.yml and README.md, stays as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

# The script stands beside the packages, not in them, and they need not be installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from orchestrator.view.alerts import ALERTS, WATCHER_DOWN, Alert  # noqa: E402 - found since now

FOLDER = ROOT / "docs" / "observability"

_HEADER = "# Made by scripts/render_observability.py; changes here are lost.\n"
#: Of a page that does not answer Prometheus can know nothing else.
_UP = 'up{job="orchestrator"}'


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


def rendered() -> Mapping[str, str]:
    """Return each file's text by its name."""
    return {"alerts.yml": rules(opt_in=False), "alerts_optional.yml": rules(opt_in=True)}


if __name__ == "__main__":
    for file_name, content in rendered().items():
        (FOLDER / file_name).write_text(content, encoding="utf-8")
