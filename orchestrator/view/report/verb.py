"""Code of `report --html`."""

from __future__ import annotations

from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.view.report import facts, page


def write(path: Path, folder: Path, other: Path | None) -> None:
    """Write the run in a run folder into one file, beside another run.

    `OrchestratorError` if that is not possible.
    """
    try:
        page.write(path, page.html(facts.frozen(folder, other), f"run {folder.name}"))
    except OSError as failure:
        raise UsageError(f"{path} cannot be written: {failure.strerror}") from failure
