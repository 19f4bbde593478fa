"""The verbs that say which levers to change; what they do is in `orchestrator.lab.advise`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import typer

from orchestrator.cli import options as opt
from orchestrator.cli.loading import (
    config_of,
    config_to_read,
    duration_s,
    import_from_here,
    print_text,
)
from orchestrator.errors import UsageError
from orchestrator.view.cells import glyphs_for


def add_to(app: typer.Typer) -> None:
    """Declare the verbs."""

    @app.command()
    def tune(  # noqa: PLR0913, PLR0917 - one parameter for each option; typer calls by name
        config: opt.ConfigPath = "cluster.yaml",
        local: opt.Local = False,
        rehearse: opt.Rehearse = False,
        preset: opt.Preset = None,
        workload: opt.TunedWorkload = "train",
        budget: opt.Budget = None,
        levers: opt.Levers = None,
        resume: opt.ResumeTuning = None,
        overrides: opt.Overrides = None,
        json_output: opt.AsJson = False,
    ) -> None:
        """Measure what each setting brings here; write tuned.yaml."""
        from orchestrator.lab.tune import tuning  # noqa: PLC0415 - `--help` should not wait

        if local and rehearse:
            raise UsageError("--local and --rehearse exclude each other")
        import_from_here()
        budget_s = duration_s(budget)
        if resume is not None:
            if local or rehearse or overrides or preset is not None or levers is not None:
                raise UsageError(
                    "--resume goes on with what was asked for; only --budget may change"
                )
            folder = tuning.folder_of(resume)
        else:
            loaded = config_of(config, overrides, {"train.preset": preset})
            request = tuning.request_of(
                loaded,
                Path(config).read_text(encoding="utf-8"),
                rehearse=rehearse,
                budget_s=budget_s,
                names=tuning.names_in(levers or ""),
                workload=workload,
            )
            folder = tuning.begin(request)
        progress = tuning.ProgressLine()
        progress.line(f"If this is interrupted: python -m orchestrator tune --resume {folder.name}")
        try:
            result = tuning.tune(folder, progress, budget_s)
        finally:
            progress.close()
        print_text(
            json.dumps(result.plain(), indent=2)
            if json_output
            else tuning.result_text(folder, result, _width())
        )

    @app.command()
    def advise(
        run_id: opt.RunId = "latest",
        config: opt.ConfigPath = "cluster.yaml",
        overrides: opt.Overrides = None,
        run_dir: opt.RunDir = None,
        json_output: opt.AsJson = False,
    ) -> None:
        """Say why cards were not busy, and which keys to change."""
        from orchestrator.lab.advise import answer  # noqa: PLC0415 - only this verb needs it

        runs_dir = Path(config_to_read(config, overrides, run_dir).run.dir)
        glyphs = glyphs_for(sys.stdout.encoding)
        raise typer.Exit(
            answer.advise(runs_dir, run_id, print_text, glyphs, json=json_output, width=_width())
        )


def _width() -> int | None:
    """Return the columns of the terminal.

    `None` where the output goes elsewhere, and has room for all.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
