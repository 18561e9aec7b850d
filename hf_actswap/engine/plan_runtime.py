"""What one applied plan works with: the model's device, host memory, and the transfer between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..plan.actions import Adjustment, MemoryPlan
from .auto_windows import AutoWindows, StageWindows
from .device_allocator import let_segments_expand, limit_memory
from .fates import FateTable, ReplicaRanks
from .frozen_weights import FrozenWeights
from .host_budget import HostMemory, Progress
from .host_pool import HostPool
from .owners import parameter_places
from .schedule import PassOrder
from .stats import Counters, SwapStats
from .swapped_storages import ForwardContext, PackHandler
from .transfer import CopyListener, Transfer, WatchedTransfer, profiler_is_on, transfer_of


@dataclass(frozen=True, slots=True)
class Resources:
    """Objects that a plan is given to work with; others are made when they are needed.

    Args:
        transfer: how bytes move; by default by streams on an accelerator and blocking on the CPU.
        progress: called with (bytes, bytes in all) while host memory is made ready.
        replicas: the tensor-parallel ranks, which the fate ``slice`` needs.
        pack_handler: makes the tickets of tensors that stay on the device (`EvictableTensors.keep`), under a
            plan without rows too. Every op is then followed at every step. It does not see tensors that
            whole-layer recomputation saves again in backward, nor those that recomputed ops rebuild.
            ``None``: `tickets.keep`, with cached traces.
        host: host memory shared with other plans, which outlives each of them; ``None``: the plan's own.
        passes: order of the passes of a pipeline stage, so that windows can reach into other passes;
            ``None``: each forward and its backward are treated alone.
        weights: the model's frozen weights on the host, whose copies share the plan's transfer.
    """

    transfer: Transfer | None = None
    progress: Progress | None = None
    replicas: ReplicaRanks | None = None
    pack_handler: PackHandler | None = None
    host: HostMemory | None = None
    passes: PassOrder | None = None
    weights: FrozenWeights | None = None


class PlanRuntime:
    """Holds the device, the host memory and the transfer of one applied plan.

    Each is made when a forward first needs it, on the device that the model is on by then.

    Args:
        adjusted: called with the adjustments that measurement has led to.

    Attributes:
        context: what all forwards share; ``None`` before the first forward.
        listener: receives the copies of forwards that start from now on, and of their backward.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: MemoryPlan,
        fates: FateTable,
        counters: Counters,
        resources: Resources,
        adjusted: Callable[[Sequence[Adjustment]], None],
    ) -> None:
        self._root, self._plan, self._fates, self.counters = root, plan, fates, counters
        self._resources, self._pack_handler, self.passes = resources, resources.pack_handler, resources.passes
        self._adjusted = adjusted
        weights_bytes = 0 if resources.weights is None else resources.weights.host_bytes
        self.host = HostMemory(plan, weights_bytes) if resources.host is None else resources.host
        self.context: ForwardContext | None = None
        self._first_parameter: tuple[nn.Module, str] | None = None
        self.listener: CopyListener | None = None
        self._of_allocator = ExitStack()
        self._set_on: torch.device | None = None

    @property
    def evictable(self) -> bool:
        """Whether tensors that stay can be evicted at present."""
        return self._pack_handler is not None

    def set_pack_handler(self, pack_handler: PackHandler | None) -> None:
        self._pack_handler = pack_handler
        if self.context is not None:
            self.context = replace(self.context, pack_handler=pack_handler)

    def bind(self) -> None:
        """Keep the calling thread beside the device, if the plan swaps and allows it."""
        self.host.bind(self.device(), self._plan)

    def device(self) -> torch.device:
        """Return the first parameter's device. Its place is found once: parameters change, places do not."""
        module, name = self._first_parameter or next(parameter_places(self._root), (self._root, ""))
        self._first_parameter = module, name
        return getattr(module._parameters.get(name), "device", torch.device("cpu"))

    @property
    def sets_allocator(self) -> bool:
        """Whether the plan changes the allocator. One for a batch does, even to keep all: it must fit."""
        planned = self._plan.fingerprint is not None or self._plan.device_memory_bytes is not None
        return planned or self._plan.does_anything

    def set_allocator(self) -> None:
        """Set the allocator of the model's device, unless that is done, and undo what was set elsewhere."""
        device = self.device()
        if device == self._set_on:
            return
        self._of_allocator.close()
        if self.sets_allocator and (restore := let_segments_expand(device)) is not None:
            self._of_allocator.callback(restore)
        limit_bytes = self._plan.device_memory_bytes
        if limit_bytes is not None and (restore := limit_memory(device, limit_bytes)) is not None:
            self._of_allocator.callback(restore)
        self._set_on = device

    def prepared(self) -> tuple[ForwardContext, bool]:
        """Return the context of the coming forward, and whether it is new, as after the model has moved."""
        device = self.device()
        if self.context is not None and self.context.device == device:
            return self.context, False
        self.host.bind(device, self._plan)
        self.set_allocator()
        self.context = None
        transfer = self.transfer()
        pool = self.pool(transfer)
        auto = None
        if any(row.fate == "swap" and row.windows is None for row in self._plan.rows):
            given = transfer, pool, self.counters, self._pending_bytes, self._adjusted
            auto = AutoWindows(*given) if self.passes is None else StageWindows(*given, self.passes)
        self.context = ForwardContext(
            self._fates,
            pool,
            transfer,
            device,
            self.counters,
            self._plan.min_tensor_bytes,
            auto,
            self._pack_handler,
            self.passes,
        )
        return self.context, True

    def watched(self, context: ForwardContext) -> ForwardContext:
        """Return ``context`` for a new forward, with observed copies if there is a listener or profiler."""
        profiled = profiler_is_on()
        if self.listener is None and not profiled:
            return context
        return replace(context, transfer=WatchedTransfer(context.transfer, self.listener, profiled))

    def transfer(self) -> Transfer:
        """Return the transfer in use, or the one that would be used on the present device."""
        if self.context is not None:
            return self.context.transfer
        weights = self._resources.weights
        if weights is not None:
            return weights.transfer(self.device())
        return self._resources.transfer or transfer_of(self.device())

    def pool(self, transfer: Transfer) -> HostPool:
        return self.host.pool(self.device(), transfer.overlaps, self._resources.progress)

    def stats(self) -> SwapStats:
        """Return the totals that were counted, and the present use of host memory."""
        return self.counters.snapshot(self.host.opened if self.context is None else self.context.pool)

    def close(self) -> None:
        """Give the host memory back, unless others share it, and restore the allocator's settings.

        Safe to call again.
        """
        self._of_allocator.close()
        self._set_on = None
        if self._resources.host is None:
            self.host.close()

    def unbind(self) -> None:
        self.host.unbind()

    def _pending_bytes(self) -> int:
        """Return the bytes of gradients that the first backward will allocate."""
        trained = (parameter for parameter in self._root.parameters() if parameter.requires_grad)
        return sum(parameter.nbytes for parameter in trained if parameter.grad is None)
