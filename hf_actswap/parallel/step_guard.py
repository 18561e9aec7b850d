"""A patched model in a training that does not know that it is patched.

Two things go wrong there without a word. `DistributedDataParallel` over all ranks copies rank 0's part of
every parameter over the others', and averages gradients of different things. And an optimizer that steps on
tagged gradients which nobody has summed lets replicas drift apart. Both are noticed in the model's next
forward with gradients, on every rank:

- DDP says which of its instances is calling;
- after a backward, tagged gradients are summed before anybody changes the parameters: a parameter that was
  changed in between was changed by a step without the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .data_sharding import refuse_tensor_axis, trained_parameters
from .gradient_watch import GradientWatch, watch_of
from .gradients import UnsummedGradientError, tagged_parameters
from .sharded_module import HeldGroup

USE_OURS = (
    "Train it with hf_actswap.ActSwapTrainer (or ActSwapTrainerMixin in front of your trainer's class), or "
    "in a loop of your own with hf_actswap.prepare"
)


class PatchedModelError(RuntimeError):
    """A patched model is trained by what would corrupt it."""


class StepGuard:
    """Pre-hook of a patched model.

    Args:
        group: tensor-parallel group.
        put_tags: puts tags on parameters that were made anew.
    """

    part_of_the_model = True

    def __init__(self, group: dist.ProcessGroup, put_tags: Callable[[], None]) -> None:
        self._held_group, self._put_tags = HeldGroup(group), put_tags
        self._watches: list[GradientWatch] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_watches": None}  # a copy has parameters of its own

    def __call__(self, model: nn.Module, _args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        group = self._held_group.group
        if group is not None:
            _refuse_wrapper(group)
        if self._watches is None:
            if group is not None:
                refuse_tensor_axis(model, group)
            self._put_tags()
            tagged = tagged_parameters(trained_parameters(model))
            self._watches = [watch_of(p) or GradientWatch(p) for p in tagged]
        stepped = sum(watch.was_stepped_unsummed() for watch in self._watches)
        if stepped:
            raise UnsummedGradientError(
                f"{stepped} tagged parameters were changed by a step on this rank's part of their gradients: "
                "the ranks' replicas differ now. Call allreduce_sequence_parallel_gradients after the last "
                f"micro-batch, before the norm and the step. {USE_OURS}"
            )


def _refuse_wrapper(group: dist.ProcessGroup) -> None:
    wrapper = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None:
        return
    ours = set(dist.get_process_group_ranks(group))
    shared = sorted(ours & set(dist.get_process_group_ranks(wrapper.process_group)))
    if len(shared) > 1:
        raise PatchedModelError(
            f"DistributedDataParallel covers ranks {shared}, which hold different parts of one model: it has "
            f"copied the part of rank {shared[0]} over the others' already. Build the model anew. {USE_OURS}"
        )
