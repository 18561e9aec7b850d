"""The storages that one forward swaps: each is copied out once, released when due, listed for backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..plan.actions import Windows
from .auto_windows import AutoWindows
from .autograd_state import next_node_number
from .checkpoint_inputs import CheckpointInputs
from .fates import Action, FateTable
from .host_pool import HostPool
from .passes import CrossingReleases, PassOrder
from .schedule import Backward, PrefetchRequest, Reference, ReleaseQueue
from .stats import Counters
from .tickets import Place, SwapGroup, SwapTicket, Ticket, View
from .transfer import Transfer, WatchedTransfer

Swapped = SwapGroup | SwapTicket
"""The ticket of a tensor that moves."""

PackHandler = Callable[[torch.Tensor], Ticket]
"""Makes the tickets of tensors that stay; by default `tickets.keep`."""

NO_HOST_MEMORY = "host memory cap"
"""The cap (``host_memory_gib``) is reached, or the machine has no more."""

TOO_SMALL = "smaller than min_tensor_mib"


@dataclass(frozen=True)
class ForwardContext:
    """What all forwards under one applied plan share."""

    fates: FateTable
    pool: HostPool
    transfer: Transfer
    device: torch.device
    counters: Counters
    min_tensor_bytes: int
    auto: AutoWindows | None = None
    pack_handler: PackHandler | None = None
    passes: PassOrder | None = None


class SwappedStorages:
    """Copies out the storages that one forward swaps, releases them when due, and lists them for backward.

    Args:
        context: what all forwards under one applied plan share.
        inputs: is told of swapped storages that may be inputs of checkpointed layers.
    """

    def __init__(self, context: ForwardContext, inputs: CheckpointInputs) -> None:
        self._context, self._inputs = context, inputs
        self._name = context.transfer.name if isinstance(context.transfer, WatchedTransfer) else None
        self._groups: dict[int, weakref.ref[SwapGroup]] = {}
        self._all_groups: list[weakref.ref[SwapGroup]] = []
        passes = context.passes
        self.releases: ReleaseQueue[weakref.ref[SwapGroup]] = (
            ReleaseQueue() if passes is None else passes.releases(next_node_number())
        )

    def ticket(
        self, tensor: torch.Tensor, place: Place, windows: Windows, op: int, asked: Action
    ) -> Swapped | None:
        """Make the ticket of a detached tensor, and start the copy out of its storage if there is none yet.

        Args:
            tensor: one that `rejects` does not reject.
            place: its place.
            windows: windows of the copy, if one starts now.
            op: operator that saves it.
            asked: the plan's action for it.

        Returns:
            ``None`` if there is no host memory, which is counted.
        """
        storage = tensor.untyped_storage()
        group = self._known(storage)
        if group is not None:
            if group.covers(place.view, tensor._version):
                return self._saved(SwapTicket(group, place.view), group, op)
            place = place._replace(range_bytes=(0, place.storage_bytes))
        group = self._new_group(tensor, place, storage, windows, op, asked)
        return None if group is None else self._saved(group, group, op)

    def ticket_at(
        self, tensor: torch.Tensor, place: Place | None, windows: Windows, op: int, asked: Action
    ) -> Swapped | None:
        """Do as `ticket_unless_rejected`, but faster if the tensor is at the place of its cached step.

        Args:
            tensor: detached, of the dtype at ``place``.
            place: place of the tensor that was swapped when the step was recorded; ``None``: none was.
            windows, op, asked: as of `ticket`.
        """
        if (  # without a call of `View.of`, for each swapped tensor of each step
            place is None
            or tensor.shape != place.view.shape
            or tensor.stride() != place.view.stride
            or tensor.storage_offset() * tensor.element_size() != place.view.offset_bytes
            or tensor.untyped_storage().nbytes() != place.storage_bytes
        ):
            return self.ticket_unless_rejected(tensor, windows, op, asked)
        return self.ticket(tensor, place, windows, op, asked)

    def ticket_unless_rejected(
        self, tensor: torch.Tensor, windows: Windows, op: int, asked: Action
    ) -> Swapped | None:
        """Do as `ticket` for any detached tensor; return ``None`` also if the tensor must stay."""
        return None if self.rejects(tensor) else self.ticket(tensor, Place.of(tensor), windows, op, asked)

    def release_due(self, op: int) -> None:
        """Release the storages that are due at a hook at operator ``op``."""
        _release(self.releases.due(op))

    def end(self, backward: Backward) -> list[PrefetchRequest[Reference]]:
        """End the forward: release the rest, now or when due; return the storages that backward will need."""
        queue, passes = self.releases, self._context.passes
        if passes is not None and isinstance(queue, CrossingReleases):
            _release(passes.forward_ended(queue, self._all_groups, backward))
        else:
            _release(queue.drain())
        self._groups.clear()
        wants: list[PrefetchRequest[Reference]] = []
        for reference in self._all_groups:
            group = reference()
            if group is not None:
                wants.append(PrefetchRequest(reference, group.last_use, group.prefetch_ops))
        return wants

    def _known(self, storage: torch.UntypedStorage) -> SwapGroup | None:
        reference = self._groups.get(storage._cdata)
        return None if reference is None else reference()

    def _saved(self, ticket: Swapped, group: SwapGroup, op: int) -> Swapped:
        group.last_use = op
        if self._inputs.listening:
            self._inputs.swapped(group)
        return ticket

    def _moves(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is swapped already: a small view that stayed would hold it."""
        group = self._known(tensor.untyped_storage())
        return group is not None and group.covers(View.of(tensor), tensor._version)

    def _new_group(
        self,
        tensor: torch.Tensor,
        place: Place,
        storage: torch.UntypedStorage,
        windows: Windows,
        op: int,
        asked: Action,
    ) -> SwapGroup | None:
        context = self._context
        start, stop = place.range_bytes
        host = context.pool.take(stop - start)
        if host is None:
            context.counters.rejected[NO_HOST_MEMORY] += tensor.nbytes
            return None
        if self._name is not None:
            self._name((asked.scope, asked.op_path))
        try:
            group = SwapGroup(
                tensor,
                place,
                storage,
                host,
                context.pool,
                context.transfer,
                context.counters,
                windows.prefetch_ops,
            )
        except BaseException:
            context.pool.give_back(host)
            raise
        reference = weakref.ref(group)
        self._groups[storage._cdata] = reference
        self._all_groups.append(reference)
        self.releases.add(reference, op, windows.release_ops)
        return group

    def rejects(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor that the plan swaps must stay on the device; if so, count it by reason."""
        reason = self.rejection(tensor)
        if reason is None:
            return False
        self._context.counters.rejected[reason] += tensor.nbytes
        return True

    def rejection(self, tensor: torch.Tensor) -> str | None:
        """Return why a tensor must stay on the device, without counting it; ``None``: it may move."""
        context = self._context
        reason = unmovable(tensor, context.device)
        if reason is not None:
            return reason
        size_bytes = tensor.nbytes
        if size_bytes < context.min_tensor_bytes and not self._moves(tensor):
            return TOO_SMALL
        return None if size_bytes else "empty"


def unmovable(tensor: torch.Tensor, device: torch.device) -> str | None:
    """Return why a tensor cannot be copied byte by byte off ``device`` and back; ``None``: it can."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not nn.Parameter:
        return f"tensor subclass {kind.__name__}"
    if (
        tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_quantized
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return "not a plain strided tensor"
    if tensor.device != device:
        return f"on {tensor.device.type}, not on the compute device"
    return None


def _release(references: Iterable[weakref.ref[SwapGroup]]) -> None:
    for reference in references:
        group = reference()
        if group is not None:
            group.release()
