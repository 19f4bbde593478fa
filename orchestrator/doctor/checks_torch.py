"""Whether the torch of one machine fits its driver and its cards. Pure: facts in, findings out.

Does not cover torch's settings in the environment (`checks_environment`).
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.doctor.checks_card import INSTALL_DRIVER, RESTART_WSL, WINDOWS_DRIVER
from orchestrator.doctor.finding import Finding, dotted, fail, ok, skip, versions, warn
from workers.host.facts import MachineFacts

#: As in pyproject.toml.
_LEAST_TORCH = (2, 9)

#: The first driver for Linux that runs any CUDA of this number (minor version compatibility, CUDA release notes).
_LEAST_DRIVER = {11: "450.80", 12: "525.60", 13: "580.65"}


def check_torch(facts: MachineFacts) -> Iterator[Finding]:
    """Yield whether torch can use the cards, and whether it was built for them."""
    yield _torch(facts)
    yield _kernels(facts)


def _torch(facts: MachineFacts) -> Finding:
    torch = facts.torch
    if torch.version is None:
        return fail("torch", f"cannot be imported: {torch.error or 'no reason given'}", fix="make setup")
    if versions(torch.version) < _LEAST_TORCH:
        return fail("torch", f"{torch.version} is too old; {dotted(_LEAST_TORCH)} or newer is needed", fix="make setup")
    if not facts.visible_cards:
        built = "for the processor" if torch.cuda is None else f"for CUDA {torch.cuda}"
        return ok("torch", f"{torch.version}, built {built}")
    if torch.cuda is None:
        newest = "" if facts.driver_cuda is None else f" (this driver runs CUDA up to {dotted(facts.driver_cuda)})"
        return fail(
            "torch",
            f"{torch.version} is built for the processor alone and will never use the card",
            hint=f'remove it, then install torch as PyTorch\'s page "Get started" shows for CUDA{newest}',
            fix="python -m pip uninstall torch",
        )
    return _torch_with_card(facts, torch.version, torch.cuda)


def _torch_with_card(facts: MachineFacts, version: str, cuda: str) -> Finding:
    wanted = versions(cuda)[:1]
    if facts.driver_cuda is not None and wanted and wanted[0] > facts.driver_cuda[0]:
        least = _LEAST_DRIVER.get(wanted[0])
        return fail(
            "torch",
            f"{version} is built for CUDA {cuda}, but driver {facts.driver or 'in use'} runs CUDA up to "
            f"{dotted(facts.driver_cuda)}",
            hint=(f"install driver {least} or newer" if least else "install a newer driver")
            + f", or a torch built for CUDA {facts.driver_cuda[0]}"
            + (f"; {WINDOWS_DRIVER}" if facts.is_wsl else ""),
            fix=RESTART_WSL if facts.is_wsl else INSTALL_DRIVER,
        )
    if not facts.torch.available:
        return fail(
            "torch",
            f"{version}, built for CUDA {cuda}, cannot use the card: {facts.torch.error or 'it gives no reason'}",
            hint="after a suspend of the PC this is usual: the driver's module must be loaded again",
            fix=RESTART_WSL if facts.is_wsl else "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm",
        )
    return ok("torch", f"{version}, built for CUDA {cuda}, sees the card")


def _kernels(facts: MachineFacts) -> Finding:
    """Machine code for sm_XY runs on X.Z with Z >= Y; compute_XY is compiled by the driver for anything newer."""
    if not facts.visible_cards or facts.torch.cuda is None:
        return skip("kernels", "no card with a torch for it")
    unknown = [card for card in facts.visible_cards if card.compute_capability is None]
    if unknown or not facts.torch.architectures:
        return skip("kernels", "the card or torch does not report it")
    for card in facts.visible_cards:
        capability = card.compute_capability or (0, 0)
        if any(_runs_on(name, capability) for name in facts.torch.architectures):
            continue
        listed = " ".join(facts.torch.architectures)
        named = f"{card.name} has compute capability {dotted(capability)}; this torch has kernels for {listed}"
        if any(_compiles_for(name, capability) for name in facts.torch.architectures):
            return warn("kernels", f"{named}: the driver compiles them at the first start, which takes minutes")
        return fail(
            "kernels",
            named,
            hint="remove it, then install a torch that knows the card: newer for a new card, older for an old one",
            fix="python -m pip uninstall torch",
        )
    return ok("kernels", "torch has kernels for the card")


def _runs_on(name: str, capability: tuple[int, int]) -> bool:
    kind, _, digits = name.partition("_")
    if kind != "sm" or not digits:
        return False
    if not digits.isdigit():  # sm_90a runs on 9.0 alone, sm_100f on its family
        return _pair(digits[:-1]) == capability
    major, minor = _pair(digits)
    return major == capability[0] and minor <= capability[1]


def _compiles_for(name: str, capability: tuple[int, int]) -> bool:
    kind, _, digits = name.partition("_")
    return kind == "compute" and digits.isdigit() and _pair(digits) <= capability


def _pair(digits: str) -> tuple[int, int]:
    return (int(digits[:-1] or 0), int(digits[-1])) if digits.isdigit() else (0, 0)
