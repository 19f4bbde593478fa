"""A training of your own: which way a noisy ring of points turns."""

import torch
from torch import nn

from workers import TrainTask


class Rings:
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        turn = 2 * (index % 2) - 1
        angles = torch.linspace(0, turn * 6.28, 32) + 6.28 * torch.rand(1, generator=draw)
        points = torch.cat([angles.cos(), angles.sin()]) + 0.1 * torch.randn(64, generator=draw)
        return points, torch.tensor(float(index % 2))


def model():
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 1))


def loss(model, part):  # the sum over the samples, not the mean
    logits, turns = model(part[0]).squeeze(1), part[1]
    return nn.functional.binary_cross_entropy_with_logits(logits, turns, reduction="sum")


rings = TrainTask(name="rings", model=model, dataset=Rings(), loss=loss)
