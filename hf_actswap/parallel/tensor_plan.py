"""Finds the projections of a model's layers, and decides how they are divided.

Hugging Face's plans (``base_model_tp_plan``) name a style for each projection of a layer. For modules without
an entry the names of their projections decide (`families.PATTERNS`). A projection is divided only if a
row-parallel one ends its block, so that the ranks' results add up to the block's result.

LoRA adapters (of PEFT, recognised by their attributes) are divided along with their projections. An adapter
adds ``B (A x)`` to a projection's output. On a column-parallel projection B is divided like the weight, and A
is whole. On a row-parallel one A is divided like the weight, B is whole, and one sum over the ranks is taken
of projection and adapter together. A whole A gets a part of its gradient from each rank's part of B, and a
whole B reads a part of ``A x``: both are tagged, with or without sequence parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import Problem
from .block_hooks import ReduceHook
from .column_input import linear
from .families import (
    EXPERTS,
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
from .layers import ColumnParallelLinear, ParallelLinear, RowParallelLinear, sizes_of
from .routed_experts import is_supported
from .sequence_region import SequenceRegion
from .weights import tag_summed

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
        if not _is_inside(EXPERTS, group) and group not in ended:
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
        if pattern.fullmatch(path) and not _is_inside(EXPERTS, path)
    }


def _matching(group: str, module: nn.Module, known: set[str]) -> Iterator[Styles]:
    """Yield the styles of each pattern that a module matches, unless it holds other, unknown parameters."""
    prefix = f"{group}." if group else ""
    for columns, row in PATTERNS:
        names = (*columns, row)
        if any(prefix + name in known for name in names):
            continue
        if not all(_exists(module, name) and is_linear(found_at(module, name)) for name in names):
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


def _is_inside(name: str, path: str) -> bool:
    return name in path.split(".")


def _exists(module: nn.Module, path: str) -> bool:
    return isinstance(found_at(module, path), nn.Module | nn.Parameter)


def found_at(module: nn.Module, path: str) -> Any:
    """Return the module or parameter at a path; ``None``: there is none."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(module.get_submodule(parent), name, None)
    except AttributeError:
        return None


def _is_row(layer: nn.Module, path: str, style: str | Columns) -> bool:
    ends = path.rpartition(".")[2] in _ROW_NAMES and style in (*_ROWS, *_GATHERED)
    return ends and isinstance(found_at(layer, path), nn.Module)


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
