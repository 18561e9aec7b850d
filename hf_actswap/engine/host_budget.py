"""The host memory of one rank: its limit, its source, and a forecast of what it will hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, Problem
from ..plan.actions import MemoryPlan
from ..plan.dry_run import check_device, dry_call, fake_batch, fake_weights, know_values
from ..plan.forward_recorder import ForwardRecorder
from ..plan.model_structure import ModelStructure, unwrapped
from ..plan.record import SavedStorage
from ..plan.repeated_layers import repeated_uses
from ..plan.saved_bytes import RUN_AGAIN, SavedBytes, dropped_bytes, swapped_copies
from .host_memory import (
    available_bytes,
    bind_rank,
    budget_bytes,
    cpus_of,
    floor_bytes,
    forecast,
    node_of,
    ranks_on_this_machine,
    room_beyond,
)
from .host_pool import ALIGNMENT_BYTES, PINNED_SLAB_BYTES, HostPool, PageableSlabs, PinnedSlabs, SlabSource

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


def dropped_by(plan: MemoryPlan, forecast: DryRunForecast) -> int | None:
    """Return the bytes that a plan drops and rebuilds in a forward; ``None``: they are not known."""
    if all(row.fate not in RUN_AGAIN for row in plan.rows):
        return 0
    saved = forecast.saved()
    return None if saved is None else dropped_bytes(saved, plan)


class DryRunForecast:
    """Forecasts what one forward will save. The run on fake tensors takes place once, when first needed.

    Args:
        model: the model inside its wrappers.
        args, kwargs: of the call of ``called``, a module in the model; ``None``: of the model itself.

    Attributes:
        compiled: whether the compiler decides what is saved, which is not known before.
        why_not: why nothing is known, after `saved` has returned ``None``.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        called: nn.Module | None = None,
    ) -> None:
        self._call = model, structure, args, kwargs
        self._called = called
        self._ran = False
        self._saved: SavedBytes | None = None
        self.compiled = structure.compiled or any(layer.compiled for layer in structure.all_layers)
        self.why_not = "the compiler decides what compiled layers save" if self.compiled else ""

    def saved(self) -> SavedBytes | None:
        if not (self._ran or self.compiled or torch.compiler.is_compiling()):
            self._ran = True
            try:
                self._saved = record_saved(*self._call, called=self._called)
            except Exception as error:  # the model's own code runs: it may raise anything
                self.why_not = next(iter(str(error).splitlines()), "")
                logger.debug("no run on fake tensors", exc_info=True)
        return self._saved


def record_saved(
    model: nn.Module,
    structure: ModelStructure,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    device: torch.device = _CPU,
    called: nn.Module | None = None,
) -> SavedBytes:
    """Return what autograd saves, and for which op, when a model is called with ``args`` and ``kwargs``.

    Nothing is computed: no hook on the model runs, none of its tensors is touched, no random number is drawn.
    The present autocast state holds. Compiled modules run eagerly. If a plan on the model already recomputes
    layers whole, only the inputs of these layers are seen.

    Args:
        model: the model inside its wrappers, as the model structure names it.
        args, kwargs: of tensors only shape, dtype and device are read; of a mask and of positions also
            whether they mask or pack anything, because attention then runs in another way.
        device: where tensors on ``meta`` are taken to be, as attention kernels differ.
        called: the module in ``model`` that is called; ``None``: the model itself.

    Raises:
        ValueError: this build of PyTorch knows no such device.
        Exception: whatever the model raises on fake tensors (data-dependent shapes, custom kernels).
    """
    check_device(device)
    call = args, kwargs or {}, device, model if called is None else called
    root = unwrapped(model)
    if repeats := structure.repeats_in(root):
        try:
            with ExitStack() as left_out:
                few = structure
                for repeat in repeats:
                    few = left_out.enter_context(few.without(root, repeat.left_out, repeat.stack))
                storages = _record_saved(model, few, *call)
            for repeat in repeats:
                storages = repeated_uses(storages, repeat)
            return SavedBytes(storages, structure.modules)
        except Exception as error:  # the model's own code runs on fewer layers than it has
            logger.debug("Layers that look alike are not, so all of them run: %s", str(error))
    return SavedBytes(_record_saved(model, structure, *call), structure.modules)


def _record_saved(
    model: nn.Module,
    structure: ModelStructure,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    device: torch.device,
    called: nn.Module,
) -> tuple[SavedStorage, ...]:
    with dry_call(model, kwargs) as named:
        state = fake_weights(called, device)
        fake_args, fake_kwargs = fake_batch((args, named), device)
        know_values((fake_args, fake_kwargs), (args, named))
        first = next(model.parameters(), None)
        here = _CPU if first is None else device if first.is_meta else first.device
        recorder = ForwardRecorder(structure.scopes, structure.attention, here)
        with recorder.saving():
            recorder.run_on_fakes(called, model, state, fake_args, fake_kwargs)
    return recorder.used()


Progress = Callable[[int, int], None]
"""Called with (bytes allocated so far, bytes to allocate in all); the two are equal in the last call."""

_TOO_LITTLE = Problem(
    "plan",
    "host memory for what the plan swaps",
    "",
    "Plan again for what there is: `hf-actswap plan ... --host-memory-gib N`, or train with `actswap: auto`.",
)

_EXACT = 1
"""Slab size of pageable memory: slabs are exactly as large as requests, as larger ones would save nothing."""


