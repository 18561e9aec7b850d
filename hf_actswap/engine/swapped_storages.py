"""The storages that one forward swaps: each is copied out once, released when due, listed for backward.

**Layers that are recomputed whole.** Backward needs their inputs at their last operator, not at their first:
``torch.utils.checkpoint`` saves the arguments of a layer before the layer runs, and backward reads them at
the first of the layer's nodes that it reaches and that saved something inside. Only the checkpoint can say
which node that is; it is near the end. So prefetching treats a checkpointed layer as one moment, its last
operator. Its nodes are counted as in any other layer, because forward builds them all.

Backward calls our unpack hook once for such a layer. So in a stack of them a prefetch point lies inside a
layer above, and the copy starts when backward enters that layer, before the layer runs again: at least ``p``
operators and one layer ahead.

**Kept tensors that can be evicted** when memory has run out. A plan says beforehand what is swapped. Before
there is a plan, in the planner's first steps, everything is kept, and when the device is full, **idle**
tensors can be evicted: those that are saved for backward and held only by autograd. `EvictableTensors.keep`
replaces `tickets.keep`, and `EvictableTensors.evict` moves the storages that backward will read last to the
host, synchronously::

    on device --evict--> host only --read--> block on the device --last reader, or evict--> host only

A storage is idle if only our tickets hold it, that is if its use count is the number of our tickets. So
nothing that is in use is evicted: parameters, tensors in a variable of the model's code, the inputs of the
op that runs, and what a running backward node has read (a reader gets an alias, which counts), until the
node is done. Nothing is freed by force: our references are dropped, and a storage is freed because these
were the last ones.

All tickets of one storage share its host copy, and share the reloaded block until each has read it once. The
host copy stays: so the block can be dropped again without a copy, and a second backward can reload it.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..plan.actions import Scope, Windows
from ..plan.model_structure import LayerStructure
from ..plan.wrappers import checkpoints_its_call, is_checkpointed
from .auto_windows import AutoForward, AutoWindows, Key
from .autograd_state import next_node_number
from .fates import Action, FateTable
from .host_pool import HostBuffer, HostPool, mapped
from .moving_block import MovingBlock
from .schedule import (
    Backward,
    CrossingReleases,
    OperatorClock,
    PassOrder,
    PrefetchRequest,
    Reference,
    ReleaseQueue,
)
from .stats import Counters
from .tickets import Place, StaleTensorError, SwapGroup, SwapTicket, Ticket, View, keep
from .transfer import BlockingTransfer, Transfer, WatchedTransfer

logger = logging.getLogger(__name__)

Checkpoint = Literal["forward", "call"]
"""Which part of a layer is checkpointed: its forward, or its call with its hooks (transformers 5.17)."""


def checkpoint_of(
    module: nn.Module, layer: LayerStructure | None, ours: Container[Scope]
) -> Checkpoint | None:
    """Return which part of a call of ``module`` is checkpointed; ``None``: none, or the layer is compiled.

    Args:
        layer: structure of ``module``; ``None``: it is no decoder layer.
        ours: layers around whose forward the plan has put a checkpoint.
    """
    if layer is None or layer.compiled:
        return None
    if layer.index in ours:
        return "forward"
    if not (module.training and is_checkpointed(module)):
        return None
    return "call" if checkpoints_its_call(module) else "forward"


class CheckpointInputs:
    """Sets when backward needs the inputs of checkpointed layers: at the last operator of their layer.

    Args:
        hooks: operators at which tensors were saved; for checkpointed layers they become the layer's last.

    Attributes:
        listening: whether a tensor saved now may be such an input, as between scopes.
    """

    def __init__(self, clock: OperatorClock, hooks: list[int]) -> None:
        self._clock, self._hooks = clock, hooks
        self._groups: list[SwapGroup] = []
        self._keys: list[tuple[Key, int]] = []
        self._first_node: int | None = None
        self._first_hook = 0
        self.listening = True

    def swapped(self, group: SwapGroup) -> None:
        self._groups.append(group)

    def chosen(self, key: Key, op: int) -> None:
        """Note that a storage, whose key under ``auto`` is ``key``, was saved at operator ``op``."""
        self._keys.append((key, op))

    def start(self, checkpoint: Checkpoint | None) -> None:
        self._first_node, self.listening = None, checkpoint is not None
        if checkpoint == "call":  # our hooks run inside: the checkpoint has saved its inputs at this operator
            now = self._clock.now()
            while len(self._hooks) > self._first_hook and self._hooks[self._first_hook] != now:
                self._first_hook += 1
            self._groups = [group for group in self._groups if group.last_use == now]
            self._keys = [(key, op) for key, op in self._keys if op == now]
        else:
            self.clear()
        if checkpoint is not None:
            self._first_node = next_node_number()

    def end(self, auto: AutoForward | None) -> None:
        """End the scope: its inputs are needed at its last operator, also for ``auto``."""
        if self._first_node is not None and len(self._hooks) > self._first_hook:
            last_op = self._clock.gather(self._first_node)
            self._hooks[self._first_hook :] = [last_op]
            for group in self._groups:
                group.last_use = last_op
            if auto is not None:
                for key, _ in self._keys:
                    auto.used(key, last_op)
        self._first_node, self.listening = None, True
        self.clear()

    def clear(self) -> None:
        self._groups, self._keys, self._first_hook = [], [], len(self._hooks)


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

    ``inputs`` is told of swapped storages that may be inputs of checkpointed layers.
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
            op: operator that saves it.
            asked: the plan's action for it; ``windows`` are those of the copy, if one starts now.

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
        """Do as `ticket` for any detached tensor, faster if it is at the place of its cached step.

        Returns ``None`` also if the tensor must stay.

        Args:
            tensor: detached, of the dtype at ``place``.
            place: place of the tensor that was swapped when the step was recorded; ``None``: none was.
        """
        if (  # without a call of `View.of`, for each swapped tensor of each step
            place is None
            or tensor.shape != place.view.shape
            or tensor.stride() != place.view.stride
            or tensor.storage_offset() * tensor.element_size() != place.view.offset_bytes
            or tensor.untyped_storage().nbytes() != place.storage_bytes
        ):
            if self.rejects(tensor):
                return None
            place = Place.of(tensor)
        return self.ticket(tensor, place, windows, op, asked)

    def release_due(self, op: int) -> None:
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
        pool, transfer, counters = context.pool, context.transfer, context.counters
        try:
            group = SwapGroup(tensor, place, storage, host, pool, transfer, counters, windows.prefetch_ops)
        except BaseException:
            pool.give_back(host)
            raise
        reference = weakref.ref(group)
        self._groups[storage._cdata] = reference
        self._all_groups.append(reference)
        self.releases.add(reference, op, windows.release_ops)
        return group

    def rejects(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor must stay on the device; if so, count it by reason."""
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
        if size_bytes < context.min_tensor_bytes:
            group = self._known(tensor.untyped_storage())
            if group is None or not group.covers(View.of(tensor), tensor._version):
                return TOO_SMALL  # else it moves too: a small view that stayed would hold the storage
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


