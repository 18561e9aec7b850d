"""Modules that keep attributes on their parameters, and modules that hold parts of full parameters.

Attributes of parameters say which gradients are summed, and how a norm counts a parameter (NxD's contract).
PyTorch loses them wherever it makes a new parameter object; here the module keeps them.

A module of another library, which keeps its class, can have parameters divided too: see `divide_parameter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn

from .group import group_or_enclosing
from .weights import Partition, like_parameter, whole_of_ranks


class HeldGroup:
    """Holds a module's process group: copies of the module share the group, a pickled module has none.

    Args:
        group: the group, if there is one.
    """

    __slots__ = ("group",)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldGroup:
        return self

    def __reduce__(self) -> tuple[type[HeldGroup], tuple[()]]:
        return HeldGroup, ()


class TaggedModule(nn.Module):
    """A module that puts attributes on its parameters again whenever these are made anew.

    They are made anew by ``to``, ``copy.deepcopy``, ``load_state_dict(assign=True)``, ``fully_shard`` (the
    shard and the gathered parameter) and by assignment.

    Attributes:
        tags: parameter name -> attributes.
    """

    tags: dict[str, dict[str, Any]]

    def tag(self, name: str, **tags: Any) -> None:
        """Keep attributes on the parameter ``name``, which may not be there yet."""
        every = self.__dict__.setdefault("tags", {})
        every[name] = {**every.get(name, {}), **tags}
        self._put_tags()

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 writes parameters past `nn.Module.__setattr__`, and so past the tags, unless it is overridden.
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self._put_tags()

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._put_tags()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._put_tags()

    def _put_tags(self) -> None:
        every: dict[str, dict[str, Any]] = self.__dict__.get("tags", {})  # nn.LayerNorm registers before
        for name, tags in every.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                vars(parameter).update(tags)


class ShardedModule(TaggedModule):
    """A module some of whose parameters are parts of full ones.

    Loading a full tensor (``load_state_dict``) takes the rank's part of it.

    Args:
        group: tensor-parallel group; ``None``: the enclosing one.

    Attributes:
        partitions: parameter name -> how it is divided.
    """

    partitions: dict[str, Partition]

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self._held_group = HeldGroup(group_or_enclosing(group))
        self.partitions = {}

    @property
    def tensor_model_parallel_group(self) -> dist.ProcessGroup:
        """The group; after unpickling that of a `tensor_parallel_group` (RuntimeError if there is none)."""
        group = self._held_group.group
        if group is None:
            group = group_or_enclosing(None)
            self._held_group = HeldGroup(group)
        return group

    def divide(self, name: str, partition: Partition) -> None:
        """Set how the parameter ``name`` is divided; the parameter need not exist yet."""
        self.partitions[name] = partition
        self.tag(name, **partition.tags)

    def full_parameter(self, name: str) -> torch.Tensor:
        """Return the full tensor of a parameter, without padding. Every rank of the group must call it."""
        tensor: torch.Tensor = self.get_parameter(name).detach()
        partition = self.partitions.get(name)
        if partition is None or partition.ranks == 1:
            return tensor.clone()
        return whole_of_ranks(tensor, partition, self.tensor_model_parallel_group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        cut_to_parts(self, state_dict, prefix, self.tensor_model_parallel_group.rank())
        super()._load_from_state_dict(state_dict, prefix, *args)


def partitions_in(module: nn.Module) -> dict[str, Partition]:
    """Return how a module's own parameters are divided, by name; the module may be of any class."""
    found: dict[str, Partition] = vars(module).get("partitions", {})
    return found


def divide_parameter(module: nn.Module, name: str, partition: Partition, rank: int) -> None:
    """Replace a parameter of any module by this rank's part; loading a full tensor then takes this part too.

    The caller must put the attributes (``partition.tags``) on the new parameter.
    """
    full = module.get_parameter(name)
    with torch.no_grad():
        module._parameters[name] = like_parameter(partition.part(full, rank), full)
    if "partitions" not in vars(module):
        vars(module)["partitions"] = {}
        module.register_load_state_dict_pre_hook(_CutToParts(rank))
    vars(module)["partitions"][name] = partition


def cut_to_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, rank: int) -> None:
    """Replace full tensors of a state dict by this rank's parts."""
    for name, partition in partitions_in(module).items():
        parameter, given = module._parameters.get(name), state_dict.get(prefix + name)
        if parameter is None or given is None or given.shape == parameter.shape:
            continue
        if partition.fits(given.shape):
            state_dict[prefix + name] = partition.part(given, rank)


class _CutToParts:
    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        cut_to_parts(module, state_dict, prefix, self._rank)
