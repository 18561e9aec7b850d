"""Collectives over the stages of a model: sums of shared gradients, the gradient norm, the whole state.

A parameter that several stages hold (tied embeddings: the first and the last) gets the sum of their gradients
on each of them, so that their optimizers make the same step; it counts once in the norm. The norm is computed
as `torch.nn.utils.clip_grad_norm_` does in one process, from the norms of all parameters in the model's
order, so that it is equal bit for bit. With tensor parallelism it is the norm of the stages' norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..parallel.gradients import get_grad_norm
from ..parallel.mesh import own_group
from ..parallel.weights import whole_of_ranks
from .stages import StagedModel

Value = TypeVar("Value")


class StageGradients:
    """Sums and norm of the gradients of a staged model.

    Every rank makes one, also those of other pipelines; its methods are collective.

    Args:
        staged: the model, after `StagedModel.cut`.
        group: the ranks of the pipeline, in the order of the stages.
        device: device of this rank.
        tensor_group: the tensor-parallel ranks of this stage; ``None``: this rank holds the stage alone.
        timeout_s: how long a collective waits; ``None``: as long as PyTorch's groups do.
    """

    def __init__(
        self,
        staged: StagedModel,
        group: dist.ProcessGroup,
        device: torch.device,
        tensor_group: dist.ProcessGroup | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._staged, self._group, self._device = staged, group, device
        self._tensor_group = tensor_group
        self._names = list(dict.fromkeys(staged.entries.values()))
        self._shared: dict[tuple[int, ...], list[str]] = {}
        for name in self._names:
            if len(holders := staged.holders(name)) > 1:
                self._shared.setdefault(holders, []).append(name)
        self._groups = {}
        for holders in sorted(self._shared):
            found = _group_of_holders(holders, group, staged.layout.pp, timeout_s)
            if staged.stage in holders:
                self._groups[holders] = found

    def _own(self) -> dict[str, torch.Tensor]:
        """Return the trained parameters of this rank by name."""
        return {name: tensor for name, tensor in self._staged.own_state().items() if tensor.requires_grad}

    def sum_shared(self) -> None:
        """Give each stage that holds a shared parameter the sum of its gradients; once per step."""
        own = self._own()
        for holders, group in self._groups.items():
            _sum([own[name] for name in self._shared[holders] if name in own], group, self._device)

    def average_over_data(self, group: dist.ProcessGroup) -> None:
        """Average gradients over the data-parallel ranks in ``group``, which hold the same stage."""
        held = list(self._own().values())
        _sum(held, group, self._device)
        for parameter in held:
            if parameter.grad is not None:
                parameter.grad /= group.size()

    def norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """Return the norm of the whole model's gradients, an fp32 scalar, the same on every rank."""
        stage, place = self._staged.stage, {name: index for index, name in enumerate(self._names)}
        counted = {
            name: parameter
            for name, parameter in self._own().items()
            if self._staged.holders(name)[0] == stage
        }
        if self._tensor_group is not None:
            of_stages = torch.zeros(self._staged.layout.pp, device=self._device)
            of_stages[stage] = get_grad_norm(counted.values(), norm_type, process_group=self._tensor_group)
            dist.all_reduce(of_stages, group=self._group)
            return torch.linalg.vector_norm(of_stages, norm_type)
        gradients = {name: p.grad.detach() for name, p in counted.items() if p.grad is not None}
        found = torch.zeros(2, len(place), device=self._device)
        if gradients:
            at = torch.tensor([place[name] for name in gradients], device=self._device)
            norms: Any = torch._foreach_norm(list(gradients.values()), norm_type)
            found[0, at] = torch.stack(list(norms)).to(found)
            found[1, at] = 1.0
        dist.all_reduce(found, group=self._group)
        return torch.linalg.vector_norm(found[0][found[1] > 0], norm_type)


def _group_of_holders(
    holders: tuple[int, ...], pipeline: dist.ProcessGroup, stages: int, timeout_s: float | None
) -> dist.ProcessGroup:
    """Make, in all pipelines, a group of the stages in ``holders`` and one of the others; return this rank's.

    Every rank must call it (`own_group`).
    """
    if len(holders) == stages:
        return pipeline
    others = [stage for stage in range(stages) if stage not in holders]
    width = dist.get_world_size() // stages  # stages are the outermost axis (`stage_of_rank`)
    table = [
        [stage * width + column for stage in part] for column in range(width) for part in (holders, others)
    ]
    return own_group(table, timeout_s)


def _sum(parameters: list[torch.Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum gradients over a group; a gradient that is ``None`` on every rank stays ``None``."""
    has = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=device)
    dist.all_reduce(has, dist.ReduceOp.MAX, group=group)
    for parameter, is_there in zip(parameters, has.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def gathered_on_first_rank(own: Mapping[str, Value], group: dist.ProcessGroup) -> dict[str, Value]:
    """Return the values of all ranks on the first rank of a group; on the others an empty dict.

    Args:
        own: values of this rank by name, sent one by one; tensors must be on the CPU.
        group: all of its ranks must call this.
    """
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    if rank > 0:
        dist.send_object_list([len(own)], ranks[0], group=group)
        for item in own.items():
            dist.send_object_list([item], ranks[0], group=group)
        return {}
    found = dict(own)
    for source in ranks[1:]:
        (count,) = _received(source, group)
        for _ in range(count):
            ((name, value),) = _received(source, group)
            found[name] = value
    return found


def _received(source: int, group: dist.ProcessGroup) -> list[Any]:
    received: list[Any] = [None]
    dist.recv_object_list(received, source, group=group)
    return received


def whole_state(
    staged: StagedModel, group: dist.ProcessGroup, tensor_group: dist.ProcessGroup | None = None
) -> dict[str, torch.Tensor]:
    """Return the whole model's state dict on the CPU, on the first stage; on the others an empty dict.

    Args:
        staged: the model, after `StagedModel.cut`.
        group: the ranks of the pipeline; all of them must call this.
        tensor_group: the tensor-parallel ranks of this stage, which must all call this too; ``None``: this
            rank holds the stage alone.
    """
    own, partitions = {}, staged.own_partitions()
    for name, tensor in staged.own_state().items():
        if staged.holders(name)[0] == staged.stage:
            whole, partition = tensor.detach(), partitions.get(name)
            if partition is not None and tensor_group is not None:
                whole = whole_of_ranks(whole, partition, tensor_group)
            own[name] = whole.cpu()
    if tensor_group is not None and tensor_group.rank() > 0:
        own = {}  # only the first rank of each stage sends it
    found = gathered_on_first_rank(own, group)
    return {name: found[first] for name, first in staged.entries.items()} if found else {}
