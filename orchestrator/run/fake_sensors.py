"""The fake sensors of a rehearsal: each node's workers read a card of a script instead of the
driver's.

Does not read sensors (the workers do, through the real nvidia-ml-py) and does not know what is in a
script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from orchestrator.core.placement import SlotPlan
from orchestrator.errors import UsageError
from workers.nvml.fake.library import FakeSensorsError
from workers.nvml.fake.prepare import prepare
from workers.nvml.fake.script import read_script


def check(script: Path, *, is_rehearsal: bool) -> None:
    """Refuse, as a `UsageError`, a script that cannot be used, or that would show real cards as
    cool ones.
    """
    if not is_rehearsal:
        raise UsageError(
            "--fake-sensors only makes sense with --rehearse: real cards have sensors of their own"
        )
    try:
        if not read_script(script).cards:
            raise UsageError(f"{script} describes no cards; each node's workers read one")
    except FakeSensorsError as error:
        raise UsageError(str(error)) from error


def with_sensors(
    plans: Sequence[SlotPlan], script: Path, folder: Path, elapsed_s: float
) -> tuple[SlotPlan, ...]:
    """Return the slots with workers that read the script; the first node its first card, and so on.

    The library for it is built in `folder`. A run that was resumed has gone on for `elapsed_s`
    already.

    Raises:
        UsageError: It cannot be built.
    """
    try:
        cards = len(read_script(script).cards)
        folder.mkdir(exist_ok=True)
        fake = prepare(script, folder, elapsed_s=elapsed_s)
    except FakeSensorsError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(
            f"the fake sensors cannot be made ready in {folder}: {error.strerror}"
        ) from error
    nodes = list(dict.fromkeys(plan.spec.node for plan in plans))
    return tuple(
        replace(
            plan,
            spec=replace(
                plan.spec, fake_sensors=fake, fake_card=nodes.index(plan.spec.node) % cards
            ),
        )
        for plan in plans
    )
