"""The gain of a team: known figures, limits of the arithmetic, and the sentences."""

from __future__ import annotations

import random

import pytest

from orchestrator.core.team_time import LEAST_GAIN, StepTimes, least_alone_s, step_times
from workers.messages import TeamPace


def pace(alone_s: float, update_s: float = 0.0) -> TeamPace:
    return TeamPace(steps=9, step_s=1.0, alone_s=alone_s, update_s=update_s)


@pytest.mark.parametrize(
    ("alone_s", "compute_s", "wire_s", "said"),
    [
        (12.7, 8.2, 4.5, "together 8.2 + 4.5 s on the wire: no gain, pc1/0 alone"),
        (12.7, 8.2, 4.45, "together 8.2 + 4.45 s on the wire: no gain, pc1/0 alone"),
        (12.7, 8.2, 4.0, "together 8.2 + 4 s on the wire: 4% faster, pc1/0 alone"),
        (12.7, 8.2, 1.3, "together 8.2 + 1.3 s on the wire: 34% faster"),
    ],
)
def test_the_sentence_says_what_to_do(
    alone_s: float, compute_s: float, wire_s: float, said: str
) -> None:
    times = StepTimes("pc1/0", alone_s, compute_s, wire_s)
    assert times.sentence == f"pc1/0 alone 12.7 s a step, {said}"
    assert times.pays is not times.sentence.endswith("alone")


def test_members_end_at_the_same_time() -> None:
    rng = random.Random(0)  # noqa: S311
    for _ in range(200):
        paces = {name: pace(rng.uniform(1, 9), rng.uniform(0, 0.2)) for name in "abc"}
        times = step_times(paces, 0.5, equal=False)
        shares = [
            (times.compute_s - each.update_s) / (each.alone_s - each.update_s)
            for each in paces.values()
        ]
        assert sum(shares) == pytest.approx(1)
        assert times.alone_s == min(each.alone_s for each in paces.values())
        equal = step_times(paces, 0.5, equal=True)
        assert equal.compute_s >= times.compute_s - 1e-9, "the slowest sets the pace"


def test_equal_shares_wait_for_the_slowest() -> None:
    times = step_times({"a": pace(4.0), "b": pace(12.0)}, 0.0, equal=True)
    assert (times.compute_s, times.pays) == (6.0, False)


def test_from_when_on_it_pays() -> None:
    for wire_s, other in ((0.9, 0.55), (0.1, 1.0), (3.0, 0.3)):
        least_s = least_alone_s([1.0, other], wire_s)
        assert least_s is not None
        times = step_times({"a": pace(least_s), "b": pace(least_s / other)}, wire_s, equal=False)
        assert times.gain == pytest.approx(LEAST_GAIN)
    # A member with 9 % of the speed does not gain 10 % of the time, however fast the wire is.
    assert least_alone_s([1.0, 0.09], 0.001) is None
