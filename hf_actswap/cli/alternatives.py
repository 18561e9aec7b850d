"""What a user could write so that an op has another fate: tried, with all the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..config import ActSwapConfig, load_config
from ..errors import ActSwapError
from ..plan import MemoryPlan, Outline, resolve_plan
from ..plan.mindformers_names import DEFAULT_SELECT_PATTERNS, DEFAULT_SWAP_PATTERN
from .requested_ops import wishes_of


@dataclass(frozen=True)
class Alternative:
    """A change of the configuration, and what the op would get.

    Args:
        fate: that the change asks for.
        change: what to write.
        got: fate of the op then.
        because: why that is another one; empty if it is not.
    """

    fate: str
    change: str
    got: str
    because: str = ""

    def __str__(self) -> str:
        if self.got == self.fate:
            return f"{self.fate}: {self.change}"
        reason = f": {self.because}" if self.because else ""
        return f"{self.fate}: not by {self.change}; {self.got or 'refused'}{reason}"


def alternatives(
    config: ActSwapConfig, outline: Outline, plan: MemoryPlan, layer: int, op_path: str
) -> tuple[Alternative, ...]:
    """Return one change for each fate that the op has not.

    Args:
        config: that resolves.
        outline: of the model.
        plan: of the configuration.
        layer, op_path: of the op; ``""`` is the whole layer.
    """
    now = plan.fate(layer, op_path)
    found = []
    for fate, change, document in _changes(config, outline, layer, op_path, now):
        if fate == now:
            continue
        try:
            other = resolve_plan(load_config(document), outline)
        except ActSwapError as error:
            found.append(Alternative(fate, change, "", str(error.problems[0])))
            continue
        got = other.fate(layer, op_path)
        known = set(plan.overrides)
        new = [item.reason for item in other.overrides if item not in known and layer in item.layers]
        found.append(Alternative(fate, change, got, "" if got == fate else "; ".join(dict.fromkeys(new))))
    return tuple(found)


def _changes(
    config: ActSwapConfig, outline: Outline, layer: int, op_path: str, now: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if now != "swap":
        yield "swap", *_to_swap(config, outline, layer, op_path)
    if now != "recompute":
        yield "recompute", *_to_recompute(config, layer, op_path)
    if now == "recompute" and op_path:
        document = config.to_dict()
        section = document.setdefault("recompute_config", {})
        layers: list[int] | bool = [layer] if config.swap_config.swap else True
        kept = _by_name(section.get("select_recompute_exclude", False), ())
        section["select_recompute_exclude"] = {**kept, op_path: layers}
        yield "keep", f"recompute_config.select_recompute_exclude: {{{op_path}: {_shown(layers)}}}", document
    if now == "swap":
        yield from _to_keep(config, outline, layer, op_path)


def _to_swap(config: ActSwapConfig, outline: Outline, layer: int, op_path: str) -> tuple[str, dict[str, Any]]:
    """Take the layer out of recomputation too, where that goes: its keys name layers beside swap only."""
    document = config.to_dict()
    taken = _out_of_recompute(document, config, outline, layer, op_path) if config.swap_config.swap else []
    left_out = f"layer {layer} left out of {', '.join(taken)}, and " if taken else ""
    section = document.setdefault("swap_config", {})
    was_on, ahead = config.swap_config.swap, config.swap_config.default_prefetch
    if was_on and config.swap_config.op_swap is None and config.swap_config.layer_swap is None:
        everywhere = {"op_name": DEFAULT_SWAP_PATTERN, "backward_prefetch": ahead, "layers": True}
        section["op_swap"] = [everywhere]
    section["swap"] = True
    key = "op_swap" if op_path else "layer_swap"
    entry = {"op_name": op_path} if op_path else {}
    entry |= {"backward_prefetch": ahead, "layers": [layer]}  # type: ignore[dict-item]
    section[key] = [entry, *(section.get(key) or [])]
    text = ", ".join(f"{name}: {_shown(value)}" for name, value in entry.items())
    return f"{left_out}swap_config.{'' if was_on else 'swap: true, '}{key}: {{{text}}}", document


def _out_of_recompute(
    document: dict[str, Any], config: ActSwapConfig, outline: Outline, layer: int, op_path: str
) -> list[str]:
    section: dict[str, Any] = document.get("recompute_config", {})
    taken = []
    for wish in wishes_of(config, outline):
        if wish.asked != "recompute" or not wish.names(layer, op_path):
            continue
        others = [other for other in wish.layers if other != layer]
        if not wish.op_name:
            section["recompute"] = others
            taken.append(wish.where)
            continue
        table = _by_name(section["select_recompute"], DEFAULT_SELECT_PATTERNS)
        section["select_recompute"] = {**table, wish.op_name: others}
        taken.append(f"{wish.where}.{wish.op_name}")
    return taken


def _to_recompute(config: ActSwapConfig, layer: int, op_path: str) -> tuple[str, dict[str, Any]]:
    """With swap the key takes layer indices; without, a number of first layers."""
    document = config.to_dict()
    section = document.setdefault("recompute_config", {})
    swap = config.swap_config.swap
    if not op_path:
        before = section.get("recompute", False)
        also = before if swap and isinstance(before, list) else []
        section["recompute"] = sorted({*also, layer}) if swap else [layer + 1]
        return f"recompute_config.recompute: {_shown(section['recompute'])}{_counted(swap, layer)}", document
    layers = [layer] if swap else [layer + 1]
    table = _by_name(section.get("select_recompute", False), DEFAULT_SELECT_PATTERNS)
    section["select_recompute"] = {**table, op_path: layers}
    text = f"recompute_config.select_recompute: {{{op_path}: {_shown(layers)}}}"
    return f"{text}{_counted(swap, layer)}", document


def _to_keep(
    config: ActSwapConfig, outline: Outline, layer: int, op_path: str
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Take the layer out of every swap entry that means the op."""
    document, changed = config.to_dict(), []
    count = len(outline.layers)
    for key, wholes in (("op_swap", False), ("layer_swap", True)):
        rules = document.get("swap_config", {}).get(key) or []
        for wish in wishes_of(config, outline):
            inside = wish.where.startswith(f"swap_config.{key}[")
            if not inside or wholes != (not wish.op_name) or not wish.names(layer, op_path):
                continue
            rule = rules[int(wish.where.rpartition("[")[2].rstrip("]"))]
            layers = range(count) if rule["layers"] is True else rule["layers"]
            rule["layers"] = [other for other in layers if other != layer]
            changed.append(f"{wish.where}.layers")
    if changed:
        yield "keep", f"layer {layer} left out of {', '.join(changed)}", document


def _by_name(value: Any, defaults: tuple[str, ...]) -> dict[str, Any]:
    """A selection as a mapping from op path to layers."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        return dict.fromkeys(value, True)
    return {} if value in (False, []) else dict.fromkeys(defaults, value)


def _counted(swap: bool, layer: int) -> str:
    return "" if swap else f" (a number of first layers: 0 to {layer})" if layer else " (the first layer)"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
