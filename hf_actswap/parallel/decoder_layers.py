"""Divides the layers of a decoder: the projections of each block, and the modules between the blocks.

Replaced modules keep the names of their parameters, so the names in state dicts do not change.

Outside its blocks a layer has three kinds of modules. Norms, further linear layers and the residual stream
work token by token: under sequence parallelism on this rank's tokens, so that their parameters are tagged.
Modules that may mix tokens and are not divided (a state-space mixer) get the whole sequence. For routed
experts each rank routes its own tokens, and computes its part of the experts for the tokens of all ranks.

**A rank computes a share of a block's output**: it has a part of the features, the row-parallel projection
multiplies this part, and the ranks' shares are summed. So in backward the gradients of all other parameters
in the block (norms of heads, low-rank projections, routers, activations) are shares too. Backward is linear,
so shares pass through these modules like whole gradients. They are summed in the end: the input's gradient by
its communication, the gradients of whole parameters once per step, because they are tagged.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..errors import Problem
from .block_hooks import (
    BlockInputHook,
    GatherHook,
    HeadArgumentsHook,
    RankStreamHooks,
    ReduceHook,
    SharesCheck,
    WholeBlockHooks,
    WideNormHooks,
)
from .families import COUNTS, EXPERTS, FAMILIES, Block, Columns, Family
from .gradients import TAG
from .layers import (
    ColumnParallelLinear,
    GatheredColumns,
    ParallelLinear,
    RowParallelLinear,
    SplitRow,
    sizes_of,
)
from .routed_experts import divide_experts, experts_of, problems_of_experts
from .sequence_region import (
    SEQUENCE_DIM,
    LengthCheck,
    ScatterHook,
    SequenceRegion,
    TagAfterLayersHook,
    WholeAgainHook,
)
from .tensor_plan import (
    SharedInputLinear,
    UnreducedRowLinear,
    base_of,
    blocks_of,
    divide_column_adapters,
    divide_row_adapters,
    found_at,
    is_adapted,
    is_linear,
    plan_of,
    problems_of_adapter,
    undivided_expert_parents,
    wide_norms,
)
from .weights import ParameterTags, Partition, divide_parameter, partitions_in, tag, tag_summed


@dataclass(frozen=True)
class Heads:
    """Numbers of attention heads of a whole block, and of the ranks that divide them.

    In a block without attention each rank is one head.
    """

    query: int
    key_value: int
    ranks: int

    @classmethod
    def of(cls, config: Any, layer: nn.Module, block: Block, ranks: int) -> Heads:
        if not block.is_attention:
            return cls(ranks, ranks, ranks)
        module: Any = layer.get_submodule(block.path)
        groups, head_dim = getattr(module, "num_key_value_groups", None), getattr(module, "head_dim", None)
        key = base_of(getattr(module, "k_proj", module))
        keys = key.out_features // head_dim if head_dim and isinstance(key, nn.Linear) else None
        if groups and keys:
            return cls(keys * groups, keys, ranks)
        query = _counted(module, "query") or config.num_attention_heads
        key_value = _counted(module, "key_value") or keys or (query // groups if groups else None)
        return cls(query, key_value or getattr(config, "num_key_value_heads", None) or query, ranks)

    @property
    def replicas(self) -> int:
        """Number of ranks that hold the same key and value heads."""
        return max(self.ranks // self.key_value, 1)

    @property
    def own_query(self) -> int:
        return self.query // self.ranks

    @property
    def own_key_value(self) -> int:
        return max(self.key_value // self.ranks, 1)

    def problems(self) -> Iterator[Problem]:
        where = "parallel_config.tensor_parallel_size"
        if self.query % self.ranks:
            expected = f"a divisor of {self.query}, the number of attention heads (num_attention_heads)"
            yield Problem(where, expected, str(self.ranks))
        if self.key_value % self.ranks and self.ranks % self.key_value:
            expected = f"a divisor or a multiple of {self.key_value}, the number of key-value heads"
            yield Problem(where, f"{expected} (num_key_value_heads)", str(self.ranks))

    def settings(self, size: int, kind: Columns) -> dict[str, Any]:
        """Return the arguments for a column-parallel layer of ``size`` output features.

        Raises:
            ValueError: each head has its q, k and v side by side, and the ranks do not divide the heads.
        """
        if kind is Columns.KEY_VALUE:
            return {"replicas": self.replicas}
        if kind is Columns.FUSED_PAIR:
            return {"sections": (size // 2,) * 2}
        if kind is Columns.FUSED_QKV or (kind is Columns.FUSED_HEADS and self.key_value == 1):
            width = size // (self.query + 2 * self.key_value)
            sections = (self.query * width, self.key_value * width, self.key_value * width)
            replicas = 1 if self.replicas == 1 else (1, self.replicas, self.replicas)
            return {"sections": sections, "replicas": replicas}
        if kind is Columns.FUSED_HEADS and self.key_value % self.ranks:
            raise ValueError(
                f"{self.key_value} key-value heads, each beside its queries, on {self.ranks} ranks"
            )
        return {}

    def partition(self, dim: int, size: int, kind: Columns | None) -> Partition:
        """Return how ``size`` features are divided: output features by ``kind``; ``None``: input features."""
        return Partition.of(dim, size, self.ranks, **({} if kind is None else self.settings(size, kind)))


class OwnHeadsConfig:
    """A configuration as one rank's attention reads it: with its own numbers of heads."""

    def __init__(self, config: Any, heads: Heads) -> None:
        self._config = config
        self.num_attention_heads, self.num_key_value_heads = heads.own_query, heads.own_key_value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)


