"""Puts a plan on a model and takes it off again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ..config import Verify
from ..errors import PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import SCOPES, Adjustment, MemoryPlan, OpCall, Tile
from ..plan.in_words import plan_in_words
from ..plan.model_structure import OUTPUT, ModelStructure, unwrapped
from ..plan.tiles import checked_tiles
from ..plan.wrapper_rules import problems_of_compiled
from ..plan.wrappers import FSDP2_METHOD, named_op_modules, parameter_groups
from .fates import ReplicaRanks
from .frozen_weights import FrozenWeights
from .hook_wrappers import Hook
from .hooks import Engine
from .plan_runtime import PlanRuntime, Resources
from .stats import SwapStats
from .swapped_storages import PackHandler
from .tiled_calls import is_tiled, tile_module
from .tiled_logits import is_tiled_head, tile_head
from .transfer import Transfer

logger = logging.getLogger(__name__)

Attach = Callable[[], list[Callable[[], None]]]
"""Installs hooks on a model; returns functions that remove them, in order of installation."""


class AppliedPlan:
    """A plan on a model. Use as a context manager, or call `remove`.

    Args:
        plan: the plan that is applied.
        make: takes a plan; returns a new engine for the model, and the function that installs its hooks.
        weights: the model's frozen weights on the host; ``None``: all weights stay.
        counts_weights: whether `stats` includes their copies; a planner counts them once for all its plans.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        make: Callable[[MemoryPlan], tuple[Engine, Attach]],
        weights: FrozenWeights | None = None,
        counts_weights: bool = True,
    ) -> None:
        self._make, self.weights = make, weights
        self._engine, self._attach = make(plan)
        self.structure = self._engine.structure
        self._weights_before = None if weights is None or not counts_weights else weights.stats()
        self._undo: list[Callable[[], None]] = []
        self._last: list[Callable[[], None]] = []
        self._removed = False
        self._hooks: list[Callable[[], None]] | None = None
        self.resume()

    @property
    def plan(self) -> MemoryPlan:
        """The applied plan; once ``auto`` has measured, with an adjustment for each of its decisions."""
        return self._engine.plan

    def stats(self) -> SwapStats:
        """Return the totals since the plan was applied, with frozen weights; subtract two to get a step."""
        own = self._engine.runtime.stats()
        if self.weights is None or self._weights_before is None:
            return own
        return own.with_weights(self.weights.stats() - self._weights_before)

    @property
    def dropped_bytes(self) -> int | None:
        """Bytes that one forward drops and backward rebuilds, counted in a run of it on fake tensors.

        ``None``: not known (compiled layers, models that do not run on fake tensors, no forward yet).
        """
        return self._engine.dropped_bytes

    def set_pack_handler(self, pack_handler: PackHandler | None) -> None:
        """Let ``pack_handler`` make the tickets of tensors that stay on the device, from the next forward on.

        With ``None`` tensors stay for good, and cached traces are used. Any other handler needs a plan with
        rows, or one that was installed with a pack handler.
        """
        self._engine.set_pack_handler(pack_handler)

    @property
    def transfer(self) -> Transfer:
        """The transfer that copies between device and host."""
        return self._engine.runtime.transfer()

    @property
    def runtime(self) -> PlanRuntime:
        """Device, host memory, transfer and counters of the plan, for code that also acts on the step."""
        return self._engine.runtime

    def on_remove(self, step: Callable[[], None], last: bool = False) -> None:
        """Let `remove` also call ``step``: before the hooks are taken off, or as the ``last`` thing."""
        (self._last if last else self._undo).append(step)

    def verify(self, when: Verify) -> None:
        """Compare what recomputation rebuilds, as ``memory.verify`` says it, from the next forward on."""
        self._engine.verify(when)

    @property
    def differing(self) -> tuple[OpCall, ...]:
        """The ops that gave other numbers when they ran again, and are kept since."""
        return self._engine.differing

    @uninterrupted()
    def suspend(self) -> None:
        """Remove the hooks, so that another plan can be applied; what was learned and counted stays.

        Between two forwards only, and safe to call again. A graph that still exists can still run backward,
        because it holds its tickets.
        """
        hooks, self._hooks = self._hooks, None
        for step in reversed(hooks or []):
            step()

    @uninterrupted()
    def resume(self) -> None:
        """Install the hooks again after `suspend`, if they are off; from the next forward on the plan acts.

        Raises:
            PlanError: another plan is on the model, or this one was removed.
        """
        if self._hooks is None:
            if self._removed:
                raise PlanError([Problem("plan", "one that is suspended", "one that was removed")])
            self._hooks = self._attach()

    @uninterrupted()
    def change_to(self, plan: MemoryPlan) -> None:
        """Let a plan with the same tiles act, before the first training forward; counting begins anew.

        It is not checked against the model.
        """
        self.suspend()
        before = self._engine.runtime
        before.unbind()
        before.close()
        self._engine, self._attach = self._make(plan)
        self._engine.runtime.listener = before.listener
        self.resume()

    @uninterrupted()
    def remove(self) -> None:
        """Take everything off the model and free the host memory. Safe to call again.

        A graph that still exists keeps its tickets and their host blocks and can still run backward.
        """
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()
        self.suspend()
        if not self._removed:
            self._removed = True
            self._engine.close()
            for step in reversed(self._last):
                step()

    def __repr__(self) -> str:
        state = "removed" if self._removed else "suspended" if self._hooks is None else "on"
        return f"<AppliedPlan, {state}: {'; '.join(plan_in_words(self.plan, self.structure))}>"

    def __enter__(self) -> AppliedPlan:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def install(
    model: nn.Module,
    plan: MemoryPlan,
    structure: ModelStructure,
    resources: Resources = Resources(),
) -> AppliedPlan:
    """Put ``plan`` on ``model``.

    Args:
        model: bare or wrapped; hooks go to the model inside the wrapper.
        plan: fates of the ops of this model.
        structure: structure of this model.
        resources: transfer, host memory and more that the plan is to work with.

    Raises:
        PlanError: the plan does not belong to this model, or a plan is on it already.
    """
    root = unwrapped(model)
    tiles = plan.tiles if resources.host is None else ()  # else a planner has put them on for all its plans
    _check(root, replace(plan, tiles=tiles), structure, resources.replicas)
    parts = tile_parts(root, tiles, structure, resources.replicas)

    def make(plan: MemoryPlan) -> tuple[Engine, Attach]:
        engine = Engine(model, plan, structure, resources)
        acts = plan.rows or plan.tiles or plan.streamed or resources.weights is None or resources.pack_handler

        def attach() -> list[Callable[[], None]]:
            if not acts:  # the weights alone: another plan may come beside them
                return []
            if problems := _other_plan(root, structure, tiles):
                raise PlanError(problems)
            undo = engine.attach()
            undo += put_tiles(root, parts, structure, partial(engine.adjust, level=logging.WARNING))
            if plan.gather_weights_again:
                sharded = (module for module in model.modules() if hasattr(type(module), FSDP2_METHOD))
                undo += [_reshard_after_forward(module) for module in sharded]
            return undo

        return engine, attach

    return AppliedPlan(plan, make, resources.weights, counts_weights=resources.host is None)


