"""The verb `doctor`: looks, prints, and returns the exit code."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from rich.console import Console

from orchestrator.doctor.drawing import diagnosis_json, diagnosis_lines
from orchestrator.doctor.finding import exit_code
from orchestrator.doctor.visit import diagnose
from orchestrator.run.stdio import own_screen
from orchestrator.watch.cells import glyphs_for


def doctor(config_path: str, overrides: Sequence[str], node: str | None, *, json: bool) -> int:
    """Print what is found on every node of the running cluster, or on this machine; return 1 if anything failed.

    Args:
        config_path: cluster.yaml.
        overrides: As typed after `--set`.
        node: Which node of cluster.yaml this machine is; `None` if the user does not say.
        json: One object on standard output instead of lines.

    Raises:
        UsageError: cluster.yaml has no such node.
    """
    width = shutil.get_terminal_size(fallback=(0, 0)).columns or None  # without a terminal, no line is broken
    with own_screen(None) as screen:  # Ray prints as it likes
        if sys.stdin.isatty() and screen.err.isatty() and not json:
            print("Looking around, which takes some seconds ...", file=screen.err)
        diagnosis = diagnose(config_path, overrides, node)
        if json:
            screen.out.write(diagnosis_json(diagnosis) + "\n")
        else:
            console = Console(file=screen.out, highlight=False, markup=False, emoji=False)
            for line in diagnosis_lines(diagnosis, width, glyphs_for(screen.out.encoding)):
                console.print(line, soft_wrap=True)
    return exit_code(diagnosis.findings)
