"""The verb `doctor`: looks here or at every node of a running cluster, runs the checks, and prints
what they find.

Connects the pure checks to machines; Ray's token and the port of a head are looked at here. Changes
nothing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from rich.console import Console

from orchestrator.cluster.connect import connected, head_address
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeAnswer
from orchestrator.core.placement import Refusal, refusals
from orchestrator.doctor.checks_cluster import check_nodes, check_plan
from orchestrator.doctor.checks_machine import check_disk, check_machine
from orchestrator.doctor.drawing import diagnosis_json, diagnosis_lines
from orchestrator.doctor.finding import (
    Diagnosis,
    Finding,
    exit_code,
    fail,
    named,
    ok,
    skip,
    warn,
    with_config,
)
from orchestrator.errors import ConfigError, NoClusterError, Problem, UsageError
from orchestrator.run.terminal import own_screen
from orchestrator.view.phrases import counted
from workers.host.facts import MachineFacts
from workers.host.machine import free_bytes, look_around

#: The configuration that is read if the user names none.
_DEFAULT_CONFIG = "cluster.yaml"

#: This machine's own ports answer at once or refuse at once.
_KNOCK_S = 1.0


def doctor(config_path: str, overrides: Sequence[str], node: str | None, *, json: bool) -> int:
    """Print what is found on every node of the running cluster, or on this machine; return 1 if
    anything failed.

    What is wrong with the configuration is a finding. `node` is what the user says this machine is.

    Raises:
        UsageError: cluster.yaml has no such node.
    """
    width = (
        shutil.get_terminal_size(fallback=(0, 0)).columns or None
    )  # without a terminal, no line is broken
    with own_screen(None) as screen:  # Ray prints as it likes
        if sys.stdin.isatty() and screen.err.isatty() and not json:
            print("Looking around, which takes some seconds ...", file=screen.err)
        diagnosis = _diagnosed(config_path, overrides, node)
        options = "" if config_path == _DEFAULT_CONFIG else f"--config {shlex.quote(config_path)}"
        findings = tuple(with_config(finding, options) for finding in diagnosis.findings)
        diagnosis = replace(diagnosis, findings=findings, options=options)
        if json:
            screen.out.write(diagnosis_json(diagnosis) + "\n")
        else:
            console = Console(file=screen.out, highlight=False, markup=False, emoji=False)
            for line in diagnosis_lines(diagnosis, width):
                console.print(line, soft_wrap=True)
    return exit_code(diagnosis.findings)


def _diagnosed(config_path: str, overrides: Sequence[str], node: str | None) -> Diagnosis:
    """Look at every node of the running cluster, or at this machine where there is none."""
    config, findings = _configuration(config_path, overrides)
    if node is not None and config is not None and node not in config.nodes:
        raise UsageError(f"{config_path} has no node {node!r}; valid: {', '.join(config.nodes)}")
    address, without = _address(config)
    if config is not None and address is not None:
        try:
            with connected(address, config.cluster.auth) as fleet:
                from orchestrator.cluster.node_tasks import survey  # noqa: PLC0415 - imports ray

                missing, answers = refusals(config, fleet.nodes()), survey()
        except NoClusterError as error:
            hint = f"if it does not run, start it on {config.head_node} with what this prints"
            without = fail(
                str(error), hint=hint, fix=f"python -m orchestrator up {config.head_node}"
            )
        else:
            return _of_cluster(config, address, missing, answers, findings)
    return _of_this_machine(config, node, findings, without)


def _configuration(path: str, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    if path == _DEFAULT_CONFIG and not Path(path).exists() and not overrides:
        found = f"there is no {_DEFAULT_CONFIG} in this folder"
        return None, [
            warn(found, hint="write one that fits this PC", fix="python -m orchestrator init")
        ]
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return None, [_config_problem(problem, path) for problem in error.problems]
    workers = sum(planned.workers for planned in config.nodes.values())
    return config, [ok(f"{counted(len(config.nodes), 'node')}, {counted(workers, 'worker')}")]


def _config_problem(problem: Problem, path: str) -> Finding:
    fix = None
    if problem.source == path and problem.line is not None:
        fix = f"${{EDITOR:-nano}} +{problem.line} {shlex.quote(path)}"
    elif problem.text == "no such file":
        fix = f"python -m orchestrator init --output {shlex.quote(path)}"
    return fail(str(problem), fix=fix)


def _address(config: Config | None) -> tuple[str | None, Finding]:
    """Return where the cluster is, if there is one to be asked, and what to say if
    there is none.
    """
    only = "only this machine was looked at"
    try:
        address = head_address("auto" if config is None else config.cluster.address)
    except NoClusterError as error:
        return None, skip(f"{error}; {only}")
    if config is None:
        return None, skip(f"one was started at {address}; without a configuration {only}")
    host, _, port = address.rpartition(":")
    if config.cluster.address == "auto" and host in _own_addresses() and not _answers(host, port):
        return None, warn(
            f"the Ray head that was started here, at {address}, does not answer any more; {only}",
            hint="to start it again, do what this prints",
            fix=f"python -m orchestrator up {config.head_node}",
        )
    return address, skip(only)


def _of_cluster(
    config: Config,
    address: str,
    missing: Sequence[Refusal],
    answers: Sequence[NodeAnswer],
    config_found: list[Finding],
) -> Diagnosis:
    found = named(
        {
            "config": config_found,
            "token": check_token(config.cluster.auth, is_needed=True),
            "disk": check_disk(free_bytes(config.run.dir)),
        }
    )
    found += check_nodes(config, address, missing, answers)
    for answer in answers:
        if answer.facts is not None:
            of_node = _of_machine(answer.facts, config, answer.name, is_sure=True)
            found += [replace(finding, node=answer.title) for finding in of_node]
    return Diagnosis(
        where=f"the cluster at {address}",
        is_cluster=True,
        has_card=any(answer.facts is not None and bool(answer.facts.cards) for answer in answers),
        has_config=True,
        findings=tuple(found),
    )


def _of_this_machine(
    config: Config | None, node: str | None, config_found: list[Finding], no_cluster: Finding
) -> Diagnosis:
    facts = look_around()
    name, is_sure = (None, False) if config is None else _own_node(config, node, facts.hostname)
    found = _of_machine(facts, config, name, is_sure=is_sure)
    here: dict[str, Finding | Iterable[Finding]] = {}
    if config is not None and name is None:
        names = ", ".join(config.nodes)
        here["plan"] = skip(
            f"which node of cluster.yaml this PC is ({names}) is not known; say it: --node NAME"
        )
    here["disk"] = check_disk(free_bytes("." if config is None else config.run.dir))
    here["token"] = check_token("token" if config is None else config.cluster.auth, is_needed=False)
    if config is not None:
        here["port"] = check_port(config.cluster.port)
    return Diagnosis(
        where=f"this machine ({facts.hostname})",
        is_cluster=False,
        has_card=bool(facts.cards),
        has_config=config is not None,
        findings=(*found, *named({**here, "config": config_found, "cluster": no_cluster})),
    )


def _of_machine(
    facts: MachineFacts, config: Config | None, name: str | None, *, is_sure: bool
) -> list[Finding]:
    if config is None:
        return check_machine(facts, workers=0, mps=False)
    plan = config.nodes.get(name or "")
    found = check_machine(
        facts,
        workers=0 if plan is None else plan.workers,
        mps=config.workers.mps,
    )
    if name is not None and plan is not None:
        found += named({"plan": check_plan(name, plan, facts, is_sure=is_sure)})
    return found


def _own_node(config: Config, node: str | None, hostname: str) -> tuple[str | None, bool]:
    """Return which node of the configuration this machine is, and whether that is sure."""
    if node is not None:
        return node, True
    own = {hostname, *_own_addresses()}
    for name, planned in config.nodes.items():
        if name == hostname or planned.host in own:
            return name, True
    return (next(iter(config.nodes)), False) if len(config.nodes) == 1 else (None, False)


def _own_addresses() -> set[str]:
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6}
        and not address.address.startswith(("127.", "::1"))
    }


def _answers(host: str, port: str) -> bool:
    with suppress(OSError, ValueError):
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
        return True
    return False


def check_token(auth: str, *, is_needed: bool) -> Finding:
    """Look for the user's token as Ray does, the variable first, then the file, and never into it.

    Args:
        auth: `cluster.auth`.
        is_needed: Whether a cluster is up, which asks for it.
    """
    if auth == "none":
        return warn(
            "switched off (cluster.auth: none): any program that reaches the head's port may run "
            "code on these PCs",
            hint="set cluster.auth: token, end every node and start it with what `up` prints",
        )
    if os.environ.get("RAY_AUTH_TOKEN"):
        return ok("in the environment (RAY_AUTH_TOKEN)")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = path.stat().st_mode
    except OSError:
        if is_needed:
            return fail(f"there is none in {path}", hint="copy that file from the head; mode 600")
        return skip(
            "none yet; a cluster needs one: run what `python -m orchestrator up NODE` prints"
        )
    if mode & 0o077:
        return warn(f"{path} can be read by other users of this PC", fix=f"chmod 600 {path}")
    return ok(f"{path}, for this user alone")


def check_port(port: int) -> Finding:
    """Try whether a head could listen on this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return warn(
                f"{port} is taken{_by_whom(port)}; a head on this PC could not listen there",
                hint="end that program, or set cluster.port",
                fix=f"sudo ss -ltnp 'sport = :{port}'",
            )
    return ok(f"{port} is free for a head on this PC")


def _by_whom(port: int) -> str:
    try:
        for connection in psutil.net_connections(kind="tcp"):
            address = connection.laddr
            if (
                connection.status == psutil.CONN_LISTEN
                and address
                and address.port == port
                and connection.pid
            ):
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return ""
    return ""
