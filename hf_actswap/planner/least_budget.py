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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..engine.stats import gib_text
from ..plan.actions import MemoryPlan
from ..plan.model_structure import unwrapped
from ..plan.tile_ladder import tile_names
from .budget import limits_of
from .record.devices import known_device_or_default
from .record.shapes import profile_from_shapes
from .run import PlannedTraining
from .search.find_plan import least_peak_bytes
from .states.optimizer_kinds import expected_state_bytes, inner_optimizer

logger = logging.getLogger(__name__)


class LeastBudget:
    """Finds the least budget that any plan fits, from a step on fake tensors of the batch that failed.

    Args:
        training: the model and, if known, its optimizer. States not made yet are counted as Adam's would be.
        fixed: returns the fates written by hand, with the current tiles.
        device: name of the model's device.
    """

    def __init__(self, training: PlannedTraining, fixed: Callable[[], MemoryPlan], device: str) -> None:
        self._rates = known_device_or_default(device)
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
        return self._computed()

    def in_words(self, least_bytes: int) -> str:
        """Return a sentence that names the least budget; an empty string if it is not known.

        Args:
            least_bytes: device memory that is known to be needed in any case.
        """
        tiled = tile_names(self._fixed().tiles)
        key = self._shape, self._gradients_exist, tiled
        if key not in self._known:
            self._known[key] = self._computed()
        found = self._known[key]
        if found is None:
            return ""
        least_bytes = max(found, least_bytes)
        states = "" if self._state_bytes() is None else ", optimizer states included"
        states += f", with {tiled} in tiles" if tiled else ""
        return (
            f"The least budget that would do for a batch of {self._shape} is about "
            f"{gib_text(least_bytes, math.ceil)} (computed from shapes{states})."
        )

    def _computed(self) -> int | None:
        found: list[int] = []
        context = contextvars.copy_context()  # it holds the tensor-parallel group
        thread = threading.Thread(target=context.run, args=(self._search, found), name="least-budget")
        thread.start()
        thread.join()
        return found[0] if found else None

    def _search(self, found: list[int]) -> None:
        if self._call is None or self._autocast or self._structure.sharded or self._is_foreign():
            return
        try:
            profile = profile_from_shapes(
                self._root,
                self._structure,
                tree_map(_on_meta, self._call),
                self._rates,
                optimizer_state_bytes=self._state_bytes() or 0,
                gradients_exist=self._gradients_exist,
            )
            fixed = self._fixed()
            limits = limits_of(self._memory, profile.device_bytes, fixed.min_tensor_bytes)
            found.append(least_peak_bytes(profile, fixed, limits))
        except Exception:  # an error is on its way already, and it is the one that counts
            logger.debug("the least budget is not known", exc_info=True)

    def _is_foreign(self) -> bool:
        """Return whether Accelerate wraps the forward in its device's autocast: the fakes are on the CPU."""
        return hasattr(self._root, "_original_forward")

    def _state_bytes(self) -> int | None:
        """Bytes of the optimizer's states that are on the device in every step; ``None``: not known."""
        if self._memory.preference == "memory_saving":
            return 0
        return None if self._optimizer is None else expected_state_bytes(self._optimizer)


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
