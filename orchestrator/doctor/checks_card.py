"""The cards of one machine, their driver, who uses them, and the torch for them. Pure: facts in,
findings out.

Does not compare with cluster.yaml (`checks_cluster`) nor cover torch's settings in the environment
(`checks_machine`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.config.gpu_specs import peak_tflops, profile_of
from orchestrator.doctor.finding import Finding, dotted, fail, ok, skip, versions, warn
from orchestrator.view.phrases import counted
from workers.host.facts import CardFacts, Holder, MachineFacts
from workers.units import GIB

#: Of a card's memory; a desktop takes less on all but the smallest cards.
_MUCH_USED = 0.15

_INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
_WINDOWS_DRIVER = (
    "under WSL2 the driver is the one of Windows: install NVIDIA's newest there, none here, then "
    "type in Windows the "
    "command below"
)
_RESTART_WSL = "wsl --shutdown"

#: As in pyproject.toml.
_LEAST_TORCH = (2, 9)

#: The first driver for Linux that runs any CUDA of this number (minor version compatibility, CUDA
#: release notes).
_LEAST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}


def card_checks(facts: MachineFacts) -> dict[str, Finding | Iterable[Finding]]:
    """Return what there is to say about the cards, their driver, who uses them, and whether torch
    can, by check.
    """
    return {
        "card": _cards(facts),
        "driver": _driver(facts),
        "nvml": _nvml(facts),
        "vram": _memory(facts),
        "persistence": _persistence(facts),
        "torch": _torch(facts),
        "kernels": _kernels(facts),
    }


def _cards(facts: MachineFacts) -> Iterator[Finding]:
    for text in facts.card_errors:
        yield fail(
            f"{text}: the driver counts it and cannot reach it",
            hint="if it stays lost after a restart, check its seat in the slot, its power cables "
            "and the power supply",
            fix="sudo reboot",
        )
    if facts.visible_cards:
        yield ok(", ".join(_card_text(card) for card in facts.visible_cards))
    elif facts.cards:
        setting = f"CUDA_VISIBLE_DEVICES={facts.setting('CUDA_VISIBLE_DEVICES')}"
        yield fail(
            f"{len(facts.cards)} in this PC, but {setting} hides every one",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    elif not facts.card_errors:
        yield _no_card(facts)


def _no_card(facts: MachineFacts) -> Finding:
    if facts.pci_cards:
        cause = (
            "; nouveau, the kernel's own driver, holds it and cannot compute"
            if facts.has_nouveau
            else ""
        )
        return fail(
            f"an NVIDIA card is in this PC, but NVIDIA's driver does not answer{cause}",
            hint="install the driver of your distribution (the command is Ubuntu's)",
            fix=_INSTALL_DRIVER,
        )
    if facts.is_wsl:
        return warn(
            "WSL2 shows no NVIDIA card; without one, workers run on the processor",
            hint=f"if this PC has one: {_WINDOWS_DRIVER}",
            fix=_RESTART_WSL,
        )
    return warn(
        "no NVIDIA card in this PC. Nothing is wrong: everything can be rehearsed here, with "
        "workers on the processor",
        hint="real speed needs a PC with an NVIDIA card, its driver and a torch for CUDA; a "
        "rehearsal needs none of it",
        fix="python -m orchestrator run --rehearse --duration 1",
    )


def _card_text(card: CardFacts) -> str:
    profile = profile_of(card)
    parts = [f"#{card.index} {card.name}", f"{card.total_bytes / GIB:.2f} GiB"]
    peak = peak_tflops(profile, "fp16")
    if peak is not None:
        parts.append(f"{peak:.0f} TFLOP/s in fp16")
    if profile.bandwidth_gb_s is not None:
        parts.append(f"{profile.bandwidth_gb_s:.0f} GB/s")
    parts.append(f"in cluster.yaml: {profile.key}")
    return ", ".join(parts)


def _driver(facts: MachineFacts) -> Finding:
    if facts.driver is None:
        return skip("none answers")
    runs = "" if facts.driver_cuda is None else f", runs CUDA up to {dotted(facts.driver_cuda)}"
    return ok(f"{facts.driver}{runs}")


def _nvml(facts: MachineFacts) -> Finding:
    error = facts.nvml_error
    if error is None:
        return ok(f"answers for {counted(len(facts.cards), 'card')}")
    if "mismatch" in error.lower():
        found = f"{error}: the driver was updated while it was in use"
        return fail(found, hint="a restart loads the new one", fix="sudo reboot")
    if facts.pci_cards or facts.torch.available:
        return fail(error, hint="it comes with the driver", fix=_INSTALL_DRIVER)
    return skip(f"no card to ask ({error})")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    for card in facts.visible_cards:
        if card.used_bytes is None:
            yield skip(f"card #{card.index} does not report what is in use")
            continue
        free = f"card #{card.index}: {(card.total_bytes - card.used_bytes) / GIB:.2f} GiB free"
        found = f"{free} of {card.total_bytes / GIB:.2f}{_held_by(card.holders)}"
        hint = "end what you do not need, or plan with less: memory_fraction in cluster.yaml"
        is_fine = card.used_bytes <= _MUCH_USED * card.total_bytes or is_ours(card.holders)
        yield ok(found) if is_fine else warn(found, hint=hint, fix="nvidia-smi")


def _held_by(holders: Sequence[Holder]) -> str:
    if not holders:
        return ""
    known = sorted(holders, key=lambda holder: holder.used_bytes or 0, reverse=True)
    shown = ", ".join(
        f"{holder.name or 'unknown'} (pid {holder.pid}"
        + (f", {holder.used_bytes / GIB:.2f} GiB)" if holder.used_bytes is not None else ")")
        for holder in known[:5]
    )
    return f"; held by {shown}" + (f" and {len(known) - 5} more" if len(known) > 5 else "")


def is_ours(holders: Sequence[Holder]) -> bool:
    """Say whether a run is under way: nothing but workers of Ray holds the card."""
    return bool(holders) and all((holder.name or "").startswith("ray::") for holder in holders)


def _persistence(facts: MachineFacts) -> Finding:
    asleep = [
        card for card in facts.visible_cards if card.persistence is False and not card.display
    ]
    if not facts.visible_cards:
        return skip("no card")
    if facts.is_wsl:
        return skip("Windows keeps the card awake")
    if not asleep:
        return ok("the driver stays loaded between runs")
    return warn(
        "off: the driver unloads an idle card, so that each start takes seconds longer and "
        "settings are lost",
        fix="sudo systemctl enable --now nvidia-persistenced || sudo nvidia-smi -pm 1",
    )


def _torch(facts: MachineFacts) -> Finding:
    torch = facts.torch
    if torch.version is None:
        return fail(f"cannot be imported: {torch.error or 'no reason given'}", fix="make setup")
    if versions(torch.version) < _LEAST_TORCH:
        return fail(
            f"{torch.version} is too old; {dotted(_LEAST_TORCH)} or newer is needed",
            fix="make setup",
        )
    if not facts.visible_cards:
        built = "for the processor" if torch.cuda is None else f"for CUDA {torch.cuda}"
        return ok(f"{torch.version}, built {built}")
    if torch.cuda is None:
        newest = (
            ""
            if facts.driver_cuda is None
            else f" (this driver runs CUDA up to {dotted(facts.driver_cuda)})"
        )
        return fail(
            f"{torch.version} is built for the processor alone and will never use the card",
            hint='remove it, then install torch as PyTorch\'s page "Get started" shows for '
            f"CUDA{newest}",
            fix="python -m pip uninstall torch",
        )
    return _torch_with_card(facts, torch.version, torch.cuda)


def _torch_with_card(facts: MachineFacts, version: str, cuda: str) -> Finding:
    wanted = versions(cuda)[:1]
    if facts.driver_cuda is not None and wanted and wanted[0] > facts.driver_cuda[0]:
        least = _LEAST_DRIVER.get(wanted[0])
        return fail(
            f"{version} is built for CUDA {cuda}, but driver {facts.driver or 'in use'} runs CUDA "
            "up to "
            f"{dotted(facts.driver_cuda)}",
            hint=(f"install driver {least} or newer" if least else "install a newer driver")
            + f", or a torch built for CUDA {facts.driver_cuda[0]}"
            + (f"; {_WINDOWS_DRIVER}" if facts.is_wsl else ""),
            fix=_RESTART_WSL if facts.is_wsl else _INSTALL_DRIVER,
        )
    if not facts.torch.available:
        return fail(
            f"{version}, built for CUDA {cuda}, cannot use the card: "
            f"{facts.torch.error or 'it gives no reason'}",
            hint="after a suspend of the PC this is usual: the driver's module must be loaded "
            "again",
            fix=_RESTART_WSL
            if facts.is_wsl
            else "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
        )
    return ok(f"{version}, built for CUDA {cuda}, sees the card")


def _kernels(facts: MachineFacts) -> Finding:
    if not facts.visible_cards or facts.torch.cuda is None:
        return skip("no card with a torch for it")
    for card in facts.visible_cards:
        if card.compute_capability is None or not facts.torch.architectures:
            return skip("the card or torch does not report it")
        ways = {
            _how_it_runs(kernel, card.compute_capability) for kernel in facts.torch.architectures
        }
        if "runs" in ways:
            continue
        has = f"{card.name} has compute capability {dotted(card.compute_capability)}"
        found = f"{has}; this torch has kernels for {' '.join(facts.torch.architectures)}"
        if "compiled" in ways:
            return warn(
                f"{found}: the driver compiles them at the first start, which takes minutes"
            )
        return fail(
            found,
            hint="remove it, then install a torch that knows the card: newer for a new card, "
            "older for an old one",
            fix="python -m pip uninstall torch",
        )
    return ok("torch has kernels for the card")


def _how_it_runs(kernel: str, capability: tuple[int, int]) -> str | None:
    """Machine code for sm_XY runs on X.Z with Z >= Y.

    Compute_XY is compiled by the driver for anything newer.
    """
    parts = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", kernel)
    if parts is None:
        return None
    built = int(parts[2]), int(parts[3])
    if parts[4]:  # sm_90a runs on 9.0 alone, sm_100f on its family
        return "runs" if built == capability and parts[1] == "sm" else None
    if parts[1] == "sm":
        return "runs" if built[0] == capability[0] and built <= capability else None
    return "compiled" if built <= capability else None
