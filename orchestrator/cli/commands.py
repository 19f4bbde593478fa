"""The verbs that send a command to a running run; what they do is in `orchestrator.control`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import typer

from orchestrator.cli import options as opt
from orchestrator.cli.loading import config_to_read, print_text
from orchestrator.record.folders import RUNNING, find_run

#: Of the verbs that only name slots.
_HELP = {
    "pause": "Hold slots: no more work; process and memory stay.",
    "unpause": "Let paused and drained slots work again.",
    "drain": "Hold slots and end their processes: their memory is free.",
    "reinstate": "Start quarantined slots again, their failures forgotten.",
    "save": "Have slots save now what they train.",
}


def add_to(app: typer.Typer) -> None:
    """Declare the verbs."""
    for do, summary in _HELP.items():
        _add(app, do, summary)
    _add(app, "resume", "The old name of `unpause`.", hidden=True)

    @app.command()
    def cap(
        slot: opt.Slot,
        amount: opt.Amount,
        run: opt.OfRun = RUNNING,
        config: opt.ConfigPath = "cluster.yaml",
        overrides: opt.Overrides = None,
        run_dir: opt.RunDir = None,
    ) -> None:
        """Bound the memory of a slot; its whole budget lifts that."""
        _send("cap", [slot], run, config, overrides, run_dir, amount)


def _add(app: typer.Typer, do: str, summary: str, *, hidden: bool = False) -> None:
    @app.command(do, help=summary, hidden=hidden)
    def verb(
        slots: opt.Slots,
        run: opt.OfRun = RUNNING,
        config: opt.ConfigPath = "cluster.yaml",
        overrides: opt.Overrides = None,
        run_dir: opt.RunDir = None,
    ) -> None:
        if do == "resume":
            typer.echo(
                "`resume` is called `unpause` now; a run goes on with `run --resume`", err=True
            )
        _send(do, slots, run, config, overrides, run_dir)


def _send(
    do: str,
    slots: Sequence[str],
    run: str,
    config: str,
    overrides: list[str] | None,
    run_dir: str | None,
    amount: str | None = None,
) -> None:
    from orchestrator.control.client import command  # noqa: PLC0415 - only these verbs need it

    folder = find_run(Path(config_to_read(config, overrides, run_dir).run.dir), run)
    print_text(command(folder, do, slots, amount))
