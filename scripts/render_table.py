"""Draws the health table of a run as SVG, for the documentation.

    python scripts/render_table.py runs/<id> docs/health-table.svg

Covers the last moment of a run only. Does not read samples or events.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

# The script is outside the packages, and the packages need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from orchestrator.record.archive import read_run
from orchestrator.view.live import health_lines

_WIDTH = 150


def render(folder: Path, output_path: Path) -> None:
    """Write the table of the run in a run folder to a file."""
    snapshot = read_run(folder).snapshot()
    console = Console(
        record=True, width=_WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    for line in health_lines(snapshot, _WIDTH):
        console.print(line)
    # With a fixed id, the same run gives the same file, so a commit shows only real changes.
    content = console.export_svg(title=f"run {snapshot.run_id}", unique_id="health-table")
    output_path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    render(Path(sys.argv[1]), Path(sys.argv[2]))
