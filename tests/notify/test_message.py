"""The words of a message: hostile text stays harmless. What messages say is for `test_notify.py`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.record.model import Row
from orchestrator.view.alerts import Alert
from orchestrator.view.notify.outbox import Message, MessageText, message_text
from tests.alerts.traces import frame_at
from tests.factories import make_row, make_snapshot

NOW_UNIX_S = 10_000.0


def alert(
    subject: str, name: str = "CardSlowed", severity: str = "warning", text: str = "at 84 C"
) -> Alert:
    return Alert(
        name=name,
        severity=severity,  # type: ignore[arg-type]  # one of the three
        subject=subject,
        node=subject.partition("/")[0],
        text=text,
        what_to_do="clean its fans",
        since_unix_s=NOW_UNIX_S - 90,
    )


def words(message: Message, *rows: Row) -> MessageText:
    frame = replace(frame_at(0), snapshot=make_snapshot(*rows))
    return message_text(message, frame, NOW_UNIX_S)


def test_hostile_and_endless_text_stays_harmless_and_short() -> None:
    hostile = alert("pc1/0\r\nBcc: all@mail.example", text="\x1b]0;gone\x07" + "x" * 100_000)
    many = tuple(alert(f"pc{number}") for number in range(2000))
    rows = [make_row(slot=f"pc{number}/0", node=f"pc{number}") for number in range(1000)]
    told = words(Message(begun=(hostile, *many), still=many), *rows)
    assert told.title.isprintable()
    assert len(told.title) <= 120
    assert all(line.isprintable() for line in told.body.splitlines())
    assert not any(line.startswith("Bcc") for line in told.body.splitlines())
    assert len(told.body) < 8_000
    assert "lines more" in told.body


def test_what_is_only_over_alarms_no_one() -> None:
    told = words(Message(over=(alert("pc3", "NodeMissing", "critical"),)))
    assert (told.title, told.severity) == ("0b76: over: NodeMissing pc3", "info")
