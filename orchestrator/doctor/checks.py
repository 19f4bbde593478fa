"""What is wrong with one machine, with a running cluster as a whole, and with this PC as the one on
which a run is typed.

A check is one function that yields findings, and its line in `OF_MACHINE`, `OF_CLUSTER` or
`OF_HERE`. Those of machines and clusters are pure: facts in, findings out. Those of this PC look
themselves, and change nothing. Does not cover what the cluster offers to Ray
(`placement.refusals`).
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from orchestrator.config.capacity import budget_bytes, card_total_gib, overbooked, workers_per_card
from orchestrator.config.gpu_specs import PROFILES, key_of, match_profile
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.core.fleet import NodeAnswer
from orchestrator.core.node_commands import node_command
from orchestrator.core.placement import Refusal
from orchestrator.doctor.report import Finding, Verdict, fail, ok, skip, warn
from orchestrator.view.phrases import counted
from workers.host.facts import Holder, MachineFacts
from workers.host.machine import free_bytes
from workers.host.processes import ENGINE_NAME
from workers.units import GIB, MIB

_Subject = TypeVar("_Subject")

#: As in pyproject.toml.
_LEAST_RAY = (2, 56)

#: Of a card's memory; a desktop takes less on all but the smallest cards.
_MUCH_USED = 0.15
#: Their powersave follows the load; that of the other drivers pins the lowest clock (kernel.org,
#: intel_pstate.rst).
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate-epp")
_LITTLE_DISK_BYTES: Final = 1 * GIB
_NO_DISK_BYTES: Final = 64 * MIB

#: Those of Ray's workers, and those from which Linux takes the ports that Ray picks at random.
_RAY_PORTS = "10002:19999,32768:60999"

_INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
_RESTART_WSL = "wsl --shutdown"
_NEW_FILE = "python -m orchestrator init --output mine.yaml"


def found_by(
    checks: Mapping[str, Callable[[_Subject], Iterable[Finding]]], subject: _Subject
) -> list[Finding]:
    """Return what some checks find on a machine or cluster, with their names."""
    return [
        replace(finding, check=name) for name, check in checks.items() for finding in check(subject)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One machine, and what is planned for it."""

    facts: MachineFacts
    config: Config | None = None
    name: str | None = None
    """Which node of the configuration it is; `None`: not known."""
    is_sure: bool = True
    """Whether it is that node; else what would fail is only a warning."""

    @property
    def plan(self) -> NodeConfig | None:
        """What is planned for it, as far as it is known."""
        return None if self.config is None else self.config.nodes.get(self.name or "")


