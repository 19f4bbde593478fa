"""What a Chrome trace of torch.profiler says of a device's time. Pure.

Each moment of the trace counts once: as computing if a kernel runs, else as copying, else as
synchronising if the host is still waiting for the device, else as idle. On a CPU the operators are
the kernels, and copies are taken out of them. Does not know what made the device idle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

Span: TypeAlias = tuple[float, float]
"""Beginning and end, in microseconds."""

#: Categories of a trace's events (libkineto/src/output_json.cpp).
_KERNELS: Final = frozenset({"kernel", "gpu_memset"})
_COPIES: Final = frozenset({"gpu_memcpy"})
_CALLS: Final = frozenset({"cuda_runtime", "cuda_driver"})
_OPERATORS: Final = frozenset({"cpu_op"})
_COUNTED: Final = _KERNELS | _COPIES | _CALLS | _OPERATORS

#: Of these the longest are named.
_LONGEST: Final = 3
_LONGEST_NAME: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceShares:
    """Where the time of a trace went, in per cent of it; the first four add up to 100."""

    duration_s: float
    kernels_pct: float
    copies_pct: float
    """Copies that no kernel hides."""
    synchronisations_pct: float
    """The device has nothing to do, and the host still waits for it."""
    idle_pct: float
    host_waits_pct: float
    """All of the time in which the host waits for the device, also while that computes."""
    longest: str
    """The kernels (on a CPU: operators) with the most time, each with its share of the trace."""


def trace_shares(events: Iterable[Mapping[str, Any]]) -> TraceShares | None:
    """Return the shares of the `traceEvents` of a Chrome trace; `None`: nothing in it took time."""
    known = [
        each
        for each in events
        if each.get("ph") == "X" and each.get("cat") in _COUNTED and "dur" in each
    ]
    if not known:
        return None
    window_us = max(_span(each)[1] for each in known) - min(_span(each)[0] for each in known)
    if window_us <= 0:
        return None
    waits = [_span(each) for each in known if _waits(each)]
    kernels = [each for each in known if each["cat"] in _KERNELS]
    copies = [_span(each) for each in known if each["cat"] in _COPIES]
    if kernels:
        kernels_us = _covered_us(_span(each) for each in kernels)
        copies_us = _covered_us([*map(_span, kernels), *copies]) - kernels_us
        waits_us = _covered_us([*map(_span, kernels), *copies, *waits]) - kernels_us - copies_us
    else:
        kernels = _outermost(each for each in known if each["cat"] in _OPERATORS)
        copies = [_span(each) for each in known if each["name"] == "aten::copy_"]
        copies_us = _covered_us(copies)
        kernels_us = _covered_us([*map(_span, kernels), *copies]) - copies_us
        waits_us = 0.0
    share = 100 / window_us
    return TraceShares(
        duration_s=window_us / 1e6,
        kernels_pct=share * kernels_us,
        copies_pct=share * copies_us,
        synchronisations_pct=share * waits_us,
        idle_pct=max(0.0, 100 - share * (kernels_us + copies_us + waits_us)),
        host_waits_pct=share * _covered_us(waits),
        longest=_longest(kernels, share),
    )


def _span(event: Mapping[str, Any]) -> Span:
    began = float(event["ts"])
    return began, began + float(event["dur"])


def _waits(event: Mapping[str, Any]) -> bool:
    return event["cat"] in _CALLS and (
        event["name"].endswith("Synchronize") or event["name"] == "cudaMemcpy"
    )


def _covered_us(spans: Iterable[Span]) -> float:
    """Return the length of the union."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


def _outermost(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the operators that no other operator of their thread has called."""
    found: list[Mapping[str, Any]] = []
    ends: defaultdict[Any, float] = defaultdict(lambda: float("-inf"))
    for event in sorted(events, key=lambda each: (_span(each)[0], -_span(each)[1])):
        first, last = _span(event)
        if first >= ends[event["tid"]]:
            found.append(event)
            ends[event["tid"]] = last
    return found


def _longest(events: Iterable[Mapping[str, Any]], share: float) -> str:
    sums: defaultdict[str, float] = defaultdict(float)
    for event in events:
        sums[event["name"][:_LONGEST_NAME]] += share * float(event["dur"])
    longest = sorted(sums, key=lambda name: -sums[name])[:_LONGEST]
    return ", ".join(f"{name} {sums[name]:.0f} %" for name in longest)
