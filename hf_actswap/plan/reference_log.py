"""Writes the lines that MindFormers ("the reference") logs for a configuration, to compare both logs.

The ``Set ...`` lines report what was asked, not what takes effect: that is how the reference prints them.
White space is collapsed and a pattern shows a single backslash, as in its documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import ActSwapConfig
from ..config.schema import LayerSwapRule, OpSwapRule, Prefetch
from .layer_tables import format_formative

ALL_SWAP_LOST = "All layers and ops that are enabled swap do not work! Because recompute = True."


@dataclass
class LayerRequests:
    """What the configuration asks of one layer, under the names that the reference logs."""

    full: bool = False
    select: list[str] = field(default_factory=list)
    select_comm: list[str] = field(default_factory=list)
    select_exclude: list[str] = field(default_factory=list)
    comm_exclude: list[str] = field(default_factory=list)
    layer_swap: Prefetch | None = None
    op_swap: list[tuple[str, Prefetch]] = field(default_factory=list)
    compile_budget: float | None = None

    def lines(self, layer: int, swap: bool, recompute_everywhere: bool) -> list[str]:
        """Return the ``Set ...`` lines of global layer ``layer``."""
        at = f"at layer {layer}"
        on = "" if swap else " on"
        lines = []
        if self.full and not (swap and recompute_everywhere):
            lines.append(f"Set full recompute {at}")
        if self.select:
            lines.append(f"Set select recompute{on} {at}: {', '.join(self.select)}")
        if self.select_comm:
            lines.append(f"Set select comm recompute{on} {at}: {', '.join(self.select_comm)}")
        if self.select_exclude:
            lines.append(f"Set select recompute exclude {at}: {', '.join(self.select_exclude)}")
        if self.comm_exclude:
            lines.append(f"Set select comm recompute exclude {at}: {', '.join(self.comm_exclude)}")
        if self.layer_swap is not None:
            lines.append(f"Set layer swap {at} and value is: {prefetch_text(self.layer_swap)}")
        if self.op_swap:
            items = (f"{name}, value={prefetch_text(prefetch)}" for name, prefetch in self.op_swap)
            lines.append(f"Set op_swap {at}: {', '.join(items)}")
        if self.compile_budget is not None:
            lines.append(f"Set compile budget {at} and value is: {self.compile_budget:g}")
        return lines


def prefetch_text(prefetch: Prefetch) -> str:
    """Return a prefetch number as the reference prints it."""
    return "Auto" if prefetch == "auto" else str(prefetch)


def formative_lines(
    recompute: Any,
    selections: Mapping[str, Mapping[str, Any]],
    layer_swap: Sequence[LayerSwapRule] | None,
    op_swap: Sequence[OpSwapRule] | None,
    swap: bool,
) -> list[str]:
    """Return the ``Formative ...`` lines: the normalised tables.

    Args:
        recompute: normal form of the key ``recompute``.
        selections: key of ``recompute_config`` -> op path -> normal form; empty exclude keys are not logged.
        layer_swap, op_swap: the swap rules in force.
        swap: whether ``swap_config.swap`` is on.
    """
    lines = [f"Formative layer_recompute: {format_formative(recompute)}"]
    for key, table in selections.items():
        if table or not key.endswith("_exclude"):
            lines.append(f"Formative {key}: {format_formative(table)}")
    if swap:
        layer_entries = [_entry(rule) for rule in layer_swap or ()]
        lines.append(f"Formative layer swap: [{', '.join(layer_entries)}]")
        by_name: dict[str, list[str]] = {}
        for rule in op_swap or ():
            by_name.setdefault(rule.op_name, []).append(_entry(rule))
        entries = (f"'{name}': [{', '.join(items)}]" for name, items in by_name.items())
        lines.append(f"Formative op swap: {{{', '.join(entries)}}}")
    return lines


def _entry(rule: LayerSwapRule | OpSwapRule) -> str:
    layers = rule.layers if isinstance(rule.layers, bool) else list(rule.layers)
    prefetch = "'Auto'" if rule.backward_prefetch == "auto" else str(rule.backward_prefetch)
    return f"{{'backward_prefetch': {prefetch}, 'layers': {layers}}}"


def conflict_warnings(
    config: ActSwapConfig,
    num_layers: int,
    full_layers: Sequence[int],
    layer_swap: Mapping[int, Prefetch],
    op_swap: Mapping[str, Sequence[int]],
    swaps: bool,
) -> list[str]:
    """Return the warnings that the reference prints at start when swap meets recomputation.

    They follow its rules to the letter: a selective pattern is compared with ``op_swap`` names as text,
    bool and list forms are not compared, overlap of patterns is not seen. What takes effect is in the
    plan's adjustments.

    Args:
        config: the configuration.
        num_layers: number of layers of the whole model.
        full_layers: layers recomputed whole.
        layer_swap: layer -> prefetch, for the layers that ``layer_swap`` names.
        op_swap: op name as written -> the layers that it names.
        swaps: whether the plan swaps anything (our key ``recompute_input`` swaps what the reference cannot).
    """
    recompute = config.recompute_config.recompute
    if recompute is True:
        return [ALL_SWAP_LOST] if (layer_swap or op_swap) and not swaps else []
    warnings = [_lost("All", layer) for layer in full_layers if layer in layer_swap]
    for name, layers in op_swap.items():
        warnings += [_lost(name, layer) for layer in full_layers if layer in layers]
    select = config.recompute_config.select_recompute
    for pattern, value in select.items() if isinstance(select, dict) else ():
        if value is True:
            warnings.append(
                f"{pattern} operator in all layers that is enabled swap do not work! "
                "Because it is enabled recompute."
            )
            continue
        chosen = [] if isinstance(value, bool) else [layer for layer in value if type(layer) is int]
        swapped = [
            layer for layer in range(num_layers) if layer in layer_swap or layer in op_swap.get(pattern, ())
        ]
        warnings += [_lost(pattern, layer) for layer in chosen if layer in swapped]
    return warnings


def _lost(name: str, layer: int) -> str:
    return (
        f"{name} operator in layer {layer} that is enabled swap do not work! Because it is enabled recompute."
    )
