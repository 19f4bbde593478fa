"""Settings for the next member of a sweep from the values that earlier ones reached: Optuna's TPE.

The queue is the truth: a study is made from its members for each question, so a head
that was killed asks for the same settings again. Keeps no study, and stops no job. Optuna is loaded
when it is first needed; it is the extra `sweep`.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.jobs.entries import Sweep, with_numbers
from orchestrator.jobs.sweep import Settings, dotted_key, range_of
from workers.settings import Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What the queue knows of a member."""

    settings: Settings
    """Of `Job.settings`."""
    value: float | None = None
    """Its best; `None` or no number of a member that has ended: it failed."""
    has_ended: bool = False


def require_optuna() -> Any:  # noqa: ANN401  # optuna need not be there
    """Return the package.

    Raises:
        UsageError: It is not installed.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise UsageError(
            "a sweep of method optuna needs the package optuna; type: pip install '.[sweep]', "
            "or say method: random"
        ) from None


class Sampler:
    """Asks for the next member of one sweep of method optuna.

    Raises:
        UsageError: Optuna is not installed.
    """

    def __init__(self, sweep: Sweep, *, is_min: bool, is_train: bool) -> None:
        self._optuna = require_optuna()
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._seed = sweep.seed
        self._direction = "minimize" if is_min else "maximize"
        self._ranges = {
            dotted_key(key) if is_train else key: self._range_of(
                with_numbers(values) if is_train else values
            )
            for key, values in sweep.over.items()
        }

    def ask(self, trials: Sequence[Trial]) -> dict[str, Scalar]:
        """Return settings for member number `len(trials)`, given all before it in their order.

        Members that have not ended count as bad ones, so that two at a time do not try the same.
        """
        # Each question has its own seed: the answer does not depend on how many this process asked.
        seed = (self._seed + len(trials) * 1_000_003) % 2**32
        sampler = self._optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        study = self._optuna.create_study(direction=self._direction, sampler=sampler)
        for trial in trials:
            self._add(study, trial)
        asked: dict[str, Scalar] = study.ask(self._ranges).params
        return asked

    def _add(self, study: Any, trial: Trial) -> None:  # noqa: ANN401  # optuna need not be there
        states = self._optuna.trial.TrialState
        value = trial.value if trial.value is not None and math.isfinite(trial.value) else None
        if not trial.has_ended:
            state, value = states.RUNNING, None
        else:
            state = states.FAIL if value is None else states.COMPLETE
        # A member of before the ranges were changed tells nothing about the new ones.
        with contextlib.suppress(ValueError):
            study.add_trial(
                self._optuna.trial.create_trial(
                    state=state,
                    params=dict(trial.settings),
                    distributions=self._ranges,
                    value=value,
                )
            )

    def _range_of(self, values: Any) -> Any:  # noqa: ANN401  # a list or a range; optuna's
        kind, bounds = range_of(values)
        ranges = self._optuna.distributions
        if kind == "choice":
            return ranges.CategoricalDistribution(bounds)
        if kind == "integer":
            return ranges.IntDistribution(*bounds)
        return ranges.FloatDistribution(*bounds, log=kind == "log")
