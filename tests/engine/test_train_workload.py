"""The workload `train` in the real engine: DONE, kills, too little memory, and NaN."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.engine.scene import events, names, with_ooms
from tests.engine.trainings import trained
from tests.engine.trainings import training_spec as spec
from tests.in_child import InChild
from tests.scene import MIB
from workers.messages import Cause, Status, StepCounts, Verdict, WorkerState
from workers.settings import FailureKind
from workers.testing import injected_error
from workers.training.trainer import Trainer

WHOLE = {"duration_s": 600.0}


def task(name: str) -> str:
    return f"trainings:{name}"


@pytest.fixture(scope="module")
def undisturbed(in_child: InChild, tmp_path_factory: pytest.TempPathFactory) -> Status:
    (report,) = in_child(trained, str(tmp_path_factory.mktemp("alone")), spec(), [WHOLE])
    return report


def test_a_training_ends_by_done_with_all_that_the_table_shows(undisturbed: Status) -> None:
    assert (undisturbed.verdict, undisturbed.state) == (Verdict.DONE, WorkerState.DONE)
    told = undisturbed.progress
    assert (told.train_step, told.train_steps, told.saved_step) == (6, 6, 6)
    assert (told.micro_batch, told.accumulation) == (4, 2)
    assert told.loss is not None
    assert told.first_loss is not None
    assert told.tokens_per_s == pytest.approx(15 * told.samples_per_s), (
        "a sample of 16 tokens predicts 15"
    )
    assert told.weights_sha256 is not None
    assert (undisturbed.counts.steps_ok, undisturbed.counts.parts_further) == (6, 6)
    assert undisturbed.counts.work_flop > 1e6


def test_states_go_to_the_host_while_memory_is_short(in_child: InChild, tmp_path: Path) -> None:
    keys: dict[str, object] = {"preset": task("wide"), "steps": 24, "save_every_s": 1e6}
    alone = in_child(trained, str(tmp_path / "alone"), spec(**keys), [WHOLE])
    # Weights, sums of gradients and states are 9, 9 and 18 MiB, and the gradients of a part 9 MiB.
    # The first step loads libraries, and so needs 40 MiB although its states are on the host: with
    # less, no size would seem to fit.
    short = [{}] * 14 + [{"lease_bytes": 44 * MIB}] * 14 + [{}] * 20
    reports = in_child(trained, str(tmp_path / "short"), spec(**keys, states_on_host="auto"), short)
    assert [(each.counts.steps_error, each.counts.emergency_count) for each in reports] == [
        (0, 0)
    ] * len(reports)
    told = events(reports, "memory_moved")
    shares = [each.detail["states_on_host_pct"] for each in told]
    assert shares[-1] == 0, "and back"
    assert max(int(share or 0) for share in shares) >= 25
    assert all(int(each.detail["peak_bytes"] or 0) > 0 for each in told)
    assert reports[-1].progress.weights_sha256 == alone[-1].progress.weights_sha256 is not None


def test_levers_of_the_model_work_together(in_child: InChild, tmp_path: Path) -> None:
    model = {
        "activations_on_host": True,
        "adapter": "dora",
        "adapter_rank": 4,
    }
    objective = {"layer_decay": 0.9, "dropout": 0.1, "r_drop": 1.0, "label_smoothing": 0.1}
    levers = {**model, **objective, "ema_decay": 0.9, "ema_on": "host", "states_on_host": 50}
    (report,) = in_child(trained, str(tmp_path), spec(**levers), [WHOLE])
    assert report.verdict is Verdict.DONE
    (attention,) = events(report, "attention")
    assert attention.detail == {"ran": "flash"}
    (adapter,) = events(report, "adapter")
    # Of four blocks of width 64: rank 4 for 64 to 192, 64 to 64, 64 to 256 and 256 to 64, and a
    # length for each row.
    assert adapter.detail["trained_parameters"] == 4 * (
        4 * (256 + 128 + 320 + 320) + 192 + 64 + 256 + 64
    )
    assert adapter.detail["trained_pct"] == pytest.approx(7.8, abs=0.2)
    (evaluated,) = events(report, "evaluated")
    assert 1 < evaluated.detail["validation_loss"] < 6


def test_an_edited_file_is_another_training_and_told(in_child: InChild, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [json.dumps({"text": f"{place} times " * (1 + place % 3)}) for place in range(400)]
    path.write_text("\n".join(lines))
    wanted = spec(data=str(path), documents="lines", packing=True, save_every_s=0.001)
    in_child(trained, str(tmp_path), wanted, [{}] * 7)
    path.write_text("\n".join([lines[0].replace("0", "the first"), *lines[1:]]))
    (last,) = in_child(trained, str(tmp_path), wanted, [WHOLE], None, {"incarnation": 1})
    told = [str(each.detail["reason"]) for each in events(last, "checkpoint_refused")]
    assert "it was trained with data_fingerprint=lines" in told[0]
    assert told[-1] == "training begins anew"
    assert last.verdict is Verdict.DONE
    (evaluated,) = events(last, "evaluated")
    assert 1 < evaluated.detail["validation_loss"] < 6


def test_another_process_goes_on_to_the_same_bits(
    in_child: InChild, tmp_path: Path, undisturbed: Status
) -> None:
    often = {"save_every_s": 0.001}
    first = in_child(trained, str(tmp_path), spec(**often), [{}] * 7)
    assert first[-1].progress.train_step == 3
    (last,) = in_child(trained, str(tmp_path), spec(**often), [WHOLE], None, {"incarnation": 1})
    (restored,) = events(last, "restored")
    assert 0 < restored.detail["step"] <= 3
    assert last.counts.steps_ok == 6 - restored.detail["step"]
    assert last.progress.weights_sha256 == undisturbed.progress.weights_sha256
    (fresh,) = in_child(trained, str(tmp_path), spec(**often), [{}])
    assert "restored" not in names(fresh), "the first process of a run begins anew"


def test_a_node_without_its_disk_goes_on_from_the_heads_copy(
    in_child: InChild, tmp_path: Path, undisturbed: Status
) -> None:
    wanted = spec(save_every_s=0.001, checkpoints="head")
    first = in_child(trained, str(tmp_path / "one"), wanted, [{}] * 8)
    copy = Path(first[-1].saved)
    last = in_child(
        trained,
        str(tmp_path / "other"),
        wanted,
        [WHOLE],
        None,
        {"incarnation": 1, "checkpoint": copy},
    )
    (restored,) = events(last, "restored")
    assert 0 < restored.detail["step"] <= 4
    assert last[-1].verdict is Verdict.DONE
    assert last[-1].progress.weights_sha256 == undisturbed.progress.weights_sha256
    assert last[-1].saved in {str(path) for path in (tmp_path / "other").rglob("generation-?.pt")}


@pytest.mark.parametrize("lease_bytes", [MIB, 0])
def test_without_memory_it_is_parked_and_ends_with_the_same_bits(
    in_child: InChild, tmp_path: Path, undisturbed: Status, lease_bytes: int
) -> None:
    directives = [{}] * 5 + [{"lease_bytes": lease_bytes}] * 3 + [{}] * 30
    reports = in_child(trained, str(tmp_path), spec(), directives)
    parked = reports[6:8]
    assert [report.state for report in parked] == [WorkerState.PARKED] * 2
    assert all(
        re.match(r"\d+ MiB of its state wait in host memory: ", report.reason) for report in parked
    )
    if lease_bytes:
        assert re.search(r"\([1-9]\d*\.\d MiB, allowed 1\.0\)$", parked[0].reason)
    assert names(reports).count("parked") == 1
    assert parked[-1].progress.train_step == reports[4].progress.train_step, (
        "it can be asked while it is parked"
    )
    assert reports[8].state is WorkerState.RUNNING, "the next turn after memory is back does a step"
    assert reports[-1].progress.weights_sha256 == undisturbed.progress.weights_sha256
    assert sum(report.counts.steps_oom + report.counts.steps_error for report in reports) == 0


def test_parts_that_run_out_of_memory_are_done_again_to_the_same_bits(
    in_child: InChild, tmp_path: Path, undisturbed: Status
) -> None:
    seconds = [{"duration_s": 1.0}] * 60
    reports = in_child(trained, str(tmp_path), with_ooms(spec(), 0.2), seconds)
    report = reports[-1]
    assert report.verdict is Verdict.DONE
    assert events(reports, "oom")
    assert not events(reports, "parked", "emergency"), "their figures say that memory is there"
    assert all("level" in event.detail for event in events(reports, "oom", "backoff"))
    assert {each.memory.kept_bytes for each in reports} == {None}, "a state that is kept is no leak"
    counts = StepCounts.total(each.counts for each in reports)
    assert counts.steps_ok == 6, "each step is done once"
    parts = counts.steps_ok + counts.parts_further
    assert parts > 6
    assert counts.success_rate == parts / (parts + counts.steps_oom - counts.steps_oom_probe)
    assert report.progress.weights_sha256 == undisturbed.progress.weights_sha256


def first_unpark_fails(_folder: str) -> None:
    """Make the first attempt to restore a parked state fail for want of memory."""
    usual, tries = Trainer.unpark, list[Trainer]()

    def unpark(run: Trainer) -> None:
        tries.append(run)
        if len(tries) == 1:
            raise injected_error(FailureKind.DEFINITE)
        usual(run)

    Trainer.unpark = unpark  # type: ignore[method-assign]  # in a process of its own


def test_a_state_that_does_not_fit_yet_stays_parked(
    in_child: InChild, tmp_path: Path, undisturbed: Status
) -> None:
    # The policy waits 10 s before it tries a failed size again.
    directives = [{}] * 5 + [{"lease_bytes": MIB}] * 3 + [{"duration_s": 1.0}] * 30
    reports = in_child(trained, str(tmp_path), spec(), directives, first_unpark_fails)
    assert sum(report.counts.steps_oom for report in reports) == 1
    assert names(reports).count("parked") == 1
    assert reports[-1].verdict is Verdict.DONE
    assert reports[-1].progress.weights_sha256 == undisturbed.progress.weights_sha256


def test_a_loss_that_is_not_finite_stops_the_slot(in_child: InChild, tmp_path: Path) -> None:
    nan = spec(preset=task("becomes_nan"), steps=100, save_every_s=0.001, seq=None)
    report = in_child(trained, str(tmp_path), nan, [WHOLE])[-1]
    assert (report.verdict, report.verdict_cause) == (Verdict.INCOMPATIBLE, Cause.NAN_LOSS)
    found = re.search(
        r"loss of optimiser step (\d+) is nan.* last good checkpoint is of step (\d+)",
        report.reason,
    )
    assert found is not None, report.reason
    assert 0 < int(found[2]) <= int(found[1])
    assert str(tmp_path) in report.reason


def test_an_update_that_is_cut_off_is_rolled_back_and_said(
    in_child: InChild, tmp_path: Path
) -> None:
    cut = spec(preset=task("cut_update"), seq=None)
    reports = in_child(trained, str(tmp_path / "cut"), cut, [WHOLE] * 2)
    assert [report.verdict for report in reports] == [Verdict.OK, Verdict.DONE]
    (rolled_back,) = events(reports, "rolled_back")
    assert rolled_back.detail == {"step": 0, "redone_steps": 3}
    assert "the training went back to step 0, and does 3 steps again" in reports[0].reason
    assert reports[-1].progress.redone_steps == 3
    (good,) = in_child(
        trained, str(tmp_path / "good"), spec(preset=task("uncut_update"), seq=None), [WHOLE]
    )
    assert reports[-1].progress.weights_sha256 == good.progress.weights_sha256


@pytest.mark.parametrize(
    ("changes", "cause", "said"),
    [
        (
            {"preset": task("absent")},
            Cause.BAD_CONFIG,
            "'trainings:absent' cannot be loaded on this machine",
        ),
        ({"data": "/nowhere"}, Cause.EXCEPTION, "/nowhere"),
    ],
)
def test_what_cannot_be_trained_is_said_in_a_sentence(
    in_child: InChild, tmp_path: Path, changes: dict[str, object], cause: Cause, said: str
) -> None:
    (report,) = in_child(trained, str(tmp_path), spec(**changes), [WHOLE])
    assert (report.verdict, report.verdict_cause) == (Verdict.BAD_INPUT, cause)
    assert said in report.reason


MIBS_IMPORTED = 120


def write_large_module(folder: str) -> None:
    """Write a task whose module needs more memory than the cap, as transformers does."""
    text = (
        f"import trainings\nKEPT = b'x' * {MIBS_IMPORTED * MIB}\n"
        "def task(settings):\n    return trainings.good\n"
    )
    (Path(folder) / "large_task.py").write_text(text)
    sys.path.insert(0, folder)


def test_what_a_task_imports_is_not_taken_from_its_cap(in_child: InChild, tmp_path: Path) -> None:
    small = spec(60 * MIB, preset="large_task:task")
    (report,) = in_child(trained, str(tmp_path), small, [WHOLE], write_large_module)
    assert report.verdict is Verdict.DONE
    (opened,) = events(report, "device_opened")
    assert opened.detail["imported_bytes"] > 0.9 * MIBS_IMPORTED * MIB
    assert opened.detail["cap_bytes"] < MIBS_IMPORTED * MIB


#: Settings with four parts in an optimiser step.
QUARTERS = spec(micro=2, save_every_s=36000)


def test_a_save_that_was_asked_for_waits_for_the_step_to_end(
    in_child: InChild, tmp_path: Path
) -> None:
    parts = [{}, *[{"saves": 1}] * 3, {"saves": 2}]
    reports = in_child(trained, str(tmp_path), QUARTERS, parts)
    assert [report.save_due for report in reports] == [False, True, True, False, False]
    assert [report.progress.saved_step for report in reports] == [None, None, None, 1, 1], (
        "asked between two steps, too"
    )


def test_a_training_that_is_held_ends_its_step_and_saves_first(
    in_child: InChild, tmp_path: Path
) -> None:
    statuses = in_child(trained, str(tmp_path), QUARTERS, [{}, *[{"holds": True, "saves": 1}] * 5])
    assert [status.is_held for status in statuses] == [False] * 4 + [True] * 2
    assert [status.counts.steps_ok for status in statuses] == [0, 0, 0, 1, 0, 0], (
        "a turn may do a part of a step"
    )
    assert (statuses[-1].saves, statuses[-1].save_due) == (1, False)
    assert statuses[-1].progress.saved_step == 1
    assert statuses[-1].wall_s == 0, "time in which it is held is no time of work"


def test_a_training_without_memory_is_held_at_once(in_child: InChild, tmp_path: Path) -> None:
    short = {"lease_bytes": MIB}
    held = {**short, "holds": True, "saves": 1}
    statuses = in_child(trained, str(tmp_path), QUARTERS, [{}, short, held])
    assert [status.is_held for status in statuses] == [False, False, True]
    assert (statuses[-1].state, statuses[-1].save_due) == (WorkerState.PARKED, True)
