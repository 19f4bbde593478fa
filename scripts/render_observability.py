"""Writes docs/observability from the catalogues of metrics and alerts: rules, their tests, and the
dashboard.

    python scripts/render_observability.py [FOLDER]

What a person may change, prometheus.yml and README.md, stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

# The script stands beside the packages, not in them, and they need not be installed.
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from observability.dashboard import dashboard  # noqa: E402 - found since now
from observability.rules import rule_tests, rules  # noqa: E402 - found since now

FOLDER = ROOT / "docs" / "observability"


def rendered() -> Mapping[str, str]:
    """Return each file's text by its name."""
    return {
        "alerts.yml": rules(opt_in=False),
        "alerts_optional.yml": rules(opt_in=True),
        "alerts_test.yml": rule_tests(),
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