def put_tiles(
    root: nn.Module,
    parts: Mapping[Tile, int],
    structure: ModelStructure,
    adjust: Callable[[list[Adjustment]], None] | None = None,
) -> list[Callable[[], None]]:
    """Let the head, and modules of layers, run in tiles; return functions that restore them.

    Args:
        root: the model.
        parts: result of `tile_parts` for the tiles of a plan.
        structure: structure of the model.
        adjust: called with each reason why something runs whole after all, once; ``None``: it is logged.
    """
    said: set[str] = set()

    def say(tile: Tile, reason: str, got: str = "whole logits") -> None:
        if tile.scope == "head":
            found = Adjustment("tile_config.loss", (), "head", str(tile), got, reason)
        else:
            found = Adjustment("tile_config.tile", (tile.scope,), tile.op_path, str(tile), "whole", reason)
        if str(found) not in said:
            said.add(str(found))
            if adjust is None:
                logger.warning("%s", found)
            else:
                adjust([found])

    return [
        tile_head(module, tile, partial(say, tile), root, partial(say, tile, got="no tiles"))
        if tile.scope == "head"
        else tile_module(module, tile, partial(say, tile), parts[tile])
        for tile, module in _tiled(root, parts, structure)
    ]


def _tiled(
    root: nn.Module, tiles: Iterable[Tile], structure: ModelStructure
) -> Iterator[tuple[Tile, nn.Module]]:
    for tile in tiles:
        if (path := structure.scopes.get(tile.scope)) is None:
            continue
        module = root.get_submodule(path)
        found = dict(named_op_modules(module)).get(tile.op_path) if tile.op_path else module
        if found is not None:
            yield tile, found


