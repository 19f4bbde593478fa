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
from orchestrator.run.environment import Environment, Mode
from orchestrator.run.runner import Experiment
from workers.nvml.fake import FakeSensorsError
from workers.nvml.fake.script import prepare, read_script


class ScriptedSensors(Experiment):
    """`--fake-sensors` as an addition to a run."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self.line = f"Sensors: faked by {script}"

    def check(self, environment: Environment) -> None:
        """Refuse a script that cannot be used, or that would show real cards as cool ones."""
        if environment.mode is not Mode.REHEARSE:
            raise UsageError(
                "--fake-sensors only makes sense with --rehearse: real cards have sensors of their "
                "own"
            )
        try:
            if not read_script(self._script).cards:
                raise UsageError(f"{self._script} describes no cards; each node's workers read one")
        except FakeSensorsError as error:
            raise UsageError(str(error)) from error

    def equip(
        self, plans: Sequence[SlotPlan], folder: Path, elapsed_s: float
    ) -> Sequence[SlotPlan]:
        """Let the workers of the first node read the first card of the script, and so on.

        The library for it is built in the run's folder.
        """
        folder = folder / "fake-sensors"
        try:
            cards = len(read_script(self._script).cards)
            folder.mkdir(exist_ok=True)
            fake = prepare(self._script, folder, elapsed_s=elapsed_s)
        except FakeSensorsError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            raise UsageError(
                f"the fake sensors cannot be made ready in {folder}: {error.strerror}"
            ) from error
        nodes = list(dict.fromkeys(plan.spec.node for plan in plans))
        return [
            replace(
                plan,
                spec=replace(
                    plan.spec, fake_sensors=fake, fake_card=nodes.index(plan.spec.node) % cards
                ),
            )
            for plan in plans
        ]