def problems_of_block(where: str, layer: nn.Module, block: Block, heads: Heads) -> Iterator[Problem]:
    """Yield a problem for each part of a dense block of a layer (named ``where``) that cannot be divided."""
    yield from heads.problems()
    for name, (dim, parts) in block.parameters.items():
        try:
            Partition.of(dim, found_at(layer, name).shape[dim], heads.ranks, parts)
        except ValueError as error:
            yield Problem(f"{where}.{name}", "a size that the ranks divide", str(error))
    for name in (*block.columns, *block.rows):
        found: Any = found_at(layer, name)
        if isinstance(found, nn.Module) and not is_linear(found):
            yield Problem(f"{where}.{name}", "nn.Linear", type(base_of(found)).__name__)
            continue
        if isinstance(found, nn.Module):
            yield from problems_of_adapter(f"{where}.{name}", found, name in block.rows)
            if block.sums_output and name in block.rows and base_of(found).bias is not None:
                yield Problem(f"{where}.{name}", "a projection without bias", "one with bias")
        kind = block.columns.get(name)
        try:
            if isinstance(found, nn.Parameter):
                size = len(found)
            else:
                size = sizes_of(base_of(found))[0 if kind is None else 1]
            heads.partition(0, size, kind)
        except ValueError as error:
            yield Problem(f"{where}.{name}", "a size that the ranks divide", str(error))


def divide_block(layer: nn.Module, block: Block, heads: Heads, region: SequenceRegion) -> None:
    is_split = Columns.GATHERED in block.columns.values()
    wide = [] if is_split else wide_norms(layer, block.path)
    is_adapted_anywhere = any(is_adapted(found_at(layer, name)) for name in block.columns)
    readers = _divide_columns(layer, block, heads, region)
    rows = list(_divide_rows(layer, block, is_split, region))
    for name, (dim, parts) in block.parameters.items():
        partition = Partition.of(dim, found_at(layer, name).shape[dim], heads.ranks, parts)
        _divide_parameter(layer, name, partition, region)
    shared, whole = _share_rest(layer, block, region)
    gather = GatherHook(region, readers + shared, layer, in_autocast_dtype=not is_adapted_anywhere)
    module = layer.get_submodule(block.path)
    if block.norm is None:
        module.register_forward_pre_hook(BlockInputHook(gather), with_kwargs=True)
    else:
        layer.get_submodule(block.norm).register_forward_hook(gather)
    for row in rows:
        row.tokens = gather.tokens
    if block.sums_output:
        module.register_forward_hook(ReduceHook(region, gather.tokens))
    if whole and all(row.startswith(f"{block.path}.") for row in block.rows):
        module.register_forward_hook(SharesCheck(block.path, whole))
    if block.is_attention and not is_split:
        _count_own_heads(module, heads, rows[0].input_size, region)
    for name in wide:
        replicas = heads.replicas if name == "k_norm" else 1
        WideNormHooks(region, replicas).attach(module.get_submodule(name))