def _card(machine: Machine) -> Iterator[Finding]:
    facts = machine.facts
    for text in facts.card_errors:
        yield fail(
            f"{text}: the driver counts it and cannot reach it",
            hint="if it stays lost after a restart, check its seat in the slot, its power cables "
            "and the power supply",
            fix="sudo reboot",
        )
    for card in facts.visible_cards:
        name = f"#{card.index} {card.name}, {card.total_bytes / GIB:.2f} GiB"
        yield ok(f"{name}, in cluster.yaml: {key_of(card.name, card.total_bytes)}")
    if facts.visible_cards:
        return
    if facts.cards:
        setting = f"CUDA_VISIBLE_DEVICES={facts.cuda_visible_devices}"
        yield fail(
            f"{len(facts.cards)} in this PC, but {setting} hides every one",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    elif facts.pci_cards and not facts.card_errors:
        nouveau = "; nouveau, the kernel's own driver, holds it and cannot compute"
        yield fail(
            "an NVIDIA card is in this PC, but NVIDIA's driver does not answer"
            f"{nouveau if facts.has_nouveau else ''}",
            hint="install the driver of your distribution (the command is Ubuntu's)",
            fix=_INSTALL_DRIVER,
        )
    elif not facts.card_errors:
        yield warn(
            "no NVIDIA card in this PC. Nothing is wrong: everything can be rehearsed here, with "
            "workers on the processor",
            hint="real speed needs a PC with an NVIDIA card, its driver and a torch for CUDA; "
            "under WSL2 the driver is the one of Windows",
            fix="python -m orchestrator run --rehearse --duration 1",
        )


def _driver(machine: Machine) -> Iterator[Finding]:
    facts = machine.facts
    error = facts.nvml_error
    if error is None:
        cuda = (
            "" if facts.driver_cuda is None else f", runs CUDA up to {_dotted(facts.driver_cuda)}"
        )
        yield ok(f"{facts.driver}{cuda}, answers for {counted(len(facts.cards), 'card')}")
    elif "mismatch" in error.lower():
        found = f"{error}: the driver was updated while it was in use"
        yield fail(found, hint="a restart loads the new one", fix="sudo reboot")
    elif facts.pci_cards or facts.torch.available:
        yield fail(error, hint="it comes with the driver", fix=_INSTALL_DRIVER)
    else:
        yield skip(f"no card to ask ({error})")


def _vram(machine: Machine) -> Iterator[Finding]:
    plan, cards = machine.plan, machine.facts.visible_cards
    planned = 0 if plan is None else plan.gpus
    for card in cards:
        if card.used_bytes is None:
            yield skip(f"card #{card.index} does not report what is in use")
            continue
        wanted_bytes = 0
        if plan is not None and card in cards[:planned]:
            wanted_bytes = workers_per_card(plan.workers, planned) * budget_bytes(plan)
        free_bytes = card.total_bytes - card.used_bytes
        wanted = f"; its workers want {wanted_bytes / GIB:.2f}" if wanted_bytes else ""
        found = (
            f"card #{card.index}: {free_bytes / GIB:.2f} GiB free of {card.total_bytes / GIB:.2f}"
            f"{wanted}{_held_by(card.holders)}"
        )
        is_full = free_bytes < wanted_bytes <= card.total_bytes
        is_used = card.used_bytes > _MUCH_USED * card.total_bytes
        if _is_ours(card.holders) or not (is_full or is_used):
            yield ok(found)
        else:
            yield warn(
                found,
                hint="workers run smaller steps; to use all of it, end the other programs on the "
                "card, or plan with less: memory_fraction in cluster.yaml",
                fix="nvidia-smi",
            )


def _held_by(holders: Sequence[Holder]) -> str:
    known = sorted(holders, key=lambda holder: holder.used_bytes or 0, reverse=True)
    shown = ", ".join(
        f"{holder.name or 'unknown'} (pid {holder.pid}"
        + (f", {holder.used_bytes / GIB:.2f} GiB)" if holder.used_bytes is not None else ")")
        for holder in known[:5]
    )
    more = f" and {len(known) - 5} more" if len(known) > 5 else ""
    return f"; held by {shown}{more}" if shown else ""


def _is_ours(holders: Sequence[Holder]) -> bool:
    """Say whether a run is under way: nothing but workers holds the card."""
    names = [holder.name or "" for holder in holders]
    return bool(names) and all(name == ENGINE_NAME or name.startswith("ray::") for name in names)


def _persistence(machine: Machine) -> Iterator[Finding]:
    cards = machine.facts.visible_cards
    if not cards:
        yield skip("no card")
    elif machine.facts.is_wsl:
        yield skip("Windows keeps the card awake")
    elif any(card.persistence is False and not card.display for card in cards):
        yield warn(
            "off: the driver unloads an idle card, so that each start takes seconds longer and "
            "settings are lost",
            fix="sudo systemctl enable --now nvidia-persistenced || sudo nvidia-smi -pm 1",
        )
    else:
        yield ok("the driver stays loaded between runs")


def _torch(machine: Machine) -> Iterator[Finding]:
    facts, torch = machine.facts, machine.facts.torch
    if torch.version is None:
        yield fail(f"cannot be imported: {torch.error or 'no reason given'}", fix="make setup")
        return
    target = "the processor" if torch.cuda is None else f"CUDA {torch.cuda}"
    built = f"{torch.version}, built for {target}"
    runs = (
        "" if facts.driver_cuda is None else f" (this driver: up to {_dotted(facts.driver_cuda)})"
    )
    if not facts.visible_cards:
        yield ok(built)
    elif torch.cuda is None:
        yield fail(
            f"{built} alone, will never use the card",
            hint=f'remove it, then install torch as PyTorch\'s page "Get started" shows for CUDA'
            f"{runs}",
            fix="python -m pip uninstall torch",
        )
    elif facts.driver_cuda is not None and _numbers(torch.cuda)[:1] > facts.driver_cuda[:1]:
        yield fail(
            f"{built}, but driver {facts.driver or 'in use'} runs CUDA up to "
            f"{_dotted(facts.driver_cuda)}",
            hint=f"install a newer driver, or a torch built for CUDA {facts.driver_cuda[0]}; under "
            "WSL2 the driver is the one of Windows",
            fix=_RESTART_WSL if facts.is_wsl else _INSTALL_DRIVER,
        )
    elif not torch.available:
        reload = "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"
        yield fail(
            f"{built}, cannot use the card: {torch.error or 'it gives no reason'}",
            hint="after a suspend of the PC this is usual: the driver's module must be loaded "
            "again",
            fix=_RESTART_WSL if facts.is_wsl else reload,
        )
    else:
        yield _kernels(facts) or ok(f"{built}, sees the card")


def _kernels(facts: MachineFacts) -> Finding | None:
    """Return what is wrong where this torch has no kernels for a card."""
    kernels = facts.torch.architectures
    for card in facts.visible_cards:
        capability = card.compute_capability
        if capability and kernels and not any(_runs(kernel, capability) for kernel in kernels):
            return fail(
                f"{card.name} has compute capability {_dotted(capability)}; this torch has kernels "
                f"for {' '.join(kernels)}",
                hint="remove it, then install a torch that knows the card: newer for a new card, "
                "older for an old one",
                fix="python -m pip uninstall torch",
            )
    return None


def _runs(kernel: str, capability: tuple[int, int]) -> bool:
    """Machine code for sm_XY runs on X.Z with Z >= Y; compute_XY is compiled for anything newer."""
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)", kernel)
    if parts is None:
        return kernel.startswith("sm_{}{}".format(*capability))  # sm_90a runs on 9.0 alone
    built = int(parts[2]), int(parts[3])
    return built <= capability and (parts[1] == "compute" or built[0] == capability[0])


