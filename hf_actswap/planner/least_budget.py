"""Finds the least budget that would do when training runs out of memory before a step could be recorded.

The step is run on fake tensors of the batch's shape (`record.shapes`), and the least peak that any plan
reaches is searched for it. This happens on its own thread while the training waits, because the error comes
from within a forward or backward: another thread does not share its modes, hooks and autograd state.

Errors of this computation are only logged for debugging: the error that is about to be raised matters more.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.stats import gib_text
from ..engine.tiled_calls import AUTO_LEAST_TOKENS
from ..plan.actions import MemoryPlan
from ..plan.model_structure import unwrapped
from ..plan.tiles import tile_names
from .budget import limits_of
from .record.devices import known_device_or_default
from .record.shapes import profile_from_shapes
from .run import ApplyTiles, PlannedTraining
from .search.find_plan import least_peak_bytes
from .states.streamed_step import expected_state_bytes, inner_optimizer

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


_LESS = 0.99
"""Tiles are pointed to if they lower the least budget to less than this share."""


class LeastBudget:
    """Finds the least budget that any plan fits, from a step on fake tensors of the batch that failed.

    Args:
        training: the model and, if known, its optimizer. States not made yet are counted as Adam's would be.
        fixed: returns the fates written by hand, with the current tiles.
        device: name of the model's device.
        put_tiles: puts tiles on the model and returns what takes them off.
        states_moved: returns whether the optimizer's states wait on the host.
        ladder: plans with more and more in tiles that the planner may choose.
    """

    def __init__(
        self,
        training: PlannedTraining,
        fixed: Callable[[], MemoryPlan],
        device: str,
        put_tiles: ApplyTiles = lambda _: [],
        states_moved: Callable[[], bool] = lambda: False,
        ladder: Iterable[MemoryPlan] = (),
    ) -> None:
        self._put_tiles, self._states_moved, self._ladder = put_tiles, states_moved, ladder
        self._rates, self._workspaces = known_device_or_default(device), device != "cpu"
        self._root, self._structure, self._fixed = unwrapped(training.model), training.structure, fixed
        optimizer, self._memory = training.optimizer, training.memory
        self._optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self._first = next((item for item in self._root.parameters() if item.requires_grad), None)
        self._call: Mapping[str, Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._gradients_exist = self._autocast = False
        self._known: dict[object, int | None] = {}

    def forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember a batch; a forward pre-hook of the model. Floating-point values are not kept."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return
        self._call = None if args else tree_map(_without_numbers, kwargs)
        self._shape = next((tuple(leaf.shape) for leaf in leaves if leaf.dim() >= 2), ())
        self._gradients_exist = self._first is not None and self._first.grad is not None
        self._autocast = any(torch.is_autocast_enabled(leaf.device.type) for leaf in leaves)

    def least_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        """Return the least peak of any plan for a forward with these arguments; ``None``: it is not known."""
        self.forward_starts(self._root, args, kwargs)
        return self._computed(self._fixed())

    def least_in_tiles(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, MemoryPlan] | None:
        """Return the least peak in all tiles that the planner may choose, and the plan with these tiles.

        Args:
            args, kwargs: those of the coming forward; none: the last forward's.
        """
        if args or kwargs:
            self.forward_starts(self._root, args, dict(kwargs))
        plans = [self._fixed(), self._more_tiled()]
        found = [(self._computed(plan), plan) for plan in plans if plan is not None]
        return min(
            ((least, plan) for least, plan in found if least is not None), key=itemgetter(0), default=None
        )

    def in_words(self, least_bytes: int) -> str:
        """Return a sentence that names the least budget; an empty string if it is not known.

        Args:
            least_bytes: device memory that is known to be needed in any case.
        """
        fixed = self._fixed()
        tiled = tile_names(fixed.tiles)
        found = self._computed(fixed)
        if found is None:
            return ""
        least_bytes = max(found, least_bytes)
        states = "" if self._state_bytes() is None else ", optimizer states included"
        states += f", with {tiled} in tiles" if tiled else ""
        return (
            f"The least budget that would do for a batch of {self._shape} is about "
            f"{gib_text(least_bytes, math.ceil)} (computed from shapes{states})."
            f"{self._with_more_tiles(least_bytes)}"
        )

    def _with_more_tiles(self, least_bytes: int) -> str:
        """Return a sentence with the least budget in all tiles of the ladder, if that is less."""
        most = self._more_tiled()
        found = None if most is None else self._computed(most)
        if most is None or found is None or found >= _LESS * least_bytes:
            return ""
        return (
            f" With {tile_names(most.tiles)} in tiles {gib_text(found, math.ceil)} would do: write "
            "`tile_config: {loss: auto, tile: {op_name: feed_forward}}`, or let `Planner.micro_batch` run "
            "forward and backward, as the Trainer does: then the planner adds tiles when memory runs out."
        )

    def _computed(self, plan: MemoryPlan) -> int | None:
        key = self._shape, self._gradients_exist, plan.tiles
        if key not in self._known:
            self._known[key] = _on_own_thread(lambda: self._searched(plan))
        return self._known[key]

    def _more_tiled(self) -> MemoryPlan | None:
        """Return the plan with most tiles that the planner may choose; ``None``: no more than there are."""
        if prod(self._shape) <= AUTO_LEAST_TOKENS:
            return None
        most = _on_own_thread(lambda: self._most_tiled)
        return None if most is None or len(most.tiles) <= len(self._fixed().tiles) else most

    @cached_property
    def _most_tiled(self) -> MemoryPlan | None:
        *_, most = [None, *self._ladder]
        return most

    def _searched(self, plan: MemoryPlan) -> int | None:
        if self._call is None or self._autocast or self._structure.sharded or self._is_foreign():
            return None
        with ExitStack() as tiled:
            there = self._fixed().tiles
            for undo in self._put_tiles([tile for tile in plan.tiles if tile not in there]):
                tiled.callback(undo)
            profile = profile_from_shapes(
                self._root,
                self._structure,
                tree_map(_on_meta, self._call),
                self._rates,
                optimizer_state_bytes=self._state_bytes() or 0,
                gradients_exist=self._gradients_exist,
                with_workspaces=self._workspaces,
            )
        limits = limits_of(self._memory, profile.device_bytes, plan.min_tensor_bytes)
        return least_peak_bytes(profile, plan, limits)

    def _is_foreign(self) -> bool:
        """Return whether Accelerate wraps the forward in its device's autocast: the fakes are on the CPU."""
        return hasattr(self._root, "_original_forward")

    def _state_bytes(self) -> int | None:
        """Bytes of the optimizer's states that are on the device in every step; ``None``: not known."""
        if self._states_moved():
            return 0
        return None if self._optimizer is None else expected_state_bytes(self._optimizer)


def _on_own_thread(compute: Callable[[], Value | None]) -> Value | None:
    """Return what ``compute`` returns on a thread of its own; ``None`` if it fails."""
    found: list[Value | None] = []

    def run() -> None:
        try:
            found.append(compute())
        except Exception:  # an error is on its way already, and it is the one that counts
            logger.debug("the least budget is not known", exc_info=True)

    context = contextvars.copy_context()  # it holds the tensor-parallel group
    thread = threading.Thread(target=context.run, args=(run,), name="least-budget")
    thread.start()
    thread.join()
    return found[0] if found else None


@dataclass(frozen=True)
class _Shape:
    """Shape and type of a tensor whose values do not matter, kept in its place."""

    shape: torch.Size
    dtype: torch.dtype


def _without_numbers(value: Any) -> Any:
    """Return a `_Shape` for a floating-point tensor; ids and masks stay, as the values of a mask matter."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return _Shape(value.shape, value.dtype)
    return value


def _on_meta(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, _Shape) else value
