"""The cards of one machine, their driver, and who uses them. Pure: facts in, findings out.

Does not cover torch (`checks_torch`) nor compare with cluster.yaml (`checks_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.config.gpu_specs import profile_of
from orchestrator.doctor.finding import Finding, dotted, fail, ok, skip, warn
from orchestrator.watch.phrases import counted
from workers.host.facts import CardFacts, Holder, MachineFacts
from workers.units import GIB

#: Of a card's memory; a desktop takes less on all but the smallest cards.
_MUCH_USED = 0.15

INSTALL_DRIVER = "sudo ubuntu-drivers install && sudo reboot"
WINDOWS_DRIVER = (
    "under WSL2 the driver is the one of Windows: install NVIDIA's newest there, none here, then type in Windows the "
    "command below"
)
RESTART_WSL = "wsl --shutdown"


def check_cards(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what there is to say about the cards, their driver, and who uses them."""
    yield from _cards(facts)
    yield _driver(facts)
    yield _nvml(facts)
    yield from _memory(facts)
    yield _persistence(facts)


def _cards(facts: MachineFacts) -> Iterator[Finding]:
    for text in facts.card_errors:
        yield fail(
            "card",
            f"{text}: the driver counts it and cannot reach it",
            hint="if it stays lost after a restart, check its seat in the slot, its power cables and the power supply",
            fix="sudo reboot",
        )
    if facts.visible_cards:
        yield ok("card", ", ".join(_card_text(card) for card in facts.visible_cards))
    elif facts.cards:
        setting = facts.setting("CUDA_VISIBLE_DEVICES")
        yield fail(
            "card",
            f"{len(facts.cards)} in this PC, but CUDA_VISIBLE_DEVICES={setting} hides every one",
            fix="unset CUDA_VISIBLE_DEVICES",
        )
    elif not facts.card_errors:
        yield _no_card(facts)


def _no_card(facts: MachineFacts) -> Finding:
    if facts.pci_cards:
        cause = "; nouveau, the kernel's own driver, holds it and cannot compute" if facts.has_nouveau else ""
        return fail(
            "card",
            f"an NVIDIA card is in this PC, but NVIDIA's driver does not answer{cause}",
            hint="install the driver of your distribution (the command is Ubuntu's)",
            fix=INSTALL_DRIVER,
        )
    if facts.is_wsl:
        return warn(
            "card",
            "WSL2 shows no NVIDIA card; without one, workers run on the processor",
            hint=f"if this PC has one: {WINDOWS_DRIVER}",
            fix=RESTART_WSL,
        )
    return warn(
        "card",
        "no NVIDIA card in this PC. Nothing is wrong: everything can be rehearsed here, with workers on the processor",
        hint="real speed needs a PC with an NVIDIA card, its driver and a torch for CUDA; a rehearsal needs none of it",
        fix="python -m orchestrator run --rehearse --duration 1",
    )


def _card_text(card: CardFacts) -> str:
    profile = profile_of(card)
    parts = [f"#{card.index} {card.name}", f"{card.total_bytes / GIB:.2f} GiB"]
    if profile.fp16_tflops is not None:
        parts.append(f"{profile.fp16_tflops:.0f} TFLOP/s in fp16")
    if profile.bandwidth_gb_s is not None:
        parts.append(f"{profile.bandwidth_gb_s:.0f} GB/s")
    parts.append(f"in cluster.yaml: {profile.key}")
    return ", ".join(parts)


def _driver(facts: MachineFacts) -> Finding:
    if facts.driver is None:
        return skip("driver", "none answers")
    runs = "" if facts.driver_cuda is None else f", runs CUDA up to {dotted(facts.driver_cuda)}"
    return ok("driver", f"{facts.driver}{runs}")


def _nvml(facts: MachineFacts) -> Finding:
    """NVML is how everything but computing is asked of a card; it comes with the driver."""
    error = facts.nvml_error
    if error is None:
        return ok("nvml", f"answers for {counted(len(facts.cards), 'card')}")
    if "mismatch" in error.lower():
        return fail(
            "nvml", f"{error}: the driver was updated while it was in use", hint="a restart loads the new one",
            fix="sudo reboot",
        )  # fmt: skip
    if facts.pci_cards or facts.torch.available:
        return fail("nvml", error, hint="it comes with the driver", fix=INSTALL_DRIVER)
    return skip("nvml", f"no card to ask ({error})")


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    for card in facts.visible_cards:
        if card.used_bytes is None:
            yield skip("vram", f"card #{card.index} does not report what is in use")
            continue
        free = f"card #{card.index}: {(card.total_bytes - card.used_bytes) / GIB:.2f} GiB free"
        found = f"{free} of {card.total_bytes / GIB:.2f}{_held_by(card.holders)}"
        if card.used_bytes <= _MUCH_USED * card.total_bytes or _is_ours(card.holders):
            yield ok("vram", found)
        else:
            yield warn(
                "vram",
                found,
                hint="end what you do not need, or plan with less: memory_fraction in cluster.yaml",
                fix="nvidia-smi",
            )


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


def _is_ours(holders: Sequence[Holder]) -> bool:
    """Say whether a run is under way: nothing but workers of Ray holds the card."""
    return bool(holders) and all((holder.name or "").startswith("ray::") for holder in holders)


def _persistence(facts: MachineFacts) -> Finding:
    asleep = [card for card in facts.visible_cards if card.persistence is False and not card.display]
    if not facts.visible_cards:
        return skip("persistence", "no card")
    if facts.is_wsl:
        return skip("persistence", "Windows keeps the card awake")
    if not asleep:
        return ok("persistence", "the driver stays loaded between runs")
    return warn(
        "persistence",
        "off: the driver unloads an idle card, so that each start takes seconds longer and settings are lost",
        fix="sudo systemctl enable --now nvidia-persistenced || sudo nvidia-smi -pm 1",
    )
