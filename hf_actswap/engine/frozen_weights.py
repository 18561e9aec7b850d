"""Frozen weights of decoder layers in host memory, copied to the device layer by layer ahead of their use.

In a training of adapters most memory holds weights that nobody changes, and one layer of them is read at a
time. `FrozenWeights` keeps them in page-locked host memory, and a **window** of layers on the device: the
layer that runs and the next `LAYERS_AHEAD`, in the direction of travel. `LayerWeights` is one layer.

::

    forward    0 1 2 3 ... n-1      at layer p the device has p, p+1; p is dropped when it is through
    turn                n-2 n-1     the last layers stay: backward begins with them, and no copy waits
    backward   n-1 ... 3 2 1 0      at layer p the device has p, p-1
    turn       0 1                  the first layers stay for the next forward

So a forward and its backward copy each layer in twice, without those that stay at the two turns
(`step_bytes`).

**One block for each layer.** A layer's weights lie in one block of host memory, and come to the device as one
block of the same bytes, which the allocator fits into the place of the layer before. A copy in is a prefetch
without a copy out: nobody writes the block. A parameter stays the same object. Between the calls of its layer
its data is the host block's, during a call the device block's (`LayerWeights.shown`).

**How a layer is reached.** Every module of a layer that holds streamed weights, or modules that do, has its
forward wrapped. The outermost of these calls brings the layer: in forward the layer's own, in backward that
of a recomputation (``torch.utils.checkpoint`` runs the layer, a plan's region or a tile may run one module in
it). In backward proper nothing is called, and the first ticket that autograd reads brings the layer. In which
direction the window lies follows from whether autograd is running a backward (of a streamed sequence, whose
forwards run inside one, from whether it runs another in there: `FrozenWeights.in_chunks`).

**What autograd saves.** A linear layer saves its weight, or a view of it, to compute the gradient of its
input. A reference to the device block would keep all layers on the device until backward. So while a layer
is called, a pair of saved-tensor hooks stands in front of those around it (a plan's, those of
``torch.utils.checkpoint``, or none): what lies on the device block becomes a `WeightTicket`, which holds the
layer and the view's geometry and no memory; everything else goes on to the hooks behind. PyTorch asks the
innermost pair alone, so where others have been pushed inside the layer (a checkpoint of its forward), the
next module that is called pushes this one again. A recomputation calls the layer again, or modules in it, and
so meets the same pairs: both runs save the same tensors in the same order.

**Versions.** A parameter's version counter does not change when its data does. A change from outside
(``load_state_dict``) raises it and goes to the host block. At its next use the layer notices and drops its
device copy. A ticket of before then has the wrong values to offer and raises `StaleTensorError`, as autograd
does for any weight that was written between forward and backward. A write during the layer's call would be
lost with the device block, and is an error.

Writes through ``weight.data`` raise no version (PEFT merges adapters so). So a forward of a model in
evaluation begins with no layer on the device. One in training, also a chunk's without gradients, finds at
most the layers with which a pass ended; they are dropped if a sample of the words of each weight has changed
(``_SAMPLED_WORDS``). Other data put in the place of a weight's is copied to the host block.

**Streams, events and lifetimes** are those of `transfer`, whose argument holds unchanged:

* A layer's device block is allocated by `Transfer.reload` on compute's stream, and the copy-in stream waits
  for an event recorded there at that moment. Compute has been given everything up to layer p by then, so the
  copy into the memory of the layer before p begins when that layer's kernels have ended, and runs beside p's.
* Before a block is read, by a call (`LayerWeights.shown`) or through a ticket, compute's stream waits for the
  copy's event (`settle`): once for each stream, because what is enqueued later there is behind the wait.
* A block is dropped by dropping the reference, after the same wait where nobody has read it. The allocator
  gives its memory to work that compute is given later. A tensor that a running node or a recomputation still
  holds keeps the block alive by itself.
* The host block is written once, before the first copy, and read only after that: copies of two passes need
  no order among themselves. It is given back when the weights are taken back (`remove`), after all copies.
* Autograd holds tickets, which own no memory. So a graph that never runs backward, several forwards before
  a backward, ``retain_graph`` and an exception in mid-step cost at most a copy: a layer that is not in the
  window when it is read is fetched then, late, and counted as late.

**Threads.** Forward runs in one thread and backward in autograd's, one after the other. A call in a second
thread while a layer runs would find its weights half moved, and is rejected.

**Moving the model.** ``model.to(device)`` moves everything but the streamed weights, so a model that was
loaded to the CPU never has to fit the device (`_Stays`). Layers compute where the rest of the model is, as
looked up at each call. Page-locked memory is taken when that is first an accelerator, or at the first call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ..config.sizes import gib_text
from ..errors import PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import Scope
from ..plan.model_structure import ModelStructure, is_container
from ..plan.record import storage_key
from ..plan.wrappers import FSDP2_METHOD, is_checkpointed, is_compiled
from .autograd_state import running_backward
from .hook_wrappers import Undo, replace_forward, replace_method
from .host_budget import slab_source
from .host_memory import available_bytes, floor_bytes, room_beyond
from .host_pool import HostPool
from .moving_block import MovingBlock
from .owners import parameter_places
from .stats import Counters, SwapStats
from .tickets import StaleTensorError, View, keep, restore
from .transfer import Transfer, transfer_of

logger = logging.getLogger(__name__)

LAYERS_AHEAD = 1
"""Layers that are fetched before the one that runs has ended. One hides the copies wherever a layer's copy
takes no longer than its compute. Where it takes longer the link is always busy, and more would not help."""

_ALIGNMENT_BYTES = 512
"""Weights start at multiples of it in a block, as PyTorch's allocators place tensors: there are kernels that
compute differently by the alignment of their operands."""

_WORD_BYTES = 8

_LEAST_BUFFER_BYTES = 2**20
"""Smaller buffers stay on the device: they may be written, and are small beside a layer's weights."""

