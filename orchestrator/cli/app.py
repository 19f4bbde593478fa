"""The verbs and their options: parses the command line and calls the code of each verb.

Does not implement the verbs, nor decide how an error reaches the user (`main.py`).
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.options import (
    ApplyPowerLimit,
    AsJson,
    ConfigPath,
    Debug,
    FakeSensors,
    Local,
    NewRunDir,
    Overrides,
    Plain,
    Rehearse,
    RunDir,
)
from orchestrator.config.duration import parse_duration
from orchestrator.config.load import load_config
from orchestrator.errors import UsageError

app = typer.Typer(
    name="orchestrator",
    help="Keeps several GPU workers per card busy on ordinary PCs, and survives out-of-memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def run(  # noqa: PLR0913 - one parameter for each option of the command
    config: ConfigPath = "cluster.yaml",
    duration: Annotated[
        str | None, typer.Option(help="Minutes, or 30s, 2h, 1h30m. Default: run.duration.", metavar="TIME")
    ] = None,
    local: Local = False,
    rehearse: Rehearse = False,
    debug: Debug = False,
    scale: Annotated[
        float | None, typer.Option(help="Of bytes in a rehearsal; sizes by its root. Default: 1/16 on a CPU.")
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="matmul, or your own package.module:Class.", metavar="NAME")
    ] = None,
    policy: Annotated[
        str | None, typer.Option(help="How sizes follow memory: adaptive or classic.", metavar="NAME")
    ] = None,
    overrides: Overrides = None,
    json_output: AsJson = False,
    plain: Plain = False,
    wait_for_nodes: Annotated[
        bool, typer.Option("--wait-for-nodes", help="Start on what is there; nodes may join later.")
    ] = False,
    run_dir: NewRunDir = None,
    resume: Annotated[
        str | None, typer.Option(help="Resume a run whose head was killed or interrupted.", metavar="RUN_ID")
    ] = None,
    chaos: Annotated[
        str | None, typer.Option(help='Inject faults, such as "oom:rate=0.05;kill:every=20s".', metavar="FAULTS")
    ] = None,
    chaos_seed: Annotated[int, typer.Option(help="Of --chaos: the same seed, the same faults.")] = 0,
    fake_sensors: FakeSensors = None,
    apply_power_limit: ApplyPowerLimit = False,
    yes_really: Annotated[
        bool, typer.Option("--yes-really", help="Allow --chaos on a real cluster, not only in a rehearsal.")
    ] = False,
) -> None:
    """Run the workers and show their health. Ctrl-C ends the run and writes the summary."""
    from orchestrator.core.chaos.plan import parse_chaos  # noqa: PLC0415
    from orchestrator.run import environment as environments  # noqa: PLC0415 - `--help` should not wait
    from orchestrator.run import runner  # noqa: PLC0415
    from orchestrator.watch.archive import read_run  # noqa: PLC0415
    from orchestrator.watch.folders import find_run  # noqa: PLC0415

    if local and rehearse:
        raise UsageError("--local and --rehearse exclude each other")
    if debug and (local or rehearse):
        raise UsageError("--debug runs one worker in this process: it excludes --local and --rehearse")
    if scale is not None and not rehearse:
        raise UsageError("--scale only makes sense with --rehearse")
    options = runner.Options(
        json=json_output,
        plain=plain,
        wait_for_nodes=wait_for_nodes,
        chaos=None if chaos is None else parse_chaos(chaos, chaos_seed),
        yes_really=yes_really,
        fake_sensors=fake_sensors,
        apply_power_limit=apply_power_limit,
    )
    named = {"run.duration": duration, "workload.name": workload, "memory.policy": policy, "run.dir": run_dir}
    given = [f"{key}={json.dumps(value)}" for key, value in named.items() if value is not None]
    if duration is not None:
        _check_duration(duration)
    loaded = load_config(config, [*(overrides or []), *given])
    _let_workers_import_from_here()
    if resume is not None:
        changed = [text for text in given if not text.startswith("run.dir=")]
        if local or rehearse or debug or changed or overrides:
            raise UsageError("--resume uses the run's own configuration; start a new run to change anything")
        raise typer.Exit(runner.go_on(read_run(find_run(Path(loaded.run.dir), resume)), options))
    if rehearse:
        environment = environments.in_rehearsal(loaded, scale)
    elif debug:
        environment = environments.in_this_process(loaded)
    elif local:
        environment = environments.on_this_machine(loaded)
    else:
        environment = environments.on_cluster(loaded)
    raise typer.Exit(runner.run(environment, options))


@app.command()
def plan(config: ConfigPath = "cluster.yaml", overrides: Overrides = None, json_output: AsJson = False) -> None:
    """Show where each worker will go and what it may use."""
    from orchestrator.cli.plan import plan_json, plan_text  # noqa: PLC0415 - only this verb needs it

    loaded = load_config(config, overrides or [])
    typer.echo(plan_json(loaded) if json_output else plan_text(loaded))


@app.command()
def up(
    node: Annotated[str, typer.Argument(help="A key under nodes: in the configuration.")],
    config: ConfigPath = "cluster.yaml",
    overrides: Overrides = None,
    head_address: Annotated[
        str | None,
        typer.Option(
            help="How other PCs reach the head. Default: what is configured, else this PC.", metavar="HOST[:PORT]"
        ),
    ] = None,
    execute: Annotated[bool, typer.Option("--exec", help="Run the commands instead of printing them.")] = False,
) -> None:
    """Print the exact commands that make a PC a node of the cluster."""
    from orchestrator.cli import nodes  # noqa: PLC0415 - only this verb needs it

    loaded = load_config(config, overrides or [])
    if node not in loaded.nodes:
        raise UsageError(f"{config} has no node {node!r}; valid: {', '.join(loaded.nodes)}")
    command = nodes.command_for(loaded, node, head_address)
    if not execute:
        typer.echo(command.script(node))
        return
    raise typer.Exit(nodes.execute(command))


@app.command()
def stop(
    config: ConfigPath = "cluster.yaml",
    overrides: Overrides = None,
    node: Annotated[
        str | None, typer.Option(help="Also end the Ray node that `up NODE` started on this PC.", metavar="NODE")
    ] = None,
) -> None:
    """End the runs under way on this machine as Ctrl-C would."""
    from orchestrator.cli import nodes  # noqa: PLC0415 - only this verb needs it

    loaded = load_config(config, overrides or [])
    for line in nodes.stop_runs(loaded.run.dir):
        typer.echo(line)
    if node is not None:
        for line in nodes.stop_node(node):
            typer.echo(line)


@app.command()
def runs(
    config: ConfigPath = "cluster.yaml",
    overrides: Overrides = None,
    run_dir: RunDir = None,
    json_output: AsJson = False,
) -> None:
    """List the runs made so far, the newest first."""
    from orchestrator.cli.runs import runs_json, runs_text  # noqa: PLC0415 - only this verb and the next need it
    from orchestrator.watch.cells import glyphs_for  # noqa: PLC0415

    folder = _runs_dir(config, overrides, run_dir)
    glyphs = glyphs_for(sys.stdout.encoding)
    _print(runs_json(folder) if json_output else runs_text(folder, glyphs))


@app.command()
def report(
    run_id: Annotated[
        str, typer.Argument(help="As `runs` shows it, or its end. Default: the newest.", metavar="RUN_ID")
    ] = "latest",
    config: ConfigPath = "cluster.yaml",
    overrides: Overrides = None,
    run_dir: RunDir = None,
    text: Annotated[bool, typer.Option("--text", help="In words: this is the default.")] = False,
    json_output: AsJson = False,
) -> None:
    """Tell what happened in a run, also in one that is under way or whose head was killed."""
    from orchestrator.cli.runs import report_json, report_text  # noqa: PLC0415 - only this verb and the one before need it
    from orchestrator.watch.cells import glyphs_for  # noqa: PLC0415
    from orchestrator.watch.folders import find_run  # noqa: PLC0415

    if text and json_output:
        raise UsageError("--text and --json exclude each other")
    folder = find_run(_runs_dir(config, overrides, run_dir), run_id)
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    if json_output:
        _print(report_json(folder))
    else:
        _print(report_text(folder, width, glyphs_for(sys.stdout.encoding)))


@app.command()
def limits(
    clear: Annotated[bool, typer.Option("--clear", help="Forget them, or those that match.")] = False,
    card: Annotated[str | None, typer.Option(help="Only of cards whose name contains this.", metavar="TEXT")] = None,
    workload: Annotated[
        str | None, typer.Option(help="Only of workloads whose name contains this.", metavar="TEXT")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """List what runs have learned about the sizes that fit a card, or forget it."""
    from orchestrator.cli import limits as limits_verb  # noqa: PLC0415 - only this verb needs it
    from orchestrator.watch.cells import glyphs_for  # noqa: PLC0415
    from workers.learned_limits.store import LimitStore  # noqa: PLC0415

    store, now_unix_s = LimitStore(), time.time()
    selection = limits_verb.Selection(card=card, workload=workload)
    glyphs = glyphs_for(sys.stdout.encoding)
    if clear and json_output:
        _print(limits_verb.cleared_json(store, selection, now_unix_s))
    elif clear:
        _print(limits_verb.cleared_text(store, selection, now_unix_s, glyphs))
    elif json_output:
        _print(limits_verb.limits_json(store, selection, now_unix_s))
    else:
        width = shutil.get_terminal_size(fallback=(0, 0)).columns or None  # without a terminal, one line for each
        _print(limits_verb.limits_text(store, selection, now_unix_s, width, glyphs))


@app.command()
def burn(  # noqa: PLR0913 - one parameter for each option of the command
    config: ConfigPath = "cluster.yaml",
    duration: Annotated[
        str | None,
        typer.Option(
            help="Of the heat phase, minutes or 30s, 2h; the others are never longer. Default: 60.", metavar="TIME"
        ),
    ] = None,
    phase: Annotated[
        list[int] | None,
        typer.Option(help="1 caps and precision, 2 heat, 3 full load. Default: all.", metavar="NUMBER", min=1, max=3),
    ] = None,
    local: Local = False,
    rehearse: Rehearse = False,
    overrides: Overrides = None,
    json_output: AsJson = False,
    plain: Plain = False,
    run_dir: NewRunDir = None,
    fake_sensors: FakeSensors = None,
    apply_power_limit: ApplyPowerLimit = False,
) -> None:
    """Validate every card in three phases, and say PASS or FAIL: caps and precision, heat, full load."""
    from orchestrator.burn import phases, verb  # noqa: PLC0415
    from orchestrator.run import environment as environments  # noqa: PLC0415 - `--help` should not wait

    if local and rehearse:
        raise UsageError("--local and --rehearse exclude each other")
    if duration is not None:
        _check_duration(duration)
    given = [] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"]
    loaded = load_config(config, [*(overrides or []), *given])
    _let_workers_import_from_here()
    make_environment = environments.on_this_machine if local else environments.on_cluster
    if rehearse:
        make_environment = functools.partial(environments.in_rehearsal, scale=None)
    wish = verb.Wish(
        config=loaded,
        make_environment=make_environment,
        heat_s=phases.HEAT_S if duration is None else parse_duration(duration),
        phases={phases.Phase(number) for number in phase or (1, 2, 3)},
        json=json_output,
        plain=plain,
        fake_sensors=fake_sensors,
        apply_power_limit=apply_power_limit,
    )
    raise typer.Exit(verb.burn(wish))


@app.command()
def doctor(
    config: ConfigPath = "cluster.yaml",
    overrides: Overrides = None,
    node: Annotated[
        str | None, typer.Option(help="Which node of the configuration this PC is.", metavar="NODE")
    ] = None,
    json_output: AsJson = False,
) -> None:
    """Check every node of the running cluster, or this machine alone, and say how to put right what is wrong."""
    from orchestrator.doctor import verb  # noqa: PLC0415 - only this verb needs it

    raise typer.Exit(verb.doctor(config, overrides or [], node, json=json_output))


@app.command()
def init(
    output: Annotated[str, typer.Option("--output", "-o", help="Where to.", metavar="FILE")] = "cluster.yaml",
    force: Annotated[bool, typer.Option("--force", help="Replace that file if it is there.")] = False,
) -> None:
    """Write a commented configuration that fits every node of the running cluster, or this machine alone."""
    from orchestrator.cli.init import write_config  # noqa: PLC0415 - only this verb needs it

    for line in write_config(output, force=force):
        typer.echo(line)


def _check_duration(text: str) -> None:
    try:
        parse_duration(text)
    except ValueError as error:
        raise UsageError(f"--duration {text}: {error}") from error


def _runs_dir(config: str, overrides: list[str] | None, run_dir: str | None) -> Path:
    """Return where run folders are: as typed, else as configured."""
    given = [] if run_dir is None else [f"run.dir={json.dumps(run_dir)}"]
    return Path(load_config(config, [*(overrides or []), *given]).run.dir)


def _print(text: str) -> None:
    """Print text that may come from a file: characters that the terminal cannot show must not stop the output."""
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(text.encode(encoding, "backslashreplace").decode(encoding))


def _let_workers_import_from_here() -> None:
    """Make the user's own workload importable by workers: Ray hands this process's search path on to them."""
    if os.getcwd() not in sys.path:  # noqa: PTH109 - sys.path holds strings
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
