"""Combines FSDP2 over the data axis with tensor parallelism inside: finds, gathers and makes shards.

A rank's part of a parameter (of tensor parallelism) is a plain tensor; ``fully_shard`` over the data axis
alone divides it further, by rows, into DTensors. The two do not interfere: tensor parallelism works inside a
layer on the gathered part, FSDP2 gathers before the layer and averages gradients over the data axis after it,
and tagged gradients are summed over the tensor axis shard by shard.

FSDP2 makes two new parameters of each: the shard, which optimizers see, and the gathered parameter, which the
layer sees while it runs. Neither has the attributes of the old parameter. The gathered one exists from the
first gather on, and takes the shard's place in its module. So inside a forward the shards of the outermost
module can be found in FSDP2's private state only (`plan.wrappers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import Problem
from ..plan.wrappers import parameter_groups
from .mesh import MeshError


class ShardedParameter(NamedTuple):
    """A parameter under FSDP2, under one of its names.

    Args:
        module, name: the module that holds it, and its name there.
        shard: the parameter that optimizers see.
        gathered: the parameter that the module sees while it runs; ``None`` before the first gather.
    """

    module: nn.Module
    name: str
    shard: nn.Parameter
    gathered: nn.Parameter | None


def shard_over_data(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, **settings: Any) -> None:
    """Apply ``fully_shard`` to each layer and the model: it divides parameters by rows over the data axis.

    Args:
        model: a model, patched or not.
        layers: the model's decoder layers.
        mesh: the data axis, a mesh of one dim: ``build_mesh(..).device_mesh["dp_shard"]``.
        settings: further arguments of ``torch.distributed.fsdp.fully_shard``.

    Raises:
        MeshError: the mesh has more dims; along the tensor axis ranks hold different parts.
    """
    if mesh.ndim != 1:
        hint = 'Pass one axis: device_mesh["dp_shard"]. Ranks of the tensor axis hold different parts.'
        raise MeshError([Problem("mesh", "the data axis alone", f"{mesh.ndim} axes", hint)])
    for layer in layers:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh, **settings)


def sharded_parameters(model: nn.Module) -> Iterator[ShardedParameter]:
    """Yield each parameter that FSDP2 shards, tied ones under each of their names."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for held in _held_by(module):
                info, gathered = held._module_info, getattr(held, "_unsharded_param", None)
                yield ShardedParameter(info.module, info.param_name, held.sharded_param, gathered)
                for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    yield ShardedParameter(other, name, held.sharded_param, gathered)


def trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each parameter that an optimizer of ``model`` sees (FSDP2: shards) once, also in a forward."""
    shards = {
        id(found.gathered): found.shard for found in sharded_parameters(model) if found.gathered is not None
    }
    seen: set[int] = set()
    for parameter in model.parameters():
        trained = shards.get(id(parameter), parameter)
        if id(trained) not in seen:
            seen.add(id(trained))
            yield trained


def whole_over_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor; a shard is gathered, for which every rank of the data axis must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: torch.Tensor = tensor.full_tensor()
    return whole


def sharded_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``whole``, which each rank has, if ``like`` is sharded; else ``whole``."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    device, mesh = like.to_local().device, like.device_mesh
    # No data are sent: each rank takes its own part.
    return distribute_tensor(whole.to(device), mesh, like.placements, src_data_rank=None)


def reject_tensor_axis(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Check that FSDP2 does not shard a patched model over ranks that hold different parts of it.

    Raises:
        MeshError: it does; names the ranks.
    """
    ours = set(dist.get_process_group_ranks(group))
    for found in sharded_parameters(model):
        shard = found.shard
        if isinstance(shard, DTensor):
            shared = sorted(ours & set(shard.device_mesh.mesh.flatten().tolist()))
            if len(shared) > 1:
                hint = 'Pass fully_shard the data axis alone: mesh=build_mesh(..).device_mesh["dp_shard"].'
                problem = Problem("fully_shard", "a mesh of the data axis", f"ranks {shared} in it", hint)
                raise MeshError([problem])


def _held_by(module: Any) -> list[Any]:
    """Return FSDP2's own objects for a module's parameters."""
    return [held for group in parameter_groups(module) for held in group.fsdp_params]