_SAMPLED_WORDS = 1024
"""Words of eight bytes, evenly spaced, by which writes to a weight are noticed that raise no version."""

_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of transformers' layers: the function by which they run again in backward."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldWeight:
    """A parameter or buffer that waits on the host.

    Args:
        name: its path inside the layer.
        modules: the modules that own it, each with its name there.
        view: its geometry in the layer's block.
        origin: the device that it was on.
    """

    name: str
    tensor: torch.Tensor
    modules: list[tuple[nn.Module, str]]
    view: View
    origin: torch.device


class LayerWeights:
    """The frozen weights of one layer: on the host always, on the device while the layer needs them.

    Args:
        scope, path: the layer's scope in a plan, and its module path.
        position: its place in the order in which forward calls the layers.
        held: the weights, which lie in a block of ``size_bytes``.
        read: called with the layer before a ticket reads it, so that the layer is on the device then.

    Attributes:
        needed_in_backward: whether the latest training forward saved something of the layer.
        running: whether a call of the layer runs.
        edition: how often somebody else has written the weights.
    """

    def __init__(
        self,
        scope: Scope,
        path: str,
        position: int,
        held: tuple[HeldWeight, ...],
        size_bytes: int,
        read: Callable[[LayerWeights], None],
    ) -> None:
        self.scope, self.path, self.position = scope, path, position
        self.held, self.size_bytes = held, size_bytes
        self.needed_in_backward, self.running = True, False
        self._read = read
        self._block: MovingBlock | None = None
        self._on_host: tuple[torch.Tensor, ...] = ()
        self._views: tuple[torch.Tensor, ...] = ()
        self._versions: list[int] = []
        self._words, self._places, self._sample = (torch.empty(0, dtype=torch.int64) for _ in range(3))
        self.edition = 0

    @property
    def on_device(self) -> bool:
        """Whether the device has a copy, or one is on its way."""
        return self._block is not None and self._block.target is not None

    @property
    def is_exchanged(self) -> bool:
        """Whether other tensors are in the place of the weights (a dry run on fake tensors)."""
        weight = self.held[0]
        module, name = weight.modules[0]
        place = module._parameters if name in module._parameters else module._buffers
        return place.get(name) is not weight.tensor

    def to_host(
        self, pool: HostPool, before: HostPool | None, transfer: Transfer, counters: Counters
    ) -> None:
        """Move the weights to a block of ``pool`` (from the pool ``before``, if they are in one already)."""
        views = []
        with torch.no_grad(), _disable_current_modes():  # a meter of the device does not count the block
            host = pool.take(self.size_bytes)
            if host is None:
                raise PlanError([_no_room(self.path, self.size_bytes, pool)])
            host.hold(torch.uint8, torch.Size([self.size_bytes]))
            whole = host.whole()
            assert whole is not None  # this pool's slabs have exactly the sizes asked for
            for weight in self.held:
                view = weight.view.on(whole, 0)
                _write(view, weight.tensor)
                weight.tensor.data = view
                views.append(view)
            self._words, self._places = whole.view(torch.int64), self._sampled_places()
            self._sample = self._words[self._places]
        if before is not None and self._block is not None:
            before.give_back(self._block.host)
        self._block, self._on_host = MovingBlock(host, transfer, counters, "host"), tuple(views)
        self._versions = self._present_versions()

    def restore_origin(self, pool: HostPool) -> None:
        """Give the weights memory of their own again, on the device that they came from."""
        self.drop()
        block, self._block, self._on_host = self._block, None, ()
        self._words = torch.empty(0, dtype=torch.int64)
        if block is None:
            return
        for weight in self.held:
            own = torch.empty_strided(
                weight.view.shape, weight.view.stride, dtype=weight.view.dtype, device=weight.origin
            )
            _write(own, weight.tensor)
            weight.tensor.data = own
        block.end()
        pool.give_back(block.host)

    def note_outside_writes(self) -> None:
        """If somebody has written the weights since their last use, forget the device copy."""
        versions = self._present_versions()
        if self._took_other_data() or versions != self._versions:
            self._versions = versions
            self._forget_copy()

    def note_silent_writes(self) -> None:
        """As `note_outside_writes`, also if no version tells, from a sample of the words of each weight."""
        if self._block is not None and not torch.equal(self._words[self._places], self._sample):
            self._forget_copy()

    def _forget_copy(self) -> None:
        self._sample = self._words[self._places]
        self.edition += 1
        self.drop()

    def _sampled_places(self) -> torch.Tensor:
        """Return which words of the block belong to the sample."""
        found = []
        for weight in self.held:
            start, stop = weight.view.range_bytes
            first, last = start // _WORD_BYTES, max(start, stop - 1) // _WORD_BYTES
            count = min(_SAMPLED_WORDS, last - first + 1)
            found.append(torch.linspace(first, last, count, dtype=torch.float64).long())
        return torch.cat(found)

    def _took_other_data(self) -> bool:
        """Copy what somebody has put in the place of a weight's data to the host; whether there was any."""
        changed = False
        for weight, view in zip(self.held, self._on_host, strict=True):
            now = weight.tensor
            if now.data_ptr() == view.data_ptr():
                continue
            changed = True
            if (now.shape, now.dtype) != (view.shape, view.dtype):
                expected, found = (f"{item.dtype}, {tuple(item.shape)}" for item in (view, now))
                hint = "Call remove() first, or write values of the same shape and dtype."
                raise PlanError([Problem(f"{self.path}.{weight.name}", expected, found, hint)])
            _write(view, now)
            now.data = view
        return changed

    def copied_by(self, transfer: Transfer) -> None:
        """Let ``transfer``, of another device, copy from now on."""
        if self._block is not None:
            self._block.transfer = transfer

    def fetch(self, late: bool) -> None:
        """Start the copy in, unless the device has the weights."""
        block = self._block
        if block is None or block.target is not None:
            return
        with torch.inference_mode(False), torch.no_grad():  # the copy may serve a training forward later
            target = block.reload()
            self._views = tuple(weight.view.on(target, 0) for weight in self.held)
        block.counters.late_prefetches += late

    def settle(self) -> None:
        """Make compute wait for the copy in, before anything reads it; on each stream that reads it."""
        if self._block is not None and self._block.target is not None:
            self._block.settle()

    def drop(self) -> None:
        """Drop the device copy. What still refers to it keeps its memory: a running node, a recomputation."""
        if self._block is not None:
            self._block.drop()
        self._views = ()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the weights' data is the device's. A layer that writes to them is an error."""
        for weight, view in zip(self.held, self._views, strict=True):
            weight.tensor.data = view
        try:
            yield
        finally:
            for weight, view in zip(self.held, self._on_host, strict=True):
                weight.tensor.data = view
        versions = self._present_versions()
        if versions == self._versions:
            return
        found = zip(self.held, versions, self._versions, strict=True)
        written = ", ".join(weight.name for weight, now, before in found if now != before)
        hint = "Use memory: {weights: keep}: on the host, what a layer writes to its weights would be lost."
        expected = "a layer that does not write its frozen weights"
        raise PlanError([Problem(self.path, expected, f"its forward writes {written} in place", hint)])

    def packing(self) -> AbstractContextManager[object]:
        """Return a context in which autograd saves tickets of the weights, and other hooks get the rest."""
        target = None if self._block is None else self._block.target
        if target is None or not torch.is_grad_enabled():
            return nullcontext()
        outer: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            outer = _detached, restore
        elif getattr(outer[0], "func", None) is _pack and outer[0].args[0] is self:
            return nullcontext()  # they are the innermost already
        pack = partial(_pack, self, storage_key(target), outer[0])
        return torch.autograd.graph.saved_tensors_hooks(pack, partial(_unpack, outer[1]))

    def ticket(self, tensor: torch.Tensor) -> WeightTicket:
        """Return what stands for ``tensor``, on the device block, until backward."""
        self.needed_in_backward = True
        return WeightTicket(self, View.of(tensor), self.edition)

    def read(self, view: View, edition: int) -> torch.Tensor:
        """Return a view of the weights on the device, for a backward. Raises `StaleTensorError`."""
        self._read(self)
        if edition != self.edition:
            raise StaleTensorError(view.shape, edition, self.edition, self.path)
        if self._block is not None and self._block.target is not None:
            return view.on(self._block.target, 0)
        # The graph has outlived `remove`: each weight has memory of its own again.
        start_bytes = view.range_bytes[0]
        weight = max(
            (weight for weight in self.held if weight.view.offset_bytes <= start_bytes),
            key=lambda weight: weight.view.offset_bytes,
        )
        own = view._replace(offset_bytes=view.offset_bytes - weight.view.offset_bytes)
        return own.on(weight.tensor.detach(), 0)

    def _present_versions(self) -> list[int]:
        return [weight.tensor._version for weight in self.held]


def _pack(
    layer: LayerWeights, key: int | None, outer: Callable[[torch.Tensor], Any], tensor: torch.Tensor
) -> Any:
    """Return a ticket of what lies in the block with this storage key, and leave the rest to ``outer``."""
    return layer.ticket(tensor) if storage_key(tensor) == key else outer(tensor)


def ticket_of_weight(tensor: torch.Tensor) -> WeightTicket | None:
    """Return the ticket of a tensor on the device block of the layer that is called; ``None``: of another.

    It is for who holds a tensor until backward past autograd's hooks, as an input of a call that runs again.
    """
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or getattr(hooks[0], "func", None) is not _pack:
        return None
    layer, key, _ = hooks[0].args
    return layer.ticket(tensor) if storage_key(tensor) == key else None


def _unpack(outer: Callable[[Any], torch.Tensor], ticket: Any) -> torch.Tensor:
    return ticket.restore() if type(ticket) is WeightTicket else outer(ticket)


class WeightTicket:
    """What autograd holds in the place of a frozen weight, or a view of it.

    ``edition`` says how often the weights had been written when it was saved.
    """

    __slots__ = ("_edition", "_layer", "_view")

    def __init__(self, layer: LayerWeights, view: View, edition: int) -> None:
        self._layer, self._view, self._edition = layer, view, edition

    def restore(self) -> torch.Tensor:
        """Return the tensor on the device. Raises `StaleTensorError` if the weights have been written."""
        return self._layer.read(self._view, self._edition)


def _detached(tensor: torch.Tensor) -> Any:
    return keep(tensor.detach())


def _write(target: torch.Tensor, weight: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(weight.detach())


def _no_room(path: str, size_bytes: int, pool: HostPool) -> Problem:
    limit = pool.limit_bytes
    left = "no more" if limit is None else f"{max(0, limit - pool.used_bytes) / 2**30:.2f} GiB"
    return Problem(
        "memory.weights",
        f"host memory for the frozen weights of {path} ({size_bytes / 2**30:.2f} GiB)",
        left,
        "Raise memory.host_memory_gib, start fewer ranks on this machine, or leave weights: host out.",
    )


def window_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the most bytes on the device at once, of layers with these sizes in the order of forward."""
    count = min(LAYERS_AHEAD + 1, len(sizes_bytes))
    return max(sum(sizes_bytes[at : at + count]) for at in range(len(sizes_bytes) - count + 1))


