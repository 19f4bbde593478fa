"""Environment variables: what torch's allocator reads, and what old guides recommend. Pure: facts in, findings out.

The workers of a run put allocator settings aside, so these matter to your own programs and to `resilient` in them.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from orchestrator.doctor.finding import Finding, ok, skip, warn
from workers.host.facts import MachineFacts

_NEW, _OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"


def check_environment(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what there is to say about the environment variables of one machine."""
    yield from _allocator(facts)
    yield from _bogus(facts)
    yield _order(facts)


def composed(facts: MachineFacts) -> str:
    """Return what PYTORCH_ALLOC_CONF should say here: what is set, under either name, less what cannot work.

    `expandable_segments` works on Linux itself: it breaks under WSL2 (pytorch #192330) and is ignored on Windows.
    """
    works = facts.system == "linux" and not facts.is_wsl
    return ",".join(part for part in _parts(facts) if works or not _is_expandable(part))


def _parts(facts: MachineFacts) -> list[str]:
    said = facts.setting(_NEW) or facts.setting(_OLD) or ""
    return [part.strip() for part in said.split(",") if part.strip()]


def _is_expandable(part: str) -> bool:
    name, _, value = part.partition(":")
    return name.strip() == "expandable_segments" and value.strip().lower() == "true"


def _allocator(facts: MachineFacts) -> Iterator[Finding]:
    new, old = facts.setting(_NEW), facts.setting(_OLD)
    if new is None and old is None:
        yield ok("allocator", f"{_NEW} is not set; torch's defaults are right for the workers of a run")
        return
    right = composed(facts)
    problems = []
    if old is not None:
        # The new name is torch 2.9's, the oldest that this project takes.
        problems.append(f"{_OLD} is deprecated: the name is {_NEW}")
    if right != ",".join(_parts(facts)):
        problems.append("expandable_segments " + ("breaks under WSL2" if facts.is_wsl else "works on Linux alone"))
    fix = f"export {_NEW}={shlex.quote(right)}" if right else f"unset {_NEW}"
    if old is not None:
        fix = f"unset {_OLD}; {fix}"
    for found in problems:
        yield warn("allocator", found, hint="workers of a run ignore it; your own programs do not", fix=fix)
    if not problems:
        yield ok("allocator", f"{_NEW}={new}; workers of a run ignore it")


def _bogus(facts: MachineFacts) -> Iterator[Finding]:
    found = [
        (name, words)
        for name, (values, words) in _OLD_ADVICE.items()
        if (value := facts.setting(name)) is not None and (values is None or value in values)
    ]
    for name, words in found:
        yield warn("variables", f"{name}={facts.setting(name)}: {words}", fix=f"unset {name}")
    if not found:
        yield ok("variables", "none of those that old guides recommend and that do harm or nothing")


#: Which values are meant (`None`: any), and what is wrong with them.
_OLD_ADVICE: dict[str, tuple[frozenset[str] | None, str]] = {
    "PYTORCH_CUDA_MEMCHECK": (None, "a flag of PyTorch's own test suite; does nothing here (use compute-sanitizer)"),
    "TORCH_USE_CUDA_DSA": (None, "a setting for building PyTorch; does nothing at run time"),
    "CUDA_LAUNCH_BLOCKING": (
        frozenset({"1", "true", "TRUE"}),
        "each kernel waits for the one before; slow, for debugging only",
    ),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (
        frozenset({"1"}),
        "switches torch's allocator off, and every cap with it; workers of a run ignore it",
    ),
    "NVIDIA_TF32_OVERRIDE": (
        None,
        "0 forbids TF32 to every program, other values mean nothing; say it in cluster.yaml: workload.dtype: tf32",
    ),
}


def _order(facts: MachineFacts) -> Finding:
    name, setting = "CUDA_DEVICE_ORDER", facts.setting("CUDA_DEVICE_ORDER")
    if len(facts.cards) < 2:
        return skip("device_order", "one card or none")
    if setting == "PCI_BUS_ID":
        return ok("device_order", f"{name}=PCI_BUS_ID: CUDA and nvidia-smi count the cards alike")
    if len({card.name for card in facts.cards}) == 1:
        return ok("device_order", "the cards are alike; workers count them as nvidia-smi does")
    return warn(
        "device_order",
        f"{name} is {setting or 'not set'}: CUDA counts the fastest card first, nvidia-smi by slot",
        hint="workers of a run set it themselves; your own programs do not",
        fix=f"export {name}=PCI_BUS_ID",
    )