def _other_plan(root: nn.Module, structure: ModelStructure, tiles: Iterable[Tile]) -> list[Problem]:
    acts = (hook.act for hook in root._forward_pre_hooks.values() if isinstance(hook, Hook))
    tiled = any(is_tiled_head(module) or is_tiled(module) for _, module in _tiled(root, tiles, structure))
    if tiled or any(isinstance(getattr(act, "__self__", None), Engine) for act in acts):
        hint = "Call remove() on it first; if it is lost, copy.deepcopy(model) has no plan."
        return [Problem("model", "no plan on it yet", "one that is applied", hint)]
    return []


def _check(
    root: nn.Module, plan: MemoryPlan, structure: ModelStructure, replicas: ReplicaRanks | None
) -> None:
    problems = _other_plan(root, structure, plan.tiles)
    if plan.num_layers != len(structure.layers):
        problems.append(
            Problem("plan.num_layers", f"{len(structure.layers)}, as in the model", str(plan.num_layers))
        )
    else:
        problems += problems_of_compiled(plan, structure)
    layers = {layer.index: layer for layer in structure.all_layers}
    for row in plan.rows:
        where = f"plan row {row.scope}.{row.op_path}"
        if isinstance(row.scope, str) and row.scope not in (*layers, *SCOPES):
            problems.append(Problem(where, "a layer of this model", row.scope))
        elif row.fate == "re-gather" and (
            row.scope not in layers or row.op_path not in layers[row.scope].communications
        ):
            problems.append(Problem(where, "a communication of the layer", row.fate))
        elif row.fate == "slice" and row.op_path != OUTPUT:
            problems.append(Problem(where, f"{OUTPUT}, the output of a layer or of the embedding", row.fate))
        elif row.fate == "slice" and replicas is None:
            hint = "Apply the plan inside `with tensor_parallel_group(group):`."
            problems.append(Problem(where, "a tensor-parallel group", row.fate, hint))
        elif row.fate == "recompute" and row.scope in SCOPES:
            problems.append(Problem(f"plan row {row.scope}", "keep or swap outside the layers", row.fate))
    if problems:
        raise PlanError(problems)


def tile_parts(
    root: nn.Module, tiles: Iterable[Tile], structure: ModelStructure, replicas: ReplicaRanks | None
) -> dict[Tile, int]:
    """Return into how many parts ranks divide the sequence of the output of each tile's module (else 1).

    Raises:
        PlanError: something cannot run over tiles of the tokens in this model.
    """
    tiles, problems, hint = tuple(tiles), [], "See tile_config in docs/reference.md."
    modules = {layer.index: layer.module_paths for layer in structure.all_layers if not layer.compiled}
    modules |= {scope: frozenset({""}) for scope in ("final_norm", "head") if scope in structure.scopes}
    for tile in tiles:
        if structure.compiled or tile.op_path not in modules.get(tile.scope, ()):
            where, expected = f"plan tile {tile.scope}.{tile.op_path}", "a module outside of compiled code"
            problems.append(
                Problem(where, f"{expected}, of a layer, the final norm or the head", str(tile), hint)
            )
    if problems:
        raise PlanError(problems)
    return checked_tiles(root, tiles, structure, 1 if replicas is None else replicas.size)


def _reshard_after_forward(module: Any) -> Callable[[], None]:
    """Let an FSDP2 module free gathered weights after forward; return a function that restores its setting.

    MindSpore's flag (``parallel_optimizer_comm_recompute``) meant that the all-gather of optimizer-sharded
    weights is done again in backward, so that they are not held gathered in between: for FSDP2,
    ``reshard_after_forward`` of all modules, the outermost too. The setting is read from private attributes,
    those of PyTorch 2.13; earlier versions have one group of parameters for each module.
    """
    state = module._get_fsdp_state()
    groups = parameter_groups(module)
    automatic = getattr(state, "_auto_reshard_after_forward", False)
    undecided = automatic and state._is_root is None
    before = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(True, recurse=False)

    def restore() -> None:
        state._auto_reshard_after_forward = automatic
        # FSDP2 decides at the first forward who is the root, whose weights it then keeps gathered.
        root_since = undecided and state._is_root
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = None if root_since else mesh

    return restore
