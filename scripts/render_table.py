"""Draws the health table of a finished run from its summary.json, as SVG or text, for the
documentation.

    python scripts/render_table.py runs/<id>/summary.json docs/health-table.svg [--width 150]

Covers the last moment of a run only. Does not read samples or events.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

# The script stands beside the packages, not in them, and they need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from orchestrator.record.summary import snapshot_from_summary
from orchestrator.view.table import health_table

_MIN_WIDTH = 40


def render(summary_path: Path, output_path: Path, width: int) -> None:
    """Write the table of a run to a file, in the form of its suffix, .svg or .txt.

    Raises OSError or ValueError.
    """
    snapshot = snapshot_from_summary(json.loads(summary_path.read_text(encoding="utf-8")))
    console = Console(
        record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(health_table(snapshot, width))
    if output_path.suffix == ".svg":
        # A fixed id: the same run gives the same file, and a commit shows only real changes.
        content = console.export_svg(title=f"run {snapshot.run_id}", unique_id="health-table")
    elif output_path.suffix == ".txt":
        content = "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())
    else:
        raise ValueError(f"{output_path.name} must end in .svg or .txt")
    output_path.write_text(content, encoding="utf-8")


def main() -> int:
    """Run the script and return its exit code: 0, or 2 with one line about what is wrong."""
    parser = argparse.ArgumentParser(description="Draw the health table of a finished run.")
    parser.add_argument("summary", type=Path, help="summary.json of the run")
    parser.add_argument("output", type=Path, help="file to write, ending in .svg or .txt")
    parser.add_argument(
        "--width", type=int, default=150, help=f"characters in a line, at least {_MIN_WIDTH}"
    )
    arguments = parser.parse_args()
    if arguments.width < _MIN_WIDTH:
        parser.error(f"--width must be at least {_MIN_WIDTH}")
    try:
        render(arguments.summary, arguments.output, arguments.width)
    except (OSError, ValueError) as problem:
        print(f"render_table: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
