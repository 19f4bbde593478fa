"""What samples say: noise is smoothed, exact ones are taken at their word, cuts at once, and failures teach."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from workers.policy.adaptive.free_memory import Level, doubted, sampled, trusted

GIB = 2.0**30


def after(level: Level | None, sample_bytes: float, *, every_step: bool, failed: bool = False) -> Level:
    at_s = 0.0 if level is None else level.at_s + 1.0
    return sampled(level, sample_bytes, every_step=every_step, at_s=at_s, failed=failed)


def fed(samples: Iterable[float], *, every_step: bool = False) -> Level:
    level = reduce(lambda level, sample: after(level, sample, every_step=every_step), samples, None)
    assert level is not None
    return level


def noisy(count: int, *, noise: float = 0.03, walk: float = 0.0, seed: int = 1) -> list[float]:
    draw, true_bytes, samples = Random(seed), 4 * GIB, []  # noqa: S311 - a simulation
    for _ in range(count):
        true_bytes *= 1.0 + draw.gauss(0.0, walk)
        samples.append(true_bytes * (1.0 + draw.gauss(0.0, noise)))
    return samples


def test_the_first_sample_is_taken_at_its_word() -> None:
    assert fed([4 * GIB]).usable_bytes == 4 * GIB


def test_noise_is_smoothed_and_its_error_is_known() -> None:
    misses = [fed(noisy(200, seed=seed)).level_bytes / (4 * GIB) - 1.0 for seed in range(40)]
    errors = [fed(noisy(200, seed=seed)).error for seed in range(40)]
    assert statistics.stdev(misses) < 0.015, "half of the noise at most"
    assert 0.6 < statistics.fmean(errors) / statistics.stdev(misses) < 1.7
    assert all(fed(noisy(200, seed=seed)).usable_bytes < 4 * GIB for seed in range(40))


def test_a_walk_is_followed_faster_than_noise() -> None:
    still = statistics.fmean(fed(noisy(400, seed=seed)).gain for seed in range(20))
    walking = statistics.fmean(fed(noisy(400, walk=0.03, seed=seed)).gain for seed in range(20))
    assert walking > still + 0.2


def test_few_samples_are_worth_less_than_many() -> None:
    samples = noisy(60)
    assert fed(samples[:3]).error > fed(samples).error
    once, often = (Level(level_bytes=GIB, sample_bytes=GIB, samples=samples) for samples in (1, 100))
    assert once.error > 2 * often.error


def test_memory_taken_shows_at_once_and_memory_given_at_the_second_sample() -> None:
    level = fed(noisy(100))
    taken = after(level, 2 * GIB, every_step=False)
    assert taken.level_bytes == 2 * GIB
    once = after(level, 8 * GIB, every_step=False)
    assert once.level_bytes == level.level_bytes
    assert after(once, 8 * GIB, every_step=False).level_bytes == 8 * GIB
    assert after(after(once, 4 * GIB, every_step=False), 8 * GIB, every_step=False).level_bytes < 5 * GIB


def test_what_repeats_itself_to_the_byte_is_exact_and_only_for_its_own_step() -> None:
    assert fed([4 * GIB, 4 * GIB], every_step=True).exact
    assert not fed([4 * GIB, 4 * GIB], every_step=False).exact
    assert not fed([4 * GIB, 4.1 * GIB], every_step=True).exact


def test_until_it_is_proven_a_fresh_sample_bounds_what_is_usable() -> None:
    level = fed([*noisy(50), 3.7 * GIB], every_step=True)
    assert not level.exact
    assert level.usable_bytes <= 3.7 * GIB


def telling_level() -> Level:
    level = after(fed(noisy(50), every_step=True), 4.4 * GIB, every_step=True)
    assert level.telling
    return level


def test_a_high_sample_tells_exact_from_noisy() -> None:
    level = telling_level()
    assert level.usable_bytes == level.sample_bytes
    believed = trusted(level, 4.35 * GIB)
    assert believed.proof > 0
    assert after(believed, 4.1 * GIB, every_step=True).exact
    refuted = doubted(level)
    assert not refuted.exact
    assert refuted.usable_bytes < level.level_bytes
    assert not after(refuted, 4.5 * GIB, every_step=True).exact


def test_a_step_that_the_smoothed_level_allowed_proves_nothing() -> None:
    assert trusted(telling_level(), 3.9 * GIB).proof == 0


def test_what_was_noisy_is_tested_again_much_later_and_each_time_later() -> None:
    tested = telling_level()
    level = doubted(tested)
    assert -level.proof == tested.next_ban >= 1000
    assert level.next_ban == 2 * tested.next_ban
    for _ in range(tested.next_ban - 1):
        level = trusted(level, GIB)
    assert level.proof == -1
    assert trusted(level, GIB).proof == 0


def test_one_failure_refutes_what_was_proven_once_and_not_what_was_proven_often() -> None:
    once = trusted(telling_level(), 4.35 * GIB)
    assert not doubted(replace(once, telling=False)).exact
    often = fed([4 * GIB, 4 * GIB], every_step=True)
    assert doubted(often).exact
    assert not doubted(doubted(often)).exact


def test_a_failure_widens_the_reserve_and_samples_without_one_narrow_it_slowly() -> None:
    level = fed(noisy(50))
    wider = doubted(level)
    assert wider.reserve > level.reserve
    assert wider.usable_bytes < level.usable_bytes
    narrower = reduce(lambda level, sample: after(level, sample, every_step=False), noisy(60), wider)
    assert 0.0 < wider.reserve - narrower.reserve < wider.reserve - level.reserve, "a minute undoes no failure"
    assert reduce(lambda level, _: doubted(level), range(100), level).reserve < 10


@given(
    samples=st.lists(st.floats(0.0, 1e13), min_size=1, max_size=40),
    fresh=st.booleans(),
    ends=st.lists(st.booleans(), max_size=40),
)
def test_usable_is_never_more_than_was_seen_and_never_negative(
    samples: list[float], fresh: bool, ends: list[bool]
) -> None:
    level: Level | None = None
    for place, sample in enumerate(samples):
        level = after(level, sample, every_step=fresh)
        assert 0.0 <= level.usable_bytes <= max(samples[: place + 1]) * (1 + 1e-9)
        assert level.usable_bytes <= level.likely_bytes or level.exact
        if place < len(ends):
            level = trusted(level, sample) if ends[place] else doubted(level)


def exact(*samples: float) -> Level:
    level = fed([*samples[:1], *samples], every_step=True)
    assert level.exact
    return level


def soon(*samples: float) -> Level:
    """Exact ones, four a second."""
    level = None
    for number, sample in enumerate([*samples[:1], *samples]):
        level = sampled(level, sample, every_step=True, at_s=number / 4)
    assert level is not None
    return level


def test_one_fall_is_taken_as_it_is_and_after_two_a_third_is_expected() -> None:
    assert exact(4 * GIB, 3.6 * GIB).usable_bytes == 3.6 * GIB
    assert exact(4 * GIB, 3.6 * GIB, 3.24 * GIB).usable_bytes < 0.91 * 3.24 * GIB
    assert exact(4 * GIB, 3.6 * GIB, 3.7 * GIB, 3.33 * GIB).usable_bytes == 3.33 * GIB, "it rose in between"
    assert exact(4 * GIB, 2 * GIB, GIB).usable_bytes >= 0.69 * GIB, "not everything is given up"


def test_what_loads_takes_the_same_bytes_again_and_a_small_rise_between_ends_no_row() -> None:
    assert 5.0 * GIB < soon(10 * GIB, 8.5 * GIB, 7 * GIB).usable_bytes < 5.5 * GIB
    assert soon(10 * GIB, 8.5 * GIB, 7 * GIB, 7.1 * GIB, 5.6 * GIB).usable_bytes < 4.1 * GIB
    jitter = soon(10 * GIB, 9.8 * GIB, 9.6 * GIB, 9.7 * GIB, 9.5 * GIB)
    assert jitter.usable_bytes > 0.97 * 9.5 * GIB, "two pieces are a row, jitter is not"


def test_a_fall_that_was_expected_is_forgotten_when_it_does_not_come() -> None:
    level = exact(4 * GIB, 3.6 * GIB, 3.24 * GIB)
    for _ in range(10):
        level = after(level, 3.24 * GIB, every_step=True)
    assert level.usable_bytes > 0.999 * 3.24 * GIB


def test_what_has_just_come_back_is_not_used_up_at_once() -> None:
    level = exact(GIB, 4 * GIB)
    assert 0.9 * 4 * GIB < level.usable_bytes < 0.99 * 4 * GIB
    for _ in range(10):
        level = after(level, 4 * GIB, every_step=True)
    assert level.usable_bytes > 0.999 * 4 * GIB


def test_after_a_step_that_failed_for_a_little_jitter_more_of_it_is_expected() -> None:
    level = exact(4 * GIB)
    assert after(level, 3.9 * GIB, every_step=True).usable_bytes == 3.9 * GIB
    jittery = after(level, 3.9 * GIB, every_step=True, failed=True)
    assert jittery.usable_bytes <= 3.9 * GIB - 0.1 * 3.9 / 4 * GIB * 0.99
    assert after(level, GIB, every_step=True, failed=True).usable_bytes == GIB, "that was no jitter"
    for _ in range(60):
        jittery = after(jittery, 3.9 * GIB, every_step=True)
    assert 0.98 * 3.9 * GIB < jittery.usable_bytes < 0.99 * 3.9 * GIB, "a minute later, half of it is"


def test_what_is_expected_to_go_away_never_hides_what_a_telling_step_is_to_find_out() -> None:
    level = telling_level()
    assert level.usable_bytes == level.sample_bytes