def _divide_columns(layer: nn.Module, block: Block, heads: Heads, region: SequenceRegion) -> list[nn.Module]:
    """Divide the projections that read the block's input; return their linear layers."""
    readers: list[nn.Module] = []
    for name, kind in block.columns.items():
        target: Any = found_at(layer, name)
        if isinstance(target, nn.Parameter):
            _divide_parameter(layer, name, heads.partition(0, len(target), kind), region)
            continue
        full = base_of(target)
        own = heads.settings(sizes_of(full)[1], kind)
        settings = {**_settings(region), **own, "input_is_shared": True}
        layer_class = GatheredColumns if kind is Columns.GATHERED else ColumnParallelLinear
        column = layer_class.from_linear(full, **settings)
        _put(layer, name, target, column, region)
        readers.append(column)
        if is_adapted(target):
            readers += divide_column_adapters(target, column, settings, region)
    return readers


def _divide_rows(
    layer: nn.Module, block: Block, is_split: bool, region: SequenceRegion
) -> Iterator[RowParallelLinear]:
    row_class = UnreducedRowLinear if block.sums_output else SplitRow if is_split else RowParallelLinear
    for name in block.rows:
        target = layer.get_submodule(name)
        if is_adapted(target):
            row: RowParallelLinear = divide_row_adapters(target, _settings(region), region)
            region.adopt(row)
        else:
            row = row_class.from_linear(target, **_settings(region))
            _put(layer, name, target, row, region)
        yield row


def _share_rest(
    layer: nn.Module, block: Block, region: SequenceRegion
) -> tuple[list[nn.Module], list[tuple[nn.Module, str]]]:
    """Tag the parameters of the block outside its projections; return them with their modules.

    Before them come the linear layers outside the projections, which may read the block's input.
    """
    readers: list[nn.Module] = []
    whole: list[tuple[nn.Module, str]] = []
    module = layer.get_submodule(block.path)
    for name, inner in list(module.named_modules()):
        if name and type(inner) is nn.Linear and not _is_adapter_part(module, name):
            shared = SharedInputLinear(inner, region).train(inner.training)
            module.set_submodule(name, shared)
            readers.append(shared)
            inner = shared
        if not isinstance(inner, ParallelLinear):
            held = [
                n for n, p in inner._parameters.items() if p is not None and n not in partitions_in(inner)
            ]
            whole += [(inner, own) for own in held]
    for inner, own in whole:
        tag(inner, own, **{TAG: True})
    return readers, whole


