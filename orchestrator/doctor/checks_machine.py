"""What is wrong with one machine: its cards and their driver, torch, Ray, and the plan.

Pure: facts in, findings out. A check is one function and its line in `CHECKS`. Does not cover nodes
against each other (`checks_cluster`) nor the token, port and disk of this PC (`verb`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.config.capacity import budget_bytes, card_total_gib, overbooked, workers_per_card
from orchestrator.config.gpu_specs import PROFILES, key_of, match_profile
from orchestrator.config.schema import Config, NodeConfig
from orchestrator.doctor.finding import (
    Finding,
    Verdict,
    checked,
    dotted,
    fail,
    ok,
    skip,
    versions,
    warn,
)
from orchestrator.view.phrases import counted
from workers.host.facts import Holder, MachineFacts
from workers.units import GIB

#: As in pyproject.toml.
_LEAST_RAY = (2, 56)

#: Of a card's memory; a desktop takes less on all but the smallest cards.
_MUCH_USED = 0.15
#: Their powersave follows the load; that of the other drivers pins the lowest clock (kernel.org,
#: intel_pstate.rst).
_CLEVER_DRIVERS = ("intel_pstate", "amd-pstate-epp")

_INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
_RESTART_WSL = "wsl --shutdown"
_NEW_FILE = "python -m orchestrator init --output mine.yaml"


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


def check_machine(machine: Machine) -> list[Finding]:
    """Return what there is to say about one machine."""
    return checked(CHECKS, machine)


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
        cuda = "" if facts.driver_cuda is None else f", runs CUDA up to {dotted(facts.driver_cuda)}"
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
    """Say whether a run is under way: nothing but workers of Ray holds the card."""
    return bool(holders) and all((holder.name or "").startswith("ray::") for holder in holders)


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
    runs = "" if facts.driver_cuda is None else f" (this driver: up to {dotted(facts.driver_cuda)})"
    if not facts.visible_cards:
        yield ok(built)
    elif torch.cuda is None:
        yield fail(
            f"{built} alone, will never use the card",
            hint=f'remove it, then install torch as PyTorch\'s page "Get started" shows for CUDA'
            f"{runs}",
            fix="python -m pip uninstall torch",
        )
    elif facts.driver_cuda is not None and versions(torch.cuda)[:1] > facts.driver_cuda[:1]:
        yield fail(
            f"{built}, but driver {facts.driver or 'in use'} runs CUDA up to "
            f"{dotted(facts.driver_cuda)}",
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
                f"{card.name} has compute capability {dotted(capability)}; this torch has kernels "
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
    ray, least = machine.facts.ray, dotted(_LEAST_RAY)
    if ray is None:
        yield fail("is not installed in this Python", fix="make setup")
    elif versions(ray) < _LEAST_RAY:
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


_Check: TypeAlias = Callable[[Machine], Iterable[Finding]]

#: What is checked on each machine, by the name in the report. A new check is one function, and its
#: line here.
CHECKS: Final[Mapping[str, _Check]] = MappingProxyType(
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
