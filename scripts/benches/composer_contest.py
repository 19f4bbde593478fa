"""Real Composer under pressure, in a venv of its own: started as a script by that venv's Python.

Its trainer halves the micro-batch when memory runs out, on a card. On a CPU it refuses to: two of
its functions are replaced here, one that asks for a card and one that knows the words of a card
alone. Two operators of torchvision, which cannot be loaded without CUDA, are defined and never
called.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
# mypy: ignore-errors
# Composer is not installed where mypy runs.
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch  # noqa: E402 - found since now

_stubs = torch.library.Library("torchvision", "DEF")
_stubs.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_stubs.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

import composer.trainer.trainer as composer_trainer  # noqa: E402
from composer import Callback, Trainer  # noqa: E402
from composer.models import ComposerModel  # noqa: E402

from benches.common import status_bytes  # noqa: E402
from benches.train_job import (  # noqa: E402
    BATCH,
    OverError,
    Samples,
    Tally,
    _plain,
    batches,
    count_every_tensor,
    is_oom,
    mean_loss,
    rate_of,
)
from workers.devices.cpu import _lay_in_stock, _use_mappings_for_blocks  # noqa: E402


class _Model(ComposerModel):
    def __init__(self, inner: torch.nn.Module, tally: Tally) -> None:
        super().__init__()
        self.inner, self.tally, self.rows = inner, tally, 0

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.rows = len(batch)
        try:
            return mean_loss(self.inner, batch)
        except Exception as error:
            if is_oom(error):
                self.tally.failed(self.rows)
            raise

    def loss(self, outputs: torch.Tensor, _batch: torch.Tensor) -> torch.Tensor:
        return outputs


class _Watch(Callback):
    def __init__(self, tally: Tally, rate: object) -> None:
        self.tally, self.rate, self.total, self.micro = tally, rate, 0.0, BATCH

    def batch_start(self, state: object, _logger: object) -> None:
        self.rate(int(state.timestamp.batch))
        self.total = 0.0

    def after_backward(self, state: object, _logger: object) -> None:
        rows = state.model.rows
        self.tally.part(rows)
        if self.tally.over:
            raise OverError

    def batch_end(self, state: object, _logger: object) -> None:
        loss = state.total_loss_dict["loss/train/total"] if state.total_loss_dict else float("nan")
        self.tally.stepped(int(state.timestamp.batch), float(loss))


def main() -> None:
    seconds, course = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _use_mappings_for_blocks()
    _lay_in_stock()
    count_every_tensor()
    composer_trainer._is_auto_microbatching = lambda size, **_: size == "auto"
    composer_trainer._is_cuda_oom = is_oom
    tally = Tally(seconds, [tuple(each) for each in course])
    spare, spares_optimizer, _ = _plain()
    for limit in (BATCH, 32, 16, 8, 4, 2, 1):  # what libraries keep, they have now
        mean_loss(spare, next(batches())[1][:limit]).backward()
    spares_optimizer.step()
    # What a training holds at all times is not the cap's affair: gradients and states come with its
    # first step.
    held = [each.grad for each in spare.parameters()], [*spares_optimizer.state.values()]
    del spare, spares_optimizer
    inner, optimizer, _ = _plain()
    watch = _Watch(tally, rate_of(optimizer))
    model = _Model(inner, tally)
    made = Trainer(
        model=model,
        optimizers=optimizer,
        train_dataloader=torch.utils.data.DataLoader(Samples(), batch_size=BATCH),
        max_duration=f"{10**9}ba",
        device="cpu",
        device_train_microbatch_size="auto",
        callbacks=[watch],
        progress_bar=False,
        log_to_console=False,
        train_subset_num_batches=10**9,
    )
    print(json.dumps({"base_bytes": status_bytes("VmData")}), flush=True)
    del held
    sys.stdin.readline()
    tally.began_s += tally.at_s
    tally.starts = 1
    ended = None
    try:
        made.fit()
    except OverError:
        pass
    except Exception as error:  # noqa: BLE001 - a contestant that gives up is a finding
        ended = (
            f"{type(error).__name__} at {tally.at_s:.1f} s: {' '.join(str(error).split())[:200]}"
        )
    row = {
        key: getattr(tally, key)
        for key in ("rows", "starts", "wrong_batches", "losses", "failed_at_s", "parts")
    }
    print(json.dumps({**row, "done_in_time": tally.done_in_time, "ended": ended}), flush=True)


if __name__ == "__main__":
    main()
