"""Builds the mesh of processes: which ranks hold one model together, which hold the same part of it.

The ranks of a tensor-parallel group follow one another (they lie on one machine and its fast links), so rank
r has tensor-parallel rank ``r % tp`` and data-parallel rank ``r // tp``. In a pipeline the stages are the
outermost axis, as in Megatron and NxD: r = (stage * dp + data rank) * tp + tensor rank. So messages between
stages, which are the smallest, cross the slowest links. The dims are named as Accelerate reads them: data
loaders divide ``tp`` out of the process index and count ``dp_replicate`` or ``dp_shard``.

**FSDP2 over the data axis, tensor parallelism inside.** A rank's part of a parameter is a plain tensor;
``fully_shard`` over the data axis alone divides it further, by rows, into DTensors. The two do not interfere:
tensor parallelism works inside a layer on the gathered part, FSDP2 gathers before the layer and averages
gradients over the data axis after it, and tagged gradients are summed over the tensor axis shard by shard.

FSDP2 makes two new parameters of each: the shard, which optimizers see, and the gathered parameter, which the
layer sees while it runs. Neither has the attributes of the old parameter. The gathered one exists from the
first gather on, and takes the shard's place in its module. So inside a forward the shards of the outermost
module can be found in FSDP2's private state only (`plan.wrappers`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import ActSwapError, Problem
from ..plan.wrappers import parameter_groups

TENSOR_AXIS = "tp"
REPLICATED_DATA_AXIS = "dp_replicate"

_SIZE = "parallel_config.tensor_parallel_size"


class MeshError(ActSwapError):
    """The processes that were started cannot hold the model as the configuration requires."""

    subject = "parallel set-up"


@dataclass(frozen=True)
class ParallelMesh:
    """The processes as a table: the ranks of a row divide one model, those of a column hold the same part.

    ``device_mesh`` has two dims, the data axis and then the tensor axis.
    """

    device_mesh: DeviceMesh

    @property
    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold this rank's model together."""
        return self.device_mesh.get_group(1)

    @property
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold the same part of the model, and train on other data."""
        return self.device_mesh.get_group(0)

    @property
    def data_axis(self) -> DeviceMesh:
        """The data axis alone, for FSDP2."""
        names = self.device_mesh.mesh_dim_names
        assert names is not None
        return self.device_mesh[names[0]]

    @property
    def tensor_parallel_size(self) -> int:
        """Number of ranks among which one model is divided."""
        return self.device_mesh.size(1)

    @property
    def data_parallel_size(self) -> int:
        """Number of models, which is the number of ranks in a column."""
        return self.device_mesh.size(0)

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of the part of the model that this rank holds."""
        return self.device_mesh.get_local_rank(1)

    @property
    def data_parallel_rank(self) -> int:
        """Index of the part of the data that this rank trains on."""
        return self.device_mesh.get_local_rank(0)


