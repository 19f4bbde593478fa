"""Which steps take several times what others of their size take, and when the next one is due.

Validation every n steps, an optimiser that steps every k-th time: such steps come after equal
numbers of ordinary ones. Once two equal gaps were seen, the next one is expected and can be run
smaller. Those that come irregularly, and more than once a minute, are reckoned with in every step.
Does not know how much memory there is, and decides no size.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: A step that takes so many times what the line says is no wobble. It is no change of the workload
#: either, unless the next one takes as much.
HEAVY: Final = 1.25

#: A heavy step that did not fit although it was expected takes at least so many times more than was
#: thought.
_HEAVIER: Final = 2.0

#: Irregular ones are reckoned with after so many within so long: more than one a minute.
_OFTEN: Final = 3
_OFTEN_WITHIN_S: Final = 120.0

#: Places that are remembered, to find a period among irregular ones.
_REMEMBERED: Final = 6

#: A period is given up after so many heavy steps in a row that did not come.
_MISSES: Final = 2


class HeavySteps(NamedTuple):
    """What is known of them; an immutable value, changed with `_replace`."""

    ordinary: int = 0
    """Ordinary steps so far."""
    places: tuple[int, ...] = ()
    """Where the last few heavy ones came, as the ordinary steps before each."""
    at_s: tuple[float, ...] = ()
    """When they came."""
    period: int | None = None
    """Ordinary steps between two that come regularly."""
    due: int = 0
    """Where the next of these is expected, at the latest."""
    slack: int = 0
    """Steps since the last heavy one that failed for another reason: some workloads count them, and
    some do not.
    """
    misses: int = 0
    confirmed: bool = False
    """Whether one came when it was due."""
    ratio: float = 1.0
    """A heavy step takes so many times what an ordinary one of its size takes, as far as is known.
    """
    failed: bool = False
    """Whether the last step was heavy and failed: it may be tried again at once."""
    streak: bool = False
    """Whether the last step was heavy and ended well."""

    @property
    def is_due(self) -> bool:
        """Whether the next step is expected to be heavy."""
        return self.period is not None and (
            self.failed or self.due - self.slack <= self.ordinary <= self.due
        )

    def factor(self, now_s: float) -> float:
        """Return how many times an ordinary step's memory the next one may take."""
        if self.period is not None:
            return self.ratio if self.is_due else 1.0
        often = len(self.at_s) >= _OFTEN and now_s - self.at_s[-_OFTEN] < _OFTEN_WITHIN_S
        return self.ratio if often else 1.0

    def met(self, at_s: float, ratio: float, *, failed: bool) -> HeavySteps:
        """Return what is known after a heavy step that took, or would have taken, so many times the
        memory.
        """
        if failed:
            ratio = max(ratio, self.ratio * (_HEAVIER if self.is_due else 1.0))
        if self.failed:  # the same one again
            return self._replace(ratio=ratio, failed=failed, streak=not failed)
        places = (*self.places, self.ordinary)[-_REMEMBERED:]
        period, due, misses, confirmed = self.period, self.due, self.misses, self.confirmed
        found = _period(places)
        if found is not None and (period is None or found < period):
            period, due, misses = found, self.ordinary + found, 0
        elif period is not None and (self.is_due or self.ordinary - self.places[-1] == period):
            due, misses, confirmed = self.ordinary + period, 0, True
        return HeavySteps(
            ordinary=self.ordinary,
            places=places,
            at_s=(*self.at_s, at_s)[-_REMEMBERED:],
            period=period,
            due=due,
            misses=misses,
            confirmed=confirmed,
            ratio=ratio,
            failed=failed,
            streak=not failed,
        )

    def passed(self, *, failed: bool = False) -> HeavySteps:
        """Return what is known after an ordinary step.

        `failed`: for another reason than its weight.
        """
        if failed:
            return self._replace(slack=self.slack + 1, streak=False)
        if self.period is None or self.ordinary < self.due or self.failed:
            return self._replace(ordinary=self.ordinary + 1, failed=False, streak=False)
        if self.misses + 1 >= _MISSES:
            return HeavySteps(ordinary=self.ordinary + 1, places=self.places, ratio=self.ratio)
        return self._replace(
            ordinary=self.ordinary + 1,
            due=self.due + self.period * (1 + (self.ordinary - self.due) // self.period),
            slack=0,
            misses=self.misses + 1,
            failed=False,
            streak=False,
        )


def _period(places: tuple[int, ...]) -> int | None:
    """Return the distance of the last place from one before it, if another one is as far before
    that.
    """
    *earlier, last = places
    return next(
        (
            last - place
            for place in reversed(earlier)
            if 2 * place - last in earlier and place < last
        ),
        None,
    )
