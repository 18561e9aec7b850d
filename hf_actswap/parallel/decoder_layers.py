"""Finds the projections of a decoder's layers, and divides them and the modules between the blocks.

Hugging Face's plans (``base_model_tp_plan``) name a style for each projection of a layer. For modules without
an entry the names of their projections decide (`families.PATTERNS`). A projection is divided only if a
row-parallel one ends its block, so that the ranks' results add up to the block's result. Replaced modules
keep the names of their parameters, so the names in state dicts do not change.

LoRA adapters (of PEFT, recognised by their attributes) are divided along with their projections. An adapter
adds ``B (A x)`` to a projection's output. On a column-parallel projection B is divided like the weight, and A
is whole. On a row-parallel one A is divided like the weight, B is whole, and one sum over the ranks is taken
of projection and adapter together. A whole A gets a part of its gradient from each rank's part of B, and a
whole B reads a part of ``A x``: both are tagged, with or without sequence parallelism.

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
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
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
from .column_input import linear
from .families import (
    COUNTS,
    EXPERTS,
    FAMILIES,
    HEAD_PARAMETERS,
    KINDS,
    LINEAR_CLASSES,
    LOW_RANK,
    PATTERNS,
    WIDE_NORMS,
    Block,
    Columns,
    Family,
)
from .gradients import TAG
from .layers import (
    ColumnParallelLinear,
    GatheredColumns,
    ParallelLinear,
    RowParallelLinear,
    SplitRow,
    sizes_of,
)
from .routed_experts import divide_experts, experts_of, is_supported, problems_of_experts
from .sequence_region import (
    SEQUENCE_DIM,
    LengthCheck,
    ScatterHook,
    SequenceRegion,
    TagAfterLayersHook,
    WholeAgainHook,
)
from .weights import ParameterTags, Partition, divide_parameter, partitions_in, tag, tag_summed

_EXPECTED = "a plain LoRA adapter"


class SharedInputLinear(nn.Linear):
    """A whole linear layer in a divided block, which may read the same input as the divided layers."""

    def __init__(self, full: nn.Linear, region: SequenceRegion) -> None:
        super().__init__(full.in_features, full.out_features, bias=False, device="meta")
        self.weight, self.bias = full.weight, full.bias
        self._region = region

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, r]``, alike on all ranks; the gradients that come back are this rank's part."""
        output = linear(input, self.weight, self._region.group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class UnreducedRowLinear(RowParallelLinear):
    """A row-parallel layer that returns this rank's share; its caller sums shares and adds the bias."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        return F.linear(input_, self.weight)


def is_adapted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def base_of(module: nn.Module) -> nn.Module:
    return module.get_submodule("base_layer") if is_adapted(module) else module


def problems_of_adapter(where: str, module: nn.Module, is_row: bool) -> Iterator[Problem]:
    """Yield a problem for each part of an adapter that is not supported: anything besides A and B."""
    if not is_adapted(module):
        return
    lora_a, lora_b = getattr(module, "lora_A", None), getattr(module, "lora_B", None)
    if not isinstance(lora_a, nn.ModuleDict) or not isinstance(lora_b, nn.ModuleDict):
        yield Problem(where, _EXPECTED, type(module).__name__, "Of PEFT's methods LoRA is supported.")
        return
    if getattr(module, "merged", False):
        yield Problem(where, "an adapter that is not merged", "a merged one", "Call unmerge_adapter() first.")
    variants = getattr(module, "lora_variant", None)
    if variants:
        yield Problem(where, _EXPECTED, f"the variant {next(iter(variants.values()))}", "Leave it out.")
    for part in (*lora_a.values(), *lora_b.values()):
        if type(part) is not nn.Linear:
            yield Problem(where, _EXPECTED, f"{type(part).__name__} inside")
        elif is_row and part.bias is not None:
            yield Problem(where, "an adapter without bias", "lora_bias=True", "Set lora_bias=False.")


def divide_column_adapters(
    module: Any, base: ColumnParallelLinear, settings: dict[str, Any], region: SequenceRegion
) -> list[nn.Module]:
    """Put ``base`` into an adapted projection, and divide each B like it; return each A, for its input."""
    module.base_layer = base
    readers: list[nn.Module] = []
    for name, lora_a in module.lora_A.items():
        module.lora_A[name] = SharedInputLinear(lora_a, region).train(lora_a.training)
        tag_summed(module.lora_A[name])
        module.lora_B[name] = ColumnParallelLinear.from_linear(module.lora_B[name], **settings)
        readers.append(module.lora_A[name])
    return readers


def divide_row_adapters(module: Any, settings: dict[str, Any], region: SequenceRegion) -> UnreducedRowLinear:
    """Divide an adapted projection and each A by input features; a hook sums the output over the ranks."""
    base = module.base_layer = UnreducedRowLinear.from_linear(module.base_layer, **settings)
    for name, lora_a in module.lora_A.items():
        module.lora_A[name] = UnreducedRowLinear.from_linear(lora_a, **settings)
        tag_summed(module.lora_B[name])
    module.register_forward_hook(ReduceHook(region))
    return base


Styles = dict[str, str | Columns]

_COLUMN, _GATHERED = ("colwise", "packed_colwise"), ("colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
_ROW_NAMES = {row.rpartition(".")[2] for _, row in PATTERNS}
_ATTENTION = (Columns.QUERY, Columns.KEY_VALUE, Columns.FUSED_HEADS, Columns.FUSED_QKV)


def plan_of(config: Any) -> dict[str, str]:
    """Return the tensor-parallel plan in a configuration: path in a layer (``*``: a number) -> style."""
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    return {path.partition(".*.")[2]: style for path, style in plan.items() if ".*." in path}


def blocks_of(layer: nn.Module, plan: Mapping[str, str], family: Family) -> list[Block]:
    """Return the blocks of a layer whose projections are divided, in the order of its modules."""
    found: list[Block] = []
    for group, styles in _groups(layer, plan, family).items():
        rows = tuple(path for path, style in styles.items() if _is_row(layer, path, style))
        kinds = {path: _kind(path, style) for path, style in styles.items() if path not in rows}
        columns = {path: kind for path, kind in kinds.items() if kind is not None}
        if rows and columns:
            found += _blocks(group, _with_features(layer, group, columns, family), rows, family)
    for path, parameters in family.shares.items():
        if _exists(layer, f"{path}.{EXPERTS}"):
            found = _as_one(path, parameters, found)
    places = {name: place for place, (name, _) in enumerate(layer.named_modules())}
    return sorted(found, key=lambda block: places[block.path])


def undivided_expert_parents(layer: nn.Module, family: Family) -> list[str]:
    """Return the modules of a layer that stay whole because they hold routed experts of an unknown kind."""
    experts = [path for path, module in layer.named_modules() if path.rpartition(".")[2] == EXPERTS]
    unknown = [path for path in experts if not is_supported(layer.get_submodule(path))]
    return [parent for path in unknown if (parent := path.rpartition(".")[0]) not in family.shares]


def is_linear(module: Any) -> bool:
    """Whether ``module`` is a linear layer that can be divided, or an adapter around one."""
    return isinstance(module, nn.Module) and type(base_of(module)).__name__ in LINEAR_CLASSES


def _blocks(
    group: str, columns: dict[str, Columns], rows: tuple[str, ...], family: Family
) -> Iterator[Block]:
    """Yield one block; if its projections are direct children of the layer, one block for each of them."""
    parents = {path.rpartition(".")[0] for path in columns}
    path = min(parents, key=len)
    if not all(_is_at_or_below(parent, path) for parent in parents):
        path = group
    if path:
        is_attention = any(kind in _ATTENTION for kind in columns.values())
        yield Block(path, columns, rows, family.norms.get(path), is_attention)
        return
    for number, (column, kind) in enumerate(columns.items()):
        yield Block(column, {column: kind}, () if number else rows)


def _as_one(path: str, parameters: Mapping[str, tuple[int, int]], found: list[Block]) -> list[Block]:
    """Return the blocks, with all that lie in the module ``path`` merged into one."""
    inside = [block for block in found if _is_at_or_below(block.path, path)]
    columns = {name: kind for block in inside for name, kind in block.columns.items()}
    rows = tuple(row for block in inside for row in block.rows)
    own = {f"{path}.{name}": division for name, division in parameters.items()}
    one = Block(path, columns, rows, parameters=own, sums_output=True)
    return [*(block for block in found if block not in inside), one]


def _groups(layer: nn.Module, plan: Mapping[str, str], family: Family) -> dict[str, Styles]:
    """Return the styles of the layer's projections and parameters, by the path of the module of a block."""
    groups: dict[str, Styles] = {}
    for path, style in _planned(layer, plan).items():
        groups.setdefault(path.rpartition(".")[0], {})[path] = style
    ended = [g for g, of in groups.items() if any(_is_row(layer, path, style) for path, style in of.items())]
    for group in list(groups):
        outer = next((other for other in ended if group.startswith(f"{other}.")), None)
        if outer is not None:
            groups[outer].update(groups.pop(group))
    for group, module in layer.named_modules():
        if EXPERTS not in group.split(".") and group not in ended:
            for pattern in _matching(group, module, {path for of in groups.values() for path in of}):
                groups.setdefault(group, {}).update(pattern)
    for styles in groups.values():
        styles.update({path: kind for path, kind in family.styles.items() if path in styles})
    whole = (*family.undivided, *undivided_expert_parents(layer, family))
    return {g: of for g, of in groups.items() if not any(_is_at_or_below(g, path) for path in whole if path)}


def _planned(layer: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the plan's styles for the modules and parameters that the layer has, except routed experts."""
    modules = [name for name, module in layer.named_modules() if not isinstance(module, ParallelLinear)]
    paths = [*modules, *(name for name, of in layer.named_parameters() if of.dim() == 1)]
    wanted = {re.compile(re.escape(path).replace(r"\*", r"\d+")): style for path, style in plan.items()}
    return {
        path: style
        for path in paths
        for pattern, style in wanted.items()
        if pattern.fullmatch(path) and EXPERTS not in path.split(".")
    }


def _matching(group: str, module: nn.Module, known: set[str]) -> Iterator[Styles]:
    """Yield the styles of each pattern that a module matches, unless it holds other, unknown parameters."""
    prefix = f"{group}." if group else ""
    for columns, row in PATTERNS:
        names = (*columns, row)
        if any(prefix + name in known for name in names):
            continue
        if not all(_exists(module, name) and is_linear(_found_at(module, name)) for name in names):
            continue
        heads = tuple(name for name in HEAD_PARAMETERS if _exists(module, name))
        is_attention = any(KINDS.get(name) in _ATTENTION for name in columns)
        if not _further(module, (*names, *heads)) if group else not is_attention:
            known.update(prefix + name for name in names)
            yield {**{prefix + name: "colwise" for name in (*columns, *heads)}, prefix + row: "rowwise"}


def _further(module: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return a module's parameters besides the named ones, and besides those of norms and activations."""
    return [
        name
        for name, parameter in module.named_parameters()
        if not any(_is_at_or_below(name, known) for known in (*names, *LOW_RANK))
        and "norm" not in type(module.get_submodule(name.rpartition(".")[0])).__name__.lower()
        and parameter.numel() > 1
    ]


def _is_at_or_below(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _exists(module: nn.Module, path: str) -> bool:
    return isinstance(_found_at(module, path), nn.Module | nn.Parameter)


def _found_at(module: nn.Module, path: str) -> Any:
    """Return the module or parameter at a path; ``None``: there is none."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(module.get_submodule(parent), name, None)
    except AttributeError:
        return None


def _is_row(layer: nn.Module, path: str, style: str | Columns) -> bool:
    ends = path.rpartition(".")[2] in _ROW_NAMES and style in (*_ROWS, *_GATHERED)
    return ends and isinstance(_found_at(layer, path), nn.Module)


def _kind(path: str, style: str | Columns) -> Columns | None:
    """Return how a projection is divided; ``None``: its style does not divide it."""
    if isinstance(style, Columns):
        return style
    name = path.rpartition(".")[2]
    if style in _COLUMN:
        return KINDS.get(name, Columns.QUERY if name in HEAD_PARAMETERS else Columns.PLAIN)
    if style in _GATHERED:
        fused = KINDS.get(name)
        return fused if fused in (Columns.FUSED_QKV, Columns.FUSED_PAIR) else Columns.GATHERED
    return None


def _with_features(
    layer: nn.Module, group: str, columns: dict[str, Columns], family: Family
) -> dict[str, Columns]:
    """Return ``columns`` with two exceptions.

    All are gathered if the family's block needs all features; q, k, v that a plan gathers only for their
    norms are divided.
    """
    if getattr(layer.get_submodule(group), family.gathered.get(group, ""), 0):
        return dict.fromkeys(columns, Columns.GATHERED)
    gathered = {path for path, kind in columns.items() if kind is Columns.GATHERED}
    of_norms = {f"{group}.{name}" for name in ("q_proj", "k_proj", "v_proj")}
    if gathered != of_norms or not wide_norms(layer, group):
        return columns
    return {path: _kind(path, "colwise") or kind for path, kind in columns.items()}


def wide_norms(layer: nn.Module, group: str) -> list[str]:
    """Return the names of norms in a block that are over all features of a divided projection."""
    block = layer.get_submodule(group)
    found = []
    for name, projection in WIDE_NORMS.items():
        weight = getattr(getattr(block, name, None), "weight", None)
        full: Any = getattr(block, projection, None)
        if weight is None or not is_linear(full):
            continue
        sizes = sizes_of(base_of(full))
        if weight.numel() == sizes[0 if projection in _ROW_NAMES else 1]:
            found.append(name)
    return found


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
            Partition.of(dim, _found_at(layer, name).shape[dim], heads.ranks, parts)
        except ValueError as error:
            yield Problem(f"{where}.{name}", "a size that the ranks divide", str(error))
    for name in (*block.columns, *block.rows):
        found: Any = _found_at(layer, name)
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
    is_adapted_anywhere = any(is_adapted(_found_at(layer, name)) for name in block.columns)
    readers = _divide_columns(layer, block, heads, region)
    rows = list(_divide_rows(layer, block, is_split, region))
    for name, (dim, parts) in block.parameters.items():
        partition = Partition.of(dim, _found_at(layer, name).shape[dim], heads.ranks, parts)
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
        target: Any = _found_at(layer, name)
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
