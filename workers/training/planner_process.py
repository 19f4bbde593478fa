"""The plan of memory in a process of its own, so that what a task keeps, such as a model in a
cache, never holds tensors without data in the process that trains.

It answers one question a line, and ends when its input is closed. It sees no card. Presets that
make their model themselves are planned without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from dataclasses import asdict
from typing import Any, Final

import torch

from workers.oom import one_line
from workers.training.errors import TaskError
from workers.training.memory_plan import MemoryPlan, MemoryPlanner
from workers.training.model_levers import level_of
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task

#: A large model of the user, on a slow disk.
_TIMEOUT_S: Final = 300.0


class PlannerProcess:
    """What `MemoryPlanner` says, asked of another process.

    Raises:
        TaskError: It cannot be planned; the message says why.
    """

    def __init__(self, settings: TrainSettings, seed: int, *, on_card: bool) -> None:
        """Start the process, and have it make the model."""
        self._settings = settings
        question = {"settings": settings.model_dump(), "seed": seed, "on_card": on_card}
        self._start()
        try:
            most_level = self._ask({**question, "with_data": False})
        except TaskError:
            self._start()  # afresh: a model in a cache may hold tensors without data now
            most_level = self._ask({**question, "with_data": True})
        self.most_level = int(most_level)
        """How many blocks can be recomputed."""

    def _start(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this module, as a program
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            # A task is found where this process has found it.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
        )

    def level_of(self, offered: int) -> int:
        """See `MemoryPlanner.level_of`."""
        return level_of(self._settings.recompute, offered, self.most_level)

    def states(self, share_pct: int) -> tuple[int, int, int]:
        """See `MemoryPlanner.states`."""
        states: tuple[int, int, int] = tuple(self._ask({"states": [share_pct]}))
        return states

    def plan(self, micro: int, level: int, share_pct: int | None = None) -> MemoryPlan:
        """See `MemoryPlanner.plan`."""
        return MemoryPlan(**self._ask({"plan": [micro, level, share_pct]}))

    def close(self) -> None:
        """End the process; nothing can be asked any more."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def _ask(self, question: dict[str, Any]) -> Any:  # noqa: ANN401 - what JSON can hold
        line = ""
        with contextlib.suppress(OSError, ValueError):  # it has ended
            answers = self._process.stdout
            assert answers is not None  # noqa: S101 - a pipe, as asked above
            print(json.dumps(question), file=self._process.stdin, flush=True)
            if select.select([answers], [], [], _TIMEOUT_S)[0]:
                line = answers.readline()
        answer = json.loads(line or '{"error": "the process that plans has ended"}')
        if "error" in answer:
            self.close()
            raise TaskError(answer["error"])
        return answer["answer"]


def serve() -> None:
    """Answer the questions on standard input; what a task prints goes to standard error."""
    output, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    planner: MemoryPlanner | None = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if planner is None:
                settings = TrainSettings.model_validate(question["settings"])
                task = find_task(settings, question["seed"])
                planner = MemoryPlanner(
                    task,
                    settings,
                    on_card=question["on_card"],
                    with_data=question["with_data"],
                )
                answer: Any = planner.most_level
            elif "states" in question:
                answer = planner.states(*question["states"])
            else:
                answer = asdict(planner.plan(*question["plan"]))
            said = {"answer": answer}
        except Exception as error:  # noqa: BLE001 - a user's model fails in any way
            said = {"error": one_line(error)}
        print(json.dumps(said), file=output, flush=True)


if __name__ == "__main__":
    serve()