def step_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the bytes that a forward which follows a backward, and its own backward, copy in."""
    count = min(LAYERS_AHEAD + 1, len(sizes_bytes))
    return 2 * sum(sizes_bytes) - sum(sizes_bytes[:count]) - sum(sizes_bytes[-count:])


def sizes_on_host(root: nn.Module, structure: ModelStructure) -> dict[Scope, int]:
    """Return the bytes of each layer that would wait on the host, in the order of forward; none is read.

    Raises `PlanError` if the layers have no frozen weights.
    """
    sizes = {layer.scope: layer.size_bytes for layer in _layers(root, structure, lambda _layer: None)}
    if not sizes:
        raise PlanError([_NOTHING_FROZEN])
    return sizes


class FrozenWeights:
    """Keeps the frozen weights of a model's layers on the host, until `remove`.

    Args:
        root: the model inside its wrappers.
        structure: its structure.
        transfer: copies bytes; ``None``: the one for the device on which the model is when a layer runs.
        bind_numa: whether host memory is taken beside the device.
        cap_bytes: most bytes of host memory; ``None``: what the machine has.

    Attributes:
        layers: the layers that have frozen weights.
        moving: whether weights are being moved at the moment, in the thread that reads them.

    Raises:
        PlanError: the layers have no frozen weights, or something else owns or writes them.
    """

    def __init__(
        self,
        root: nn.Module,
        structure: ModelStructure,
        transfer: Transfer | None = None,
        bind_numa: bool = True,
        cap_bytes: int | None = None,
    ) -> None:
        if problems := problems_of_weights(root, structure):
            raise PlanError(problems)
        self._root, self._given, self._bind_numa, self._cap_bytes = root, transfer, bind_numa, cap_bytes
        self.layers = tuple(_layers(root, structure, partial(self._bring, backward=True)))
        if not self.layers:
            raise PlanError([_NOTHING_FROZEN])
        self._counters = Counters()
        self.moving = self._said_casts = False
        self._forward_follows, self._task = False, -1
        self._device: torch.device | None = None
        self._transfer: tuple[torch.device, Transfer] | None = None
        self._pool: HostPool | None = None
        self._pinned = False
        self._thread: int | None = None
        held = {id(weight.tensor) for layer in self.layers for weight in layer.held}
        self._anchor = next(
            place for place in parameter_places(root) if id(place[0]._parameters[place[1]]) not in held
        )
        self._undo: list[Undo] = []

    @property
    def sizes_bytes(self) -> dict[Scope, int]:
        """Bytes of each streamed layer, in the order of forward."""
        return {layer.scope: layer.size_bytes for layer in self.layers}

    @property
    def host_bytes(self) -> int:
        """Bytes of all streamed layers, on the host."""
        return sum(self.sizes_bytes.values())

    @property
    def window_bytes(self) -> int:
        """The most bytes of streamed weights on the device at once."""
        return window_bytes(list(self.sizes_bytes.values()))

    @property
    def step_bytes(self) -> int:
        """Bytes that a forward and its backward copy in, where one such pair follows another."""
        return step_bytes(list(self.sizes_bytes.values()))

    def stats(self) -> SwapStats:
        """Return the totals of copies in and of waits for them, and the host memory."""
        return self._counters.snapshot(self._pool)

    def transfer(self, device: torch.device) -> Transfer:
        """Return the transfer for ``device``: all copies of one model share its streams."""
        if self._transfer is None or self._transfer[0] != device:
            self._transfer = device, self._given or transfer_of(device)
        return self._transfer[1]

    def names_in(self, model: nn.Module) -> list[str]:
        """Return the names that the streamed weights have in ``model``, which may be around the root."""
        held = {id(weight.tensor) for layer in self.layers for weight in layer.held}
        named = (*model.named_parameters(), *model.named_buffers())
        return [name for name, tensor in named if id(tensor) in held]

    @contextmanager
    def in_chunks(self, turns: bool) -> Iterator[None]:
        """Within the block the model is called for one chunk of a sequence after another.

        Args:
            turns: whether the backward of a chunk follows its forward, all inside a backward around them;
                else the next chunk's forward follows, whose first layers come during the last.
        """
        before = self._forward_follows, self._task
        self._forward_follows, self._task = not turns, running_backward()
        try:
            yield
        finally:
            self._forward_follows, self._task = before

    def attach(self) -> None:
        """Move the weights of a model on an accelerator to the host, and wrap the calls of its layers."""
        with uninterrupted():
            for layer in self.layers:
                self._wrap(layer)
        self.follow_model()

    @uninterrupted()
    def remove(self) -> None:
        """Take the wrappers off and give the weights memory where they were before. Safe to call again."""
        undo, self._undo = self._undo, []
        for step in reversed(undo):
            step()
        pool, self._pool = self._pool, None
        if pool is not None:
            if self._transfer is not None:
                self._transfer[1].synchronize()
            pool.close()  # so that each layer's memory is free as soon as the layer has left it
            for layer in self.layers:
                layer.restore_origin(pool)
        self._device = None

    @property
    def device(self) -> torch.device:
        """The device of the rest of the model, on which layers compute."""
        module, name = self._anchor
        return getattr(module._parameters.get(name), "device", torch.device("cpu"))

    def follow_model(self) -> None:
        """Page-lock the weights now, if the rest of the model has come to a device, not in its next forward.

        How much host memory is left beside them is known only then.
        """
        if self.device.type != "cpu" and self.device != self._device:
            self._prepare(self.device)

    def _prepare(self, device: torch.device) -> None:
        """Be ready to copy to ``device``: drop copies elsewhere, and move the weights to memory for it."""
        for layer in self.layers:
            layer.drop()
        transfer = self.transfer(device)
        overlaps = transfer.overlaps
        if self._pool is None or overlaps > self._pinned:
            room = room_beyond(floor_bytes(available_bytes()))
            source = slab_source(device, overlaps, self._bind_numa)
            pool = HostPool(source, self._cap_bytes, slab_bytes=1, room=room)
            if self._pool is not None:
                self._pool.close()
            for layer in self.layers:
                layer.to_host(pool, self._pool, transfer, self._counters)
            self._pool, self._pinned = pool, overlaps
        else:
            for layer in self.layers:
                layer.copied_by(transfer)
        self._device = device

    def _wrap(self, layer: LayerWeights) -> None:
        """Wrap the calls that may read the weights of a layer, and let ``.to()`` leave the weights alone."""
        names: dict[nn.Module, list[str]] = {}
        for weight in layer.held:
            for module, name in weight.modules:
                names.setdefault(module, []).append(name)
        for module, own in names.items():
            self._undo.append(replace_method(module, "_apply", partial(_Stays, self, module, own)))
        for module in self._root.get_submodule(layer.path).modules():
            if not is_container(module) and any(part in names for part in module.modules()):
                self._undo.append(self._wrapped(layer, module))

    def _wrapped(self, layer: LayerWeights, module: nn.Module) -> Undo:
        forward = module.forward

        @functools.wraps(forward)
        def with_weights(*args: Any, **kwargs: Any) -> Any:
            if not is_checkpointed(module):
                return self._reached(layer, forward, args, kwargs)
            with self._inside_checkpoint(layer, module):
                return self._reached(layer, forward, args, kwargs)

        return replace_forward(module, with_weights)

    @contextmanager
    def _inside_checkpoint(self, layer: LayerWeights, module: nn.Module) -> Iterator[None]:
        """Within the block, what transformers' checkpointing of a layer runs again brings the weights too.

        From transformers 5.23 on the checkpoint is inside the layer's forward and does not run that again.
        """
        before = vars(module).get(_CHECKPOINT)
        if before is None:
            yield
            return

        def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def again(*given: Any, **named: Any) -> Any:
                return self._reached(layer, function, given, named)

            return before(again, *args, **kwargs)

        vars(module)[_CHECKPOINT] = checkpoint
        try:
            yield
        finally:
            vars(module)[_CHECKPOINT] = before

    def _reached(
        self, layer: LayerWeights, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``forward``, which may read the weights of a layer, and bring them, unless they are there."""
        if layer.running and self._thread == get_ident():
            with layer.packing():
                return forward(*args, **kwargs)
        if layer.is_exchanged:
            return forward(*args, **kwargs)
        if self._thread is not None and self._thread != get_ident():
            raise PlanError([_THREADS])
        outer, self._thread = self._thread, get_ident()
        backward = running_backward() not in (-1, self._task)
        try:
            with torch._C.DisableTorchFunction():  # a mode around the layer would take these for its ops
                self._bring(layer, backward)
                self._note_casts(layer)
                layer.running, layer.needed_in_backward = True, not torch.is_grad_enabled()
            with layer.shown(), layer.packing():
                return forward(*args, **kwargs)
        finally:
            layer.running, self._thread = False, outer
            if not backward and layer.position not in self._window(layer.position + 1, False)[0]:
                layer.drop()

    def _note_casts(self, layer: LayerWeights) -> None:
        """Say once if autocast casts the weights: its cache does not keep such a cast, autograd does."""
        kind = self.device.type
        if self._said_casts or not torch.is_grad_enabled() or not torch.is_autocast_enabled(kind):
            return
        dtype = torch.get_autocast_dtype(kind)
        cast = [one for one in layer.held if one.tensor.dtype == torch.float32 and one.tensor.dim() > 1]
        if not cast:
            return
        self._said_casts = True
        kept_bytes = len(self.layers) * sum(one.tensor.numel() * dtype.itemsize for one in cast)
        logger.warning(
            "memory.weights: %s.%s and %d more weights of each layer are in %s, and autocast computes in %s: "
            "autograd keeps the casts on the device until backward (%s in all layers), unless the layers are "
            "recomputed. Load the model in that type (dtype=...).",
            layer.path,
            cast[0].name,
            len(cast) - 1,
            cast[0].tensor.dtype,
            dtype,
            gib_text(kept_bytes),
        )

    def _bring(self, layer: LayerWeights, backward: bool) -> None:
        """Move the window to a layer, and make compute wait for its weights."""
        self.moving = True
        try:
            device = self.device
            if device != self._device:
                self._prepare(device)
            if layer.position == 0 and not backward and self._task == -1:
                self._forward_begins()
            layer.note_outside_writes()
            window, ahead = self._window(layer.position, backward)
            for other in self.layers:  # first, so that the new layer can have the memory
                if other.position not in window and other.on_device and not other.running:
                    other.drop()
            layer.fetch(late=True)
            for position in ahead:
                other = self.layers[position]
                if other.needed_in_backward or not backward:
                    other.note_outside_writes()
                    other.fetch(late=False)
            layer.settle()
        finally:
            self.moving = False

    def _forward_begins(self) -> None:
        """Drop copies from before this forward, if the weights may have been written since."""
        for layer in self.layers:
            if layer.on_device and not layer.running:
                if torch.is_grad_enabled() or self._root.training:
                    layer.note_silent_writes()
                else:
                    layer.drop()

    def _window(self, at: int, backward: bool) -> tuple[Container[int], Iterable[int]]:
        """Return the layers that may be on the device at layer ``at``, and which to fetch, in order."""
        count = len(self.layers)
        size = min(LAYERS_AHEAD + 1, count)
        if not backward and self._forward_follows:
            ahead = [(at + step) % count for step in range(1, size)]
            return {at, *ahead}, ahead
        first = max(0, at - size + 1) if backward else min(at, count - size)
        window = range(first, first + size)
        return window, range(at - 1, first - 1, -1) if backward else range(at + 1, window.stop)


