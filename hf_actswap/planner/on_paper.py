"""Computes the coming step of a training from the shapes of its batch, before anything ran.

From its profile ``adaptive`` plans before the first step. The least budget that would do is for the error
where a training runs out of memory before a step could be measured. Both are computed on a thread of its own
while the training waits: they are asked for from within a forward or backward, whose modes, hooks and
autograd state another thread does not share. Errors are only logged for debugging: the training goes on
without, or another error is about to be raised.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from math import prod
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..config.sizes import gib_text
from ..engine.call_state import CallState
from ..engine.frozen_weights import weights_of
from ..engine.tiled_calls import AUTO_LEAST_TOKENS
from ..plan.actions import MemoryPlan
from ..plan.dry_run import named_arguments
from ..plan.model_structure import unwrapped
from ..plan.tiles import tile_names
from .budget import limits_of
from .devices import DEFAULT_DEVICE, device_rates, rates_name
from .profile import Profile
from .record.adjusted import with_weights_on_host
from .record.fsdp_step import of_one_rank
from .record.shapes import profile_from_shapes
from .run import ApplyTiles, PlannedTraining
from .search.find_plan import least_peak_bytes
from .states.optimizer_states import (
    inner_optimizer,
)
from .states.state_bytes import expected_state_bytes

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


_LESS = 0.99
"""Tiles are pointed to if they lower the least budget to less than this share."""


class StepOnPaper:
    """Computes a step of a training from the shapes of its batch, and the least budget that any plan fits.

    Args:
        training: the model and, if known, its optimizer. States not made yet are counted as Adam's would be.
        fixed: returns the fates written by hand, with the current tiles.
        states_moved: returns whether the optimizer's states wait on the host.
        ladder: plans with more and more in tiles that the planner may choose.

    Attributes:
        knows_steps: whether a step can be timed on paper: the device's rates are known, nothing is compiled.
    """

    def __init__(
        self,
        training: PlannedTraining,
        fixed: Callable[[], MemoryPlan],
        device: torch.device,
        put_tiles: ApplyTiles = lambda _: [],
        states_moved: Callable[[], bool] = lambda: False,
        ladder: Iterable[MemoryPlan] = (),
    ) -> None:
        self._put_tiles, self._states_moved, self._ladder = put_tiles, states_moved, ladder
        rates = rates_name(device)
        self._rates, self._workspaces = rates or DEFAULT_DEVICE, rates != "cpu"
        self._root, self._structure, self._fixed = unwrapped(training.model), training.structure, fixed
        optimizer, self._memory = training.optimizer, training.memory
        self._optimizer = None if optimizer is None else inner_optimizer(optimizer)
        self._first = next((item for item in self._root.parameters() if item.requires_grad), None)
        self._call: Mapping[str, Any] | None = None
        self._shape: tuple[int, ...] = ()
        self._gradients_exist = False
        self._known: dict[object, int | None] = {}
        self.knows_steps = self._workspaces and rates is not None and not self._structure.compiles

    def forward_starts(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember a batch; a forward pre-hook of the model. Floating-point values are not kept."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return
        self._call = tree_map(_without_numbers, named_arguments(self._root, args, kwargs))
        self._shape = next((tuple(leaf.shape) for leaf in leaves if leaf.dim() >= 2), ())
        self._gradients_exist = self._first is not None and self._first.grad is not None

    def profile(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], accumulates: bool, forwards_before: int
    ) -> Profile | None:
        """Return the profile of a step's micro-batch, with the tiles that are on the model.

        ``None``: how weights are sharded is not known, or the model does not run on fake tensors.

        Args:
            args, kwargs: those of the coming forward.
            accumulates: whether its backward adds to gradients.
            forwards_before: how many such forwards run ahead of it, whose backward is to come too.
        """
        self.forward_starts(self._root, args, kwargs)
        return _on_own_thread(lambda: self._profile(accumulates, forwards_before))

    def least_bytes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        self.forward_starts(self._root, args, kwargs)
        return self._computed(self._fixed())

    def least_in_tiles(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[int, MemoryPlan] | None:
        """Return the least peak in all tiles that the planner may choose, and the plan with these tiles.

        ``args`` and ``kwargs`` are those of the coming forward; none: the last forward's.
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

        ``least_bytes`` of device memory are known to be needed in any case.
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
        with ExitStack() as tiled:
            there = self._fixed().tiles
            for undo in self._put_tiles([tile for tile in plan.tiles if tile not in there]):
                tiled.callback(undo)
            profile = self._profile(self._gradients_exist)
        if profile is None:
            return None
        limits = limits_of(self._memory, profile.device_bytes, plan.min_tensor_bytes)
        return least_peak_bytes(profile, plan, limits)

    def _profile(self, gradients_exist: bool, forwards_before: int = 0) -> Profile | None:
        if self._call is None:
            return None
        with _AutocastOnFakes():
            profile = profile_from_shapes(
                self._root,
                self._structure,
                self._call,
                self._rates,
                optimizer_state_bytes=self._state_bytes() or 0,
                gradients_exist=gradients_exist,
                with_workspaces=self._workspaces,
                forwards_before=forwards_before,
            )
        if self._structure.sharded:
            return of_one_rank(profile, self._root, self._structure, device_rates(self._rates).fabric)
        streamed = weights_of(self._root)
        return profile if streamed is None else with_weights_on_host(profile, streamed.sizes_bytes)

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
            with state.autocast_restored():
                found.append(compute())
        except Exception:  # an error is on its way already, and it is the one that counts
            logger.debug("the step is not known on paper", exc_info=True)

    # Its context variables hold the tensor-parallel group.
    state = CallState(torch.accelerator.current_accelerator() or torch.device("cpu"), False, ())
    thread = threading.Thread(target=state.run, args=(run,), name="step-on-paper")
    thread.start()
    thread.join()
    return found[0] if found else None


class _AutocastOnFakes(TorchFunctionMode):
    """Turns autocast on for fake tensors, which are on the CPU, where a forward turns it on for its device.

    That is how Accelerate wraps a forward. It is done once: what the model's code then turns off for the
    device of its tensors stays off.
    """

    def __init__(self) -> None:
        super().__init__()
        accelerator = torch.accelerator.current_accelerator()
        self._kind = None if accelerator is None else accelerator.type

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if self._kind is not None and torch.is_autocast_enabled(self._kind):
            torch.set_autocast_dtype("cpu", torch.get_autocast_dtype(self._kind))
            torch.set_autocast_enabled("cpu", True)
            self._kind = None
        return func(*args, **(kwargs or {}))


def _without_numbers(value: Any) -> Any:
    """Return a floating-point tensor on ``meta``; ids and masks stay, as the values of a mask matter."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value
