"""Frozen weights of decoder layers in host memory, copied to the device layer by layer ahead of their use.

In a training of adapters most memory holds weights that nobody changes, and one layer of them is read at a
time. `FrozenWeights` keeps them in page-locked host memory, and a **window** of layers on the device: the
layer that runs and the next `LAYERS_AHEAD`, in the direction of travel. What is one layer's alone (its block,
its copy, what autograd saves of it) is in `layer_weights`.

::

    forward    0 1 2 3 ... n-1      at layer p the device has p, p+1; p is dropped when it is through
    turn                n-2 n-1     the last layers stay: backward begins with them, and no copy waits
    backward   n-1 ... 3 2 1 0      at layer p the device has p, p-1
    turn       0 1                  the first layers stay for the next forward

So a forward and its backward copy each layer in twice, without those that stay at the two turns
(`step_bytes`).

**How a layer is reached.** Every module of a layer that holds streamed weights, or modules that do, has its
forward wrapped. The outermost of these calls brings the layer: in forward the layer's own, in backward that
of a recomputation (``torch.utils.checkpoint`` runs the layer, a plan's region or a tile may run one module in
it). In backward proper nothing is called, and the first ticket that autograd reads brings the layer. In which
direction the window lies follows from whether autograd is running a backward.

**Streams, events and lifetimes** are those of `transfer`, whose argument holds unchanged:

* A layer's device block is allocated by `Transfer.reload` on compute's stream, and the copy-in stream waits
  for an event recorded there at that moment. Compute has been given everything up to layer p by then, so the
  copy into the memory of the layer before p begins when that layer's kernels have ended, and runs beside p's.
* Before a block is read, by a call (`LayerWeights.shown`) or through a ticket, compute's stream waits for the
  copy's event (`settle`): once, because what is enqueued later is behind the wait.
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
loaded to the CPU never has to fit the device (`_Stays`). Where layers compute is where the rest of the model
is; that is looked up at each call, and page-locked memory is taken when it is first an accelerator, or at the
first call.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn

from ..errors import PlanError, Problem
from ..interrupts import uninterrupted
from ..plan.actions import Scope
from ..plan.model_structure import ModelStructure
from ..plan.record import storage_key
from ..plan.wrappers import FSDP2_METHOD, is_checkpointed, is_compiled
from .hook_wrappers import Undo, replace_forward
from .host_budget import slab_source
from .host_memory import available_bytes, margin_bytes, room_beyond
from .host_pool import HostPool
from .layer_weights import LayerWeights, laid_out
from .owners import parameter_places
from .stats import Counters, SwapStats, gib_text
from .transfer import Transfer, transfer_of

logger = logging.getLogger(__name__)

LAYERS_AHEAD = 1
"""Layers that are fetched before the one that runs has ended. One hides the copies wherever a layer's copy
takes no longer than its compute; more would not help where it takes longer, because the link is always busy
then, and each is a layer's weights on the device."""

LEAST_BUFFER_BYTES = 2**20
"""Smaller buffers stay on the device: they may be written, and are small beside a layer's weights."""

_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of transformers' layers: the function by which they run again in backward."""

_Place = tuple[nn.Module, str]


