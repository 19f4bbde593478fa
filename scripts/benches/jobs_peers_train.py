"""A small training that knows nothing of a queue and logs one line for each step.

    python jobs_peers_train.py --name lr-0 --steps 100 --log FOLDER

A restart begins at step 0. A step takes at least 0.2 s, as if it waited for a card. With `--wide`
the training allocates 700 MiB more at step 20; if that fails, it exits with the message that torch
prints for a card.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch

_BATCH, _STEP_S = 32, 0.2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--wide", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = None
    with (options.log / f"{options.name}.log").open("a", buffering=1) as log:
        for step in range(options.steps):
            began_s = time.monotonic()
            if options.wide and step >= 20 and more is None:
                try:
                    more = torch.empty(700 * 2**20, dtype=torch.uint8)
                except RuntimeError:
                    sys.exit(
                        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 700 MiB"
                    )
            x = torch.randn(_BATCH, 64)
            loss = (model(x) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(max(0.0, _STEP_S - (time.monotonic() - began_s)))
            log.write(f"{os.getpid()} {step}\n")
        log.write(f"{os.getpid()} done\n")


if __name__ == "__main__":
    main()
