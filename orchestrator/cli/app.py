"""The verbs and their options: parses the command line and calls the code of each verb.

Does not implement the verbs, nor decide how an error reaches the user (`main.py`).
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console
from typer import Argument, Option

from orchestrator.cli import jobs
from orchestrator.cli.loading import (
    APPLY_POWER_LIMIT,
    AS_JSON,
    RUN_ID,
    SLOT,
    ConfigOptions,
    MachineOptions,
    NewRunOptions,
    RunsOptions,
    duration_s,
    flag,
    import_from_here,
    shared,
    value,
)
from orchestrator.cli.printing import print_json, print_text
from orchestrator.errors import UsageError
from orchestrator.record.folders import LATEST, RUNNING, list_runs, run_object

#: Verb -> help text, for the verbs that have only slots as arguments.
_COMMANDS = {
    "pause": "Hold slots: no more work; process and memory stay.",
    "unpause": "Let paused and drained slots work again.",
    "drain": "Hold slots and end their processes: their memory is free.",
    "reinstate": "Start quarantined slots again and forget their failures.",
    "save": "Make slots write a checkpoint of their training now.",
}
_OF_RUN = value("RUN_ID", "Default: the newest running one.", RUNNING, "--run")

app = typer.Typer(
    name="orchestrator",
    help="Keeps several GPU workers per card busy on ordinary PCs, also when memory runs out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
@shared
def run(  # noqa: PLR0913 - one parameter for each option of the command
    new: NewRunOptions,
    duration: str | None = value("TIME", "Minutes, or 30s, 2h, 1h30m. Default: run.duration."),
    workload: str | None = value("NAME", "matmul, train, or your own package.module:Class."),
    policy: str | None = value("NAME", "How sizes follow memory: adaptive or classic."),
    wait_for_nodes: bool = flag(
        "--wait-for-nodes", "Start with the nodes that are there; others may join."
    ),
    resume: str | None = value("RUN_ID", "Resume a run whose head was killed or interrupted."),
    chaos: str | None = value("FAULTS", 'Faults to inject: "oom:rate=0.05;kill:every=20s".'),
    chaos_seed: int = value("NUMBER", "For --chaos: the same seed gives the same faults.", 0),
    yes_really: bool = flag("--yes-really", "Allow --chaos on a cluster, or memory offsets."),
    apply_power_limit: bool = APPLY_POWER_LIMIT,
) -> None:
    """Run the workers and show their health. Ctrl-C ends the run and writes the summary."""
    from orchestrator.cli.plan import refuse_folder
    from orchestrator.record.archive import read_run
    from orchestrator.run import runner

    more_s, faults = duration_s(duration), None
    if chaos is not None:
        from orchestrator.lab.chaos import Chaos

        faults = Chaos(chaos, chaos_seed, yes_really=yes_really)
    options = runner.Options(
        json=new.as_json,
        plain=new.plain,
        wait_for_nodes=wait_for_nodes,
        chaos=faults,
        apply_power_limit=apply_power_limit,
        yes_really=yes_really,
    )
    import_from_here()
    if resume is not None:
        if new.local or new.rehearse or new.overrides or workload is not None or policy is not None:
            raise UsageError(
                "--resume uses the run's own configuration; start a new run to change anything "
                "but --duration"
            )
        raise typer.Exit(runner.resume_run(read_run(new.run(resume)), options, more_s))
    typed = {"run.duration": duration, "workload.name": workload, "memory.policy": policy}
    loaded = new.load_here(typed)
    refuse_folder(loaded)
    raise typer.Exit(runner.run(new.environment(loaded), options))


app.add_typer(jobs.app, name="jobs")


@app.command()
@shared
def plan(where: ConfigOptions, json_output: bool = AS_JSON) -> None:
    """Show where each worker will run and what it may use."""
    from orchestrator.cli.plan import plan_object, plan_parts

    planned = plan_object(where.load())
    print_json(planned) if json_output else print_text(*plan_parts(planned))


@app.command()
@shared
def up(
    where: ConfigOptions,
    node: str = Argument(help="A key under nodes: in the configuration."),
    head_address: str | None = value(
        "HOST[:PORT]", "The head's address for other PCs. Default: the configured one, or this PC."
    ),
    execute: bool = flag("--exec", "Run the commands instead of printing them."),
    stay: bool = flag("--stay", "With --exec: keep the node, and start it again when it ends."),
) -> None:
    """Print the exact commands that make a PC a node of the cluster."""
    from orchestrator.cli import nodes

    if stay and not execute:
        raise UsageError("--stay keeps a node that this command starts: it needs --exec")
    loaded = where.load()
    if node not in loaded.nodes:
        raise UsageError(f"{where.config} has no node {node!r}; valid: {', '.join(loaded.nodes)}")
    command = nodes.command_for(loaded, node, head_address)
    if not execute:
        typer.echo(command.script(node))
        return
    code = nodes.keep(command) if stay else nodes.execute(command)
    print_text(*(command.remarks if code == 0 else ()))
    raise typer.Exit(code)


@app.command()
@shared
def stop(
    where: RunsOptions,
    node: str | None = value("NODE", "Also end the Ray node that `up NODE` started here."),
) -> None:
    """End the runs in the folder of runs, as Ctrl-C would.

    Also restores the card settings of this PC that killed runs have changed.
    """
    from orchestrator.cli import nodes

    for line in nodes.stop(where, node):
        print_text(line)


@app.command()
@shared
def runs(where: RunsOptions, json_output: bool = AS_JSON) -> None:
    """List the runs, the newest first."""
    from orchestrator.cli.runs import runs_parts

    folder = where.runs
    listed = tuple(list_runs(folder))
    if json_output:
        print_json({"runs": [run_object(one) for one in listed]})
    else:
        print_text(*runs_parts(listed, folder))


@app.command()
@shared
def report(
    where: RunsOptions,
    run_id: str = RUN_ID,
    json_output: bool = AS_JSON,
    html: Path | None = value("FILE", "Write one file for a browser, with charts."),
) -> None:
    """Show one run: how it ended, its table, what happened.

    The run may still be running, or killed.
    """
    from orchestrator.cli.runs import report_json, report_text
    from orchestrator.view import html_report

    if json_output and html is not None:
        raise UsageError("--json and --html exclude each other")
    folder = where.run(run_id)
    if html is not None:
        html_report.write_report(html, folder)
        print_text(str(html))
    elif json_output:
        print_json(report_json(folder))
    else:
        print_text(report_text(folder, _columns()))


@app.command()
@shared
def export(
    where: RunsOptions,
    run_id: str = Argument(help="As `runs` shows it, or its ending.", metavar="RUN_ID"),
    slot: str = Argument(help="A slot, such as pc1/3, or a job.", metavar="SLOT"),
    to: Path = value("DIR", "A new folder, or an empty one.", ...),
    adapter: bool = flag("--adapter", "Only the adapters, for peft. Default: merged weights."),
    average: bool = flag("--average", "The averaged weights, if train.ema_decay is set."),
    best: bool = flag("--best", "The checkpoint with the lowest validation loss, if kept."),
) -> None:
    """Write what a slot or job trained as a Hugging Face folder.

    A run that is still running exports its last checkpoint.
    """
    from orchestrator.cli import runs as verb

    form = "adapter" if adapter else None
    print_text(*verb.export(where.run(run_id), slot, to, form, average=average, best=best))


@app.command()
@shared
def logs(
    where: RunsOptions,
    name: str = Argument(
        help="A slot, such as pc1/3, or a job as `jobs list` shows it.", metavar="NAME"
    ),
    run_id: str = value("RUN_ID", "Default: the newest.", LATEST, "--run"),
    follow: bool = Option(
        False,
        "--follow",
        "-f",
        help="Print all lines, and new ones until the end of the run or job.",
    ),
) -> None:
    """Show the last 100 lines that a worker or a job printed.

    The run folder has all lines.
    """
    for text in jobs.output_of(where.runs, run_id, name, follow=follow):
        typer.echo(text, nl=False)


@app.command()
@shared
def top(
    where: RunsOptions,
    run_id: str = RUN_ID,
    once: bool = flag("--once", "Print the table once and end; the default without a terminal."),
) -> None:
    """Follow a run from any terminal; the last line lists the keys."""
    from orchestrator.cli.runs import table_text

    folder = where.run(run_id)
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and Console(stderr=True).is_interactive
    if once or not is_screen:
        print_text(table_text(folder, _columns()))
    else:
        from orchestrator.view.top import Top  # Textual takes half a second to load

        Top(folder).run()


@app.command()
@shared
def notify(
    where: RunsOptions,
    run_id: str = RUN_ID,
    once: bool = flag("--once", "Send one status of the run and end."),
    test: bool = flag("--test", "Send one message, and print which addresses accepted it."),
) -> None:
    """Send messages about a run by mail or chat until it ends.

    Alerts are sent at once, a status every `notify.every`.
    """
    from orchestrator.run.notify_urls import URLS_VARIABLE, notify_urls
    from orchestrator.view import notify as verb

    if once and test:
        raise UsageError("--once and --test exclude each other")
    loaded = where.load_or_shipped()
    urls = notify_urls(loaded.notify)
    if not urls:
        raise UsageError(
            f"there is no address: set notify.urls_file in {where.config}, or {URLS_VARIABLE}"
        )
    if test:
        raise typer.Exit(verb.send_test(urls, print_text))
    folder = where.run(run_id)
    notifier = verb.Notifier(folder=folder, settings=loaded.notify, urls=urls, say=print_text)
    raise typer.Exit(notifier.once() if once else notifier.follow())


@app.command()
@shared
def web(
    where: RunsOptions,
    run_id: str = RUN_ID,
    port: int = Option(
        8470, help="Port of the page; 0: any free one.", min=0, max=65_535, metavar="NUMBER"
    ),
    bind: str | None = value("ADDRESS", "Address of this PC that gives Prometheus /metrics."),
    control: bool = flag("--control", "Let the page send commands for slots and jobs."),
) -> None:
    """Show a run in a browser, also a finished one.

    Prints the address of the page.
    """
    from orchestrator.view.web import server

    server.serve(where.runs, run_id, print_text, port=port, bind=bind, control=control)


@app.command()
@shared
def burn(
    new: NewRunOptions,
    duration: str | None = value("TIME", "Longest phase: that of heat (phase 2). Default: 1h."),
    phase: list[int] | None = Option(
        None,
        help="1 caps and precision, 2 heat, 3 full load. Default: all.",
        metavar="NUMBER",
        min=1,
        max=3,
    ),
    apply_power_limit: bool = APPLY_POWER_LIMIT,
) -> None:
    """Validate every card: PASS or FAIL. In three phases: caps and precision, heat, full load."""
    from orchestrator.lab import burn as verb
    from orchestrator.run import runner

    heat_s = duration_s(duration) or verb.HEAT_S
    loaded = new.load()
    import_from_here()
    options = runner.Options(
        json=new.as_json, plain=new.plain, wait_for_nodes=False, apply_power_limit=apply_power_limit
    )
    devices = {plan.spec.device for plan in new.environment(loaded).plans}
    result = verb.burn(
        verb.planned_runs(loaded, devices, heat_s, phase or (1, 2, 3)),
        new.environment,
        options,
        lambda line: typer.echo(line, err=new.as_json),
    )
    if new.as_json:
        print_json(result)
    raise typer.Exit(result["exit_code"])


@app.command()
@shared
def doctor(
    where: ConfigOptions,
    node: str | None = value("NODE", "Which node of the configuration this PC is."),
    json_output: bool = AS_JSON,
) -> None:
    """Check every node and say what to type. Without a cluster, check only this machine."""
    from orchestrator.doctor import verb

    diagnosis = verb.diagnose(where.config, where.overrides or (), node, quiet=json_output)
    print_json(diagnosis.to_json()) if json_output else print_text(*diagnosis.parts())
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def init(
    output: str = value("FILE", "The file to write.", "cluster.yaml", "--output", "-o"),
    force: bool = flag("--force", "Replace the file if it exists."),
) -> None:
    """Write a cluster.yaml that fits the machines.

    They are the nodes of the running cluster, or this machine.
    """
    from orchestrator.cli.init import write_config

    print_text(*write_config(output, force=force))


@app.command()
@shared
def tune(
    here: MachineOptions,
    workload: str = value("NAME", "train or matmul.", "train"),
    budget: str | None = value("TIME", "Default: 15 minutes; 4.5 in a rehearsal."),
    levers: str | None = value("KEY[=VALUE],...", "Measure only these. Default: all."),
) -> None:
    """Measure the effect of each setting here; write tuned.yaml."""
    from orchestrator.lab.tune import Tuning

    import_from_here()
    tuning = Tuning(
        here.load(),
        rehearse=here.rehearse,
        budget_s=duration_s(budget, "--budget"),
        names=[name.strip() for name in (levers or "").split(",") if name.strip()],
        workload=workload,
    )
    is_whole = tuning.run(lambda line: typer.echo(line, err=True))
    print_json(tuning.result) if here.as_json else print_text(tuning.text())
    if not is_whole:
        raise typer.Exit(130)


def _add_command(do: str, summary: str) -> None:
    @app.command(do, help=summary)
    @shared
    def verb(
        where: RunsOptions,
        slots: list[str] = Argument(
            help="One or more, such as pc1/3.", metavar="SLOT", show_default=False
        ),
        run_id: str = _OF_RUN,
    ) -> None:
        _send(where, do, slots, run_id)


for _do, _summary in _COMMANDS.items():
    _add_command(_do, _summary)


@app.command()
@shared
def cap(
    where: RunsOptions,
    slot: str = SLOT,
    amount: str = Argument(
        help="Such as 2GiB or 900MiB; at most the slot's budget.", metavar="BYTES"
    ),
    run_id: str = _OF_RUN,
) -> None:
    """Cap the memory of a slot; its whole budget lifts the cap."""
    _send(where, "cap", [slot], run_id, amount)


def _send(
    where: RunsOptions, do: str, slots: Sequence[str], run_id: str, amount: str | None = None
) -> None:
    from orchestrator.control.slots import command

    print_text(command(where.run(run_id), do, slots, amount))


def _columns() -> int:
    """Return the width in columns to lay out a text for; without a terminal 120."""
    return shutil.get_terminal_size(fallback=(120, 24)).columns