def build_mesh(
    tensor_parallel_size: int,
    data_axis: str = REPLICATED_DATA_AXIS,
    device_type: str | None = None,
    tensor_parallel_group: dist.ProcessGroup | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> ParallelMesh:
    """Build the mesh of all processes; every rank must call it.

    Args:
        tensor_parallel_size: ranks per model; the data axis takes the rest.
        data_axis: name of the data axis: ``dp_replicate`` (DDP) or ``dp_shard`` (FSDP2).
        device_type: type of the devices; ``None``: the accelerator's, or ``cpu`` if there is none.
        tensor_parallel_group: this rank's group, if the caller has one already; it is only checked.
        environment: variables that the launcher set; ``None``: `os.environ`.
        timeout_s: how long a collective waits; ``None``: as long as PyTorch's groups do.

    Raises:
        MeshError: the processes do not fit, or were not started together (see `check_processes`); or the
            given group is not one that the mesh would build.
    """
    check_processes(tensor_parallel_size, environment)
    world_size = dist.get_world_size()
    if tensor_parallel_group is not None:
        check_innermost(tensor_parallel_group, tensor_parallel_size)
    table = torch.arange(world_size).view(-1, tensor_parallel_size)
    kind = device_type or _device_type()
    return mesh_of(table, kind, data_axis, own_group(table.tolist(), timeout_s), timeout_s)


def mesh_of(
    table: torch.Tensor,
    device_type: str,
    data_axis: str,
    group: dist.ProcessGroup,
    timeout_s: float | None = None,
) -> ParallelMesh:
    """Return a mesh of ranks in another order than `build_mesh` puts them; every rank must call it.

    ``table`` has all ranks, ``[models, ranks per model]``; ``group`` is this rank's row.
    """
    columns = own_group(table.T.tolist(), timeout_s)
    names = (data_axis, TENSOR_AXIS)
    return ParallelMesh(DeviceMesh.from_group([columns, group], device_type, table, mesh_dim_names=names))


def own_group(table: Sequence[Sequence[int]], timeout_s: float | None = None) -> dist.ProcessGroup:
    """Make a process group of each row of ``table``; return this rank's. Every rank must call it.

    PyTorch names a group by how many groups this process has made or, if only the group's own ranks make it
    (``use_local_synchronization``), by how many it belongs to. Ranks whose numbers differ wait for each other
    under different names, for ever. So all ranks make all groups here, and each belongs to exactly one.
    """
    if len(table) == 1:
        found = dist.group.WORLD
    else:
        limit = None if timeout_s is None else timedelta(seconds=timeout_s)
        found, _ = dist.new_subgroups_by_enumeration([list(row) for row in table], timeout=limit)
    assert found is not None
    return found


def check_processes(tensor_parallel_size: int, environment: Mapping[str, str] | None = None) -> None:
    """Check that the started processes have formed one group, and can be divided into models.

    Uses only this process's environment (``None``: `os.environ`), without waiting for other ranks; all ranks
    get the same result.

    Raises:
        MeshError: with what was expected and found, and the command to start with.
    """
    problem = _problem(tensor_parallel_size, os.environ if environment is None else environment)
    if problem is not None:
        raise MeshError([problem])


def check_innermost(group: dist.ProcessGroup, tensor_parallel_size: int) -> None:
    """Check that a group is a row of the mesh: tp ranks that follow one another, from a multiple of tp on.

    Raises:
        MeshError: the group is another one; the parallel layers take any group, only the mesh does not.
    """
    ranks = dist.get_process_group_ranks(group)
    first = min(ranks) // tensor_parallel_size * tensor_parallel_size
    expected = list(range(first, first + tensor_parallel_size))
    if ranks != expected:
        wanted = f"ranks {expected}: {tensor_parallel_size} that follow one another"
        hint = (
            "Pass no group, and the mesh builds its own. With ranks in another order give the groups "
            "to the parallel layers yourself (tensor_parallel_group, process_group)."
        )
        raise MeshError([Problem("tensor_parallel_group", wanted, f"ranks {ranks}", hint)])


def launch_command(num_processes: int, on_cpu: bool | None = None) -> str:
    """Return the shell command that starts a script in so many processes on this machine.

    ``on_cpu`` ``None``: if there is no accelerator. (``--cpu`` would start one process; a configuration with
    ``use_cpu`` alone would start separate trainings.)
    """
    without_accelerator = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    command = (
        f"accelerate launch --multi_gpu --num_processes {num_processes} --num_machines 1 "
        "--mixed_precision no --dynamo_backend no SCRIPT ARGUMENTS"
    )
    return f"{command} --use_cpu true" if without_accelerator else command


def _problem(size: int, environment: Mapping[str, str]) -> Problem | None:
    if size < 1:
        return Problem(_SIZE, "a whole number from 1 on", str(size), "1 switches tensor parallelism off.")
    started = started_processes(environment)
    is_initialized = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if is_initialized else 1
    if started > 1 and world_size == 1:
        return Problem(
            "torch.distributed",
            f"one group of the {started} processes that the launcher started (WORLD_SIZE={started})",
            "a process group of one" if is_initialized else "no process group",
            "Each process would train alone, and all would write to the same place. Start with: "
            f"{launch_command(started)}",
        )
    if not is_initialized:
        return Problem(
            "torch.distributed",
            "a process group",
            "none",
            f"Start with: {launch_command(max(size, 2))}. In a script of your own call "
            "torch.distributed.init_process_group() first.",
        )
    if size > world_size:
        return Problem(
            _SIZE,
            f"at most {world_size}, the number of processes",
            str(size),
            f"Start with: {launch_command(size)}, or set {_SIZE}: {world_size}. "
            "(accelerate launch --cpu --num_processes 2 starts one process, without a word.)",
        )
    if world_size % size:
        divisors = [divisor for divisor in range(1, world_size + 1) if world_size % divisor == 0]
        return Problem(
            _SIZE,
            f"a divisor of {world_size}, the number of processes: one of {', '.join(map(str, divisors))}",
            str(size),
            f"Or start a multiple of {size} processes: {launch_command(-(-world_size // size) * size)}",
        )
    return None


def started_processes(environment: Mapping[str, str]) -> int:
    """Return how many processes the launcher has started (``WORLD_SIZE``); 1 if it does not say."""
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 1


def started_together() -> bool:
    """Whether this process is one of several, by the process group or else by the launcher's environment."""
    in_group = dist.is_available() and dist.is_initialized()
    return (dist.get_world_size() if in_group else started_processes(os.environ)) > 1


def reject_independent_processes(num_processes: int) -> None:
    """Raise `MeshError` if the launcher started several processes and Accelerate sees one, ``num_processes``.

    Accelerate starts them so, without an error, on a machine without accelerator when its configuration says
    MULTI_GPU and the script does not set the CPU: independent trainings would write to the same folder.
    """
    started = started_processes(os.environ)
    if started > 1 and num_processes == 1:
        expected = f"one training in {started} processes (WORLD_SIZE={started})"
        found = f"{started} independent trainings of one process each"
        hint = f"Start with: {launch_command(started)} (or set ACCELERATE_USE_CPU=true on a CPU)."
        raise MeshError([Problem("launcher", expected, found, hint)])


def _device_type() -> str:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


class ShardedParameter(NamedTuple):
    """A parameter under FSDP2, under one of its names in one of its modules.

    Optimizers see the ``shard``; the module sees ``gathered`` while it runs (``None`` before the first
    gather).
    """

    module: nn.Module
    name: str
    shard: nn.Parameter
    gathered: nn.Parameter | None


def shard_over_data(model: nn.Module, layers: Iterable[nn.Module], mesh: DeviceMesh, **settings: Any) -> None:
    """Apply ``fully_shard`` to each layer and the model: it divides parameters by rows over the data axis.

    Args:
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
            for held in (held for group in parameter_groups(module) for held in group.fsdp_params):
                info, gathered = held._module_info, getattr(held, "_unsharded_param", None)
                yield ShardedParameter(info.module, info.param_name, held.sharded_param, gathered)
                for other, name in zip(info.shared_modules, info.shared_param_names, strict=True):
                    yield ShardedParameter(other, name, held.sharded_param, gathered)


def trained_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield each parameter that an optimizer of ``model`` sees (FSDP2: shards) once, also in a forward."""
    shards = {id(of.gathered): of.shard for of in sharded_parameters(model) if of.gathered is not None}
    found = (shards.get(id(parameter), parameter) for parameter in model.parameters())
    yield from {id(trained): trained for trained in found}.values()


def whole_over_data(tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor; a shard is gathered, for which every rank of the data axis must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor()


def sharded_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``whole``, which each rank has, if ``like`` is sharded; else ``whole``."""
    if not isinstance(like, DTensor) or isinstance(whole, DTensor):
        return whole
    device, mesh = like.to_local().device, like.device_mesh
    # No data are sent: each rank takes its own part.
    return distribute_tensor(whole.to(device), mesh, like.placements, src_data_rank=None)


def reject_tensor_axis(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raise MeshError if FSDP2 shards a patched model over ranks that hold different parts of it."""
    ours = set(dist.get_process_group_ranks(group))
    for found in sharded_parameters(model):
        if isinstance(found.shard, DTensor):
            shared = sorted(ours & set(found.shard.device_mesh.mesh.flatten().tolist()))
            if len(shared) > 1:
                hint = 'Pass fully_shard the data axis alone: mesh=build_mesh(..).device_mesh["dp_shard"].'
                problem = Problem("fully_shard", "a mesh of the data axis", f"ranks {shared} in it", hint)
                raise MeshError([problem])
