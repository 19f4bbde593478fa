"""Whether a process that does not report hangs, by what its node sees it do. Pure; part of the
lifecycle.

A process hangs if it does nothing, or if it computes for much longer than its steps took. A process
that computes is never ended for being slow. Times are monotonic seconds. Does not look at processes
(`workers/host/processes.py` does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from workers.messages import Activity

#: A thread that computes wants a CPU all the time. Those of Ray in an idle process, which wake up
#: on a timer, want one for less than this share of the time, also on a full machine.
_ACTIVE_SHARE = 0.2

#: A step may compute so many times longer than any before it: doubling the edge of a product takes
#: 8 times as long.
_TIMES_LONGEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """What was seen of a slot's process since its last report."""

    is_up: bool = False
    """Whether the process was seen at all."""
    asked_at_s: float | None = None
    """When its node was asked what it does, until that is answered."""
    active_at_s: float | None = None
    """When it was last seen to compute."""
    computed_s: float = 0.0
    """CPU seconds of its busiest thread while it computed; on a card seconds of wall time."""


#: Nothing was seen.
NOT_SEEN = Silence()


def observe(silence: Silence, activity: Activity | None, now_s: float) -> Silence:
    """Take in what a process did; `None`: its node was asked and has not answered yet."""
    if activity is None:
        return silence if silence.asked_at_s is not None else replace(silence, asked_at_s=now_s)
    silence = replace(silence, is_up=True, asked_at_s=None)
    if not (activity.on_card or activity.wanted_s > _ACTIVE_SHARE * activity.interval_s):
        return silence
    did_s = max(activity.cpu_s, activity.interval_s if activity.on_card else 0.0)
    return replace(silence, active_at_s=now_s, computed_s=silence.computed_s + did_s)


def is_active(silence: Silence, now_s: float, within_s: float) -> bool:
    """Say whether the process was seen to compute in the last `within_s` seconds."""
    return silence.active_at_s is not None and now_s - silence.active_at_s <= within_s


def why_hung(
    silence: Silence,
    *,
    is_ready: bool,
    overdue_s: float,
    patience_s: float,
    longest_step_s: float | None,
    now_s: float,
) -> str | None:
    """Return why a process is to be ended whose slice is `overdue_s` late, or `None`.

    `is_ready` says whether it has reported before, and `patience_s` how long it may do nothing.
    `longest_step_s` is what the slot's longest step took; before its first step has ended, only
    `patience_s` says what to expect.
    """
    if overdue_s <= patience_s:
        return None
    may_compute_s = _TIMES_LONGEST * patience_s
    if longest_step_s is not None:
        may_compute_s = max(patience_s, _TIMES_LONGEST * longest_step_s)
    silent = "no report" if is_ready or silence.is_up else "its process did not come up"
    silent = f"{silent} for {overdue_s:.0f} s"
    if silence.computed_s > may_compute_s:
        computed = (
            f"computed for {silence.computed_s:.0f} s without ending a step, more than "
            f"{may_compute_s:.0f} s"
        )
        return f"{silent}, and its process has {computed}; its process was ended"
    is_asked = silence.asked_at_s is not None and now_s - silence.asked_at_s <= patience_s
    if is_asked or is_active(silence, now_s, patience_s):
        return None
    did = ", and its process used no CPU and no card" if silence.is_up else ""
    return f"{silent}{did}; its process was ended"
