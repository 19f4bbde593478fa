"""Chooses the settings of a sweep's next member from the results of earlier ones: Optuna's TPE.

The queue is the only state: each call builds a new study from the sweep's members, so a head that
was killed chooses the same settings again. Keeps no study and stops no job. Optuna, the extra
`sweep`, is imported at the first call.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from orchestrator.errors import UsageError
from orchestrator.jobs.model import ENDED, Job, JobState, Settings, Standing
from workers.settings import Scalar

#: Members in these states count with their best value; other ended ones count as failed.
_SCORED: Final = frozenset({JobState.DONE, JobState.STOPPED})


def settings_for(member: Job, before: Iterable[Standing]) -> Settings:
    """Return settings for `member`; `before` are the members that have settings, by number.

    Members that have not ended count as bad ones, so concurrent members try different settings.

    Raises:
        UsageError: Optuna is not installed.
    """
    try:
        optuna: Any = importlib.import_module("optuna")
    except ImportError:
        raise UsageError(
            "a sweep of method optuna needs the package optuna; type: pip install '.[sweep]', "
            "or say method: random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    members, rule = tuple(before), member.milestones
    ranges = {key: _range(optuna, *form) for key, form in member.ranges.items()}
    # A seed for each member: the result does not depend on earlier calls in this process.
    seed = (member.seed + len(members) * 1_000_003) % 2**32
    study = optuna.create_study(
        direction="minimize" if rule is None or rule.is_min else "maximize",
        sampler=optuna.samplers.TPESampler(seed=seed, constant_liar=True),
    )
    for each in members:
        has_ended, best = each.state in ENDED, each.best
        value = best if each.state in _SCORED and best is not None and math.isfinite(best) else None
        states = optuna.trial.TrialState
        state = states.FAIL if value is None else states.COMPLETE
        # ValueError: the member is from before the ranges changed, and says nothing about them.
        with contextlib.suppress(ValueError):
            study.add_trial(
                optuna.trial.create_trial(
                    state=state if has_ended else states.RUNNING,
                    params=dict(each.job.settings),
                    distributions=ranges,
                    value=value,
                )
            )
    asked: Settings = study.ask(ranges).params
    return asked


def _range(optuna: Any, kind: str, bounds: Sequence[Scalar]) -> Any:  # noqa: ANN401 - optuna's
    ranges = optuna.distributions
    if kind == "choice":
        return ranges.CategoricalDistribution(bounds)
    if kind == "integer":
        return ranges.IntDistribution(*bounds)
    return ranges.FloatDistribution(*bounds, log=kind == "log")