def window_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the most bytes on the device at once, of layers with these bytes in the order of forward."""
    count = min(LAYERS_AHEAD + 1, len(sizes_bytes))
    return max(sum(sizes_bytes[at : at + count]) for at in range(len(sizes_bytes) - count + 1))


def step_bytes(sizes_bytes: Sequence[int]) -> int:
    """Return the bytes that a forward and its backward copy in, of layers with these bytes.

    Each layer twice, without those that stay from forward to backward and from backward to forward. The first
    forward copies all layers; so does any forward that does not follow a backward.
    """
    count = min(LAYERS_AHEAD + 1, len(sizes_bytes))
    return 2 * sum(sizes_bytes) - sum(sizes_bytes[:count]) - sum(sizes_bytes[-count:])


def sizes_on_host(root: nn.Module, structure: ModelStructure) -> dict[Scope, int]:
    """Return the bytes of each layer that would wait on the host, in the order of forward; none is read.

    Raises:
        PlanError: the layers have no frozen weights.
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

    Raises:
        PlanError: the model has no frozen weights in its layers, or something owns or writes them that
            cannot be combined with this.
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
        self.layers = tuple(_layers(root, structure, self._reached_by_ticket))
        if not self.layers:
            raise PlanError([_NOTHING_FROZEN])
        self._counters = Counters()
        self._said_casts = False
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
    def host_bytes(self) -> int:
        """Bytes of all streamed layers, on the host."""
        return sum(layer.size_bytes for layer in self.layers)

    @property
    def window_bytes(self) -> int:
        """The most bytes of streamed weights on the device at once."""
        return window_bytes([layer.size_bytes for layer in self.layers])

    @property
    def step_bytes(self) -> int:
        """Bytes that a forward and its backward copy in, where one such pair follows another."""
        return step_bytes([layer.size_bytes for layer in self.layers])

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

    def attach(self) -> None:
        """Move the weights of a model on an accelerator to the host, and wrap the calls of its layers."""
        with uninterrupted():
            for layer in self.layers:
                self._undo += [_stays(self, module, names) for module, names in _owners(layer).items()]
                self._undo += [
                    self._wrapped(layer, module)
                    for module in _holders(layer, self._root.get_submodule(layer.path))
                ]
        if self._where().type != "cpu":
            self._prepare(self._where())

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
    def _in_window(self) -> int:
        return min(LAYERS_AHEAD + 1, len(self.layers))

    def _where(self) -> torch.device:
        module, name = self._anchor
        return getattr(module._parameters.get(name), "device", torch.device("cpu"))

    def _prepare(self, device: torch.device) -> None:
        """Be ready to copy to ``device``: drop copies elsewhere, and move the weights to memory for it."""
        for layer in self.layers:
            layer.drop()
        overlaps = self.transfer(device).overlaps
        if self._pool is None or overlaps > self._pinned:
            available = available_bytes()
            room = room_beyond(0 if available is None else margin_bytes(available))
            source = slab_source(device, overlaps, self._bind_numa)
            pool = HostPool(source, self._cap_bytes, slab_bytes=1, room=room)
            if self._pool is not None:
                self._pool.close()
            for layer in self.layers:
                layer.to_host(pool, self._pool)
            self._pool, self._pinned = pool, overlaps
        self._device = device

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

        From 5.23 on the checkpoint is inside the layer's forward: what it runs again is not that forward.
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
        return self._call(layer, forward, args, kwargs)

    def _call(
        self, layer: LayerWeights, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._thread is not None and self._thread != get_ident():
            raise PlanError([_THREADS])
        outer, self._thread = self._thread, get_ident()
        backward = in_backward()
        try:
            with torch._C.DisableTorchFunction():  # a mode around the layer would take these for its ops
                self._bring(layer, backward)
                self._note_casts(layer)
                layer.running, layer.needed_in_backward = True, not torch.is_grad_enabled()
            with layer.shown(), layer.packing():
                return forward(*args, **kwargs)
        finally:
            layer.running, self._thread = False, outer
            if not backward and layer.position < self._first_in_window(layer.position + 1, False):
                layer.drop()

    def _note_casts(self, layer: LayerWeights) -> None:
        """Say once if autocast casts the weights: its cache keeps no such cast, autograd does."""
        kind = self._where().type
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

    def _reached_by_ticket(self, layer: LayerWeights) -> None:
        self._bring(layer, backward=True)

    def _bring(self, layer: LayerWeights, backward: bool) -> None:
        """Move the window to a layer, and make compute wait for its weights."""
        device = self._where()
        if device != self._device:
            self._prepare(device)
        layer.note_outside_writes()
        transfer = self.transfer(device)
        at = layer.position
        first = self._first_in_window(at, backward)
        window = range(first, first + self._in_window)
        for other in self.layers:  # first, so that the new layer can have the memory
            if other.position not in window and other.on_device and not other.running:
                other.drop()
        layer.fetch(transfer, self._counters, late=True)
        ahead = range(at - 1, first - 1, -1) if backward else range(at + 1, window.stop)
        for position in ahead:
            other = self.layers[position]
            if other.needed_in_backward or not backward:
                other.note_outside_writes()
                other.fetch(transfer, self._counters, late=False)
        layer.settle(self._counters)

    def _first_in_window(self, position: int, backward: bool) -> int:
        if backward:
            return max(0, position - self._in_window + 1)
        return min(position, len(self.layers) - self._in_window)


def weights_of(root: nn.Module) -> FrozenWeights | None:
    """Return what keeps the frozen weights of a model on the host; ``None``: they are where they were."""
    kept = (vars(module).get("_apply") for module in root.modules())
    return next((found.weights for found in kept if isinstance(found, _Stays)), None)


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread (private; PyTorch's checkpoint reads the same)."""
    return torch._C._current_graph_task_id() != -1


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
        found: dict[int, tuple[str, torch.Tensor, tuple[_Place, ...]]] = {}
        for path, module in layer.named_modules():
            for name, tensor in _tensors(module).items():
                alone = users[storage_key(tensor)] == {scope, id(tensor)}
                if alone and _can_wait(tensor, name in module._parameters):
                    first, _, places = found.get(id(tensor), (f"{path}.{name}".strip("."), tensor, ()))
                    found[id(tensor)] = first, tensor, (*places, (module, name))
        if found:
            held, size_bytes = laid_out(list(found.values()))
            yield LayerWeights(scope, paths[scope], position, held, size_bytes, read)
            position += 1


def _tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    both = module._parameters | module._buffers
    return {name: tensor for name, tensor in both.items() if tensor is not None}


def _can_wait(tensor: torch.Tensor, is_parameter: bool) -> bool:
    least_bytes = 1 if is_parameter else LEAST_BUFFER_BYTES
    return not tensor.requires_grad and tensor.nbytes >= least_bytes


def _owners(layer: LayerWeights) -> dict[nn.Module, list[str]]:
    owners: dict[nn.Module, list[str]] = {}
    for weight in layer.held:
        for module, name in weight.modules:
            owners.setdefault(module, []).append(name)
    return owners


def _holders(layer: LayerWeights, module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a layer, the layer first, whose calls may read its streamed weights."""
    owners = _owners(layer)
    for inner in module.modules():
        called = type(inner).forward is not nn.Module.forward  # a ModuleList is never called
        if called and any(part in owners for part in inner.modules()):
            yield inner


def _stays(weights: FrozenWeights, module: nn.Module, names: list[str]) -> Undo:
    """Let ``.to()`` of a module, or of the model around it, leave the tensors of these names alone."""
    vars(module)["_apply"] = _Stays(weights, module, names)

    def undo() -> None:
        vars(module).pop("_apply", None)

    return undo


class _Stays:
    """The ``_apply`` of a module some of whose tensors wait on the host; a copy has its class's own."""

    __slots__ = ("_module", "_names", "weights")

    def __init__(self, weights: FrozenWeights, module: nn.Module, names: list[str]) -> None:
        self.weights, self._module, self._names = weights, module, names

    def __call__(self, change: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        module = self._module
        both: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        places = [(place, name, place[name]) for place in both for name in self._names if name in place]
        for _, name, tensor in places:
            probe = change(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
            if probe.dtype != tensor.dtype:
                raise PlanError([_changed_dtype(name, tensor.dtype, probe.dtype)])
        try:
            for place, name, _ in places:
                place[name] = None
            return type(module)._apply(module, change, *args, **kwargs)
        finally:
            for place, name, tensor in places:
                place[name] = tensor

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (self._module, "_apply")


def _changed_dtype(name: str, dtype: torch.dtype, other: torch.dtype) -> Problem:
    return Problem(
        "model.to",
        f"{name} in {dtype}, as it is on the host",
        f"a change to {other}",
        "Load the model in the dtype that it is to have (dtype=...), or remove() first.",
    )


def problems_of_weights(root: nn.Module, structure: ModelStructure) -> list[Problem]:
    """Return why the frozen weights of a model's layers cannot wait on the host: who else owns them."""
    found: dict[str, str] = {}
    modules = structure.layer_modules(root)
    if structure.compiled or any(layer.compiled for layer in structure.all_layers):
        found["torch.compile"] = "Compile no layer: its code is generated for weights that stay in place."
    for layer in modules.values():
        for module in layer.modules():
            for name, hint in _others(module):
                found.setdefault(name, hint)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in root.modules()):
        found["FSDP"] = _SHARDED
    if weights_of(root) is not None:
        found["weights that are on the host already"] = "Call remove() on what put them there first."
    return [
        Problem("memory.weights", "layers whose weights nothing else moves", name, hint)
        for name, hint in found.items()
    ]


_SHARDED = "It owns the weights, and moves them itself: leave weights: host out, or do not shard."


def _others(module: nn.Module) -> Iterator[tuple[str, str]]:
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
        elif tensor.is_meta:
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
