"""What a configuration asks for, entry by entry: which ops each name means, and in which layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..config import ActSwapConfig
from ..config.schema import LayerCounts, Layers, Prefetch
from ..plan import Outline
from ..plan.actions import folded
from ..plan.layer_tables import (
    layers_from_counts,
    layers_from_indices,
    normalise_counts,
    normalise_indices,
    normalise_selection,
)
from ..plan.layout import PipelineLayout, build_layout
from ..plan.match import names_by_layer
from ..plan.mindformers_names import DEFAULT_COMM_PATTERNS, DEFAULT_SELECT_PATTERNS, DEFAULT_SWAP_PATTERN

_SELECTIONS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("select_recompute_exclude", (), "keep"),
    ("select_comm_recompute_exclude", (), "keep"),
    ("select_recompute", DEFAULT_SELECT_PATTERNS, "recompute"),
    ("select_comm_recompute", DEFAULT_COMM_PATTERNS, "re-gather"),
)


@dataclass(frozen=True)
class Wish:
    """One entry of the configuration that resolved.

    Args:
        where: YAML path.
        asked: the fate.
        op_name: as written, or of the default ops; ``""``: the whole layer.
        layers: that it names.
        prefetch: of a swap.
        targets: op path -> the layers in which the name means it.
    """

    where: str
    asked: str
    op_name: str
    layers: tuple[int, ...]
    prefetch: Prefetch | None = None
    targets: dict[str, tuple[int, ...]] = field(default_factory=dict, hash=False)

    def names(self, layer: int, op_path: str) -> bool:
        """Whether the entry means an op of a layer, or what is around it."""
        if layer not in self.layers:
            return False
        paths = [path for path, layers in self.targets.items() if layer in layers] if self.op_name else [""]
        return any(not path or op_path == path or op_path.startswith(f"{path}.") for path in paths)

    def __str__(self) -> str:
        name = f" {self.op_name}" if self.op_name else ""
        ahead = f", {self.prefetch} ops ahead" if self.prefetch is not None else ""
        layers = f"layer{'s' if len(self.layers) > 1 else ''} {folded(self.layers)}"
        return f"{self.where}{name}: {self.asked} in {layers}{ahead}"


def wishes_of(config: ActSwapConfig, outline: Outline) -> tuple[Wish, ...]:
    """Return the entries that name ops or layers, the strongest first.

    Exclude keys, full recomputation, selective recomputation, ``op_swap``, ``layer_swap``: the order of
    MindFormers, Memory Optimization. For a configuration that resolves.
    """
    names = _NamesByLayer(outline)
    swap, recompute = config.swap_config, config.recompute_config
    layout, _ = build_layout(len(outline.layers), config.parallel_config)
    layout = layout or PipelineLayout(((len(outline.layers),),))
    excludes: list[Wish] = []
    selective: list[Wish] = []
    for key, patterns, fate in _SELECTIONS:
        where = f"recompute_config.{key}"
        forms, _ = normalise_selection(getattr(recompute, key), layout, patterns, swap=swap.swap, where=where)
        for op_name, form in forms.items():
            layers = (
                layers_from_indices(form, layout.num_layers)  # type: ignore[arg-type]
                if swap.swap
                else layers_from_counts(form, layout)  # type: ignore[arg-type]
            )
            wish = Wish(where, fate, op_name, layers, targets=names.targets(op_name, layers))
            (excludes if fate == "keep" else selective).append(wish)
    full = _full(recompute.recompute, layout, swap.swap)
    whole = [Wish("recompute_config.recompute", "recompute", "", full)] if full else []
    swaps = _swaps(config, names, layout.num_layers) if swap.swap else ()
    return tuple(wish for wish in (*excludes, *whole, *selective, *swaps) if wish.layers)


def _full(value: LayerCounts, layout: PipelineLayout, swap: bool) -> tuple[int, ...]:
    where = "recompute_config.recompute"
    if swap:
        return layers_from_indices(normalise_indices(value, layout.num_layers, where)[0], layout.num_layers)
    return layers_from_counts(normalise_counts(value, layout, where)[0], layout)


def _swaps(config: ActSwapConfig, names: _NamesByLayer, count: int) -> Iterator[Wish]:
    swap = config.swap_config
    if swap.op_swap is None and swap.layer_swap is None:
        layers, where = tuple(range(count)), "swap_config.swap (the default strategy)"
        targets = names.targets(DEFAULT_SWAP_PATTERN, layers)
        yield Wish(where, "swap", DEFAULT_SWAP_PATTERN, layers, swap.default_prefetch, targets)
    for index, rule in enumerate(swap.op_swap or ()):
        layers, where = _indices(rule.layers, count), f"swap_config.op_swap[{index}]"
        targets = names.targets(rule.op_name, layers)
        yield Wish(where, "swap", rule.op_name, layers, rule.backward_prefetch, targets)
    for index, entry in enumerate(swap.layer_swap or ()):
        where = f"swap_config.layer_swap[{index}]"
        yield Wish(where, "swap", "", _indices(entry.layers, count), entry.backward_prefetch)


def _indices(layers: Layers, count: int) -> tuple[int, ...]:
    if isinstance(layers, bool):
        return tuple(range(count)) if layers else ()
    return tuple(layer for layer in layers if layer < count)


class _NamesByLayer:
    """What names mean in each layer."""

    def __init__(self, outline: Outline) -> None:
        self._names = names_by_layer(outline)

    def targets(self, op_name: str, layers: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        found: dict[str, list[int]] = {}
        for layer in layers:
            for match in self._names[layer].match(op_name):
                for target in match.targets:
                    found.setdefault(target, []).append(layer)
        return {path: tuple(dict.fromkeys(where)) for path, where in found.items()}
