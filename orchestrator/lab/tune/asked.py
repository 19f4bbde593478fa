"""What a tuning was asked for: from a command line, and from the folder of a tuning that goes on."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune import levers, products, store
from orchestrator.run.environment import in_rehearsal, on_this_machine
from workers.files import replace_whole

#: A rehearsal is for looking at the tool, and its figures hold for no card.
_REHEARSAL_S: Final = 270.0

#: The baseline and its repetition load torch, take their first steps and compete in three rounds,
#: which an interval needs: half a minute at best. A lever has no turn in less than this.
_LEAST_S: Final = 60.0

FILE: Final = "asked.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a tuning was asked for; kept in its folder, for `--resume`."""

    config_text: str
    """The configuration as it is measured: overrides applied, and scaled in a rehearsal."""
    file_text: str
    """The user's file, for tuned.yaml."""
    device: str | None
    one_machine: bool
    rehearse: bool
    workload: str = "train"
    """`train` or `matmul`."""
    budget_s: float
    wanted: tuple[str, ...] = ()
    created_at: str = ""


def names_in(levers: str) -> list[str]:
    """Return the names in a text such as `precision, optimizer=adamw-fused`."""
    return [name.strip() for name in levers.split(",") if name.strip()]


def begin(asked: Asked) -> Path:
    """Make the folder of a new tuning."""
    now = datetime.now(UTC)
    folder = store.tunings_folder() / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700, parents=True)
    plain = {name: getattr(asked, name) for name in Asked.__dataclass_fields__}
    replace_whole(
        folder / FILE, json.dumps({**plain, "created_at": now.isoformat(timespec="seconds")})
    )
    return folder


def folder_of(tune_id: str) -> Path:
    """Return the folder of a tuning by its id, or the end of that.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = sorted(each.parent for each in store.tunings_folder().glob(f"*{tune_id}/{FILE}"))
    if len(found) != 1:
        known = sorted(each.parent.name for each in store.tunings_folder().glob(f"*/{FILE}"))[-3:]
        raise UsageError(
            f"{len(found) or 'no'} tunings end with {tune_id!r} in {store.tunings_folder()}; the "
            "newest: "
            f"{', '.join(known) or 'none'}"
        )
    return found[0]


def read(folder: Path) -> Asked:
    """Return what the tuning in this folder was asked for.

    Raises:
        UsageError: It cannot be read.
    """
    try:
        plain = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return Asked(**{**plain, "wanted": tuple(plain["wanted"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{folder / FILE} cannot be read ({one_line(str(error))[:200]}); run `tune` anew"
        ) from error


def asked_of(
    config: Config,
    file_text: str,
    *,
    rehearse: bool,
    budget_s: float | None,
    wanted: Sequence[str],
    workload: str = "train",
) -> Asked:
    """Return what is kept of a command line; what it leaves open the section `tune:` says.

    Raises:
        UsageError: A lever is named that there is none of, the budget ends before a lever can be
            judged, or this machine leaves a worker no memory.
    """
    if budget_s is not None and budget_s < _LEAST_S:
        raise UsageError(
            f"--budget {budget_s:g}s ends before any lever has had its rounds; the least is "
            f"{_LEAST_S:g}s"
        )
    if workload not in {"train", products.WORKLOAD}:
        raise UsageError(
            f"--workload {workload}: no levers are known of it; valid: train, {products.WORKLOAD}"
        )
    if workload == "train":
        of_file = [] if config.tune.levers == "all" else names_in(config.tune.levers)
        named, wanted = "--levers" if wanted else "tune.levers", wanted or of_file
        levers.chosen(
            levers.train_candidates(levers.baseline_of(config.train, on_card=True)), wanted, named
        )
    config_from_text(file_text, "the configuration")  # tuned.yaml is made of it without `--set`
    environment = in_rehearsal(config, None) if rehearse else on_this_machine(config)
    return Asked(
        config_text=dump_config(environment.config),
        file_text=file_text,
        device=environment.target.device,
        one_machine=environment.target.one_machine,
        rehearse=rehearse,
        workload=workload,
        budget_s=budget_s
        or (min(config.tune.budget_s, _REHEARSAL_S) if rehearse else config.tune.budget_s),
        wanted=tuple(wanted),
    )
