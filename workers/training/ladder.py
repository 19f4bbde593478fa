"""The fixed ladder on which a training saves memory, and what each move on it has bought.

Smaller parts come first, then all blocks are recomputed, then the states of the optimiser leave the
device. In this order each is slower than the one before: parts of one sample took 16 % longer than
parts of the whole batch (two CPU cores, three layers of width 64), and a recomputed forward pass
takes a third of a step's time. Does not decide where to stand: the policy does, by the memory that
parts really take.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

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


class _Place(NamedTuple):
    """Where a part of a batch was computed: its samples, recomputed blocks, states on the host."""

    micro: int
    level: int
    share_pct: int


class Moves:
    """What the memory of whole batches says of the moves between them."""

    def __init__(self) -> None:
        self._now: _Place | None = None
        self._is_whole = False
        """Whether the batch under way began here, after a first batch that did."""
        self._took_s = 0.0
        self._peak_bytes = 0
        self._settled: tuple[_Place, float, int] | None = None
        """Where a whole batch was measured last, its seconds and its bytes."""

    def at(self, micro: int, level: int, share_pct: int) -> None:
        """Take note of where a part is computed."""
        place = _Place(micro, level, share_pct)
        if place != self._now:
            self._now, self._is_whole = place, False
            self._took_s, self._peak_bytes = 0.0, 0

    def note(
        self, took_s: float, peak_bytes: int | None, *, is_whole: bool
    ) -> Iterator[tuple[str, dict[str, int | float]]]:
        """Take note of a part; yield the event of a move that has lasted for a whole batch.

        `is_whole`: it was the last part of its batch.
        """
        self._took_s += took_s
        self._peak_bytes = max(self._peak_bytes, peak_bytes or 0)
        if not is_whole or self._now is None:
            return
        was_whole, self._is_whole = self._is_whole, True
        measured = self._now, self._took_s, self._peak_bytes
        self._took_s, self._peak_bytes = 0.0, 0
        if not was_whole:
            return
        before, self._settled = self._settled, measured
        if before is None or before[0] == self._now:
            return
        (old, old_s, old_bytes), (new, new_s, new_bytes) = before, measured
        yield (
            "memory_moved",
            {
                "micro_batch": new.micro,
                "memory_level": new.level,
                "states_on_host_pct": new.share_pct,
                "from_micro_batch": old.micro,
                "from_memory_level": old.level,
                "from_states_on_host_pct": old.share_pct,
                "bought_bytes": old_bytes - new_bytes,
                "time_cost_pct": round(100 * (new_s / old_s - 1), 2) if old_s else 0.0,
            },
        )
