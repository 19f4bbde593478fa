"""Whether a team pays: the time of a step on its fastest member alone and on all members. Pure.

Members measure their pace and the wire, and `doctor` measures links. Does not consider memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from workers.messages import TeamPace

#: A team with less gain does not pay: with `train.split: auto` only its fastest member trains.
LEAST_GAIN: Final = 0.10


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step of the fastest member alone, and of the team."""

    fastest: str
    alone_s: float
    compute_s: float
    """Time in which the team computes."""
    wire_s: float
    """Time in which the team exchanges sums and does not compute."""

    @property
    def gain(self) -> float:
        """Additional steps of the team in the same time; 0.25: a quarter more."""
        return self.alone_s / (self.compute_s + self.wire_s) - 1

    @property
    def pays(self) -> bool:
        """Whether the gain is at least `LEAST_GAIN`."""
        return self.gain >= LEAST_GAIN

    @property
    def sentence(self) -> str:
        """The times and the gain as a sentence."""
        gain = f"{self.gain:.0%} faster" if self.gain >= 0.005 else "no gain"
        return (
            f"{self.fastest} alone {self.alone_s:.3g} s a step, together {self.compute_s:.3g} + "
            f"{self.wire_s:.3g} s on the wire: {gain}{'' if self.pays else f', {self.fastest} alone'}"
        )


def step_times(paces: Mapping[str, TeamPace], wire_s: float, *, equal: bool) -> StepTimes:
    """Return the expected times if members share the samples by their speed, or with `equal` (as
    for `train.exact`) in equal parts.
    """
    whole_s = {name: pace.alone_s - pace.update_s for name, pace in paces.items()}
    if equal:
        compute_s = max(whole_s[name] / len(paces) + paces[name].update_s for name in paces)
    else:
        updates = sum(paces[name].update_s / whole_s[name] for name in paces)
        compute_s = (1 + updates) / sum(1 / each_s for each_s in whole_s.values())
    fastest = min(paces, key=lambda name: paces[name].alone_s)
    return StepTimes(fastest, paces[fastest].alone_s, compute_s, wire_s)


def least_alone_s(speeds: Sequence[float], wire_s: float) -> float | None:
    """Return the shortest step time of the fastest member, in seconds, for which a team pays, if
    only the ratio of speeds is known; `None`: it never pays.
    """
    share = (1 + LEAST_GAIN) * max(speeds) / sum(speeds)
    return (1 + LEAST_GAIN) * wire_s / (1 - share) if share < 1 else None
