"""The distribution of rows: each row once, by speed, and again if a member is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from workers.team.shares import Rows, Shares

MEMBERS = ("a", "b", "c")


class Clockwork:
    """Members that compute at fixed speeds in rows a second, driven until a step is done."""

    def __init__(self, speeds: Sequence[float], batch: int, *, fixed: bool = False) -> None:
        self.speeds = dict(zip(MEMBERS, speeds, strict=False))
        self.shares = Shares(batch, MEMBERS[: len(speeds)], fixed=fixed)
        for member in self.speeds:
            self.shares.join(member)
        self.now_s = 0.0

    def step(self, number: int, most_rows: int = 8) -> dict[str, list[Rows]]:
        """Do a step; return the computed rows, keyed by member."""
        began_s = self.now_s
        self.shares.begin(number, self.now_s)
        done: dict[str, list[Rows]] = {member: [] for member in self.speeds}
        under_way: dict[str, tuple[float, Rows]] = {}
        while not self.shares.is_complete:
            for member in self.speeds:
                if member not in under_way:
                    rows = self.shares.give(member, most_rows, self.now_s)
                    if rows is not None:
                        under_way[member] = self.now_s + rows.rows / self.speeds[member], rows
            member = min(under_way, key=lambda each: under_way[each][0])
            self.now_s, rows = under_way.pop(member)
            self.shares.done(member, self.now_s)
            done[member].append(rows)
        self.took_s = self.now_s - began_s
        return done


def covered(done: dict[str, list[Rows]]) -> list[int]:
    """Return the computed rows of the batch in order."""
    return sorted(
        row for each in done.values() for one in each for row in range(one.first, one.first + one.rows)
    )  # fmt: skip


@pytest.mark.parametrize("speeds", [(1, 1), (3, 1), (1, 3), (5, 2, 1), (1, 1, 1)])
def test_shares_follow_the_speeds(speeds: tuple[float, ...]) -> None:
    run = Clockwork(speeds, 96)
    for number in range(12):
        done = run.step(number)
        assert covered(done) == list(range(96))
    counts = {member: sum(rows.rows for rows in each) for member, each in done.items()}
    for member, speed in run.speeds.items():
        assert counts[member] == pytest.approx(96 * speed / sum(speeds), abs=5)
    assert run.took_s <= 1.2 * 96 / sum(speeds)
    assert all(rows.rows >= 2 for each in done.values() for rows in each), "no crumbs at the end"


def test_a_member_that_got_nothing_is_measured_again() -> None:
    run = Clockwork((100, 1), 16)
    counts = [sum(rows.rows for rows in run.step(number, 16)["b"]) for number in range(40)]
    assert min(counts[4:]) == 0
    assert all(any(counts[first : first + 9]) for first in range(31))
    run.speeds["b"] = 300.0
    later = [sum(rows.rows for rows in run.step(number, 16)["b"]) for number in range(40, 80)]
    assert max(later) >= 8, "it has become fast"


def test_fixed_ranges_keep_their_places_whoever_computes_them() -> None:
    run = Clockwork((1, 1, 1), 32, fixed=True)
    usual = run.step(0)
    ranges = sorted((rows.unit, rows.first, rows.rows) for (rows,) in usual.values())
    assert ranges == [(0, 0, 10), (1, 10, 11), (2, 21, 11)]
    run.shares.leave("b")
    del run.speeds["b"]
    done = run.step(1)
    assert (
        sorted((rows.unit, rows.first, rows.rows) for each in done.values() for rows in each)
        == ranges
    )


def test_only_what_takes_far_longer_than_before_is_late() -> None:
    run = Clockwork((4, 4), 32)
    for number in range(4):
        run.step(number)
    run.shares.begin(4, run.now_s)
    given = run.shares.give("b", 8, run.now_s)
    assert given is not None
    should_s = given.rows / 4
    assert run.shares.late(2.0, run.now_s + 1.9 + 10 * should_s) == []
    assert run.shares.late(2.0, run.now_s + 2.1 + 10 * should_s) == ["b"]


@pytest.mark.parametrize("seed", range(5))
def test_all_rows_are_computed_once_whoever_comes_and_goes(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311 - events, not secrets
    for fixed in (False, True):
        shares = Shares(40, MEMBERS, fixed=fixed)
        shares.join("a")
        for step in range(30):
            shares.begin(step, 0.0)
            held: dict[str, list[Rows]] = {"a": [], "b": [], "c": []}
            under_way: dict[str, Rows] = {}
            here = {"a"} | {each for each in "bc" if each in shares._members}
            for now in range(10_000):
                if shares.is_complete:
                    break
                member = draw.choice("abc")
                if member not in here:
                    if draw.random() < 0.2:
                        shares.join(member)
                        here.add(member)
                        assert shares.rows_of(member) == 0
                elif member != "a" and draw.random() < 0.05:
                    back = [*held[member], *filter(None, [under_way.pop(member, None)])]
                    assert shares.leave(member) == sum(rows.rows for rows in back)
                    here.discard(member)
                    held[member] = []
                elif member in under_way:
                    shares.done(member, float(now))
                    held[member].append(under_way.pop(member))
                elif (rows := shares.give(member, draw.randint(1, 9), float(now))) is not None:
                    under_way[member] = rows
            assert covered(held) == list(range(40))
