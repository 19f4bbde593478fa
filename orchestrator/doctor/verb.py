"""The verb `doctor`: looks here or at every node of a running cluster, and runs the checks.

Connects the checks to machines. Changes nothing, and prints nothing of what they find.
"""

from __future__ import annotations

import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil

from orchestrator.cluster.connect import connected, head_address, reach
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.core.placement import refusals
from orchestrator.doctor.checks import (
    OF_CLUSTER,
    OF_HERE,
    OF_MACHINE,
    Cluster,
    Here,
    Machine,
    found_by,
)
from orchestrator.doctor.report import Diagnosis, Finding, fail, ok, skip, warn
from orchestrator.errors import ConfigError, NoClusterError, Problem, UsageError
from orchestrator.run.terminal import own_screen
from orchestrator.view.phrases import counted
from workers.host.machine import look_around

#: The configuration that is read if the user names none.
_DEFAULT_CONFIG = "cluster.yaml"

#: Commands that read the configuration.
_READ_CONFIG = tuple(f"python -m orchestrator {verb} " for verb in ("run", "up"))


def diagnose(
    config_path: str, overrides: Sequence[str], node: str | None, *, quiet: bool
) -> Diagnosis:
    """Look at every node of the running cluster, or at this machine.

    What is wrong with the configuration is a finding.

    Args:
        config_path: The file, as the user has named it.
        overrides: Of its keys, as `--set` takes them.
        node: What the user says this machine is.
        quiet: Do not say on a terminal that it takes some seconds.

    Raises:
        UsageError: cluster.yaml has no such node.
    """
    with own_screen(None) as screen:  # Ray prints as it likes
        if sys.stdin.isatty() and screen.err.isatty() and not quiet:
            print("Looking around, which takes some seconds ...", file=screen.err)
        diagnosis = _diagnosed(config_path, overrides, node)
    if config_path != _DEFAULT_CONFIG:
        diagnosis = _with_options(diagnosis, f"--config {shlex.quote(config_path)}")
    return diagnosis


def _with_options(diagnosis: Diagnosis, options: str) -> Diagnosis:
    """Let commands that read the configuration read the one that was read here."""
    findings = tuple(
        replace(finding, fix=f"{finding.fix} {options}")
        if (finding.fix or "").startswith(_READ_CONFIG)
        else finding
        for finding in diagnosis.findings
    )
    return replace(diagnosis, findings=findings, options=options)


def _diagnosed(config_path: str, overrides: Sequence[str], node: str | None) -> Diagnosis:
    """Look at every node of the running cluster, or at this machine where there is none."""
    config, findings = _configuration(config_path, overrides)
    if node is not None and config is not None and node not in config.nodes:
        raise UsageError(f"{config_path} has no node {node!r}; valid: {', '.join(config.nodes)}")
    address, without = _address(config)
    if config is not None and address is not None:
        try:
            return _of_cluster(config, address, findings)
        except NoClusterError as error:
            without = fail(
                str(error),
                check="cluster",
                hint=f"if it does not run, start it on {config.head_node} with what this prints",
                fix=f"python -m orchestrator up {config.head_node}",
            )
    return _of_this_machine(config, node, [*findings, without])


def _configuration(path: str, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    if path == _DEFAULT_CONFIG and not Path(path).exists() and not overrides:
        missing = warn(
            f"there is no {_DEFAULT_CONFIG} in this folder",
            check="config",
            hint="write one that fits this PC",
            fix="python -m orchestrator init",
        )
        return None, [missing]
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return None, [_config_problem(problem, path) for problem in error.problems]
    workers = sum(planned.workers for planned in config.nodes.values())
    found = f"{counted(len(config.nodes), 'node')}, {counted(workers, 'worker')}"
    return config, [ok(found, check="config")]


def _config_problem(problem: Problem, path: str) -> Finding:
    fix = None
    if problem.source == path and problem.line is not None:
        fix = f"${{EDITOR:-nano}} +{problem.line} {shlex.quote(path)}"
    elif _is_missing(path):
        fix = f"python -m orchestrator init --output {shlex.quote(path)}"
    return fail(str(problem), check="config", fix=fix)


def _is_missing(path: str) -> bool:
    try:
        Path(path).stat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _address(config: Config | None) -> tuple[str | None, Finding]:
    """Return where the cluster is, if one can be asked, and what to say if none can."""
    skipped = partial(skip, check="cluster", hint="only this machine was looked at")
    try:
        address = head_address("auto" if config is None else config.cluster.address)
    except NoClusterError as error:
        return None, skipped(str(error))
    if config is None:
        return None, skipped(f"one was started at {address}; there is no configuration")
    if config.cluster.address == "auto" and address.rpartition(":")[0] in _own_addresses():
        try:
            reach(address)
        except NoClusterError:
            return None, warn(
                f"the Ray head that was started here, at {address}, does not answer any more",
                check="cluster",
                hint="to start it again, do what this prints",
                fix=f"python -m orchestrator up {config.head_node}",
            )
    return address, skipped("")


def _of_cluster(config: Config, address: str, findings: list[Finding]) -> Diagnosis:
    with connected(address, config.cluster.auth) as fleet:
        from orchestrator.cluster.node_tasks import survey  # noqa: PLC0415 - imports ray

        missing, answers = refusals(config, fleet.nodes()), survey()
    cluster = Cluster(config=config, address=address, missing=missing, answers=answers)
    found = [*findings, *found_by(OF_HERE, Here(config=config, is_cluster=True))]
    found += found_by(OF_CLUSTER, cluster)
    for answer in answers:
        if answer.facts is not None:
            machine = Machine(facts=answer.facts, config=config, name=answer.name)
            found += [replace(one, node=answer.title) for one in found_by(OF_MACHINE, machine)]
    return Diagnosis(
        where=f"the cluster at {address}",
        is_cluster=True,
        has_card=any(answer.facts is not None and bool(answer.facts.cards) for answer in answers),
        has_config=True,
        findings=tuple(found),
    )


def _of_this_machine(config: Config | None, node: str | None, findings: list[Finding]) -> Diagnosis:
    facts = look_around()
    name, is_sure = (None, False) if config is None else _own_node(config, node, facts.hostname)
    machine = Machine(facts=facts, config=config, name=name, is_sure=is_sure)
    found = found_by(OF_MACHINE, machine)
    if config is not None and name is None:
        names = ", ".join(config.nodes)
        found.append(skip(f"say which node this PC is: --node NAME ({names})", check="plan"))
    found += found_by(OF_HERE, Here(config=config, is_cluster=False))
    return Diagnosis(
        where=f"this machine ({facts.hostname})",
        is_cluster=False,
        has_card=bool(facts.cards),
        has_config=config is not None,
        findings=(*found, *findings),
    )


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
