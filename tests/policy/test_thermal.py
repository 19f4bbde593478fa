"""The thermal governor's bands, pauses, reasons and alarms, one event at a time.

`test_thermal_loop.py` tests the closed loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from workers.policy.card_alarms import CALM_S
from workers.policy.thermal import ThermalBand, ThermalDecision, ThermalGovernor
from workers.readings import SensorReading, Throttle
from workers.settings import ThermalSettings

SHIPPED = ThermalSettings()
#: Seconds since the previous reading, and a reading.
Readings: TypeAlias = list[tuple[float, SensorReading]]

temperatures = st.one_of(
    st.none(),
    st.integers(min_value=15, max_value=100).map(float),
    st.sampled_from([0.0, -1.0, 255.0, math.nan, math.inf, -math.inf, 1e308]),
)
readings = st.builds(
    SensorReading,
    temperature_c=temperatures,
    throttle_bits=st.one_of(st.none(), st.integers(min_value=0, max_value=0x1FF)),
    lost=st.booleans(),
)
courses = st.lists(st.tuples(st.floats(min_value=0.0, max_value=30.0), readings), max_size=60)
thresholds = st.sampled_from(
    [
        SHIPPED,
        ThermalSettings(hot_c=None),
        ThermalSettings(critical_c=None),
        ThermalSettings(warm_c=None, hot_c=None, critical_c=None),
        ThermalSettings(resume_c=None),
        ThermalSettings(warm_c=None),
        ThermalSettings(warm_c=40.0, hot_c=50.0, critical_c=60.0, resume_c=45.0),
    ]
)


class Played:
    """A governor and its decisions."""

    def __init__(self, settings: ThermalSettings = SHIPPED) -> None:
        self.governor = ThermalGovernor(settings)
        self.now_s = 0.0
        self.decisions: list[ThermalDecision] = []

    def see(
        self, temperature_c: float | None, *, bits: int | None = 0, lost: bool = False
    ) -> ThermalDecision:
        """Read the sensors 1 s later."""
        self.now_s += 1.0
        reading = SensorReading(temperature_c=temperature_c, throttle_bits=bits, lost=lost)
        return self.tell(reading)

    def follow(
        self, course: Iterable[tuple[float, SensorReading]]
    ) -> Iterator[tuple[SensorReading, ThermalDecision]]:
        """Yield each reading of a course with the decision on it."""
        for passed_s, reading in course:
            self.now_s += passed_s
            yield reading, self.tell(reading)

    def tell(self, reading: SensorReading) -> ThermalDecision:
        decision = self.governor.after_reading(reading, self.now_s)
        self.decisions.append(decision)
        return decision

    def edges(self) -> list[tuple[str, bool]]:
        return [
            (alarm.name, alarm.raised) for decision in self.decisions for alarm in decision.alarms
        ]


def bands(temperatures_c: Iterable[float], settings: ThermalSettings = SHIPPED) -> list[str]:
    played = Played(settings)
    return [str(played.see(told_c).band) for told_c in temperatures_c]


def test_the_guides_bands_and_their_hysteresis() -> None:
    assert bands([69, 70, 68, 67, 77, 78, 76, 75, 68, 67]) == [
        *("NORMAL", "WARM", "WARM", "NORMAL", "WARM"),
        *("HOT", "HOT", "WARM", "WARM", "NORMAL"),
    ]


#: A card that warms from 60 to 86 C, stays there, and cools again.
HEAT_C = (*range(60, 87), *[86] * 15, *range(86, 59, -1))


def test_heat_throttles_from_70_and_pauses_at_83() -> None:
    played = Played()
    for told_c in HEAT_C * 3:
        decision = played.see(told_c)
        assert decision.duty == 1.0 or told_c >= SHIPPED.warm_c, (told_c, decision)
        assert decision.duty < 1.0 or told_c < SHIPPED.critical_c, (told_c, decision)
    assert {decision.paused for decision in played.decisions} == {True, False}


def test_a_pause_that_others_prolong_ends_with_a_fifth_less() -> None:
    played = Played()
    played.see(83)
    held = [played.see(80) for _ in range(119)]
    assert all(decision.paused for decision in held)
    after = played.see(80)
    assert after.duty == pytest.approx(0.8, rel=0.05)
    assert after.band is ThermalBand.HOT


def test_each_threshold_can_be_off() -> None:
    full = Played(ThermalSettings(hot_c=None))
    assert [full.see(told_c).duty for told_c in [82] * 50 + [83, 76, 74]] == [1.0] * 50 + [
        0.0,
        0.0,
        1.0,
    ]
    assert full.see(60, bits=0x40).duty == 1.0
    assert full.edges() == [("thermal slowdown by the hardware", True)], "a complaint only alarms"
    no_pause = Played(ThermalSettings(critical_c=None))
    for _ in range(600):
        assert no_pause.see(95).duty > 0.0
    assert no_pause.decisions[-1].duty == pytest.approx(0.05)
    assert bands([60, 77], ThermalSettings(warm_c=None)) == ["NORMAL", "NORMAL"]
    nearly = Played(ThermalSettings(resume_c=None))
    assert [nearly.see(told_c).paused for told_c in (83, 82, 81, 80)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hot_c": 69.0}, "warm_c must be below hot_c"),
        ({"hot_c": 83.0}, "hot_c must be below critical_c"),
        ({"resume_c": 83.0}, "resume_c must be below critical_c"),
        ({"critical_c": math.nan}, "critical_c must be between"),
        ({"warm_c": 90.0, "hot_c": None}, "warm_c must be below critical_c"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(
    wrong: dict[str, float | None], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ThermalSettings(**wrong)  # type: ignore[arg-type]


def test_a_missed_reading_ends_no_pause_and_silence_does() -> None:
    played = Played()
    played.see(84)
    assert [played.see(None).paused for _ in range(9)] == [True] * 9
    after = played.see(None)
    assert after.band is None
    assert 0.0 < after.duty <= 0.1, "what was critical may still be"
    for _ in range(300):
        after = played.see(None)
    assert after.duty == 1.0, "a sensor that never comes back stops nobody for ever"


@pytest.mark.parametrize("bit", Throttle)
def test_an_alarm_bit_is_hot_takes_duty_and_is_named_once(bit: Throttle) -> None:
    played = Played()
    for _ in range(30):
        decision = played.see(60, bits=bit | 0x4)
    assert decision.band is ThermalBand.HOT
    assert decision.duty < 0.5
    ((name, raised),) = played.edges()
    assert raised
    assert name in decision.reason
    (text,) = [alarm.text for decision in played.decisions for alarm in decision.alarms]
    assert "check" in text, "an alarm says what to do"
    for _ in range(int(CALM_S) + 1):
        played.see(60)
    assert played.edges() == [(name, True), (name, False)]
    for _ in range(120):
        decision = played.see(60)
    assert decision.duty == 1.0


@pytest.mark.parametrize(
    "bits", [[0], [0x1], [0x2], [0x4], [0x10], [0x100], [0x117], [None], [0x8, 0]]
)
def test_everyday_bits_and_a_single_slowdown_do_nothing(bits: list[int | None]) -> None:
    played = Played()
    decisions = [played.see(60, bits=each) for each in bits * 20]
    assert decisions[-1].duty == 1.0
    assert all(
        decision.duty == 1.0
        for decision, each in zip(decisions, bits * 20, strict=True)
        if each != 0x8
    )
    assert played.edges() == []


@given(settings=thresholds, course=courses)
def test_the_duty_is_a_share_and_critical_is_a_pause(
    settings: ThermalSettings, course: Readings
) -> None:
    again, played = Played(settings).follow(course), Played(settings)
    for reading, decision in played.follow(course):
        assert next(again) == (reading, decision), "equal events give equal decisions"
        assert 0.0 <= decision.duty <= 1.0
        assert decision.reason
        assert (decision.band is ThermalBand.CRITICAL) == decision.paused
        told_c = reading.temperature_c
        if (
            told_c is not None
            and settings.critical_c is not None
            and settings.critical_c <= told_c < 150.0
        ):
            assert decision.paused
        if settings.hot_c is None:
            assert decision.duty in {0.0, 1.0}
        if not decision.paused:
            assert decision.duty >= 0.05 * 0.999


@examples(max_examples=25)
@given(course=courses)
def test_a_cool_card_gets_all_of_its_time_back(course: Readings) -> None:
    played = Played()
    cool = [(1.0, SensorReading(temperature_c=60.0))] * 400
    *_, (_, decision) = played.follow([*course, *cool])
    assert decision.duty == 1.0
    assert decision.band is ThermalBand.NORMAL
    assert played.governor.alarms.standing == {}


@given(course=courses)
def test_an_alarm_is_raised_once_a_minute_at_the_most(course: Readings) -> None:
    played = Played()
    raised_at_s: dict[str, float] = {}
    standing: set[str] = set()
    for _, decision in played.follow(course):
        for alarm in decision.alarms:
            assert alarm.raised != (alarm.name in standing), "edges alternate"
            if alarm.raised:
                standing.add(alarm.name)
                assert played.now_s - raised_at_s.get(alarm.name, -math.inf) >= CALM_S * 0.999
                raised_at_s[alarm.name] = played.now_s
            else:
                standing.discard(alarm.name)
    assert standing == set(played.governor.alarms.standing)
