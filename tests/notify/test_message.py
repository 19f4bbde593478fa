"""The words of a message: what stands in the title, and that hostile text stays harmless and short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.record.archive import StoredRun
from orchestrator.record.folders import Deliveries
from orchestrator.record.model import Row
from orchestrator.view.alerts import ALERTS, Firing, Subject
from orchestrator.view.notify.digest import Message, News
from orchestrator.view.notify.message import MessageText, message_text
from tests.factories import FACTS, make_row, make_snapshot
from workers.messages import WorkerState

NOW_UNIX_S = 10_000.0


def run(
    outcome: str = "running", exit_code: int | None = None, error: str | None = None
) -> StoredRun:
    return StoredRun(
        folder=Path("here"),
        facts=FACTS,
        outcome=outcome,
        exit_code=exit_code,
        error=error,
        elapsed_s=10.0,
        updated_at_unix_s=None,
        nodes_seen=(),
        notices=(),
        restart_count=0,
        steps_lost_upper_bound=None,
        incomplete=False,
        heads=1,
        faults=(),
        slots=(),
    )


def trouble(
    subject: str, alert: str = "CardPaused", severity: str = "warning", text: str = "at 84 C"
) -> Firing:
    made = replace(
        ALERTS[0],
        name=alert,
        severity=severity,  # type: ignore[arg-type]  # one of the three
        summary=text,
        what_to_do="clean its fans",
    )
    node = subject.partition("/")[0]
    return Firing(alert=made, subject=Subject(subject, node), since_unix_s=NOW_UNIX_S - 90)


def letter(
    *news: News, rows: tuple[Row, ...] = (), told: StoredRun | None = None, still: int = 0
) -> MessageText:
    there = tuple(trouble(f"pc9/{number}") for number in range(still))
    message = Message(news=news, there=there, is_digest=not news, is_last=told is not None)
    return message_text(message, told or run(), make_snapshot(*rows), Deliveries(7, 1), NOW_UNIX_S)


def began(one: Firing, times: int = 1) -> News:
    return News(firing=one, is_there=True, times=times)


def test_the_severest_new_alert_is_in_the_title() -> None:
    over = News(firing=trouble("pc3", "NodeMissing", "critical"), is_there=False, times=0)
    told = letter(over, began(trouble("pc1/0")), began(trouble("pc2", "WrongResults", "critical")))
    assert told.title == "0b76: WrongResults pc2, 2 more"
    assert told.severity == "critical"
    first, *_ = told.body.split("\n\n")
    assert first.splitlines() == [
        "critical: WrongResults pc2",
        "  at 84 C",
        "  clean its fans",
        "warning: CardPaused pc1/0",
        "  at 84 C",
        "  clean its fans",
        "over: NodeMissing pc3, after 1m 30s",
    ]


def test_what_is_only_over_alarms_no_one() -> None:
    told = letter(News(firing=trouble("pc3", "NodeMissing", "critical"), is_there=False, times=3))
    assert (told.title, told.severity) == ("0b76: over: NodeMissing pc3", "info")
    assert "after 1m 30s, 3 times" in told.body


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
    told = letter(told=run(outcome, code, error=None if code == 0 else "no memory\nleft"))
    assert told.title.startswith(title)
    assert told.severity == severity
    assert ("no memory left" in told.body) == (code != 0)


def test_a_digest_has_each_card_once_with_its_sensors() -> None:
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
    blank = dict.fromkeys(("device_used_bytes", "device_total_bytes", "power_w"))
    told = letter(
        rows=(busy, make_row(slot="pc1/1"), make_row(slot="pc3/0", node="pc3", **blank), other)
    )
    assert told.title == "0b76: 1 PAUSED, 3 RUNNING"
    lines = told.body.splitlines()
    assert "pc1 NVIDIA GeForce RTX 3090: 71 C, 21.0 of 24.0 GiB, 98 % busy, 281 of 350 W" in lines
    assert "pc3 NVIDIA GeForce RTX 3090: 71 C" in lines
    assert "pc2 processor: 61 C, 21.0 of 24.0 GiB, 281 of 350 W" in lines
    assert sum("3090" in line for line in lines) == 2
    assert lines[-1] == "1 delivery of 8 failed so far"


def test_hostile_and_endless_text_stays_harmless_and_short() -> None:
    hostile = trouble("pc1/0\r\nBcc: all@mail.example", text="\x1b]0;gone\x07" + "x" * 100_000)
    many = [began(trouble(f"pc{number}")) for number in range(2000)]
    rows = tuple(make_row(slot=f"pc{number}/0", node=f"pc{number}") for number in range(1000))
    told = letter(began(hostile), *many, rows=rows, still=1000)
    assert told.title.isprintable()
    assert len(told.title) <= 120
    assert all(line.isprintable() for line in told.body.splitlines())
    assert not any(line.startswith("Bcc") for line in told.body.splitlines())
    assert len(told.body) < 8_000
    assert "lines more" in told.body
