"""The fixed ladder on which a training saves memory.

Smaller parts come first, then all blocks are recomputed, then the states of the optimiser leave the
device. In this order each is slower than the one before: parts of one sample took 16 % longer than
parts of the whole batch (two CPU cores, three layers of width 64), and a recomputed forward pass
takes a third of a step's time. Does not decide where to stand: the policy does, by the memory that
parts really take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from workers.training.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What a training does to save memory beside smaller parts."""

    recomputes: bool = False
    """Whether all blocks are recomputed, where `train.recompute` is `auto`."""
    states_on_host_pct: int = 0
    """Of the optimiser's states, where `train.states_on_host` is `auto`."""

    @property
    def keeps(self) -> float:
        """The share of what is held between two parts that stays on the device: of weights, sums of
        gradients and two states, the states are half.
        """
        return 1.0 - self.states_on_host_pct / 200


_RECOMPUTED: Final = Level(recomputes=True)


def levels_of(settings: TrainSettings) -> list[Level]:
    """Return the levels that a training may use: each saves more than the one before."""
    levels = [Level()]
    if settings.recompute == "auto":
        levels.append(_RECOMPUTED)
    if settings.states_on_host == "auto":
        levels.append(Level(recomputes=levels[-1].recomputes, states_on_host_pct=100))
    return levels
