"""The thermal governor's bands, pauses, words and alarms, one event at a time; test_thermal_loop.py closes the loop."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.policy.thermal.alarms import CALM_S, LOST, SLOW_MEMORY, BandwidthMeasured
from workers.policy.thermal.governor import SensorsRead, ThermalBand, ThermalDecision, ThermalGovernor, ThermalState
from workers.readings import THROTTLE_ALARMS, SensorReading, Throttle
from workers.settings import ThermalSettings

SHIPPED = ThermalSettings()
ALARM_BITS = tuple(bit for bit in Throttle if bit & THROTTLE_ALARMS)

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
        ThermalSettings(resume_c=None),
        ThermalSettings(warm_c=None, longest_pause_s=None),
        ThermalSettings(warm_c=40.0, hot_c=50.0, critical_c=60.0, resume_c=45.0, smallest_duty=1.0),
    ]
)


class Played:
    """A governor with its state and what it decided."""

    def __init__(self, settings: ThermalSettings = SHIPPED) -> None:
        self.governor = ThermalGovernor(settings)
        self.state = self.governor.initial()
        self.now_s = 0.0
        self.decisions: list[ThermalDecision] = []

    def see(self, temperature_c: float | None, *, bits: int | None = 0, lost: bool = False) -> ThermalDecision:
        """Read the sensors a second later."""
        self.now_s += 1.0
        reading = SensorReading(temperature_c=temperature_c, throttle_bits=bits, lost=lost)
        return self.tell(reading)

    def tell(self, reading: SensorReading) -> ThermalDecision:
        self.state, decision = self.governor.decide(self.state, SensorsRead(at_s=self.now_s, reading=reading))
        self.decisions.append(decision)
        return decision

    def measure(self, gb_per_s: float, clock_mhz: int | None = 9500) -> ThermalDecision:
        self.now_s += 10.0
        event = BandwidthMeasured(at_s=self.now_s, bytes_per_s=gb_per_s * 1e9, memory_clock_mhz=clock_mhz)
        self.state, decision = self.governor.decide(self.state, event)
        self.decisions.append(decision)
        return decision

    def edges(self) -> list[tuple[str, bool]]:
        return [(alarm.name, alarm.raised) for decision in self.decisions for alarm in decision.alarms]


def bands(temperatures_c: Iterable[float], settings: ThermalSettings = SHIPPED) -> list[str]:
    played = Played(settings)
    return [str(played.see(told_c).band) for told_c in temperatures_c]


# Bands and pauses


def test_the_guides_bands_and_their_hysteresis() -> None:
    assert bands([69, 70, 68, 67, 77, 78, 76, 75, 68, 67]) == [
        *("NORMAL", "WARM", "WARM", "NORMAL", "WARM"),
        *("HOT", "HOT", "WARM", "WARM", "NORMAL"),
    ]


def test_a_first_critical_reading_pauses_at_once_and_until_below_75() -> None:
    played = Played()
    assert [played.see(told_c).duty for told_c in (83, 82, 76, 75)] == [0.0] * 4
    after = played.see(74)
    assert after.band is ThermalBand.WARM
    assert 0.0 < after.duty < 1.0, "it goes on with less than what was too much"


def test_the_words_have_the_numbers() -> None:
    played = Played()
    assert played.see(62).reason == "62 C"
    assert played.see(85).reason == "paused at 85 C, goes on below 75 C"
    assert played.see(None).reason == "paused at 85 C, goes on below 75 C"
    played = Played()
    for _ in range(60):
        decision = played.see(82.0)
    assert decision.reason == f"82 C, duty {decision.duty:.0%} to hold 81.5 C"
    for _ in range(2000):
        decision = played.see(82.9)
    assert decision.duty == pytest.approx(SHIPPED.smallest_duty)
    assert "smallest duty of 5%" in decision.reason
    assert Played().see(None).reason == "temperature unknown"


def test_a_pause_that_others_prolong_ends_at_the_smallest_duty() -> None:
    played = Played()
    played.see(83)
    held = [played.see(80) for _ in range(119)]
    assert all(decision.paused for decision in held)
    after = played.see(80)
    assert after.duty == pytest.approx(SHIPPED.smallest_duty, rel=0.05)
    assert after.band is ThermalBand.HOT
    back = [played.see(80).duty for _ in range(600)]
    assert back[-1] > 0.5, "the others give way as it returns"


def test_each_threshold_can_be_off() -> None:
    full = Played(ThermalSettings(hot_c=None))
    assert [full.see(told_c).duty for told_c in [82] * 50 + [83, 76, 74]] == [1.0] * 50 + [0.0, 0.0, 1.0]
    no_pause = Played(ThermalSettings(critical_c=None))
    for _ in range(600):
        assert no_pause.see(95).duty > 0.0
    assert no_pause.decisions[-1].duty == pytest.approx(0.05)
    assert bands([60, 77], ThermalSettings(warm_c=None)) == ["NORMAL", "NORMAL"]
    nearly = Played(ThermalSettings(resume_c=None))
    assert [nearly.see(told_c).paused for told_c in (83, 82, 81, 80)] == [True, True, True, False]


def test_all_off_does_nothing() -> None:
    settings = ThermalSettings(warm_c=None, hot_c=None, critical_c=None)
    played = Played(settings)
    decision = played.see(120, bits=int(THROTTLE_ALARMS), lost=True)
    assert settings.off
    assert (decision.band, decision.duty, decision.alarms) == (None, 1.0, ())
    assert played.state == ThermalState()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"hot_c": 69.0}, "warm_c must be below hot_c"),
        ({"hot_c": 83.0}, "hot_c must be below critical_c"),
        ({"resume_c": 83.0}, "resume_c must be below critical_c"),
        ({"critical_c": math.nan}, "critical_c must be between"),
        ({"warm_c": 90.0, "hot_c": None}, "warm_c must be below critical_c"),
        ({"smallest_duty": 0.0}, "smallest_duty must be from"),
        ({"longest_pause_s": -1.0}, "longest_pause_s must be from"),
    ],
)
def test_thresholds_that_make_no_sense_are_refused(wrong: dict[str, float | None], words: str) -> None:
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


def test_state_and_decisions_survive_pickling() -> None:
    played = Played()
    decision = played.see(84, bits=0x40)
    assert pickle.loads(pickle.dumps((played.state, decision))) == (played.state, decision)  # noqa: S301 - our own


# The hardware's complaints


@pytest.mark.parametrize("bit", ALARM_BITS)
def test_an_alarm_bit_is_hot_takes_duty_and_is_named_once(bit: Throttle) -> None:
    played = Played()
    for _ in range(30):
        decision = played.see(60, bits=int(bit | Throttle.POWER_CAP))
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


@pytest.mark.parametrize("bits", [0, 0x1, 0x2, 0x4, 0x10, 0x100, 0x117, None])
def test_everyday_bits_do_nothing(bits: int | None) -> None:
    played = Played()
    assert all(played.see(60, bits=bits).duty == 1.0 for _ in range(20))
    assert played.edges() == []


def test_one_look_at_a_hardware_slowdown_may_be_a_change_of_clocks() -> None:
    played = Played()
    for _ in range(20):
        played.see(60, bits=0x8)
        assert played.see(60).duty == 1.0
    assert played.edges() == []


def test_complaints_count_without_a_temperature() -> None:
    played = Played()
    decisions = [played.see(None, bits=0x40) for _ in range(20)]
    assert decisions[0].duty == pytest.approx(0.8)
    assert decisions[-1].duty < 0.4
    assert decisions[-1].band is ThermalBand.HOT
    for _ in range(200):
        decision = played.see(None)
    assert (decision.band, decision.duty) == (None, 1.0)


def test_where_the_duty_is_never_reduced_a_complaint_only_alarms() -> None:
    played = Played(ThermalSettings(hot_c=None))
    assert played.see(60, bits=0x40).duty == 1.0
    assert played.edges() == [("thermal slowdown by the hardware", True)]


def test_a_lost_card_is_an_alarm_once_and_again_after_it_was_back() -> None:
    played = Played()
    for _ in range(5):
        played.see(None, bits=None, lost=True)
    assert played.edges() == [(LOST, True)]
    for _ in range(int(CALM_S) + 1):
        played.see(50)
    played.see(None, lost=True)
    assert played.edges() == [(LOST, True), (LOST, False), (LOST, True)]


# Bandwidth


def test_falling_bandwidth_alarms_and_clears() -> None:
    played = Played()
    for number in range(20):
        played.measure(900.0 + number % 3)
    assert played.edges() == []
    for _ in range(20):
        played.measure(780.0)
    assert played.edges() == [(SLOW_MEMORY, True)]
    (alarm,) = [alarm for decision in played.decisions for alarm in decision.alarms]
    assert "780 GB/s, 86% of the 902" in alarm.text
    for _ in range(20):
        played.measure(900.0)
    assert played.edges() == [(SLOW_MEMORY, True), (SLOW_MEMORY, False)]


def test_bandwidth_at_another_clock_or_beside_somebody_else_is_no_alarm() -> None:
    played = Played()
    for number in range(200):
        played.measure(900.0 if number % 4 == 0 else 450.0)
        played.measure(60.0, clock_mhz=810)
        played.measure(1.0, clock_mhz=None)
        played.measure(math.nan)
    assert played.edges() == []


def test_a_slower_clock_of_the_same_memory_is_not_slower_memory() -> None:
    played = Played()
    for _ in range(10):
        played.measure(900.0, clock_mhz=9500)
    for _ in range(20):
        played.measure(900.0 * 9100 / 9500, clock_mhz=9100)
    assert played.edges() == []


# Properties


@given(settings=thresholds, course=courses)
def test_the_duty_is_a_share_and_critical_is_a_pause(
    settings: ThermalSettings, course: list[tuple[float, SensorReading]]
) -> None:
    played = Played(settings)
    for passed_s, reading in course:
        played.now_s += passed_s
        decision = played.tell(reading)
        assert 0.0 <= decision.duty <= 1.0
        assert decision.reason
        assert (decision.band is ThermalBand.CRITICAL) == decision.paused
        told_c = reading.temperature_c
        if told_c is not None and settings.critical_c is not None and settings.critical_c <= told_c < 150.0:
            assert decision.paused
        if settings.hot_c is None:
            assert decision.duty in {0.0, 1.0}
        if not decision.paused:
            assert decision.duty >= min(1.0, settings.smallest_duty) * 0.999


@given(course=courses)
def test_a_pause_ends_below_the_threshold_or_after_silence_or_patience(
    course: list[tuple[float, SensorReading]],
) -> None:
    assert SHIPPED.resume_c is not None
    played = Played(ThermalSettings(longest_pause_s=None))
    paused, told_at_s = False, 0.0
    for passed_s, reading in course:
        played.now_s += passed_s
        decision = played.tell(reading)
        told_c = reading.temperature_c
        if told_c is not None and -50.0 < told_c < 150.0:
            told_at_s = played.now_s
            if paused and not decision.paused:
                assert told_c < SHIPPED.resume_c
        elif paused and not decision.paused:
            assert played.now_s - told_at_s >= 9.999
        paused = decision.paused


@given(
    settings=thresholds,
    course=courses,
    passed_s=st.floats(min_value=0.0, max_value=10.0),
    low_c=st.integers(min_value=20, max_value=100),
    more_c=st.integers(min_value=0, max_value=30),
)
def test_for_equal_history_a_higher_temperature_never_gives_more(
    settings: ThermalSettings,
    course: list[tuple[float, SensorReading]],
    passed_s: float,
    low_c: int,
    more_c: int,
) -> None:
    played = Played(settings)
    for seconds, reading in course:
        played.now_s += seconds
        played.tell(reading)
    now_s = played.now_s + passed_s
    duties = []
    for told_c in (low_c, low_c + more_c):
        reading = SensorReading(temperature_c=float(told_c))
        _, decision = played.governor.decide(played.state, SensorsRead(at_s=now_s, reading=reading))
        duties.append(decision.duty)
    assert duties[1] <= duties[0] + 1e-12


@given(course=courses)
def test_whatever_a_sensor_said_a_cool_card_gets_all_of_its_time_back(
    course: list[tuple[float, SensorReading]],
) -> None:
    played = Played()
    for passed_s, reading in course:
        played.now_s += passed_s
        played.tell(reading)
    for _ in range(400):
        decision = played.see(60)
    assert decision.duty == 1.0
    assert decision.band is ThermalBand.NORMAL
    assert played.state.alarms.names == ()


@given(course=courses)
def test_an_alarm_is_raised_once_a_minute_at_the_most(course: list[tuple[float, SensorReading]]) -> None:
    played = Played()
    raised_at_s: dict[str, float] = {}
    standing: set[str] = set()
    for passed_s, reading in course:
        played.now_s += passed_s
        for alarm in played.tell(reading).alarms:
            assert alarm.raised != (alarm.name in standing), "edges alternate"
            if alarm.raised:
                standing.add(alarm.name)
                assert played.now_s - raised_at_s.get(alarm.name, -math.inf) >= CALM_S * 0.999
                raised_at_s[alarm.name] = played.now_s
            else:
                standing.discard(alarm.name)
    assert standing == set(played.state.alarms.names)


@given(settings=thresholds, course=courses)
def test_equal_events_give_equal_decisions(
    settings: ThermalSettings, course: list[tuple[float, SensorReading]]
) -> None:
    first, second = Played(settings), Played(settings)
    for passed_s, reading in course:
        first.now_s = second.now_s = first.now_s + passed_s
        assert first.tell(reading) == second.tell(reading)
    assert first.state == second.state
