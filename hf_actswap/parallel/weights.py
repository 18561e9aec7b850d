"""Divides parameters among the ranks.

A `Partition` says which part of a full parameter a rank has. It cuts the full tensor when a layer is made or
loaded, and puts the ranks' parts together again when a model is saved.

Attributes of parameters say which gradients are summed, and how a norm counts a parameter (NxD's contract).
PyTorch drops them wherever it makes a parameter anew (``copy.deepcopy``, ``load_state_dict(assign=True)``,
FSDP2). So each module keeps those of its parameters by name (`tag`). A `TaggedModule` sets them again
itself. Norms and routed experts keep their own classes, which know nothing of them: `ParameterTags` sets
theirs again before each forward; under FSDP2 on the shards, which optimizers see. Such a module can have
parameters divided too (`divide_parameter`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .collectives import gathered, group_or_enclosing, summed_over_replicas
from .gradients import TAG
from .mesh import sharded_parameters

InitMethod = Callable[[torch.Tensor], object]
"""Fills a tensor in place, as the functions of ``torch.nn.init`` do."""


@dataclass(frozen=True)
class Partition:
    """How one dim of a full tensor is divided among the ranks.

    The dim consists of sections (of a fused weight: its q, k and v), and a rank holds a part of each, in the
    order of the sections. NxD's ``stride=k`` is k sections of equal size.

    Args:
        dim: the divided dim.
        sections: sizes of the sections in the full tensor.
        ranks: size of the tensor-parallel group.
        replicas: of each section, how many consecutive ranks hold the same part: with 2, ranks 0 and 1 hold
            the first part, ranks 2 and 3 the second. So key and value heads stay beside their query heads.
        padded: whether sizes that do not divide are filled up with zeros, to the same size on every rank.

    Raises:
        ValueError: a section does not divide.
    """

    dim: int
    sections: tuple[int, ...]
    ranks: int
    replicas: tuple[int, ...]
    padded: bool = False

    def __post_init__(self) -> None:
        if len(self.replicas) != len(self.sections):
            raise ValueError(
                f"{len(self.sections)} sections have {len(self.replicas)} numbers of replicas: give one each"
            )
        for size, replicas in zip(self.sections, self.replicas, strict=True):
            if replicas < 1 or self.ranks % replicas:
                raise ValueError(
                    f"{replicas} replicas do not divide {self.ranks} tensor-parallel ranks; "
                    "the number of ranks must be a multiple of the number of replicas"
                )
            if size % (self.ranks // replicas) and not self.padded:
                raise ValueError(
                    f"{size} in dim {self.dim} does not divide into {self.ranks // replicas} parts for "
                    f"{self.ranks} tensor-parallel ranks; choose a tensor_parallel_size that divides it"
                )

    @classmethod
    def of(
        cls,
        dim: int,
        size: int,
        ranks: int,
        stride: int = 1,
        sections: Sequence[int] | None = None,
        replicas: int | Sequence[int] = 1,
        padded: bool = False,
    ) -> Partition:
        """Return a partition with NxD's ``stride``, or with ``sections`` whose sizes add up to ``size``."""
        if sections is None:
            if size % stride:
                raise ValueError(f"stride={stride} does not divide {size} in dim {dim}")
            sections = (size // stride,) * stride
        if sum(sections) != size:
            raise ValueError(f"sections {list(sections)} add up to {sum(sections)}, not to {size}")
        counts = (replicas,) * len(sections) if isinstance(replicas, int) else tuple(replicas)
        return cls(dim, tuple(sections), ranks, counts, padded)

    @property
    def full_size(self) -> int:
        """Size of the dim in the full tensor, without padding."""
        return sum(self.sections)

    @property
    def local_sections(self) -> tuple[int, ...]:
        """Sizes of the parts of the sections, the same on every rank."""
        return tuple(
            -(-size // (self.ranks // replicas))
            for size, replicas in zip(self.sections, self.replicas, strict=True)
        )

    @property
    def local_size(self) -> int:
        """Size of the dim in a rank's part."""
        return sum(self.local_sections)

    @property
    def tags(self) -> dict[str, Any]:
        """NxD's attributes of a parameter with this division, and how many ranks hold the same part.

        ``replicated_over`` is there only if more than one rank does: an ``int``, or, if sections differ, a
        tuple with a pair (size of the part along the dim, number of ranks) for each section.
        """
        tags = {
            "tensor_model_parallel": True,
            "partition_dim": self.dim,
            "partition_stride": len(self.sections),
        }
        if max(self.replicas) == 1:
            return tags
        pairs = tuple(zip(self.local_sections, self.replicas, strict=True))
        return {**tags, "replicated_over": pairs if len(set(self.replicas)) > 1 else self.replicas[0]}

    def part(self, full: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a full tensor, in a storage of its own."""
        parts, start = [], 0
        for size, local, replicas in zip(self.sections, self.local_sections, self.replicas, strict=True):
            first = min(rank // replicas * local, size)
            held = full.narrow(self.dim, start + first, min(local, size - first))
            parts.append(held)
            if held.shape[self.dim] < local:
                shape = list(full.shape)
                shape[self.dim] = local - held.shape[self.dim]
                parts.append(full.new_zeros(shape))
            start += size
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, self.dim)

    def whole(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the full tensor, without padding, from the parts of all ranks in order."""
        pieces = [part.split(list(self.local_sections), self.dim) for part in parts]
        sections = [
            torch.cat([piece[number] for piece in pieces[::replicas]], self.dim).narrow(self.dim, 0, size)
            for number, (size, replicas) in enumerate(zip(self.sections, self.replicas, strict=True))
        ]
        return torch.cat(sections, self.dim)

    def fits(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape has the full size along the dim, without padding."""
        return self.dim < len(shape) and shape[self.dim] == self.full_size


def initial_part(
    shape: Sequence[int],
    partition: Partition | None,
    rank: int,
    init_method: InitMethod,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a rank's part of a newly initialised tensor, and the full one.

    The full tensor is drawn from the CPU's default generator in (at least) float32, cast and then cut, so
    that from the same seed a model has the same weights at any number of ranks, bitwise. On the meta device
    nothing is drawn, and there is no full tensor.
    """
    dtype = dtype or torch.get_default_dtype()
    device = torch.get_default_device() if device is None else torch.device(device)
    if device.type == "meta":
        local = list(shape)
        if partition is not None:
            local[partition.dim] = partition.local_size
        return torch.empty(local, dtype=dtype, device=device), None
    full = torch.empty(list(shape), dtype=torch.promote_types(dtype, torch.float32), device="cpu")
    with torch.no_grad():
        init_method(full)
    full = full.to(dtype)
    part = full if partition is None else partition.part(full, rank)
    return part.to(device), full


def kaiming_weight(weight: torch.Tensor) -> torch.Tensor:
    return nn.init.kaiming_uniform_(weight, a=math.sqrt(5))


def uniform_bias(input_size: int) -> InitMethod:
    bound = 1 / math.sqrt(input_size) if input_size else 0.0
    return lambda bias: bias.uniform_(-bound, bound)


def like_parameter(part: torch.Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """Return ``part`` as a parameter with the attributes and ``requires_grad`` of ``parameter``."""
    made = nn.Parameter(part, requires_grad=parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made


def whole_of_ranks(part: torch.Tensor, partition: Partition, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the full tensor of which each rank passes its ``part``. Every rank of the group must call it."""
    return partition.whole(list(gathered(part.unsqueeze(0), 0, group)))


def with_summed_gradient(weight: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return ``weight``; if ranks hold replicas of it, the replicas' gradients are summed in backward.

    Each rank with a replica computes a share of the gradient (from the query heads that it holds). After the
    sum the gradient is complete, and bitwise the same for all replicas, so that they stay alike.
    """
    replicated: int | tuple[tuple[int, int], ...] = getattr(weight, "replicated_over", 1)
    if replicated == 1 or not (torch.is_grad_enabled() and weight.requires_grad):
        return weight
    dim: int = getattr(weight, "partition_dim", 0)
    pairs = ((weight.shape[dim], replicated),) if isinstance(replicated, int) else replicated
    return _SumOverReplicas.apply(weight, dim, pairs, group)


class _SumOverReplicas(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: torch.Tensor,
        dim: int,
        pairs: tuple[tuple[int, int], ...],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.dim, ctx.pairs, ctx.group = dim, pairs, group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        parts = gradient.split([size for size, _ in ctx.pairs], ctx.dim)
        summed = [
            part if replicas == 1 else summed_over_replicas(part, replicas, ctx.group)
            for part, (_, replicas) in zip(parts, ctx.pairs, strict=True)
        ]
        return summed[0] if len(summed) == 1 else torch.cat(summed, ctx.dim), None, None, None


class HeldGroup:
    """Holds a module's process group: copies of the module share the group, a pickled module has none."""

    __slots__ = ("group",)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> HeldGroup:
        return self

    def __reduce__(self) -> tuple[type[HeldGroup], tuple[()]]:
        return HeldGroup, ()


def tag(module: nn.Module, name: str, **tags: Any) -> None:
    """Keep attributes on the parameter ``name`` of a module of any class; it may not be there yet."""
    every = vars(module).setdefault("parameter_tags", {})
    every[name] = {**every.get(name, {}), **tags}
    _put_tags(module, module._parameters)


def tag_summed(module: nn.Module) -> None:
    """Tag all parameters of ``module``, submodules included: each rank has a part of their gradients."""
    for inner in module.modules():
        for name in inner._parameters:
            tag(inner, name, **{TAG: True})


def _tags_of(module: nn.Module) -> dict[str, dict[str, Any]]:
    return vars(module).get("parameter_tags", {})


def _put_tags(module: nn.Module, parameters: Mapping[str, nn.Parameter | None]) -> None:
    for name, tags in _tags_of(module).items():
        parameter = parameters.get(name)
        if parameter is not None:
            vars(parameter).update(tags)


class TaggedModule(nn.Module):
    """A module that puts attributes (`tag`) on its parameters again whenever these are made anew.

    They are made anew by ``to``, ``copy.deepcopy``, ``load_state_dict(assign=True)``, ``fully_shard`` (the
    shard and the gathered parameter) and by assignment.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 writes parameters past `nn.Module.__setattr__`, and so past the tags, unless it is overridden.
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        _put_tags(self, self._parameters)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        _put_tags(self, self._parameters)
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _put_tags(self, self._parameters)


class ShardedModule(TaggedModule):
    """A module some of whose parameters are parts of full ones.

    Loading a full tensor (``load_state_dict``) takes the rank's part of it. ``partitions``: parameter name ->
    how it is divided.
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
        tag(self, name, **partition.tags)

    def take(self, full: nn.Module) -> Self:
        """Take the rank's parts of a full module's parameters, and its training mode; return this module."""
        rank = self.tensor_model_parallel_group.rank()
        for name, parameter in full.named_parameters(recurse=False):
            partition = self.partitions.get(name)
            with torch.no_grad():
                part = parameter.clone() if partition is None else partition.part(parameter, rank)
            setattr(self, name, like_parameter(part, parameter))
        return self.train(full.training)

    def full_parameter(self, name: str) -> torch.Tensor:
        """Return the full tensor of a parameter, without padding. Every rank of the group must call it."""
        tensor: torch.Tensor = self.get_parameter(name).detach()
        partition = self.partitions.get(name)
        if partition is None or partition.ranks == 1:
            return tensor.clone()
        return whole_of_ranks(tensor, partition, self.tensor_model_parallel_group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        cut_to_parts(self, state_dict, prefix, rank=self.tensor_model_parallel_group.rank())
        super()._load_from_state_dict(state_dict, prefix, *args)


def partitions_in(module: nn.Module) -> dict[str, Partition]:
    """Return how a module's own parameters are divided, by name; the module may be of any class."""
    return vars(module).get("partitions", {})


def divide_parameter(module: nn.Module, name: str, partition: Partition, rank: int) -> None:
    """Replace a parameter of any module by this rank's part, also of a full tensor that is loaded."""
    full = module.get_parameter(name)
    with torch.no_grad():
        module._parameters[name] = like_parameter(partition.part(full, rank), full)
    if "partitions" not in vars(module):
        vars(module)["partitions"] = {}
        module.register_load_state_dict_pre_hook(partial(cut_to_parts, rank=rank))
    vars(module)["partitions"][name] = partition
    tag(module, name, **partition.tags)


def cut_to_parts(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any, rank: int) -> None:
    for name, partition in partitions_in(module).items():
        parameter, given = module._parameters.get(name), state_dict.get(prefix + name)
        if parameter is None or given is None or given.shape == parameter.shape:
            continue
        if partition.fits(given.shape):
            state_dict[prefix + name] = partition.part(given, rank)


class ParameterTags:
    """Puts the attributes of a model's parameters on again, where nothing else does (`TaggedModule`)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tagged: list[nn.Module] | None = None

    def put(self, anew: bool = False) -> None:
        """Put all attributes on again; ``anew``: modules may have been tagged since the last time."""
        if anew or self._tagged is None:
            found = (module for module in self._model.modules() if _tags_of(module))
            self._tagged = [module for module in found if not isinstance(module, TaggedModule)]
        is_sharded = isinstance(self._model, FSDPModule)
        for module in self._tagged:
            _put_tags(module, module._parameters)
            is_sharded = is_sharded or any(isinstance(p, DTensor) for p in module._parameters.values())
        if is_sharded:
            shards: defaultdict[int, dict[str, nn.Parameter | None]] = defaultdict(dict)
            for of in sharded_parameters(self._model):
                shards[id(of.module)][of.name] = of.shard
            for module in self._tagged:
                _put_tags(module, shards[id(module)])
