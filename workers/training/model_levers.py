"""How a model is computed, as far as `train:` says so: attention, the order of pictures, where
activations wait.

One object for the training and for the plan of its memory, so that both do the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from workers.training import attention
from workers.training.host_activations import HostActivations
from workers.training.settings import TrainSettings
from workers.training.tasks import Batch


class ModelLevers:
    """The levers of one model."""

    def __init__(
        self, settings: TrainSettings, model: nn.Module, *, device_type: str, on_card: bool
    ) -> None:
        """Put the weights of convolutions into the order that is asked for.

        Args:
            settings: Those of the training.
            model: On its device.
            device_type: Where it really is.
            on_card: What it is computed, or planned, for.
        """
        self._settings = settings
        self._channels_last = settings.channels_last is True or (
            # cuDNN's kernels for tensor cores read this order; in fp32 and on a CPU there is little
            # to gain.
            settings.channels_last == "auto"
            and on_card
            and settings.precision in {"bf16", "fp16"}
            and any(isinstance(each, nn.Conv2d) for each in model.modules())
        )
        self.host_activations: HostActivations | None = None
        if settings.activations_on_host:
            self.host_activations = HostActivations(model, device_type)
        if self._channels_last:
            # Not `model.to`: on tensors without data that replaces each parameter, which a memory
            # plan cannot follow.
            for each in (*model.parameters(), *model.buffers()):
                if each.dim() == 4:
                    each.data = each.data.contiguous(memory_format=torch.channels_last)

    def region(self) -> AbstractContextManager[object]:
        """Return the region for the forward and the backward pass of a part."""
        return attention.kernels(
            self._settings.attention, deterministic=self._settings.deterministic
        )

    def saving(self) -> AbstractContextManager[object]:
        """Return the region for the forward pass alone: it says where what the backward pass needs
        is kept.
        """
        return nullcontext() if self.host_activations is None else self.host_activations.saving()

    def ordered(self, part: Batch) -> Batch:
        """Return a part of a batch with its pictures in the order that the weights have."""
        if not self._channels_last:
            return part
        if isinstance(part, Tensor):
            return part.contiguous(memory_format=torch.channels_last) if part.dim() == 4 else part
        if isinstance(part, Mapping):
            return {key: self.ordered(each) for key, each in part.items()}
        return [self.ordered(each) for each in part] if isinstance(part, list | tuple) else part
