"""Divides one block of a decoder layer: projections replaced in place, its input and heads seen to.

Replaced modules keep the names of their parameters, so that state dicts keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import Problem
from .adapters import (
    base_of,
    divide_column_adapters,
    divide_row_adapters,
    is_adapted,
    problems_of_adapter,
)
from .block_hooks import BlockInputHook, GatherHook
from .families import Block, Columns
from .layers import ColumnParallelLinear, RowParallelLinear
from .parallel_linear import ParallelLinear
from .parameter_tags import ParameterTags
from .sequence_region import SEQUENCE_DIM, LengthCheck, SequenceRegion
from .weights import Partition


@dataclass(frozen=True)
class Heads:
    """Attention heads of the whole model and the ranks that divide them."""

    query: int
    key_value: int
    ranks: int

    @classmethod
    def of(cls, config: Any, ranks: int) -> Heads:
        """Read them off the configuration of a text model."""
        query = config.num_attention_heads
        return cls(query, getattr(config, "num_key_value_heads", None) or query, ranks)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same key and value heads."""
        return max(self.ranks // self.key_value, 1)

    @property
    def own_query(self) -> int:
        """Query heads of one rank."""
        return self.query // self.ranks

    @property
    def own_key_value(self) -> int:
        """Key and value heads of one rank."""
        return max(self.key_value // self.ranks, 1)

    def problems(self) -> Iterator[Problem]:
        """Name what does not divide."""
        where = "parallel_config.tensor_parallel_size"
        if self.query % self.ranks:
            expected = f"a divisor of {self.query}, the number of attention heads (num_attention_heads)"
            yield Problem(where, expected, str(self.ranks))
        if self.key_value % self.ranks and self.ranks % self.key_value:
            expected = f"a divisor or a multiple of {self.key_value}, the number of key-value heads"
            yield Problem(where, f"{expected} (num_key_value_heads)", str(self.ranks))


class OwnHeadsConfig:
    """A configuration as one rank's attention reads it: with its own numbers of heads.

    Args:
        config: everything else is read from it.
        heads: whole numbers, and ranks.
    """

    def __init__(self, config: Any, heads: Heads) -> None:
        self._config = config
        self.num_attention_heads, self.num_key_value_heads = heads.own_query, heads.own_key_value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def problems_of_block(where: str, module: nn.Module, block: Block, heads: Heads) -> Iterator[Problem]:
    """Name what of a dense block is not understood, or does not divide."""
    understood: list[nn.Module] = []
    for name in (*block.columns, *block.rows, *block.summed):
        try:
            found = module.get_submodule(name)
        except AttributeError:
            yield Problem(f"{where}.{name}", "a module", "none")
            continue
        understood.append(found)
        if name in block.summed:
            continue
        base = base_of(found)
        if type(base) is not nn.Linear:
            yield Problem(f"{where}.{name}", "nn.Linear", type(base).__name__)
            continue
        yield from problems_of_adapter(f"{where}.{name}", found, name in block.rows)
        try:
            _partition(base, block.columns.get(name), heads)
        except ValueError as error:
            yield Problem(f"{where}.{name}", "a size that the ranks divide", str(error))
    known = {id(p) for found in understood for p in found.parameters()}
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            yield Problem(f"{where}.{name}", "a projection or a norm of heads", "a parameter without role")


def divide_block(
    layer: nn.Module, block: Block, heads: Heads, region: SequenceRegion, tags: ParameterTags
) -> None:
    """Divide a dense block of a layer in place."""
    module: Any = layer.get_submodule(block.path)
    readers: list[nn.Module] = []
    is_adapted_anywhere = False
    for name, kind in block.columns.items():
        target = module.get_submodule(name)
        full: Any = base_of(target)
        settings = {**_settings(region), **_division(full, kind, heads), "input_is_shared": True}
        column = ColumnParallelLinear.from_linear(full, **settings)
        _put(module, name, target, column, region)
        readers.append(column)
        if is_adapted(target):
            is_adapted_anywhere = True
            readers += divide_column_adapters(target, column, settings, region, tags)
    for name in block.rows:
        target = module.get_submodule(name)
        if is_adapted(target):
            region.adopt(divide_row_adapters(target, _settings(region), region, tags))
        else:
            _put(module, name, target, RowParallelLinear.from_linear(target, **_settings(region)), region)
    for name in block.summed:
        tags.add_summed(module.get_submodule(name))
    gather_input(layer, block, GatherHook(region, readers, layer, in_autocast_dtype=not is_adapted_anywhere))
    if block.is_attention:
        _count_own_heads(module, block, heads)
        module.register_forward_pre_hook(LengthCheck(), with_kwargs=True)


def gather_input(layer: nn.Module, block: Block, gather: GatherHook) -> None:
    """Put the gather where the block's input is made."""
    if block.norm is None:
        layer.get_submodule(block.path).register_forward_pre_hook(BlockInputHook(gather), with_kwargs=True)
    else:
        layer.get_submodule(block.norm).register_forward_hook(gather)


def _put(
    module: nn.Module, name: str, target: nn.Module, made: ParallelLinear, region: SequenceRegion
) -> None:
    region.adopt(made)
    if not is_adapted(target):
        parent, _, last = name.rpartition(".")
        module.get_submodule(parent)._modules[last] = made


def _settings(region: SequenceRegion) -> dict[str, Any]:
    return {
        "sequence_parallel_enabled": region.enabled,
        "sequence_dimension": SEQUENCE_DIM,
        "tensor_model_parallel_group": region.group,
        "reduce_dtype": region.reduce_dtype,
    }


def _division(full: nn.Linear, kind: Columns, heads: Heads) -> dict[str, Any]:
    """Arguments of a column-parallel layer."""
    if kind is Columns.KEY_VALUE:
        return {"replicas": heads.replicas}
    if kind is Columns.FUSED_PAIR:
        return {"sections": (full.out_features // 2,) * 2}
    if kind is Columns.FUSED_QKV:
        width = full.out_features // (heads.query + 2 * heads.key_value)
        sections = (heads.query * width, heads.key_value * width, heads.key_value * width)
        replicas = 1 if heads.replicas == 1 else (1, heads.replicas, heads.replicas)
        return {"sections": sections, "replicas": replicas}
    return {}


def _partition(full: nn.Linear, kind: Columns | None, heads: Heads) -> Partition:
    if kind is None:
        return Partition.of(1, full.in_features, heads.ranks)
    return Partition.of(0, full.out_features, heads.ranks, **_division(full, kind, heads))


def _count_own_heads(module: Any, block: Block, heads: Heads) -> None:
    """Let an attention module count its rank's heads. The model's configuration stays as it is."""
    for name, own in (
        ("num_key_value_groups", heads.own_query // heads.own_key_value),
        ("num_heads", heads.own_query),
        ("num_attention_heads", heads.own_query),
        ("num_key_value_heads", heads.own_key_value),
    ):
        if hasattr(module, name):
            setattr(module, name, own)
    if Columns.FUSED_QKV in block.columns.values():
        module.config = OwnHeadsConfig(module.config, heads)
