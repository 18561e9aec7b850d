"""Names an optimizer's parameters, and converts its state between whole tensors and this rank's parts.

The state on disk is what PyTorch's optimizer writes of an undivided model: whole tensors, numbered in the
order of the groups. Any number of ranks can read it, and so can a plain Trainer in one process. Each group
also has the parameters' names (``param_names``, PyTorch's key): states are matched by name if it is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..parallel.data_sharding import sharded_as, whole_over_data
from ..parallel.full_state import Progress, partitions_of, with_progress
from ..parallel.patch_model import Patched
from ..parallel.weights import Partition, whole_of_ranks

Names = list[list[str]]
"""Names of the parameters of each group, in the optimizer's order."""


def names_of_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> Names:
    """Return the names under which a model has an optimizer's parameters.

    Raises:
        ValueError: the optimizer has a parameter that is not in the model.
    """
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = [
        list(p.shape) for group in optimizer.param_groups for p in group["params"] if id(p) not in by_id
    ]
    if missing:
        raise ValueError(
            f"the optimizer has {len(missing)} parameters (the first of shape {missing[0]}) that are not the "
            "model's: build it on the model that is trained, and divide the model before or together with it"
        )
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def rebind(optimizer: torch.optim.Optimizer, names: Names, model: nn.Module) -> None:
    """Replace an optimizer's parameters by the model's present ones of the same names.

    Raises:
        ValueError: the optimizer already has state, which is of its earlier parameters.
    """
    if any(optimizer.state.values()):
        raise ValueError("the optimizer has made steps on the whole model: give one without state")
    present = dict(model.named_parameters())
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        group["params"] = [present[name] for name in of_group]
    optimizer.state.clear()


