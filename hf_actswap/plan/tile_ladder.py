"""Puts more and more of a model in tiles, for a budget that no mix of keep, swap and recompute meets.

First come head and loss, which cost next to no time. Then come the MLP and the norms, whose forward runs once
more in backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache

from torch import nn

from ..config.loader import ActSwapConfig
from ..config.schema import OpTileRule, TileConfig
from ..errors import PlanError
from .actions import Adjustment, MemoryPlan, Tile
from .model_structure import ModelStructure
from .resolve import resolve_plan
from .token_mixing import checked_tiles

EACH_TOKEN = ("feed_forward", "attention_norm", "ffn_norm", "final_norm")
"""Modules that treat tokens one by one in most models; the first saves most. `_norms` finds further norms."""

SECOND_CLASS = (
    "no mix of keep, swap and recompute keeps within the budget without. Losses stay; gradients of weights "
    "are sums over tiles, equal up to rounding (1e-6 in fp32) and not bitwise"
)


def tile_ladder(
    config: ActSwapConfig, model: nn.Module, structure: ModelStructure, parts: int = 1
) -> Iterator[tuple[TileConfig, MemoryPlan]]:
    """Yield (``tile_config``, plan) with more and more of the model in tiles (``auto``).

    What the user wrote stays: ``loss``, also ``off``, entries of ``tile``, and every fate. Tiles that would
    replace a written fate are left out, as are modules that mix tokens.

    Args:
        config: what the user wrote.
        model: the model, without its wrappers.
        structure: structure of the model.
        parts: number of ranks of the tensor-parallel group, which may divide the sequence.
    """
    last = resolve_plan(config, structure)
    rows = last.rows

    @cache
    def resolved(tiles: TileConfig) -> MemoryPlan | None:
        try:
            plan = resolve_plan(replace(config, tile_config=tiles), structure)
            checked_tiles(model, plan.tiles, structure, parts)
        except PlanError:
            return None
        return plan if plan.rows == rows else None

    def rungs() -> Iterator[TileConfig]:
        tiles = config.tile_config
        if tiles.loss is None:
            tiles = replace(tiles, loss="auto")
            yield tiles
        if tiles.tile:
            return

        def with_modules(names: Iterable[str]) -> TileConfig:
            return replace(tiles, tile=tuple(map(OpTileRule, names)))

        names: tuple[str, ...] = EACH_TOKEN
        found = resolved(with_modules(names))
        known = [f"{tile.op_path}." for tile in found.tiles if tile.op_path] if found is not None else []
        names += tuple(path for path in _norms(structure) if not any(map(f"{path}.".startswith, known)))
        if resolved(with_modules(names)) is None:
            names = tuple(name for name in names if resolved(with_modules([name])) is not None)
        for count in (1, len(names)):
            yield with_modules(names[:count])

    for tiles in rungs():
        plan = resolved(tiles)
        if plan is not None and len(plan.tiles) > len(last.tiles):
            last = plan
            asked = Adjustment("tile_config", (), tile_names(plan.tiles), "nothing", "tiles", SECOND_CLASS)
            yield tiles, replace(plan, adjustments=(*plan.adjustments, asked))


def _norms(structure: ModelStructure) -> tuple[str, ...]:
    """Return the op paths of all norms: Gemma has two more, and many families norm queries and keys."""
    paths = (op.path for layer in structure.layers for op in layer.ops if op.kind != "function")
    return tuple(dict.fromkeys(path for path in paths if "norm" in path.rpartition(".")[2].lower()))


def tile_names(tiles: Iterable[Tile]) -> str:
    """Return the names of the ops that run in tiles, each once."""
    return ", ".join(dict.fromkeys(tile.op_path or str(tile.scope) for tile in tiles))
