"""What is told when: tables of single rules, and the promises over any course of troubles."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.view.alerts import ALERTS, Firing, Subject
from orchestrator.view.notify import digest
from orchestrator.view.notify.digest import Digest, Message, News

ALERT = next(alert for alert in ALERTS if alert.name == "CardPaused")
MINUTE_S, HOUR_S = 60.0, 3600.0


def trouble(subject: str = "pc1/0", alert: str = "CardPaused", place: str = "pc1 GPU-0") -> Firing:
    alert_ = replace(ALERT, name=alert)
    return Firing(alert=alert_, subject=Subject(subject, place), since_unix_s=0.0)


SEVEN = tuple(trouble(f"pc1/{number}") for number in range(7))
NODE = trouble("pc2", "NodeMissing", "pc2")


def course(
    there: Mapping[float, Iterable[Firing]],
    until_s: float,
    every_s: float | None = None,
    fails: Iterable[int] = (),
) -> list[tuple[float, Message]]:
    """Look every second; what is there changes at moments.

    Return the messages; those in `fails` were not taken.
    """
    state, now, sent = digest.new_digest(every_s, 0.0), (), []
    for second in range(int(until_s) + 1):
        now = there.get(second, now)
        state = digest.after_look(state, now, second)
        if message := digest.due(state, second):
            after = digest.after_failure if len(sent) in set(fails) else digest.after_sending
            state = after(state, message, second)
            sent.append((second, message))
    return sent


def words(sent: Iterable[tuple[float, Message]]) -> list[str]:
    """Return each message as its moment, and what it says: + there, - over, with how often."""
    return [
        f"{second:g}: "
        + " ".join(
            f"{'+' if news.is_there else '-'}{news.firing.subject.name}{f' x{news.times}' if news.times > 1 else ''}"
            for news in message.news
        )
        for second, message in sent
    ]


def test_a_lost_node_is_one_message_and_one_when_it_is_over() -> None:
    sent = words(course({10: [NODE], 200: []}, until_s=2 * HOUR_S))
    assert sent == ["15: +pc2", "205: -pc2"]


def test_seven_slots_of_a_card_are_one_message() -> None:
    there = {10 + number: SEVEN[: number + 1] for number in range(4)} | {14: SEVEN}
    ((second, message),) = course(there, until_s=HOUR_S)
    assert (second, [news.firing for news in message.news]) == (15, list(SEVEN))
    assert message.there == SEVEN


def test_what_comes_within_the_minute_waits_for_it() -> None:
    others = trouble("pc3", "NodeMissing", "pc3"), trouble("pc4", "NodeMissing", "pc4")
    sent = words(course({10: [NODE], 20: [NODE, others[0]], 50: [NODE, *others]}, until_s=200))
    assert sent == ["15: +pc2", "75: +pc3 +pc4"]


def test_a_flapping_slot_is_told_of_once_an_hour() -> None:
    flapping = {second: SEVEN[:1] if second // 40 % 2 else () for second in range(40, 4 * 3600, 40)}
    sent = course(flapping | {4 * 3600: ()}, until_s=8 * HOUR_S)
    assert words(sent)[:2] == ["45: +pc1/0", "105: -pc1/0"]
    later = [second for second, _ in sent[2:]]
    assert all(after - before >= HOUR_S for before, after in itertools.pairwise(later))
    assert len(later) == 4
    assert sum(news.times for _, message in sent for news in message.news) == 4 * 3600 // 80
    assert not sent[-1][1].news[0].is_there, "in the end it is told that it is over"


def test_what_flaps_on_one_card_is_told_together() -> None:
    """Each slot at a moment of its own, and still not seven messages an hour."""
    there: dict[float, list[Firing]] = {}
    for second in range(0, 3 * 3600, 10):
        there[second] = [
            one for number, one in enumerate(SEVEN) if (second + 90 * number) // 600 % 2
        ]
    sent = course(there, until_s=3 * 3600)
    assert len([second for second, _ in sent if second > HOUR_S + 10 * MINUTE_S]) <= 3


def test_after_an_hour_of_rest_it_is_told_at_once_again() -> None:
    sent = words(course({10: [NODE], 100: [], 3800: [NODE], 3900: []}, until_s=2 * HOUR_S))
    assert sent == ["15: +pc2", "105: -pc2", "3805: +pc2", "3905: -pc2"]


def test_digests_come_at_their_interval() -> None:
    sent = course({100: [NODE]}, until_s=1300, every_s=600)
    assert [(second, message.is_digest) for second, message in sent] == [
        (105, False),
        (600, True),
        (1200, True),
    ]
    assert sent[1][1].there == (NODE,)
    assert [(second, message.is_digest) for second, message in course({598: [NODE]}, 700, 600)] == [
        (600, True)
    ]


def test_an_untaken_message_is_tried_again_later_each_time() -> None:
    sent = words(course({10: [NODE], 900: []}, until_s=2 * HOUR_S, fails=[0, 1, 2]))
    assert sent == ["15: +pc2", "135: +pc2", "375: +pc2", "855: +pc2", "915: -pc2"]


def test_the_last_message_tells_all_and_keeps_the_distance() -> None:
    state = digest.after_look(digest.new_digest(None, 0.0), [NODE], 0.0)
    first = digest.due(state, 5.0)
    assert first is not None
    state = digest.after_look(digest.after_sending(state, first, 5.0), SEVEN, 6.0)
    assert digest.due(state, 64.0, is_last=True) is None
    last = digest.due(state, 65.0, is_last=True)
    assert last is not None
    assert last.is_last
    assert {(news.firing.subject.name, news.is_there) for news in last.news} == {
        ("pc2", False),
        *((slot.subject.name, True) for slot in SEVEN),
    }


def test_what_cannot_be_known_stays_as_it_was() -> None:
    """The slots of a node that is gone are neither over nor new."""
    state = digest.after_look(digest.new_digest(None, 0.0), SEVEN[:1], 0.0)
    state = digest.after_look(
        state, [NODE, *SEVEN[1:]], 1.0, lambda one: one.subject.place == "pc1 GPU-0"
    )
    message = digest.due(state, 10.0)
    assert message is not None
    assert {(news.firing.subject.name, news.is_there) for news in message.news} == {
        ("pc1/0", True),
        ("pc2", True),
    }


SUBJECTS = [
    trouble(f"pc{node}/{slot}", alert, f"pc{node}")
    for node in (1, 2)
    for slot in (0, 1)
    for alert in "AB"
]
STEPS = st.lists(
    st.tuples(
        st.sampled_from([1, 2, 7, 30, 61, 700, 4000]),
        st.sets(st.sampled_from(range(len(SUBJECTS)))),
    ),
    max_size=40,
)


@given(STEPS, st.sets(st.integers(0, 15)), st.sampled_from([None, 60.0, 600.0]))
def test_never_two_messages_in_a_minute_and_nothing_is_lost(
    steps: list[tuple[int, set[int]]], fails: set[int], every_s: float | None
) -> None:
    state, now_s, sent = digest.new_digest(every_s, 0.0), 0.0, list[tuple[float, Message]]()
    began: Counter[digest.Key] = Counter()
    told: Counter[digest.Key] = Counter()
    last_told: dict[digest.Key, News] = {}
    there: set[int] = set()

    def look(state: Digest, there: Iterable[int]) -> Digest:
        state = digest.after_look(state, [SUBJECTS[index] for index in there], now_s)
        message = digest.due(state, now_s)
        if message is None:
            return state
        sent.append((now_s, message))
        if len(sent) in fails:
            return digest.after_failure(state, message, now_s)
        for news in message.news:
            told[news.firing.key] += news.times
            last_told[news.firing.key] = news
        return digest.after_sending(state, message, now_s)

    for wait_s, present in steps:
        now_s += wait_s
        began.update(SUBJECTS[index].key for index in present - there)
        there = present
        state = look(state, there)
    for _ in range(40):  # long enough for the longest pause after a failure, and an hour of silence
        now_s += 500.0
        state = look(state, there)
    assert all(after - before >= MINUTE_S for (before, _), (after, _) in itertools.pairwise(sent))
    assert told == began
    digests = sum(message.is_digest for _, message in sent)
    assert digests <= now_s / (every_s or now_s * 2), "one at each interval at most"
    at_the_end = {SUBJECTS[index].key for index in there}
    assert {key for key, news in last_told.items() if news.is_there} == at_the_end
    moments = [(second, news.firing.key) for second, message in sent for news in message.news]
    for key in began:
        own = [second for second, other in moments if other == key]
        # The beginning, its end, and what followed in the same hour, told as one story; and tries
        # that failed.
        assert all(
            sum(second <= other < second + HOUR_S for other in own) <= 3 + len(fails)
            for second in own
        ), "one story an hour"


def test_a_trouble_that_is_over_and_told_is_forgotten() -> None:
    """Else a run of a year with a thousand slots would keep them all."""
    state = digest.new_digest(None, 0.0)
    for second in range(0, 3 * 3600, 30):
        state = digest.after_look(state, [NODE] if second < 60 else [], float(second))
        message = digest.due(state, float(second))
        state = digest.after_sending(state, message, float(second)) if message else state
    assert not state.tracked


@pytest.mark.parametrize("times", [1, 3])
def test_the_state_tells_the_newest_text(times: int) -> None:
    state = digest.new_digest(None, 0.0)
    for number in range(times):
        state = digest.after_look(
            state,
            [replace(NODE, subject=replace(NODE.subject, text=f"text {number}"))],
            float(number),
        )
    message = digest.due(state, 10.0)
    assert message is not None
    assert message.news[0].firing.subject.text == f"text {times - 1}"
