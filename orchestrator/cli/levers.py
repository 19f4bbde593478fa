"""The verbs that say which levers to change; what they do is in `orchestrator.advise`."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from orchestrator.cli import options as opt
from orchestrator.cli.loading import config_of, print_text
from orchestrator.watch.cells import glyphs_for


def add_to(app: typer.Typer) -> None:
    """Declare the verbs."""

    @app.command()
    def advise(
        run_id: opt.RunId = "latest",
        config: opt.ConfigPath = "cluster.yaml",
        overrides: opt.Overrides = None,
        run_dir: opt.RunDir = None,
        json_output: opt.AsJson = False,
    ) -> None:
        """Say why the cards of a run were not busy, and which keys to change."""
        from orchestrator.advise import verb  # noqa: PLC0415 - only this verb needs it

        runs_dir = Path(config_of(config, overrides, {"run.dir": run_dir}).run.dir)
        raise typer.Exit(verb.advise(runs_dir, run_id, print_text, glyphs_for(sys.stdout.encoding), json=json_output))
