"""The checks of `doctor`: of one machine, of a running cluster as a whole, and of this PC, on which
the user types `run`.

A check is a function that yields findings, and is listed in `of_machine`, `of_cluster` or
`of_here`. Checks of machines and clusters are pure: facts in, findings out. Checks of this PC read
files, and change nothing. Does not check the resources of Ray's nodes (`placement.refusals`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

from orchestrator.config.gpu_specs import key_of, rounded_down
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.core.fleet import Link, NodeAnswer
from orchestrator.core.node_commands import node_command
from orchestrator.core.placement import Refusal
from orchestrator.doctor.report import Finding, fail, ok, skip, warn
from orchestrator.view.phrases import counted
from workers.host.facts import CardFacts, MachineFacts
from workers.host.machine import free_bytes
from workers.host.processes import ENGINE_NAME
from workers.units import GIB, MIB

_Subject = TypeVar("_Subject")

#: Share of a card's memory. A desktop takes less on all but the smallest cards.
_MUCH_USED = 0.15
#: With these drivers, the governor powersave follows the load; with others, it keeps the lowest
#: clock (kernel.org, intel_pstate.rst).
_LOAD_FOLLOWING_DRIVERS = ("intel_pstate", "amd-pstate-epp")
_LITTLE_DISK_BYTES: Final = 1 * GIB
_NO_DISK_BYTES: Final = 64 * MIB

#: 200 Mb/s: between a cable of 100 Mb/s and one of 1 Gb/s.
_SLOW_LINK_BYTES_PER_S: Final = 25e6

#: The ports of Ray's workers, and the range from which Linux takes the random ports of Ray.
_RAY_PORTS = "10002:19999,32768:60999"

_INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
_RESTART_WSL = "wsl --shutdown"
_NEW_FILE = "python -m orchestrator init --output mine.yaml"
_BUSY = "the PC is busy, or its disk is slow: end other programs, or wait, and check again"


def _found(subject: _Subject, *checks: Callable[[_Subject], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of all checks; the name of a check is the name of its function."""
    return [
        replace(finding, check=check.__name__.lstrip("_"))
        for check in checks
        for finding in check(subject)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine, with its plan."""

    facts: MachineFacts
    config: Config | None = None
    name: str | None = None
    """The machine's node of the configuration; `None`: unknown."""

    @property
    def plan(self) -> NodeConfig | None:
        """The configuration of the machine's node, if both are known."""
        return None if self.config is None else self.config.nodes.get(self.name or "")


def _card(machine: Machine) -> Iterator[Finding]:
    """Check whether NVIDIA's driver answers, and for which cards."""
    facts = machine.facts
    error = facts.nvml_error or "it shows no card"
    for text in facts.card_errors:
        yield fail(
            f"{text}: the driver counts it and cannot reach it",
            hint="if it stays lost after a restart, check its seat in the slot and its power",
            fix="sudo reboot",
        )
    for card in facts.visible_cards:
        key = key_of(card.name, card.total_bytes)
        name = f"#{card.index} {card.name}, {card.total_bytes / GIB:.2f} GiB, driver {facts.driver}"
        yield ok(f"{name}, in cluster.yaml: {key}")
    if facts.visible_cards or facts.card_errors:
        return
    if facts.cards:
        setting = f"CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices}"
        hidden = f"{len(facts.cards)} in this PC, but {setting} hides every one"
        yield fail(hidden, fix="unset CUDA_VISIBLE_DEVICES")
    elif "mismatch" in error.lower():
        yield fail(f"{error}: the driver was updated while it was in use", fix="sudo reboot")
    elif facts.pci_cards or facts.torch.available:
        yield fail(
            f"an NVIDIA card is in this PC, but NVIDIA's driver does not answer ({error})",
            hint="install the driver of your distribution (the command is Ubuntu's)",
            fix=_INSTALL_DRIVER,
        )
    else:
        yield warn(
            "no NVIDIA card in this PC. Nothing is wrong: everything can be rehearsed here, with "
            "workers on the processor",
            hint="real speed needs a PC with an NVIDIA card, its driver and a torch for CUDA; "
            "under WSL2 the driver is the one of Windows",
            fix="python -m orchestrator run --rehearse --duration 1",
        )


def _vram(machine: Machine) -> Iterator[Finding]:
    """Check how much memory of each card other programs hold."""
    for card in machine.facts.visible_cards:
        others = [
            holder
            for holder in card.holders
            if holder.name != ENGINE_NAME and not (holder.name or "").startswith("ray::")
        ]
        room = f"{card.free_bytes / GIB:.2f} GiB free of {card.total_bytes / GIB:.2f}"
        found = f"card #{card.index}: {room}"
        is_used = (card.used_bytes or 0) > _MUCH_USED * card.total_bytes
        if is_used and (others or not card.holders):
            names = ", ".join(f"{one.name or 'unknown'} (pid {one.pid})" for one in others[:5])
            yield warn(
                f"{found}; held by {names or 'other programs'}",
                hint="workers run smaller steps; to use all of it, end the other programs on the "
                "card, or plan with less: memory_fraction in cluster.yaml",
                fix="nvidia-smi",
            )
        else:
            yield ok(found)


def _persistence(machine: Machine) -> Iterator[Finding]:
    cards = machine.facts.visible_cards
    if machine.facts.is_wsl:
        return  # Windows keeps the card awake
    if any(card.persistence is False and not card.display for card in cards):
        yield warn(
            "off: the driver unloads an idle card, so that each start takes seconds longer and "
            "settings are lost",
            fix="sudo systemctl enable --now nvidia-persistenced || sudo nvidia-smi -pm 1",
        )
    elif cards:
        yield ok("the driver stays loaded between runs")


def _torch(machine: Machine) -> Iterator[Finding]:
    facts, torch = machine.facts, machine.facts.torch
    if torch.is_late:
        found = f"not known: {torch.error}"
        yield warn(found, hint=_BUSY, fix="python -m orchestrator doctor")
        return
    if torch.version is None:
        yield fail(f"cannot be imported: {torch.error or 'no reason given'}", fix="make setup")
        return
    target = "the processor" if torch.cuda is None else f"CUDA {torch.cuda}"
    built, newest = f"{torch.version}, built for {target}", facts.driver_cuda
    up_to = ".".join(map(str, newest or ()))
    foreign = [card for card in facts.visible_cards if not _has_kernels(facts, card)]
    has = (foreign[0].compute_capability or ()) if foreign else ()
    if not facts.visible_cards:
        yield ok(built)
    elif torch.cuda is None:
        yield fail(
            f"{built} alone, will never use the card",
            hint='remove it, then install torch as PyTorch\'s page "Get started" shows for CUDA'
            + (up_to and f" (this driver: up to {up_to})"),
            fix="python -m pip uninstall torch",
        )
    elif newest is not None and int(torch.cuda.partition(".")[0]) > newest[0]:
        yield fail(
            f"{built}, but driver {facts.driver or 'in use'} runs CUDA up to {up_to}",
            hint=f"install a newer driver, or a torch built for CUDA {newest[0]}; under "
            "WSL2 the driver is the one of Windows",
            fix=_RESTART_WSL if facts.is_wsl else _INSTALL_DRIVER,
        )
    elif not torch.available:
        yield fail(
            f"{built}, cannot use the card: {torch.error or 'it gives no reason'}",
            hint="after a suspend of the PC this is usual: the driver's module must be loaded "
            "again",
            fix=_RESTART_WSL
            if facts.is_wsl
            else "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
        )
    elif foreign:
        yield fail(
            f"{foreign[0].name} has compute capability {'.'.join(map(str, has))}; "
            f"this torch has kernels for {' '.join(torch.architectures)}",
            hint="remove it, then install a torch that knows the card: newer for a new card, "
            "older for an old one",
            fix="python -m pip uninstall torch",
        )
    else:
        yield ok(f"{built}, sees the card")


def _has_kernels(facts: MachineFacts, card: CardFacts) -> bool:
    """Return whether torch has kernels for a card, or one of the two is unknown.

    Machine code for sm_XY runs on compute capabilities X.Z with Z >= Y, but code for sm_90a on 9.0
    only. Code for compute_XY is compiled for any newer card.
    """
    has, kernels = card.compute_capability, facts.torch.architectures
    known = (re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", kernel) for kernel in kernels)
    built = [(one[1], (int(one[2]), int(one[3])), one[4]) for one in known if one]
    return (has is None or not kernels) or any(
        version == has
        or (not alone and version < has and (kind == "compute" or version[0] == has[0]))
        for kind, version, alone in built
    )


def _cpu_governor(machine: Machine) -> Iterator[Finding]:
    governors = " and ".join(machine.facts.cpu_governors)
    is_fine = machine.facts.cpu_scaling_driver in _LOAD_FOLLOWING_DRIVERS
    if "powersave" in machine.facts.cpu_governors and not is_fine:
        yield warn(
            f"{governors} holds the cores at their lowest clock; workers feed their card more "
            "slowly",
            fix="sudo cpupower frequency-set -g schedutil",
        )
    elif governors:
        yield ok(governors)


def _plan(machine: Machine) -> Iterator[Finding]:
    """Check whether a machine has the cards and the memory that cluster.yaml says."""
    plan, node, cards = machine.plan, machine.name, machine.facts.visible_cards
    if plan is None or node is None:
        return
    workers = f"{plan.workers} workers x {plan.vram_per_worker_gib:g} GiB"
    wanted_bytes, ram_bytes = plan.workers * plan.budget_bytes, machine.facts.ram_available_bytes
    if len(cards) < plan.gpus:
        there = f"{len(cards)} answer" if cards else "no NVIDIA card answers"
        yield fail(
            f"cluster.yaml gives {node} {plan.gpus} x {plan.gpu}, but {there} there",
            hint="correct cluster.yaml, or let `init` write a new file",
            fix=_NEW_FILE,
        )
    elif plan.gpus:
        least_bytes = min(card.total_bytes for card in cards[: plan.gpus])
        excess = plan.model_copy(update={"vram_gib": least_bytes / GIB}).overbooked
        if excess is not None:
            text, valid = excess
            yield fail(f"{node}: {text}", hint=f"in cluster.yaml: {valid}", fix=_NEW_FILE)
        else:
            yield ok(f"{node}: {workers} on {plan.gpus} x {plan.gpu}, which it has")
    elif wanted_bytes > ram_bytes:
        most_gib = rounded_down(ram_bytes / plan.workers / GIB)
        yield fail(
            f"{node}: {workers} on the processor = {wanted_bytes / GIB:.2f} GiB, and "
            f"{ram_bytes / GIB:.2f} GiB of memory are free",
            hint=f"in cluster.yaml: fewer workers, or vram_per_worker_gib <= {most_gib:g}",
        )
    else:
        yield ok(f"{node}: {workers} on the processor, which it has")


def of_machine(machine: Machine) -> list[Finding]:
    """Return the findings of the checks that run on each machine."""
    return _found(machine, _card, _vram, _persistence, _torch, _cpu_governor, _plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster, with its plan."""

    config: Config
    address: str
    """`host:port` of the head."""
    missing: Sequence[Refusal]
    """Planned nodes that cannot take their workers, from `placement.refusals`."""
    answers: Sequence[NodeAnswer]
    """One for each live node."""
    links: Sequence[Link] = ()
    """Measured links between the PCs of a team."""


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    """Check that planned nodes are in the cluster, and that its nodes are planned and answer."""
    config = cluster.config
    for refusal in cluster.missing:
        fix = node_command(config, refusal.node, cluster.address).line
        yield fail(refusal.text, hint=f"on {refusal.node}", fix=fix, node=refusal.node)
    if not cluster.missing:
        planned = counted(len(config.nodes), "planned node")
        yield ok(f"{planned} there, with the CPUs and GPUs planned")
    for answer in cluster.answers:
        if answer.name not in config.nodes:
            yield warn(
                "no worker is placed on this node: "
                + ("it has no label" if answer.name is None else "cluster.yaml does not name it"),
                hint="end its Ray there (ray stop), and start it with what `up` prints for one of: "
                f"{', '.join(config.nodes)}",
                fix=f"python -m orchestrator up {next(iter(config.nodes))}",
                node=answer.title,
            )
        if answer.is_late:
            found = f"does not answer: {answer.error}"
            fix = "python -m orchestrator doctor"
            yield fail(found, hint=_BUSY, fix=fix, node=answer.title)
        elif answer.facts is None:
            yield fail(
                f"does not answer: {answer.error or 'no reason given'}",
                hint="is this project installed there, in the same version, in the Python that "
                "Ray was started with?",
                fix="make setup",
                node=answer.title,
            )


def _network(cluster: Cluster) -> Iterator[Finding]:
    ports = f"{cluster.config.cluster.port},{_RAY_PORTS}"
    for answer in cluster.answers:
        if answer.unreachable:
            hosts = ", ".join(sorted({door.rpartition(":")[0] for door in answer.unreachable}))
            yield fail(
                f"cannot reach {', '.join(answer.unreachable)}; a firewall, or an address that "
                "only the other side can use",
                hint=f"on {hosts}, let {answer.title} in (this is ufw's way); a PC with several "
                "networks needs nodes.<name>.host",
                fix=f"sudo ufw allow proto tcp from {answer.address} to any port {ports}",
                node=answer.title,
            )
        elif answer.facts is not None:
            yield ok("reaches every other node", node=answer.title)


def _versions(cluster: Cluster) -> Iterator[Finding]:
    """Check that nodes have the same versions of Python, Ray, torch and this project."""
    known = [(one.title, one.facts) for one in cluster.answers if one.facts is not None]
    versions: dict[str, Callable[[MachineFacts], str | None]] = {
        "Python": lambda facts: ".".join(facts.python.split(".")[:2]),
        "Ray": lambda facts: facts.ray,
        "this project": lambda facts: facts.project,
        "torch": lambda facts: (facts.torch.version or "").split("+")[0],
    }
    is_alike = True
    for what, version in versions.items():
        by_node = {
            title: version(facts) or "none"
            for title, facts in known
            if what != "torch" or not facts.torch.is_late
        }
        if len(set(by_node.values())) > 1:
            is_alike = False
            has = ", ".join(f"{title} has {each}" for title, each in by_node.items())
            yield (warn if what == "torch" else fail)(f"{what} differs: {has}", fix="make setup")
    if is_alike and len(known) > 1:
        yield ok("the same on every node: Python, Ray, torch, this project")


def _link(cluster: Cluster) -> Iterator[Finding]:
    """Check the speed of the links between the PCs of a team."""
    for link in cluster.links:
        if link.bytes_per_s is None:
            is_used = "already in use" in str(link.error)
            yield (skip if is_used else warn)(
                f"the link to {link.to} is not measured: {link.error}",
                hint="a run's table shows its wire s/step"
                if is_used
                else "`plan` prints what to type on each PC that has a firewall",
                node=link.node,
            )
            continue
        found = f"{link.bytes_per_s * 8e-6:.0f} Mb/s to {link.to}"
        sums = f"100 MB of sums, 25 million trained weights, take {1e8 / link.bytes_per_s:.2g} s"
        if link.bytes_per_s < _SLOW_LINK_BYTES_PER_S:
            yield warn(
                f"{found}: a cable, a switch or a port of 100 Mb/s, or wireless",
                hint=f"{sums} a step; they would take 0.9 s at 1 Gb/s and 0.36 s at 2.5 Gb/s, "
                "with a cable of category 5e and ports of that speed at both ends",
                fix="grep . /sys/class/net/*/speed",
                node=link.node,
            )
        else:
            yield ok(f"{found}: {sums} a step", node=link.node)


def of_cluster(cluster: Cluster) -> list[Finding]:
    """Return the findings of the checks of a cluster as a whole."""
    return _found(cluster, _nodes, _network, _versions, _link)


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This PC, on which the user starts runs."""

    config: Config | None
    is_cluster: bool
    """Whether a cluster is running, which needs the token."""


def _disk(here: Here) -> Iterator[Finding]:
    """Check whether the disk has space for run folders, which are on this PC only."""
    free = free_bytes("." if here.config is None else here.config.run.dir)
    if free is None:
        return
    found = f"{free / GIB:.1f} GiB free where run folders go; a long run takes up to 1 GiB"
    if free < _LITTLE_DISK_BYTES:
        verdict = fail if free < _NO_DISK_BYTES else warn
        hint = "or choose another disk: --set run.dir=/some/where"
        yield verdict(found, hint=hint, fix="du -xh -d2 ~ | sort -h")
    else:
        yield ok(found)


def _token(here: Here) -> Iterator[Finding]:
    """Check the user's token where Ray looks for it: first the variable, then the file.

    Never reads the content of the file.
    """
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if here.config is not None and here.config.cluster.auth == "none":
        yield warn(
            "switched off (cluster.auth: none): any program that reaches the head's port may run "
            "code on these PCs",
            hint="set cluster.auth: token, end every node and start it with what `up` prints",
        )
    elif os.environ.get("RAY_AUTH_TOKEN"):
        yield ok("in the environment (RAY_AUTH_TOKEN)")
    elif os.access(path, os.F_OK):
        found = f"{path} can be read by other users of this PC"
        is_open = path.stat().st_mode & 0o077
        yield warn(found, fix=f"chmod 600 {path}") if is_open else ok(f"{path}, for you alone")
    elif here.is_cluster:
        yield fail(f"there is none in {path}", hint="copy that file from the head; mode 600")
    else:
        hint = "do what `python -m orchestrator up NODE` prints"
        yield skip("none yet; a cluster needs one", hint=hint)


def of_here(here: Here) -> list[Finding]:
    """Return the findings of the checks that run only on this PC."""
    return _found(here, _disk, _token)