def _ray(machine: Machine) -> Iterator[Finding]:
    ray, least = machine.facts.ray, _dotted(_LEAST_RAY)
    if ray is None:
        yield fail("is not installed in this Python", fix="make setup")
    elif _numbers(ray) < _LEAST_RAY:
        found = f"{ray} is too old; {least} or newer is needed, the same on every PC"
        yield fail(found, fix="make setup")
    else:
        yield ok(ray)


def _cpu_governor(machine: Machine) -> Iterator[Finding]:
    governors = " and ".join(machine.facts.cpu_governors)
    is_clever = machine.facts.cpu_scaling_driver in _CLEVER_DRIVERS
    if not governors:
        yield skip("the kernel does not report it (a virtual machine, or WSL2)")
    elif "powersave" in machine.facts.cpu_governors and not is_clever:
        yield warn(
            f"{governors} holds the cores at their lowest clock; workers feed their card more "
            "slowly",
            fix="sudo cpupower frequency-set -g schedutil",
        )
    else:
        yield ok(governors)


def _mps(machine: Machine) -> Iterator[Finding]:
    if machine.config is None or not machine.config.workers.mps:
        yield skip("not asked for (workers.mps is false)")
    elif machine.facts.mps_daemon:
        yield ok("its daemon runs; a fatal error of one worker ends every worker on that card")
    elif not machine.facts.visible_cards:
        yield skip("no card")
    else:
        yield fail(
            "cluster.yaml asks for it, and no control daemon runs",
            hint="under WSL2 none can: workers.mps: false",
            fix="nvidia-cuda-mps-control -d",
        )


def _plan(machine: Machine) -> Iterator[Finding]:
    plan, node = machine.plan, machine.name
    if plan is None or node is None:
        return
    where = f"{plan.gpus} x {plan.gpu}" if plan.gpus else "the processor"
    workers = f"{plan.workers} workers x {plan.vram_per_worker_gib:g} GiB"
    on_cards = _plan_on_cards if plan.gpus else _plan_on_processor
    for finding in list(on_cards(node, plan, machine.facts)) or [
        ok(f"{node}: {workers} on {where}, which it has")
    ]:
        if finding.verdict is Verdict.FAIL and not machine.is_sure:
            found = f"{finding.found} (if this PC is meant)"
            yield replace(finding, verdict=Verdict.WARN, found=found)
        else:
            yield finding


