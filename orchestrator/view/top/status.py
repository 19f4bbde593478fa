"""The lines at the bottom: why a slot is in its state, how fresh the picture is, what is sorted and
filtered. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from orchestrator.config.schema import Severity
from orchestrator.record.catalogue import FIELDS
from orchestrator.record.follow import Frame, Freshness
from orchestrator.record.model import STATE_STYLES, Row
from orchestrator.view.alerts.badges import Badge
from orchestrator.view.cells import Glyphs, clock
from orchestrator.view.phrases import counted
from orchestrator.view.top.view import View

SEVERITY_STYLES: Final[dict[Severity, str]] = {
    "critical": "bold red",
    "warning": "bold yellow",
    "info": "cyan",
}
_MORE_CELLS: Final = len("!  · 99 more")


def reason_line(row: Row | None, width: int, glyphs: Glyphs) -> Text:
    """Return why the slot under the cursor is in its state: the table has room for that on wide
    terminals only.
    """
    if row is None or not row.reason:
        return Text()
    said = f"{row.slot} {row.state.value}: {row.reason}"
    return Text(glyphs.shorten(glyphs.clean(said), width), STATE_STYLES[row.state])


def badge_line(badges: Sequence[Badge], width: int, glyphs: Glyphs) -> Text:
    """Return the alerts that fire; those that have no room are counted."""
    room, shown = max(1, width - _MORE_CELLS), list[str]()
    for badge in badges:
        if shown and len(glyphs.separator.join([*shown, badge.words])) > room:
            break
        shown.append(glyphs.clean(badge.words))
    more = [f"{len(badges) - len(shown)} more"] if len(shown) < len(badges) else []
    said = glyphs.shorten(f"! {glyphs.separator.join([*shown, *more])}", width)
    return Text(said, SEVERITY_STYLES[badges[0].severity])


def key_line(
    fresh: str | None, view: View, page: str | None, said: str, width: int, glyphs: Glyphs
) -> Text:
    """Return what the picture shows, and what happened last or which keys there are."""
    parts = [] if fresh is None else [fresh]
    order = FIELDS[view.order.key].column or view.order.key if view.order.key else "worst first"
    parts.append(f"by {order}{' reversed' if view.order.reverse else ''}")
    if view.wanted.text:
        parts.append(f"filter {view.wanted.text}")
    if view.marked:
        parts.append(f"{len(view.marked)} marked")
    if page is not None:
        parts.append(f"{page}, esc goes back")
    if said or page is None:
        parts.append(said or "? help  / filter  < > sort  enter slot  q leave")
    return Text(glyphs.shorten(glyphs.separator.join(map(glyphs.clean, parts)), width), "dim")


def freshness_words(frame: Frame, replay_unix_s: float | None) -> str:
    """Return how far what is shown is so now."""
    said = frame.freshness.value
    if frame.freshness is Freshness.ENDED:
        said = f"ended, {frame.run.outcome}"
    elif frame.freshness is not Freshness.LIVE:
        said = f"{said} for {clock(frame.late_s)}"
    if replay_unix_s is None:
        return said
    return f"{said}, replay {clock(replay_unix_s - frame.run.facts.started_at_unix_s)}"


def slots_words(slots: tuple[str, ...]) -> str:
    """Return which slots are meant: the name of one, the number of several."""
    return slots[0] if len(slots) == 1 else counted(len(slots), "slot")