def full_optimizer_state(
    optimizer: torch.optim.Optimizer, patched: Patched, keeps: bool, progress: Progress | None = None
) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with whole tensors on the CPU. Every rank must call it.

    Under FSDP2 the ranks of all data-parallel models must call it.

    Args:
        optimizer: PyTorch's optimizer of the patched model.
        patched: the divided model.
        keeps: whether this rank gets the result; other ranks only take part, and get an empty dict.
        progress: called with (bytes gathered, bytes in total) of this rank's tensors.

    Raises:
        ValueError: a state entry of a divided parameter is neither a number nor of the parameter's shape.
        RuntimeError: ranks have states of different parameters.
    """
    state = optimizer.state_dict()
    names = names_of_parameters(patched.model, optimizer)
    partitions = dict(partitions_of(patched.model))
    _reject_differences(state["state"], patched.group)
    whole: dict[int, dict[str, Any]] = {}
    kept: list[tuple[int, str, torch.Tensor, Mapping[str, Any]]] = []
    for saved, of_group, group in zip(state["param_groups"], names, optimizer.param_groups, strict=True):
        saved["param_names"] = list(of_group)
        for index, name, parameter in zip(saved["params"], of_group, group["params"], strict=True):
            if index in state["state"]:
                kept.append((index, name, parameter, state["state"][index]))
    for index, name, parameter, entries in with_progress(
        kept, [_bytes_of(item[-1]) for item in kept], progress
    ):
        partition = partitions.get(name)
        found = {
            key: gathered_entry(value, f"{name}: {key}", parameter.shape, partition, patched.group)
            for key, value in entries.items()
        }
        if keeps:
            whole[index] = found
    return {"state": whole, "param_groups": state["param_groups"]} if keeps else {}


def own_optimizer_state(
    optimizer: torch.optim.Optimizer, patched: Patched, full: Mapping[str, Any]
) -> dict[str, Any]:
    """Return this rank's ``state_dict`` for an optimizer, from one with whole tensors.

    Args:
        optimizer: PyTorch's optimizer of the patched model.
        patched: the divided model.
        full: what `full_optimizer_state` returned, or the state of an optimizer of the undivided model.

    Raises:
        ValueError: groups or shapes of ``full`` do not fit the model.
    """
    names = names_of_parameters(patched.model, optimizer)
    partitions = dict(partitions_of(patched.model))
    groups, rank = full["param_groups"], patched.group.rank()
    if [len(group["params"]) for group in groups] != [len(of_group) for of_group in names]:
        sizes = [len(group["params"]) for group in groups], [len(of_group) for of_group in names]
        raise ValueError(f"optimizer state of parameter groups of {sizes[0]} parameters, expected {sizes[1]}")
    own: dict[int, dict[str, Any]] = {}
    made, count = [], 0
    for saved, of_group, group in zip(groups, names, optimizer.param_groups, strict=True):
        index_of = dict(zip(saved.get("param_names", of_group), saved["params"], strict=True))
        unknown = sorted(set(of_group) - set(index_of))
        if unknown:
            raise ValueError(
                f"no optimizer state of {unknown[0]} (and {len(unknown) - 1} others) in its group"
            )
        indices = list(range(count, count + len(of_group)))
        count += len(of_group)
        for index, name, parameter in zip(indices, of_group, group["params"], strict=True):
            entries = full["state"].get(index_of[name])
            if entries is not None:
                own[index] = {
                    key: _shard(
                        shard_of_entry(value, f"{name}: {key}", parameter.shape, partitions.get(name), rank),
                        parameter,
                    )
                    for key, value in entries.items()
                }
        made.append({**{k: v for k, v in saved.items() if k != "param_names"}, "params": indices})
    return {"state": own, "param_groups": made}


def _bytes_of(entries: Mapping[str, Any]) -> int:
    return sum(value.nbytes for value in entries.values() if isinstance(value, torch.Tensor))


def gathered_entry(
    value: Any, what: str, shape: torch.Size, partition: Partition | None, group: dist.ProcessGroup | None
) -> Any:
    """Return an entry of an optimizer's state whole, on the CPU; every rank of the group must call it.

    Args:
        value: this rank's entry: a tensor of its parameter's shape, or a number.
        what: name of the entry, for errors.
        shape: shape of the parameter on this rank.
        partition: how the parameter is divided; ``None``: every rank has it whole.
        group: tensor-parallel group; ``None``: nothing is divided.

    Raises:
        ValueError: the parameter is divided, and the tensor has another shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = whole_over_data(value.detach())
    if partition is None or group is None or value.dim() == 0:
        return value.cpu().clone()
    if value.shape != shape:
        raise ValueError(f"{what}: expected the parameter's shape {list(shape)}, found {list(value.shape)}")
    return whole_of_ranks(value, partition, group).cpu().clone()


def shard_of_entry(value: Any, what: str, shape: torch.Size, partition: Partition | None, rank: int) -> Any:
    """Return a rank's part of what `gathered_entry` returned.

    Raises:
        ValueError: ``value`` does not have the shape of the whole parameter.
    """
    if not isinstance(value, torch.Tensor) or partition is None or value.dim() == 0:
        return value
    if not partition.fits(value.shape):
        expected = f"{partition.full_size} in dim {partition.dim}"
        raise ValueError(f"{what}: expected {expected}, found {list(value.shape)}")
    part = partition.part(value, rank)
    if part.shape != shape:
        raise ValueError(f"{what}: expected a part of shape {list(shape)}, found {list(part.shape)}")
    return part


def _shard(value: Any, parameter: torch.Tensor) -> Any:
    """Return this rank's FSDP2 shard of a tensor of its parameter's shape; any other value unchanged."""
    same = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == parameter.shape
    return sharded_as(value, parameter) if same else value


def _reject_differences(state: Mapping[int, Mapping[str, Any]], group: dist.ProcessGroup) -> None:
    """Raise on every rank if ranks would gather different tensors, and so wait for each other for ever."""
    own = [(index, sorted(entries)) for index, entries in sorted(state.items())]
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    if any(of_rank != own for of_rank in found):
        counts = [len(of_rank) for of_rank in found]
        raise RuntimeError(f"ranks have optimizer states of different parameters (numbers: {counts})")
