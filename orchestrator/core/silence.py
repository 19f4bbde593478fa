"""Whether a process that tells nothing hangs, by what its own PC sees it do. Pure; part of the
lifecycle.

A process hangs if it does nothing, or if it computes for much longer than its steps took. A process
that computes is never ended for being slow. Does not look at processes (its actor does).
"""

from __future__ import annotations

from workers.messages import Quiet

#: A step may compute so many times longer than any before it: doubling the edge of a product takes
#: 8 times as long.
_TIMES_LONGEST = 10


def why_hung(
    quiet: Quiet, *, is_up: bool, patience_s: float, longest_step_s: float | None
) -> str | None:
    """Return why a process that is quiet is to be ended, or `None`.

    `is_up` says whether it has told anything before, and `patience_s` how long it may do nothing.
    `longest_step_s` is what the slot's longest step took; before its first step has ended, only
    `patience_s` says what to expect.
    """
    if quiet.seconds <= patience_s:
        return None
    may_compute_s = _TIMES_LONGEST * patience_s
    if longest_step_s is not None:
        may_compute_s = max(patience_s, _TIMES_LONGEST * longest_step_s)
    silent = "told nothing" if is_up else "its process did not come up"
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