def _is_adapter_part(module: nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(is_adapted(module.get_submodule(".".join(parts[:end]))) for end in range(1, len(parts)))


def _divide_parameter(layer: nn.Module, name: str, partition: Partition, region: SequenceRegion) -> None:
    parent, _, last = name.rpartition(".")
    divide_parameter(layer.get_submodule(parent), last, partition, region.group.rank())


def _put(
    layer: nn.Module, name: str, target: nn.Module, made: ParallelLinear, region: SequenceRegion
) -> None:
    region.adopt(made)
    if not is_adapted(target):
        layer.set_submodule(name, made)


def _settings(region: SequenceRegion) -> dict[str, Any]:
    return {
        "sequence_parallel_enabled": region.enabled,
        "sequence_dimension": SEQUENCE_DIM,
        "tensor_model_parallel_group": region.group,
        "reduce_dtype": region.reduce_dtype,
    }


def _count_own_heads(module: Any, heads: Heads, features: int, region: SequenceRegion) -> None:
    """Set an attention module's numbers of heads to those of its rank, but not the model's configuration."""
    counts = {
        "query": (heads.query, heads.own_query),
        "key_value": (heads.key_value, heads.own_key_value),
        "groups": (heads.query // heads.key_value, heads.own_query // heads.own_key_value),
        "query features": (features, features // heads.ranks),
        "key_value features": (
            features // heads.query * heads.key_value,
            features // heads.query * heads.own_key_value,
        ),
    }
    for name, of in COUNTS.items():
        whole, own = counts[of]
        if getattr(module, name, None) == whole:
            setattr(module, name, own)
    if hasattr(module, "config"):
        module.config = OwnHeadsConfig(module.config, heads)
    module.register_forward_pre_hook(LengthCheck(), with_kwargs=True)
    module.register_forward_pre_hook(HeadArgumentsHook(module, heads.query, region), with_kwargs=True)


def _counted(module: Any, what: str) -> int | None:
    found = (getattr(module, name, None) for name, of in COUNTS.items() if of == what)
    return next((number for number in found if isinstance(number, int)), None)


@dataclass(frozen=True)
class Decoder:
    """Where a language model has its layers.

    Args:
        base: the decoder without head, which is called with ids.
        stacks: its lists of layers, by path in ``base``.
        family: what is known of the model's family.
        plan: from `plan_of`.
    """

    base: Any
    stacks: Mapping[str, nn.ModuleList]
    family: Family
    plan: Mapping[str, str]

    @classmethod
    def of(cls, root: Any) -> Decoder:
        base = _base_of(root)
        config = getattr(base, "config", root.config)
        family, plan = FAMILIES.get(config.model_type, Family()), plan_of(config)
        lists = {path: found for path, found in base.named_modules() if _is_list(found)}
        stacks = {
            path: found
            for path, found in lists.items()
            if not any(path.startswith(f"{other}.") for other in lists)
            and any(blocks_of(layer, plan, family) or experts_of(layer) for layer in found)
        }
        return cls(base, stacks, family, plan)

    @property
    def layers(self) -> list[nn.Module]:
        return list(dict.fromkeys(layer for stack in self.stacks.values() for layer in stack))

    def blocks(self, layer: nn.Module) -> list[Block]:
        return blocks_of(layer, self.plan, self.family)

    def parameters_between(self, root: Any) -> list[str]:
        """Return the names of the parameters that are neither the decoder's nor the head's."""
        known = {id(p) for p in self.base.parameters()}
        head = root.get_output_embeddings()
        known |= {id(p) for p in head.parameters()} if isinstance(head, nn.Module) else set()
        return [name for name, p in root.named_parameters() if id(p) not in known]

    def around(self) -> Iterator[tuple[nn.Module, bool]]:
        """Yield modules with parameters outside the layers, and whether each is registered after them."""
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        behind = False
        for module in self.base.modules():
            behind = behind or id(module) in inside
            if id(module) not in inside and module._parameters:
                yield module, behind and not isinstance(module, nn.Embedding)


def _base_of(root: Any) -> nn.Module:
    named = root.get_decoder() if hasattr(root, "get_decoder") else None
    children = [child for child in root.children() if any(map(_is_list, child.modules()))]
    for found in (named, getattr(root, root.base_model_prefix, None), *children):
        if isinstance(found, nn.Module) and found is not root and any(map(_is_list, found.modules())):
            return getattr(found, "language_model", found)
    return root


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList)


def problems_of_decoder(model: nn.Module, decoder: Decoder, region: SequenceRegion) -> Iterator[Problem]:
    """Yield a problem for each part that cannot be divided; names of layers are paths in ``model``."""
    names = {id(module): name for name, module in model.named_modules()}
    ranks = region.group.size()
    found: dict[Problem, None] = {}
    for name, value in decoder.family.settings.items():
        if (present := getattr(decoder.base.config, name, value)) != value:
            expected = f"{name}={value!r} where layers are divided"
            hint = f"Load the model with {name}={value!r}."
            yield Problem(f"model.config.{name}", expected, repr(present), hint)
    for layer in decoder.layers:
        for block in decoder.blocks(layer):
            heads = Heads.of(decoder.base.config, layer, block, ranks)
            found.update(dict.fromkeys(problems_of_block(names[id(layer)], layer, block, heads)))
        for path in experts_of(layer):
            found.update(dict.fromkeys(problems_of_experts(names[id(layer)], layer, path, ranks)))
    yield from found
    if region.enabled and (why_not := _why_no_sequence(decoder)):
        hint = "Set sequence_parallel_enabled: false."
        yield Problem(
            "parallel_config.sequence_parallel_enabled", "layers that take parts of a sequence", why_not, hint
        )


def _why_no_sequence(decoder: Decoder) -> str:
    if decoder.family.no_sequence:
        return decoder.family.no_sequence
    if len(decoder.stacks) > 1:
        return f"several lists of layers ({', '.join(decoder.stacks)})"
    if any("" in undivided_expert_parents(layer, decoder.family) for layer in decoder.layers):
        return "routed experts of an unknown kind that are the layer's own"
    return ""


def divide_layers(decoder: Decoder, region: SequenceRegion, tags: ParameterTags) -> None:
    """Divide all layers in place, and cut the sequence before the first."""
    drops = any(
        isinstance(value, float) and value > 0
        for module in decoder.base.modules()
        for name, value in vars(module).items()
        if "drop" in name or isinstance(module, nn.Dropout)
    )
    seen: set[int] = set()
    for layer in decoder.layers:
        _divide_layer(layer, decoder, region, drops, seen)
        seen.update(map(id, layer.modules()))
    if not region.enabled:
        return
    for module, is_behind in decoder.around():
        module.register_forward_pre_hook(TagAfterLayersHook(module, is_behind, region, tags))
    family = decoder.family
    for place, layer in enumerate(decoder.layers):
        if place == 0 or family.token_arguments:
            first_dim = None if place else family.sequence_dim
            scatter = ScatterHook(layer, region, family.token_arguments, first_dim)
            layer.register_forward_pre_hook(scatter, with_kwargs=True)
    forward = inspect.unwrap(type(decoder.base).forward)
    if not {"view", "reshape"}.isdisjoint(forward.__code__.co_names):
        # The decoder's forward may give hidden states the shape of a whole sequence.
        decoder.layers[-1].register_forward_hook(WholeAgainHook(region))


def _divide_layer(
    layer: nn.Module, decoder: Decoder, region: SequenceRegion, drops: bool, seen: set[int]
) -> None:
    blocks, experts = decoder.blocks(layer), experts_of(layer)
    if drops:
        RankStreamHooks(region, on_parts=True).attach(layer)
    for block in blocks:
        heads = Heads.of(decoder.base.config, layer, block, region.group.size())
        divide_block(layer, block, heads, region)
        if drops and block.path not in block.columns:
            rows = [layer.get_submodule(row) for row in block.rows]
            RankStreamHooks(region, on_parts=False).attach(layer.get_submodule(block.path), rows)
    for path in experts:
        divide_experts(layer, path, region)
    if region.enabled:
        handled = {*(b.path for b in blocks), *(row for b in blocks for row in b.rows), *experts}
        for path, module in _rest_of(layer, handled, seen):
            parent = path.rpartition(".")[0]
            beside_experts = bool(parent) and f"{parent}.{EXPERTS}" in handled
            is_norm = "norm" in type(module).__name__.lower()
            if not (path in decoder.family.token_wise or beside_experts or is_norm or is_linear(module)):
                WholeBlockHooks(GatherHook(region, (), layer), region).attach(module)


def _rest_of(
    module: nn.Module, handled: set[str], seen: set[int], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Tag the parameters of a layer outside its blocks; yield the modules that have them, but containers."""
    for name in module._parameters:
        tag(module, name, **{TAG: True})
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if path in handled or id(child) in seen or next(child.parameters(), None) is None:
            continue
        is_list = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if is_list or any(other.startswith(f"{path}.") for other in handled):
            yield from _rest_of(child, handled, seen, f"{path}.")
            continue
        tag_summed(child)
        yield path, child
