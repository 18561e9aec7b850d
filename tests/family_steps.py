"""A step of a tiny model of each family of transformers: whole, in chunks, and in tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_actswap import MemoryPlan, PlanError, apply, model_structure
from hf_actswap.plan import Tile
from hf_actswap.plan.tiles import checked_tiles
from tests.parallel.patched_models import VOCABULARY, tiny_model

RIGHT, REJECTED, WHOLE, WRONG = "right", "rejected", "whole", "wrong"
LENGTH, TOKENS = 17, 5
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Relative, in fp32, as for divided families: some compute with numbers large beside their gradients."""

Finding = tuple[str, str]
"""`RIGHT`, `REJECTED`, `WHOLE` (right, but an adjustment says why it is not in tiles) or `WRONG`, and why."""
Step = tuple[float, dict[str, torch.Tensor]]
"""The loss, and the gradients by name."""


def step(model: Any, family: str) -> Step:
    """Return the loss and the gradients of two sequences, the first of them with labels that are ignored."""
    ids = torch.randint(3, VOCABULARY - 3, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :3] = -100
    model.zero_grad()
    torch.manual_seed(5)
    call = {} if family == "xlm" else {"use_cache": False}  # it knows no cache
    loss = model(input_ids=ids, labels=labels, **call).loss
    loss.backward()
    found = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
    return float(loss), found


def streamed(family: str) -> Finding:
    """Say whether a model of the family is right in chunks, or rejected before any gradient; and why not."""
    return _right_or_rejected(
        family,
        lambda _model: {"stream_config": {"tokens": TOKENS}},
        lambda applied: applied.stats().offloads > 0,
    )


def tiled(family: str) -> Finding:
    """Say so of a model whose modules all run in tiles that may, but for those inside another such module."""
    return _right_or_rejected(family, plan_of_tiles, lambda applied: bool(applied.plan.tiles))


def loss_tiled(family: str) -> Finding:
    """Say so of a model with head and loss in tiles."""
    return _right_or_rejected(
        family,
        lambda _model: {"tile_config": {"loss": {"tokens": TOKENS}}},
        lambda applied: bool(applied.plan.tiles),
    )


def plan_of_tiles(model: Any) -> MemoryPlan:
    """Return a plan with a tile for each module of the layers that may run in tiles.

    Raises:
        PlanError: none may.
    """
    structure = model_structure(model)
    tiles = [
        Tile(layer.index, op.path, TOKENS)
        for layer in structure.layers
        for op in layer.ops
        if op.kind != "function"
    ]
    mixing: set[str] = set()
    try:
        checked_tiles(model, tiles, structure)
    except PlanError as error:
        mixing = {problem.where.split()[1] for problem in error.problems}
        if mixing.issuperset(tile.op_path for tile in tiles):
            raise
    able = {(tile.scope, tile.op_path) for tile in tiles if tile.op_path not in mixing}
    outermost = [
        tile
        for tile in tiles
        if (tile.scope, tile.op_path) in able
        and not any((tile.scope, outer) in able for outer in _around(tile.op_path))
    ]
    return MemoryPlan((), len(structure.layers), tiles=tuple(outermost))


def _around(op_path: str) -> list[str]:
    """Return the op paths of the modules around a module, inside its layer."""
    parts = op_path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def _right_or_rejected(
    family: str, plan_of: Callable[[Any], Any], did_something: Callable[[Any], bool]
) -> Finding:
    """Compare a step under a plan with the whole one; a rejection must come before any gradient."""
    model = tiny_model(family, output_router_logits=False)
    expected = step(model, family)
    model.zero_grad()
    try:
        with apply(model, plan_of(model)) as applied:
            found = step(model, family)
            adjusted, idle = applied.plan.adjustments, not did_something(applied)
    except PlanError as error:
        given = [name for name, item in model.named_parameters() if item.grad is not None]
        why = "; ".join(dict.fromkeys(f"{one.expected}: {one.found}" for one in error.problems))
        return (WRONG, f"gradient of {given[0]} beside an error") if given else (REJECTED, why)
    wrong = ["nothing was done"] * (idle and not adjusted) + _differences(expected, found)
    if wrong:
        return WRONG, "; ".join(wrong[:3])
    return (WHOLE, "; ".join(one.reason for one in adjusted)) if adjusted else (RIGHT, "")


def _differences(expected: Step, found: Step) -> list[str]:
    """Return what is outside of the tolerances, in words."""
    (loss, gradients), (other_loss, others) = expected, found
    wrong = []
    if not abs(other_loss - loss) <= LOSS_TOLERANCE * abs(loss):
        wrong.append(f"loss {other_loss}, not {loss}")
    wrong += [f"gradient of {name} in one of both only" for name in gradients.keys() ^ others.keys()]
    small = GRADIENT_TOLERANCE * max(float(one.norm()) for one in gradients.values())
    for name in gradients.keys() & others.keys():
        error = float((others[name] - gradients[name]).norm() / (gradients[name].norm() + small))
        if not error < GRADIENT_TOLERANCE:
            wrong.append(f"gradient of {name}: {error:.1g}")
    return wrong
