"""The words of a message: the title, what is new, and that hostile text stays harmless."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.record.model import Row
from orchestrator.view.alerts import Alert
from orchestrator.view.notify.outbox import Message, MessageText, message_text
from tests.alerts.traces import frame_at
from tests.factories import make_row, make_snapshot
from workers.messages import WorkerState

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


def words(
    message: Message, *rows: Row, outcome: str = "running", code: int | None = None
) -> MessageText:
    error = None if outcome in {"running", "good"} else "no memory\nleft"
    frame = frame_at(0, outcome=outcome, exit_code=code)
    run = replace(frame.run, error=error)
    return message_text(message, replace(frame, run=run, snapshot=make_snapshot(*rows)), NOW_UNIX_S)


def test_the_first_new_alert_is_in_the_title() -> None:
    over = alert("pc3", "NodeMissing", "critical")
    begun = alert("pc2", "WrongResults", "critical"), alert("pc1/0")
    told = words(Message(begun=begun, over=(over,), still=(alert("pc4/0"),)))
    assert (told.title, told.severity) == ("0b76: WrongResults pc2, 2 more", "critical")
    news, still, _ = told.body.split("\n\n")
    assert news.splitlines() == [
        "critical: WrongResults pc2: at 84 C",
        "  clean its fans",
        "warning: CardSlowed pc1/0: at 84 C",
        "  clean its fans",
        "over: NodeMissing pc3, after 1m 30s",
    ]
    assert still == "still: CardSlowed pc4/0, for 1m 30s"


@pytest.mark.parametrize(
    ("outcome", "code", "severity", "title"),
    [
        ("good", 0, "info", "0b76: the run has ended: good, exit code 0"),
        ("failed", 3, "warning", "0b76: the run has ended: failed, exit code 3"),
        ("interrupted", None, "critical",
         "0b76: the head is gone; `python -m orchestrator run --resume"),
    ],
)  # fmt: skip
def test_the_end_of_a_run_says_how(
    outcome: str, code: int | None, severity: str, title: str
) -> None:
    told = words(Message(is_last=True), outcome=outcome, code=code)
    assert told.title.startswith(title)
    assert told.severity == severity
    assert ("no memory left" in told.body) == (code != 0)


def test_a_status_has_each_card_once_with_its_sensors() -> None:
    """As the mails of the guides have, every ten minutes."""
    busy = make_row(utilisation_pct=98.0)
    other = make_row(
        slot="pc2/0",
        node="pc2",
        gpu_name=None,
        gpu_uuid=None,
        temperature_c=61.4,
        state=WorkerState.PAUSED,
    )
    told = words(Message(), busy, make_row(slot="pc1/1"), other)
    assert told.title == "0b76: 1 PAUSED, 2 RUNNING"
    first, second = told.body.splitlines()[-2:]
    assert first.startswith("pc1 RTX 3090: workers 2, ")
    for figures in ("card used/all 21.0/24.0", "temp C /margin 71/", "power /cap W 281/350"):
        assert figures in first
    assert "card busy % 98" in first
    assert second.startswith("pc2 ")
    assert "temp C /margin 61" in second


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