def weights_of(root: nn.Module) -> FrozenWeights | None:
    """Return what keeps the frozen weights of a model on the host; ``None``: they are where they were."""
    kept = (getattr(vars(module).get("_apply"), "call", None) for module in root.modules())
    return next((found.weights for found in kept if isinstance(found, _Stays)), None)


def _layers(
    root: nn.Module, structure: ModelStructure, read: Callable[[LayerWeights], None]
) -> Iterator[LayerWeights]:
    """Yield the weights to stream of each layer that has some, in the order of the layers."""
    modules = structure.layer_modules(root)
    layer_of = {inner: scope for scope, layer in modules.items() for inner in layer.modules()}
    users: dict[int | None, set[object]] = {}
    for module in root.modules():
        for tensor in _tensors(module).values():
            users.setdefault(storage_key(tensor), set()).update((layer_of.get(module), id(tensor)))
    paths = {layer.index: layer.module_path for layer in structure.all_layers}
    position = 0
    for scope, layer in modules.items():
        held: dict[int, HeldWeight] = {}
        end_bytes = 0
        for path, module in layer.named_modules():
            for name, tensor in _tensors(module).items():
                alone = users[storage_key(tensor)] == {scope, id(tensor)}
                least_bytes = 1 if name in module._parameters else _LEAST_BUFFER_BYTES
                if not alone or tensor.requires_grad or tensor.nbytes < least_bytes:
                    continue
                if id(tensor) not in held:
                    view = View.of(tensor)
                    start, stop = view.range_bytes
                    place, first = view._replace(offset_bytes=end_bytes), f"{path}.{name}".strip(".")
                    held[id(tensor)] = HeldWeight(first, tensor, [], place, tensor.device)
                    end_bytes += -(-(stop - start) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                held[id(tensor)].modules.append((module, name))
        if held:
            yield LayerWeights(scope, paths[scope], position, tuple(held.values()), end_bytes, read)
            position += 1


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    both = module._parameters | module._buffers
    return {name: tensor for name, tensor in both.items() if tensor is not None}


@dataclass(frozen=True, slots=True)
class _Stays:
    """The ``_apply`` of a module some of whose tensors (``names``) wait on the host."""

    weights: FrozenWeights
    module: nn.Module
    names: list[str]
    apply: Callable[..., Any]

    def __call__(self, change: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        both: tuple[dict[str, Any], ...] = (self.module._parameters, self.module._buffers)
        places = [(place, name, place[name]) for place in both for name in self.names if name in place]
        for _, name, tensor in places:
            probe = change(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if probe.dtype != tensor.dtype:
                expected = f"{name} in {tensor.dtype}, as it is on the host"
                hint = "Load the model in the dtype that it is to have (dtype=...), or remove() first."
                raise PlanError([Problem("model.to", expected, f"a change to {probe.dtype}", hint)])
        try:
            for place, name, _ in places:
                place[name] = None
            return self.apply(change, *args, **kwargs)
        finally:
            for place, name, tensor in places:
                place[name] = tensor


def problems_of_weights(root: nn.Module, structure: ModelStructure, on_paper: bool = False) -> list[Problem]:
    """Return why the frozen weights of a model's layers cannot wait on the host: who else owns them.

    ``on_paper``: nothing is moved, so that weights may be on ``meta``.
    """
    found: dict[str, str] = {}
    modules = structure.layer_modules(root)
    if structure.compiled or any(layer.compiled for layer in structure.all_layers):
        found["torch.compile"] = "Compile no layer: its code is generated for weights that stay in place."
    for layer in modules.values():
        for module in layer.modules():
            for name, hint in _others(module, on_paper):
                found.setdefault(name, hint)
    if weights_of(root) is not None:
        found["weights that are on the host already"] = "Call remove() on what put them there first."
    return [
        Problem("memory.weights", "layers whose weights nothing else moves", name, hint)
        for name, hint in found.items()
    ]


_SHARDED = "It owns the weights, and moves them itself: leave weights: host out, or do not shard."


def _others(module: nn.Module, on_paper: bool) -> Iterator[tuple[str, str]]:
    """Yield what else owns or replaces the weights of a module, each with what to do."""
    if hasattr(type(module), FSDP2_METHOD):
        yield "FSDP2 (fully_shard)", _SHARDED
    if is_compiled(module):
        yield "torch.compile", "Compile no module of a layer."
    if hasattr(module, "_hf_hook"):
        yield "hooks of accelerate (device_map)", "Load without device_map."
    if hasattr(type(module), "get_param") and hasattr(type(module), "get_base_layer"):
        yield "LoraConfig(target_parameters=...)", "It writes the weights for each call: name modules."
    for name, tensor in _tensors(module).items():
        if hasattr(tensor, "ds_id"):
            yield "ZeRO-3", _SHARDED
        elif type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            kind = type(tensor).__name__
            yield f"weights of class {kind} ({name})", "Load the base model unquantised and undivided."
        elif tensor.is_meta and not on_paper:
            yield f"weights on meta ({name})", "Load the weights to the CPU first."


_NOTHING_FROZEN = Problem(
    "memory.weights",
    "frozen parameters in the layers",
    "none: all parameters of the layers are trained, or are tied to others",
    "weights: host serves a frozen base (LoRA and other adapters): freeze it, or leave the key out.",
)
_THREADS = Problem(
    "model",
    "one call at a time where weights wait on the host",
    "a call in another thread while a layer runs",
    "Put a lock around the calls, or give each thread a model of its own.",
)