_free_weak_ref = torch.UntypedStorage._free_weak_ref
_use_count = torch._C._storage_Use_Count


def _uses(storage: torch.UntypedStorage) -> int:
    """Return the use count of a storage; ``storage`` itself counts. Private to torch, read only here."""
    return int(_use_count(storage._cdata))


class EvictableTensors:
    """The evictable tensors that are alive, in order of packing: backward reads them from the end.

    All methods may be called from any thread.

    Args:
        device: its memory is short; tensors elsewhere stay where they are.
        pool: host memory for evicted storages; if it is full they stay. ``None``: pageable memory.
        min_tensor_bytes: smaller storages stay.

    Attributes:
        counters: its offloads are evictions, its prefetches copies back.
        blocking: copies them.
        away_bytes: bytes that backward is still to read and that are not on the device now.
        around_copies: makes a context for each copy out or back, for who measures time.
    """

    def __init__(
        self, device: torch.device, pool: HostPool | None = None, min_tensor_bytes: int = 2**16
    ) -> None:
        one = torch.empty(1, device=device)
        self.device, self.pool = one.device, pool  # "cuda" has become "cuda:0"
        self._min_tensor_bytes = max(1, min_tensor_bytes)
        self._known: dict[int, weakref.ref[EvictableStorage]] = {}
        self._lock = threading.RLock()
        self._uses_of_one = _uses(one.untyped_storage())
        self.counters, self.away_bytes = Counters(), 0
        self.blocking = BlockingTransfer(self.device)  # memory is short: who frees some waits for it
        self.around_copies: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def evicted_bytes(self) -> int:
        """Bytes copied to the host so far."""
        return self.counters.offloaded_bytes

    def keep(self, tensor: torch.Tensor) -> Ticket:
        """Make the ticket of a detached tensor that stays on the device until memory runs out.

        Nothing else holds ``tensor``, but other tensors may share its storage.
        """
        if unmovable(tensor, self.device) is not None:
            return keep(tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes() < self._min_tensor_bytes:
            return keep(tensor)
        with self._lock:
            reference = self._known.pop(storage._cdata, None)
            group = None if reference is None else reference()
            if group is None:
                group = EvictableStorage(self, storage)
                reference = weakref.ref(group)
            if reference is not None:
                self._known[storage._cdata] = reference  # at the end: backward reads it sooner than the rest
            return EvictableTicket(group, group.join(tensor))

    def evict(self, wanted_bytes: int) -> int:
        """Free at least ``wanted_bytes`` of device memory, if so much is idle.

        Storages that have a host copy already go first, then those that backward reads last. Returns the
        bytes of the storages that were freed.
        """
        freed_bytes = 0
        with self._lock, _disable_current_modes(), self.around_copies():
            alive = self._alive()
            for group in alive:
                if freed_bytes < wanted_bytes:
                    freed_bytes += group.drop_reloaded()
            if freed_bytes < wanted_bytes and alive and alive[0].device.type != "cpu":
                # Other streams may still write what goes, and read what its new host block held before.
                torch.accelerator.synchronize(alive[0].device)
            for group in alive:
                if freed_bytes < wanted_bytes:
                    freed_bytes += group.evict()
        return freed_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes that `evict` could free now if the host has room for them."""
        with self._lock:
            return sum(group.idle_bytes() for group in self._alive())

    def _alive(self) -> list[EvictableStorage]:
        found = [reference() for reference in list(self._known.values())]
        return [group for group in found if group is not None]

    def forget(self, key: int, group: EvictableStorage) -> None:
        """Note that the last ticket was freed. The garbage collector calls it too, so it takes no lock."""
        reference = self._known.get(key)
        if reference is not None and reference() in (None, group):
            self._known.pop(key, None)


class EvictableStorage:
    """One storage that can be evicted, with the tensors on it that tickets hold."""

    def __init__(self, idle: EvictableTensors, storage: torch.UntypedStorage) -> None:
        self._idle, self.device, self._size_bytes = idle, storage.device, storage.nbytes()
        self._tensors: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        self._views: dict[int, View] = {}
        self._stale: dict[int, int] = {}
        self._block: MovingBlock | None = None  # there is none before an eviction
        self._pool: HostPool | None = None
        self._home: torch.Stream | None = None
        self._unread: set[int] = set()
        self._away = False
        self._key: Any = storage._weak_ref()  # keeps its address from being reused

    def join(self, tensor: torch.Tensor) -> int:
        """Add another ticket, of ``tensor``; return the number with which it reads the tensor."""
        number = len(self._versions)
        self._tensors[number], self._versions[number] = tensor, tensor._version
        return number

    def leave(self, number: int) -> None:
        """Note that a ticket was freed. The garbage collector calls it too, so it takes no lock."""
        self._tensors.pop(number, None)
        self._views.pop(number, None)
        self._has_read(number)

    def read(self, number: int) -> torch.Tensor:
        tensor = self._tensors.get(number)
        if tensor is None:
            with self._idle._lock:
                return self._read_reloaded(number)
        if tensor._version != self._versions[number]:
            raise StaleTensorError(tensor.shape, self._versions[number], tensor._version)
        return tensor.detach()  # counts as a user of the storage until its reader is done

    def idle_bytes(self) -> int:
        """Bytes that `drop_reloaded` or `evict` would free now, host memory permitting."""
        target = self._target()
        idle = self._is_idle() if target is None else self._held_by(1, target)
        return self._size_bytes if idle else 0

    def drop_reloaded(self) -> int:
        """Free the block that was read back, unless it is in use; return the bytes freed."""
        block, target = self._block, self._target()
        if block is None or target is None:
            return 0
        if not self._held_by(1, target) or target._version != block.target_version:
            return 0
        block.drop()
        self._unread.clear()
        self._goes_away(True)
        return self._size_bytes

    def evict(self) -> int:
        """Move to the host, unless it is in use or there already; return the bytes freed."""
        if not self._is_idle():
            return 0
        block = self._new_block()
        if block is None:
            return 0
        self._copy_out(block)
        for number, tensor in list(self._tensors.items()):
            self._views[number] = View.of(tensor)
            if tensor._version != self._versions[number]:
                self._stale[number] = tensor._version
        self._block = block
        self._tensors = {}
        self._goes_away(True)
        return self._size_bytes

    def _read_reloaded(self, number: int) -> torch.Tensor:
        view, stale = self._views[number], self._stale.get(number)
        if stale is not None:
            raise StaleTensorError(view.shape, self._versions[number], stale)
        block = self._block
        if block is None:
            raise RuntimeError("an evicted tensor has no host copy")
        target = block.target
        if target is None:
            target = self._reload(block)
        if target._version != block.target_version:
            raise StaleTensorError(view.shape, block.target_version, target._version)
        reader = self._stream()
        if reader is not None and reader != self._home:
            target.record_stream(reader)  # its memory goes back to the stream that has reloaded it
        self._has_read(number)
        return view.on(target, 0)

    def _has_read(self, number: int) -> None:
        self._unread.discard(number)
        if not self._unread and self._block is not None:
            self._block.drop()

    def _reload(self, block: MovingBlock) -> torch.Tensor:
        # These are ordinary ops: a guard against out-of-memory sees them and frees memory.
        with self._idle.around_copies(), torch.no_grad():
            target = block.reload()
            block.settle()
        self._unread, self._home = set(self._views), self._stream()
        self._goes_away(False)
        return target

    def _target(self) -> torch.Tensor | None:
        return None if self._block is None else self._block.target

    def _stream(self) -> torch.Stream | None:
        return None if self.device.type == "cpu" else torch.accelerator.current_stream(self.device)

    def _goes_away(self, away: bool) -> None:
        if away != self._away:
            self._away = away
            self._idle.away_bytes += self._size_bytes if away else -self._size_bytes

    def _is_idle(self) -> bool:
        first = next(iter(self._tensors.values()), None)
        return first is not None and self._held_by(len(self._tensors), first)

    def _held_by(self, tensors: int, one: torch.Tensor) -> bool:
        """Whether exactly this number of tensors holds the storage of ``one``."""
        storage = one.untyped_storage()
        uses = self._idle._uses_of_one + tensors - 1
        return storage.nbytes() == self._size_bytes and _uses(storage) == uses

    def _new_block(self) -> MovingBlock | None:
        self._pool = self._idle.pool
        if self._pool is not None:
            host = self._pool.take(self._size_bytes)
        else:
            try:
                host = HostBuffer(self._size_bytes, (mapped(self._size_bytes),), ())
            except (OSError, MemoryError, RuntimeError) as error:
                logger.warning("No more host memory (%s): nothing can be evicted.", str(error))
                return None
        return None if host is None else MovingBlock(host, self._idle.blocking, self._idle.counters)

    def _copy_out(self, block: MovingBlock) -> None:
        """Copy the whole storage. A method of its own, so that no variable holds the storage afterwards."""
        first = next(iter(self._tensors.values()))
        with torch.no_grad():
            whole = torch.empty(0, dtype=torch.uint8, device=self.device)
            whole.set_(first.untyped_storage(), 0, (self._size_bytes,), (1,))
            block.leave(whole)
            block.release()

    def __del__(self) -> None:
        # Reached when autograd has dropped the last ticket. The address is free only after this.
        self._goes_away(False)
        self._idle.forget(self._key, self)
        _free_weak_ref(self._key)
        if self._pool is not None and self._block is not None:
            self._pool.give_back(self._block.host)


class EvictableTicket:
    """The ticket of a kept tensor that may have been evicted when backward needs it."""

    __slots__ = ("_number", "_storage")

    def __init__(self, storage: EvictableStorage, number: int) -> None:
        self._storage, self._number = storage, number

    def restore(self) -> torch.Tensor:
        return self._storage.read(self._number)

    def __del__(self) -> None:
        self._storage.leave(self._number)
