"""What is told when: tables of single rules, and the promises over any course of alerts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.record.model import Row
from orchestrator.view.alerts import NODE_MISSING, Alert
from orchestrator.view.notify import Message, MessageText, Outbox, message_text
from tests.alerts.traces import frame_at
from tests.factories import make_row, make_snapshot


def alert(
    subject: str = "pc1/0", name: str = "SlotQuarantined", text: str = "it is wrong"
) -> Alert:
    node, do = subject.partition("/")[0], "look"
    return Alert(
        name=name, severity="critical", subject=subject, node=node, text=text, what_to_do=do
    )


SEVEN = tuple(alert(f"pc1/{number}") for number in range(7))
NODE = alert("pc2", NODE_MISSING)


def course(
    there: Mapping[float, Iterable[Alert]],
    until_s: int,
    every_s: float | None = None,
    fails: Iterable[int] = (),
) -> list[tuple[float, Message]]:
    """Look every second; what is there changes at moments. Return the messages with their moments.

    Telling has begun; messages with a number in `fails` were not taken.
    """
    status_at_s = math.inf if every_s is None else every_s
    outbox, now, sent = Outbox(every_s, status_at_s), tuple[Alert, ...](), []
    for second in range(until_s + 1):
        now = tuple(there.get(second, now))
        outbox.update(now, second)
        if message := outbox.due(second):
            outbox.mark_sent(second, is_accepted=len(sent) not in set(fails))
            sent.append((second, message))
    return sent


def words(sent: Iterable[tuple[float, Message]]) -> list[str]:
    """Return each message as its moment, and what it says: + begun, - over."""
    told = [
        (second, [f"+{one.subject}" for one in message.begun], message.over)
        for second, message in sent
    ]
    return [
        f"{second:g}: {' '.join([*begun, *(f'-{one.subject}' for one in over)])}"
        for second, begun, over in told
    ]


PAUSED, PC3, PC4 = alert("GPU-0", "CardPaused"), alert("pc3", NODE_MISSING), alert("pc4")
SLOT = alert("pc2/0", "SlotNotWorking")


@pytest.mark.parametrize(
    ("there", "fails", "told"),
    [
        ({10: [NODE], 200: []}, (), ["15: +pc2", "324: -pc2"]),
        ({10 + at: SEVEN[: 2 + at] for at in range(4)}, (), ["15: +pc1/0 +pc1/1 +pc1/2 +pc1/3 +pc1/4"]),
        ({10: [NODE], 20: [NODE, PC3], 50: [NODE, PC3, PC4]}, (), ["15: +pc2", "75: +pc3 +pc4"]),
        ({at: [PAUSED] if at // 40 % 2 else [] for at in range(40, 3601, 40)}, (), ["45: +GPU-0", "3724: -GPU-0"]),
        ({10: [NODE], 900: []}, (0, 1), ["15: +pc2", "75: +pc2", "135: +pc2", "1024: -pc2"]),
        ({0: [SLOT], 100: [NODE], 2000: [SLOT]}, (), ["5: +pc2/0", "105: +pc2", "2124: -pc2"]),
    ],
    ids=["node", "together", "minute", "again and again", "not taken", "slot of a node"],
)  # fmt: skip
def test_what_is_wrong_is_one_message_and_one_when_over(
    there: Mapping[float, Iterable[Alert]], fails: Iterable[int], told: list[str]
) -> None:
    assert words(course(there, 4000, fails=fails)) == told


def test_statuses_come_at_their_interval() -> None:
    sent = course({100: [NODE]}, 1900, every_s=600)
    assert words(sent) == ["105: +pc2", "600: ", "1200: ", "1800: "]
    assert sent[1][1].still == (NODE,)


def test_the_last_message_waits_only_after_a_failure() -> None:
    taken, failed = Outbox(None, 0.0), Outbox(None, 0.0)
    taken.mark_sent(0.0, is_accepted=True)
    taken.update(SEVEN, 1.0)
    last = taken.due(1.0, is_last=True)
    assert last is not None
    assert (last.begun, last.is_last) == (SEVEN, True)
    failed.mark_sent(0.0, is_accepted=False)
    assert failed.due(59.0, is_last=True) is None
    assert failed.due(60.0, is_last=True) is not None


STEPS = st.lists(
    st.tuples(st.sampled_from([1, 7, 30, 61, 700]), st.sets(st.sampled_from(range(7)))),
    max_size=40,
)


@given(STEPS, st.sets(st.integers(0, 15)), st.sampled_from([None, 60.0, 600.0]))
def test_one_message_a_minute_and_nothing_is_lost(
    steps: list[tuple[int, set[int]]], fails: set[int], every_s: float | None
) -> None:
    outbox, now_s, sent = Outbox(every_s, math.inf), 0.0, list[float]()
    told: set[str] = set()
    there: set[int] = set()
    for wait_s, present in [*steps, *([(400, None)] * 40)]:  # longer than the pause after a failure
        now_s += wait_s
        there = there if present is None else present
        outbox.update([SEVEN[index] for index in there], now_s)
        if message := outbox.due(now_s):
            is_accepted = len(sent) not in fails
            outbox.mark_sent(now_s, is_accepted=is_accepted)
            sent.append(now_s)
            if is_accepted:
                assert not told & {one.subject for one in message.begun}, "told twice"
                assert told >= {one.subject for one in message.over}, "over, and never told"
                told |= {one.subject for one in message.begun}
                told -= {one.subject for one in message.over}
    assert all(after - before >= 60 for before, after in itertools.pairwise(sent))
    assert told == {SEVEN[index].subject for index in there}


def text_of(message: Message, *rows: Row) -> MessageText:
    return message_text(message, replace(frame_at(0), snapshot=make_snapshot(*rows)), 90.0)


def test_hostile_and_endless_text_stays_harmless_and_short() -> None:
    hostile = alert("pc1/0\r\nBcc: all@mail.example", text="\x1b]0;gone\x07" + "x" * 100_000)
    many = tuple(alert(f"pc{number}") for number in range(2000))
    rows = [make_row(slot=f"pc{number}/0", node=f"pc{number}") for number in range(1000)]
    told = text_of(Message(begun=(hostile, *many), still=many), *rows)
    assert told.title.isprintable()
    assert len(told.title) <= 120
    assert all(line.isprintable() for line in told.body.splitlines())
    assert not any(line.startswith("Bcc") for line in told.body.splitlines())
    assert len(told.body) < 8_000
    assert "lines more" in told.body


def test_what_is_only_over_alarms_no_one() -> None:
    told = text_of(Message(over=(alert("pc3", "NodeMissing"),)))
    assert (told.title, told.severity) == ("0b76: over: NodeMissing pc3", "info")