def _plan_on_cards(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    has = facts.visible_cards
    if len(has) < plan.gpus:
        cards = f"{len(has)} answer" if has else "no NVIDIA card answers"
        yield fail(
            f"cluster.yaml gives {node} {plan.gpus} x {plan.gpu}, but {cards} there",
            hint="write down what it has, or let `init` write a new file",
            fix=_NEW_FILE,
        )
    if not has:
        return
    card = min(has[: plan.gpus], key=lambda one: one.total_bytes)
    excess = overbooked(plan.model_copy(update={"vram_gib": card.total_bytes / GIB}))
    if excess is not None:
        hint = f"in cluster.yaml: {excess.valid}"
        yield fail(f"{node}: {excess.text}", hint=hint, fix=_NEW_FILE)
    live = match_profile(card.name, card.total_bytes)
    key = None if live is None else live.key
    if plan.gpu in PROFILES and plan.gpu != key:
        total = card_total_gib(plan)
        claimed = "" if total is None else f", for which cluster.yaml says {total:g}"
        yield warn(
            f"cluster.yaml says that {node} has a {plan.gpu}; it has a {card.name} with "
            f"{card.total_bytes / GIB:.2f} GiB{claimed}",
            hint=f"in cluster.yaml: nodes.{node}.gpu: {key or 'any name'}, and "
            f"vram_gib: {int(card.total_bytes / GIB * 100) / 100:g}",
        )


def _plan_on_processor(node: str, plan: NodeConfig, facts: MachineFacts) -> Iterator[Finding]:
    wanted_bytes, free_bytes = plan.workers * budget_bytes(plan), facts.ram_available_bytes
    if wanted_bytes > free_bytes:
        yield fail(
            f"{node}: {plan.workers} workers x {plan.vram_per_worker_gib:g} GiB on the processor = "
            f"{wanted_bytes / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB of memory are free",
            hint="in cluster.yaml: fewer workers, or vram_per_worker_gib <= "
            f"{int(free_bytes / plan.workers / GIB * 100) / 100:g}",
        )
    if facts.visible_cards:
        yield warn(
            f"cluster.yaml lets {node} work on its processor, and it has a "
            f"{facts.visible_cards[0].name}",
            hint="write it down, or let `init` write a new file",
            fix=_NEW_FILE,
        )


def _numbers(version: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`; none of what is no
    version.
    """
    leading = re.match(r"\d+(\.\d+)*", version or "")
    return tuple(map(int, leading[0].split("."))) if leading else ()


def _dotted(version: Sequence[int]) -> str:
    """Return the numbers of a version as it is written: `12.8`."""
    return ".".join(map(str, version))


OF_MACHINE: Final[Mapping[str, Callable[[Machine], Iterable[Finding]]]] = MappingProxyType(
    {
        "card": _card,
        "driver": _driver,
        "vram": _vram,
        "persistence": _persistence,
        "torch": _torch,
        "ray": _ray,
        "cpu_governor": _cpu_governor,
        "mps": _mps,
        "plan": _plan,
    }
)
"""What is checked on each machine, by the name in the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster, and what is planned for it."""

    config: Config
    address: str
    """`host:port` of the head."""
    missing: Sequence[Refusal]
    """As `placement.refusals` says."""
    answers: Sequence[NodeAnswer]
    """One for each live node."""


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    config = cluster.config
    for refusal in cluster.missing:
        yield fail(
            refusal.text,
            hint=f"on {refusal.node}",
            fix=node_command(config, refusal.node, cluster.address).line,
            node=refusal.node,
        )
    if not cluster.missing:
        planned = counted(len(config.nodes), "planned node")
        yield ok(f"{planned} there, with the CPUs and GPUs planned")
    for answer in cluster.answers:
        if answer.name is None:
            yield warn(
                f"the node at {answer.address} has no label, so no worker is placed on it",
                hint="end its Ray there (ray stop) and start it with what `up` prints for one of: "
                f"{', '.join(config.nodes)}",
                fix=f"python -m orchestrator up {next(iter(config.nodes))}",
                node=answer.title,
            )
        elif answer.name not in config.nodes:
            found = f"cluster.yaml has no node {answer.name}, so no worker is placed on it"
            yield warn(found, node=answer.title)


def _answer(cluster: Cluster) -> Iterator[Finding]:
    for answer in cluster.answers:
        if answer.facts is None:
            yield fail(
                f"gave no answer: {answer.error or 'no reason given'}",
                hint="is this project installed there, in the same version, in the Python that "
                "Ray was started with?",
                fix="make setup",
                node=answer.title,
            )


def _network(cluster: Cluster) -> Iterator[Finding]:
    ports = f"{cluster.config.cluster.port},{_RAY_PORTS}"
    for answer in cluster.answers:
        if answer.facts is not None and not answer.unreachable:
            yield ok("reaches every other node", node=answer.title)
        elif answer.unreachable:
            shut = ", ".join(answer.unreachable)
            hosts = ", ".join(sorted({door.rpartition(":")[0] for door in answer.unreachable}))
            yield fail(
                f"cannot reach {shut}; a firewall, or an address that only the other side can use",
                hint=f"on {hosts}, let {answer.title} in (this is ufw's way); a PC with several "
                "networks needs nodes.<name>.host",
                fix=f"sudo ufw allow proto tcp from {answer.address} to any port {ports}",
                node=answer.title,
            )


def _versions(cluster: Cluster) -> Iterator[Finding]:
    """Yield where nodes differ in what must or should be the same."""
    known = [(one.title, one.facts) for one in cluster.answers if one.facts is not None]
    versions: dict[str, Callable[[MachineFacts], str | None]] = {
        "Python": lambda facts: ".".join(facts.python.split(".")[:2]),
        "Ray": lambda facts: facts.ray,
        "this project": lambda facts: facts.project,
        "torch": lambda facts: (facts.torch.version or "none").split("+")[0],
    }
    is_alike = True
    for what, version in versions.items():
        if len({version(facts) for _, facts in known}) > 1:
            is_alike = False
            has = ", ".join(f"{title} has {version(facts) or 'none'}" for title, facts in known)
            yield (warn if what == "torch" else fail)(f"{what} differs: {has}", fix="make setup")
    if is_alike and len(known) > 1:
        yield ok("the same on every node: Python, Ray, torch, this project")


OF_CLUSTER: Final[Mapping[str, Callable[[Cluster], Iterable[Finding]]]] = MappingProxyType(
    {"nodes": _nodes, "answer": _answer, "network": _network, "versions": _versions}
)
"""What is checked on a cluster as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """This PC, and what it needs to know to start a run."""

    config: Config | None
    is_cluster: bool
    """Whether a cluster is up: it asks for the token, and its head has the port."""


def _disk(here: Here) -> Iterator[Finding]:
    """Yield whether the disk has room for run folders, which this PC alone gets."""
    free = free_bytes("." if here.config is None else here.config.run.dir)
    if free is None:
        yield skip("the free space of the run folders' disk is unknown")
        return
    found = f"{free / GIB:.1f} GiB free where run folders go"
    hint, fix = "or choose another disk: --set run.dir=/some/where", "du -xh -d2 ~ | sort -h"
    if free < _NO_DISK_BYTES:
        yield fail(f"{found}: a run could not be recorded", hint=hint, fix=fix)
    elif free < _LITTLE_DISK_BYTES:
        yield warn(f"{found}; a long run takes up to 1 GiB", hint=hint, fix=fix)
    else:
        yield ok(found)


def _token(here: Here) -> Iterator[Finding]:
    """Look for the user's token as Ray does, the variable first, then the file, never into it."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if here.config is not None and here.config.cluster.auth == "none":
        yield warn(
            "switched off (cluster.auth: none): any program that reaches the head's port may run "
            "code on these PCs",
            hint="set cluster.auth: token, end every node and start it with what `up` prints",
        )
    elif os.environ.get("RAY_AUTH_TOKEN"):
        yield ok("in the environment (RAY_AUTH_TOKEN)")
    elif (mode := _mode(path)) is not None:
        found = f"{path} can be read by other users of this PC"
        yield warn(found, fix=f"chmod 600 {path}") if mode & 0o077 else ok(f"{path}, for you alone")
    elif here.is_cluster:
        yield fail(f"there is none in {path}", hint="copy that file from the head; mode 600")
    else:
        hint = "do what `python -m orchestrator up NODE` prints"
        yield skip("none yet; a cluster needs one", hint=hint)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError:
        return None


def _port(here: Here) -> Iterator[Finding]:
    """Try whether a head could listen on this machine."""
    if here.config is None or here.is_cluster:
        return
    port = here.config.cluster.port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            yield warn(
                f"{port} is taken; a head on this PC could not listen there",
                hint="end that program, or set cluster.port",
                fix=f"sudo ss -ltnp 'sport = :{port}'",
            )
        else:
            yield ok(f"{port} is free for a head on this PC")


OF_HERE: Final[Mapping[str, Callable[[Here], Iterable[Finding]]]] = MappingProxyType(
    {"disk": _disk, "token": _token, "port": _port}
)
"""What is checked on this PC alone."""
