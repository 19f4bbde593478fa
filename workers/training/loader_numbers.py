"""How many loader processes, how many batches ahead, and whether the data set is kept in RAM. Pure.

Decides from the cores and the RAM that one training has for itself. Does not know how dear a sample
is to make: whether processes help is measured (`data_wait_pct`), not guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from workers.units import MIB

#: A loader process without its batches. 59 MiB were measured (torch 2.13, forkserver); user
#: libraries come on top.
_PROCESS_BYTES: Final = 128 * MIB

#: More processes than this rarely help one card, and each takes RAM.
_MOST_WORKERS: Final = 8

#: Shares of the RAM that is free for this training, for processes with their batches and for the
#: data set.
_SHARE_OF_PROCESSES: Final = 0.25
_SHARE_OF_CACHE: Final = 0.5

#: On a CPU the training itself uses the cores: one in so many goes to the loader.
_CPU_CORES_PER_PROCESS: Final = 4

#: Batches ahead for each process, where RAM allows it. torch's default is the smaller number.
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """What one training has for itself of its host."""

    cores: int
    """Physical cores."""
    ram_bytes: int
    """That is free now."""
    on_card: bool
    """Whether the training computes on a card and leaves the cores to the loader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderNumbers:
    """What was decided, and why."""

    workers: int
    prefetch: int
    ram_cache: bool
    reason: str


def loader_numbers(
    host: HostShare,
    *,
    workers: int | Literal["auto"],
    prefetch: int | Literal["auto"],
    ram_cache: bool,
    batch_bytes: int,
    items_bytes: int | None,
) -> LoaderNumbers:
    """Return the numbers; what is given as a number stays.

    Args:
        host: What the training has for itself.
        workers: Loader processes.
        prefetch: Batches that each keeps ready.
        ram_cache: Whether to keep the data set in RAM if it fits.
        batch_bytes: Of an effective batch.
        items_bytes: Of the whole data set; `None`: it cannot be kept, because its items change from
        epoch to epoch.
    """
    reasons = []
    cached = (
        ram_cache and items_bytes is not None and items_bytes <= _SHARE_OF_CACHE * host.ram_bytes
    )
    if ram_cache:
        reasons.append(_about_cache(cached, host, items_bytes))
    allowed_bytes = _SHARE_OF_PROCESSES * host.ram_bytes
    if workers == "auto":
        by_cores = host.cores - 1 if host.on_card else host.cores // _CPU_CORES_PER_PROCESS
        ahead_bytes = (_LEAST_PREFETCH if prefetch == "auto" else prefetch) * batch_bytes
        by_ram = int(allowed_bytes // (_PROCESS_BYTES + ahead_bytes))
        processes = max(0, min(by_cores, by_ram, _MOST_WORKERS))
        reasons.append(
            f"{processes} loader processes: {host.cores} cores allow {by_cores}, RAM allows "
            f"{by_ram}"
        )
    else:
        processes = workers
    if prefetch == "auto":
        room_bytes = allowed_bytes / max(1, processes) - _PROCESS_BYTES
        ahead = max(1, min(_MOST_PREFETCH, int(room_bytes // max(1, batch_bytes))))
        if processes:
            reasons.append(f"each keeps {ahead} batches of {batch_bytes / MIB:.1f} MiB ready")
    else:
        ahead = prefetch
    return LoaderNumbers(
        workers=processes, prefetch=ahead, ram_cache=cached, reason="; ".join(reasons)
    )


def _about_cache(cached: bool, host: HostShare, items_bytes: int | None) -> str:
    if items_bytes is None:
        return (
            "the data set is not kept in RAM: its items change from epoch to epoch, or are not "
            "tensors of one shape"
        )
    told = (
        f"{items_bytes / MIB:.0f} MiB, and half of the free RAM is "
        f"{_SHARE_OF_CACHE * host.ram_bytes / MIB:.0f} MiB"
    )
    return f"the data set is {'' if cached else 'not '}kept in RAM: it takes {told}"
