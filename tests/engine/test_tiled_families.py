"""All families of transformers: whatever is found to treat tokens one by one gives the same gradients in tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_actswap import MemoryPlan, PlanError, apply, model_structure
from hf_actswap.plan.actions import Tile
from hf_actswap.plan.token_mixing import checked_tiles
from tests.engine.tiny_models import gradients
from tests.parallel.patched_models import FAMILIES, VOCABULARY, tiny_model

NOT_RUN = {
    "blt": "its configuration has no number of layers",
    "jetmoe": "it does not run on fake tensors",
    "inkling2_text": "it does not run on fake tensors",
}
TOLERANCE = 1e-4
"""Relative, in fp32, as for divided families: some models compute with numbers large beside their gradients."""


def step(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    ids = torch.randint(3, VOCABULARY - 3, (2, 11), generator=torch.Generator().manual_seed(1))
    model.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss), gradients(model)


def outermost_tiles(model: Any) -> list[Tile]:
    """Return a tile for each module that may run in tiles, and for none inside another."""
    structure = model_structure(model)
    tiles = [
        Tile(layer.index, op.path, 5)
        for layer in structure.layers
        for op in layer.ops
        if op.kind != "function"
    ]
    try:
        checked_tiles(model, tiles, structure)
        mixing = set()
    except PlanError as error:
        mixing = {problem.where.split()[1] for problem in error.problems}
    able = [tile for tile in tiles if tile.op_path not in mixing]
    return [
        tile
        for tile in able
        if not any(
            tile.scope == other.scope and tile.op_path.startswith(f"{other.op_path}.") for other in able
        )
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_without_tiles(family: str) -> None:
    if family in NOT_RUN:
        pytest.skip(NOT_RUN[family])
    model = tiny_model(family, output_router_logits=False)
    loss, expected = step(model)
    tiles = outermost_tiles(model)
    assert tiles
    with apply(model, MemoryPlan((), len(model_structure(model).layers), tiles=tuple(tiles))) as applied:
        tiled_loss, found = step(model)
    assert not applied.plan.adjustments
    assert tiled_loss == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    small = 1e-4 * max(float(one.norm()) for one in expected.values())
    errors = {
        name: float((found[name] - one).norm() / (one.norm() + small)) for name, one in expected.items()
    }
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
