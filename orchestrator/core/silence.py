"""Decides whether a process that reports nothing hangs, from what its actor observes. Pure; part of
the lifecycle.

A process hangs if it is idle, or if it computes for much longer than its longest step. A process
that is only slow is never ended. Does not observe processes (the actor does).
"""

from __future__ import annotations

from orchestrator.core.slot import Moment, Slot

#: A step may compute longer than the longest before it by this factor: doubling the edge of a
#: matrix product takes 8 times as long.
_TIMES_LONGEST = 10


def why_hung(slot: Slot, moment: Moment) -> str | None:
    """Return why the slot's process hangs and must be ended, or `None`.

    Before the end of its first step, the limit for computing is a multiple of the time for which it
    may be idle.
    """
    run, quiet = moment.run, slot.quiet
    patience_s = max(moment.slow_step_s, run.hang_timeout_s if slot.ready else run.start_timeout_s)
    unanswered_s = _unanswered_s(slot, moment.now_s)
    if unanswered_s > patience_s:
        silent = "no answer" if slot.ready else "its process did not come up"
        return f"{silent} for {unanswered_s:.0f} s; its process was ended"
    if quiet is None or quiet.seconds <= patience_s:
        return None
    may_compute_s = _TIMES_LONGEST * patience_s
    if slot.longest_step_s is not None:
        may_compute_s = max(patience_s, _TIMES_LONGEST * slot.longest_step_s)
    silent = "no report" if slot.ready else "its process did not come up"
    silent = f"{silent} for {quiet.seconds:.0f} s"
    stands = "" if quiet.stands_at is None else f", at {quiet.stands_at}"
    if quiet.computed_s > may_compute_s:
        return (
            f"{silent}, and its process has computed for {quiet.computed_s:.0f} s without ending a "
            f"step, more than {may_compute_s:.0f} s{stands}; its process was ended"
        )
    if quiet.idle_s <= patience_s:
        return None
    return f"{silent}, and its process used no CPU and no card{stands}; its process was ended"


def why_silent(slot: Slot, moment: Moment) -> tuple[str, bool] | None:
    """Return a sentence if the slot's process has reported nothing for `run.stale_after_s`, and
    whether it is stale, which means not observed to compute either. `None`: it has reported.
    """
    stale_after_s, quiet = moment.run.stale_after_s, slot.quiet
    unanswered_s = _unanswered_s(slot, moment.now_s)
    silent_s = unanswered_s + (0.0 if quiet is None else quiet.seconds)
    if not slot.ready or silent_s <= stale_after_s:
        return None
    if quiet is not None and unanswered_s + quiet.idle_s <= stale_after_s:
        did = f"computing ({quiet.computed_s:.0f} s of CPU)"
        return f"a long step: {silent_s:.0f} s so far, and {did}", False
    return f"STALE: no report for {silent_s:.0f} s", True


def _unanswered_s(slot: Slot, now_s: float) -> float:
    """Return the seconds since the last status of the slot's process arrived."""
    since_s = slot.working_since_s if slot.heard_at_s is None else slot.heard_at_s
    return 0.0 if since_s is None else now_s - since_s
