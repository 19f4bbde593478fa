"""What an arm is told, and what it answers. Pickled through a pipe between a head and its own child
process.

Loads neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from workers.settings import WorkerSpec

NO_ROOM: Final = "does not fit the cap"
"""How a refusal begins that is about memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmSpec:
    """One arm: what it computes, under which cap."""

    name: str
    spec: WorkerSpec
    """Budget and device. Its workload says what is computed: `train` or `matmul`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The section `train:` of this arm; empty for matmul."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """The section of the baseline. Its loss judges all arms, whatever each one is trained on."""
    seed: int = 0
    """Of weights and order; all arms read the same data."""
    log: Path
    """Where output of the process goes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What its environment needs before CUDA starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make the training, and do the first optimiser steps.

    Their losses are compared with the baseline's.
    """

    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What the first steps were."""

    losses: tuple[float, ...] = ()
    """Of each optimiser step."""
    weights_sha256: str | None = None
    """After the last of them."""
    validation_loss: float | None = None
    """After the last of them, on samples that were not trained on; `None`: the task cannot tell."""
    first_step_s: float = 0.0
    """What the first step took, compilation included."""
    step_s: float = 0.0
    """The median of the other ones."""
    peak_bytes: int = 0
    """The highest use of the device by tensors in a step. Turns are not looked at: what parking
    leaves on a CPU's heap differs between equal arms by 15 %, and these peaks by 1 % (measured)."""
    flop: float | None = None
    """Of what a turn counts one of, in `Done.samples`: the operations of the model, without what is
    repeated.
    """
    micro: int = 0
    """Samples computed at once. Less than asked, if those did not fit."""
    device_name: str = ""
    card: str = "cpu"
    """UUID of the card, or `cpu`."""
    device_bytes: int | None = None
    """All of the device's memory."""
    driver: str | None = None
    torch: str = ""
    host_bytes: int = 0
    """Resident memory of the process, on the host."""
    parked_bytes: int = 0
    """Host memory that its state takes between two turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Work for so long, and at least so many steps; then park."""

    seconds: float
    least_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What was done in a turn."""

    samples: float
    """Samples, or tokens where lengths differ; for matmul 10^9 operations."""
    seconds: float
    """While the device computed. Going back to the device and parking are not counted."""
    clock_mhz: float | None = None
    throttled: bool = False
    neighbour_share: float | None = None
    """What other programs used of the machine's processors meanwhile; `None` on a card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Compute the validation loss as it is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The loss on samples that were not trained on, and after how many steps."""

    validation_loss: float | None
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The arm cannot do that on this machine; its process ends."""

    reason: str