class HostMemory:
    """Makes the host memory pool of applied plans, forecasts whether it suffices, and binds the rank.

    It serves one plan, or several one after the other on the same model: the pool then stays, since
    page-locking takes 0.76 s per GiB. The machine's free memory is read when this object is made, before any
    rank has taken its part of it. A rank may take its share less a margin. Others may use half of the margin
    later; no slab is allocated that would use the other half. Tensors that do not fit stay on the device and
    are counted.

    A configuration that does not fit gives a warning and not an error, even if nothing of it fits: the rest
    of it (recomputation) still acts, and if the device itself has too little memory, PyTorch raises an error.
    A plan that was saved for this model and batch is rejected.

    Args:
        plan: gives the user's cap and says whether the rank may be bound; the same for all plans.
        weights_bytes: what frozen weights, which have a pool of their own, take of that cap.
    """

    def __init__(self, plan: MemoryPlan, weights_bytes: int = 0) -> None:
        available, cap_bytes = available_bytes(), plan.host_memory_bytes
        self._cap_bytes = None if cap_bytes is None else max(cap_bytes - weights_bytes, 0)
        self._bind_numa = plan.bind_numa
        self._available, self._ranks = available, ranks_on_this_machine()
        self._budget_bytes = budget_bytes(self._cap_bytes, self._ranks, available)
        self._floor_bytes = floor_bytes(available)
        self._bound_to: torch.device | None = None
        self._unbind: Callable[[], None] | None = None
        self._pool: HostPool | None = None
        self._pool_of: tuple[torch.device, bool] | None = None

    def pool(self, device: torch.device, pinned: bool, progress: Progress | None) -> HostPool:
        """Return the pool for swapping from ``device``, and close the one for another device."""
        if self._pool is None or self._pool_of != (device, pinned):
            self.close()
            source, room = slab_source(device, pinned, self._bind_numa), room_beyond(self._floor_bytes)
            slab_bytes = PINNED_SLAB_BYTES if pinned else _EXACT
            self._pool = HostPool(source, self._budget_bytes, slab_bytes, progress, room)
            self._pool_of = device, pinned
        return self._pool

    @property
    def limit_bytes(self) -> int | None:
        """The most that this rank may take for swapping; ``None``: not known.

        It is the user's cap, or less where the machine (or the container) had less when this was made.
        """
        return self._budget_bytes

    @property
    def opened(self) -> HostPool | None:
        """The present pool; ``None``: none was made yet, or it was closed."""
        return self._pool

    def close(self) -> None:
        """Free the pool; blocks in use are freed when they are given back. Safe to call again."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()

    def bind(self, device: torch.device, plan: MemoryPlan) -> None:
        """Keep the calling thread on the processors next to ``device``, if the plan copies and allows it."""
        if device == self._bound_to or not self._bind_numa:
            return
        self.unbind()
        if plan.streamed is not None or any(row.fate == "swap" for row in plan.rows):
            self._bound_to, self._unbind = device, bind_rank(device)

    def unbind(self) -> None:
        """Let the thread that was bound run where it could before. Safe to call again."""
        undo, self._unbind, self._bound_to = self._unbind, None, None
        if undo is not None:
            undo()

    def make_ready(self, pool: HostPool, pinned: bool, plan: MemoryPlan, dry_run: DryRunForecast) -> None:
        """Log whether what the plan will swap in a forward fits in host memory, and begin to allocate it.

        A plan that was made for this model and batch (`MemoryPlan.fingerprint`) counts on what it swaps: it
        is rejected. Only tensors that certainly move are counted. Those among which ``auto`` will choose are
        not: it chooses within the budget and allocates its own part. If the bytes cannot be known (compiled
        layers, models that do not run on fake tensors), an info line says so, and memory is allocated when it
        is first needed.

        Args:
            pinned: whether copies overlap compute; if not, ``auto`` swaps everything, and no memory is
                allocated beforehand.
            plan: the plan that acts in the forward.

        Raises:
            PlanError: there is too little host memory for a plan that was made for this model.
        """
        sizes_bytes = _swapped(plan, pinned, dry_run)
        if not sizes_bytes:
            return
        fits, message = forecast(sum(sizes_bytes), self._cap_bytes, self._ranks, self._available)
        if fits:
            logger.info("%s", message)
        elif pinned and plan.fingerprint is not None:
            raise PlanError([replace(_TOO_LITTLE, found=message)])
        else:
            nothing = self._budget_bytes is not None and self._budget_bytes < min(sizes_bytes)
            what = "all of it" if nothing else "what has no room, the latest tensors of a forward first"
            logger.warning("%s Stays on the device: %s.", message, what)
        if pinned:
            aligned = sum(-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes_bytes)
            pool.reserve(aligned)  # which allocates at most the budget


def slab_source(device: torch.device, pinned: bool, bind_numa: bool) -> SlabSource:
    """Return where host memory for ``device`` comes from.

    Args:
        pinned: whether copies overlap compute, which takes page-locked memory.
        bind_numa: whether page-locked memory is taken beside the device.
    """
    if not pinned:
        return PageableSlabs()
    node = node_of(device) if bind_numa else None
    return PinnedSlabs(device, frozenset[int]() if node is None else cpus_of(node))


def _swapped(plan: MemoryPlan, pinned: bool, dry_run: DryRunForecast) -> list[int]:
    """Return the bytes of each copy to the host; empty if there are none or they are not known."""
    moving = {row for row in plan.rows if row.fate == "swap" and (row.windows is not None or not pinned)}
    if not moving or torch.compiler.is_compiling():
        return []
    saved = dry_run.saved()
    if saved is not None:
        return [copy.size_bytes for copy in swapped_copies(saved, plan) if copy.row in moving]
    why = dry_run.why_not
    if not dry_run.compiled:
        why = f"the model does not run on fake tensors ({why})"
    logger.info("No forecast of host memory: %s.", why)
    return []
