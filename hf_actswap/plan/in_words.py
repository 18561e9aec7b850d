"""Says in a few lines what a plan does: which layers swap and recompute what; equal layers share a line."""

from __future__ import annotations

from collections.abc import Iterable

from .actions import COMPILE_BUDGET, MemoryPlan, Scope, folded_tiles, format_scopes
from .model_structure import ModelStructure, is_below

MOST_LINES = 4
_MOST_NAMES = 6


def plan_in_words(plan: MemoryPlan, structure: ModelStructure | None = None) -> list[str]:
    """Return lines such as ``layers 0-2: swap self_attn; recompute input_layernorm.*``; windows are left out.

    By ``structure`` ``mlp.*`` is told from some ops of the MLP; without it the ops are listed.
    """
    scopes_by_words: dict[str, list[Scope]] = {}
    for scope in plan.scopes:
        if words := _scope_in_words(plan, structure, scope):
            scopes_by_words.setdefault(words, []).append(scope)
    found = [(len(scopes), f"{_places(scopes)}: {words}") for words, scopes in scopes_by_words.items()]
    found += [(1, f"{label}: {op} {how}".strip()) for label, op, how, *_ in folded_tiles(plan.tiles)]
    if plan.streamed is not None:
        found.insert(0, (plan.num_layers, f"the sequence: {plan.streamed}"))
    if plan.weights == "host":
        line = "frozen weights of the layers: on the host, copied in layer by layer"
        found.insert(0, (plan.num_layers, line))
    lines = [text for _, text in found]
    if len(lines) > MOST_LINES:
        most = sorted(range(len(found)), key=lambda index: -found[index][0])[:MOST_LINES]
        left = len(lines) - MOST_LINES
        lines = [*(lines[index] for index in sorted(most)), f"and {left} more (`log: full` shows the table)"]
    return lines or ["everything is kept"]


def _places(scopes: list[Scope]) -> str:
    places = format_scopes(scopes)
    return f"layer{'s' if len(scopes) > 1 else ''} {places}" if isinstance(scopes[0], int) else places


def _scope_in_words(plan: MemoryPlan, structure: ModelStructure | None, scope: Scope) -> str:
    paths: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.scope == scope:
            budget = row.parameters.get(COMPILE_BUDGET)
            verb = row.fate if budget is None else f"{row.fate} (compile budget {budget:g})"
            paths.setdefault(verb, []).append(row.op_path)
    layers = () if structure is None else structure.all_layers
    known = [op.path for layer in layers if layer.index == scope for op in layer.ops]
    return "; ".join(f"{verb} {', '.join(_collapsed(found, known))}" for verb, found in paths.items())


def _collapsed(paths: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return op paths with those of one module together: ``mlp.*`` if they are all of it."""
    by_parent: dict[str, list[str]] = {}
    for path in dict.fromkeys(paths):
        by_parent.setdefault(path.rpartition(".")[0], []).append(path)
    found = []
    for parent, inside in by_parent.items():
        if not parent or len(inside) == 1:
            found += [path or "everything" for path in inside]
            continue
        others = [op for op in known if is_below(op, parent) and op != parent]
        if others and all(any(is_below(op, one) or is_below(one, op) for one in inside) for op in others):
            found.append(f"{parent}.*")
        elif len(inside) > _MOST_NAMES:
            found.append(f"{len(inside)} ops of {parent}")
        else:
            names = ", ".join(path.removeprefix(f"{parent}.") for path in inside)
            found.append(f"{parent}.{{{names}}}")
    return found
